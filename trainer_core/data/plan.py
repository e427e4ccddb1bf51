"""Plan the whole run before it starts: the pictures, crops and captions of every step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..common.axes import Shape, Size
from ..common.rng import generator, uniforms
from ..common.wording import count, names
from ..config import DatasetConfig, TrainConfig, setting
from .buckets import BucketChoice, choose_sizes, cover, merge_buckets, parse_resolution
from .captions import compose_caption, is_dropped, mentions_side, plain_caption, varies
from .controls import Control, Reference, References, control_crop
from .crops import Crop, fit, variant
from .holdout import hold_out
from .roles import give_roles
from .scan import Manifest, Picture
from .shapes import shape_of
from .visits import cycle_starts, shuffled, trained_resolutions, visit_offsets, visit_rates

Item = tuple[int, int]  # (index of the picture, number of its visit in the run)
Group = tuple[Shape, int]  # (bucket, concept, or -1 if concepts mix); samples of one group can share a batch
_Batch = tuple[Shape, tuple[Item, ...]]


class View(NamedTuple):
    """A crop of a picture, or of the other picture of its pair."""

    picture: int  # index in Manifest.pictures
    crop: Crop
    other_end: bool = False

    @property
    def order(self) -> tuple[bool, int, str]:
        """Sort views by it to decode each file once."""
        return self.other_end, self.picture, repr(self.crop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One visit of one picture."""

    picture: int  # index in Manifest.pictures
    visit: int  # counts the visits of this picture in the run
    crop: Crop
    caption: str  # final text
    use_mask: bool  # False: no mask, or trained without it at this visit
    weight: float  # loss weight of the concept
    other_end: bool = False  # of the other picture of a pair, with all else alike
    seen: int = 0  # frames of a clip that the model sees beside it: none, the first, or the last, too

    @property
    def view(self) -> View:
        """What of which file it shows."""
        return View(self.picture, self.crop, self.other_end)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one bucket that go through the network together."""

    index: int  # running over the run
    samples: tuple[Sample, ...]
    bucket: Shape
    first: int = 0  # samples of the same optimizer step in earlier micro-batches
    step_samples: int = 1  # samples of the whole optimizer step

    def other_end(self) -> MicroBatch:
        """Build the micro-batch of the other pictures of its pairs, with all else alike."""
        return replace(self, samples=tuple(replace(sample, other_end=True) for sample in self.samples))


class Plan:
    """The samples of a run as a pure function of the step; built by build_plan.

    A picture's visits are numbered through the run. Visit v takes resolution (start + v) mod n of its n resolutions,
    and cycles through a clip's parts and its variants in the same way, so that all are used equally often and can be
    cached.
    """

    def __init__(self, manifest: Manifest, dataset: DatasetConfig, train: TrainConfig) -> None:
        self.manifest = manifest
        self.dataset = dataset
        self.train = train
        pictures = manifest.pictures
        self.concepts = [dataset.concepts[p.concept] for p in pictures]
        self.resolutions = [trained_resolutions(concept, train) for concept in self.concepts]  # of each picture
        self.trained = [i for i, concept in enumerate(self.concepts) if concept.role != "validation"]
        self.rates = visit_rates(manifest, self.concepts, [len(r) for r in self.resolutions], train)
        self._offsets = visit_offsets(self.trained, manifest, train.seed)
        self._buckets = self._choose_sizes()
        self._starts = cycle_starts(len(pictures), train.seed)
        self._first_parts = [self._first_part(i) for i in range(len(pictures))]
        self._warming: dict[Item, int] = {}  # the step of each visit in the tag warm-up
        self._texts = [self._fixed_caption(i) for i in range(len(pictures))]
        self.guarded = [
            concept.flip and any(map(mentions_side, picture.lines))
            for picture, concept in zip(pictures, self.concepts, strict=True)
        ]
        self._crops: dict[tuple[int, int, int, int], Crop] = {}
        self.same_every_epoch = all(
            self.rates[i].denominator == 1 and len(self.resolutions[i]) == 1 for i in self.trained
        )
        self._first_batch = [0]  # running number of the first micro-batch of each epoch that is known so far
        if train.epochs:
            self.micro_batches = self._epoch_start(train.epochs)
            if not self.micro_batches:
                raise ValueError(
                    f"No picture is visited in the epochs of this run; raise {setting('train.epochs')}, or repeats."
                )
            # -(-a // b) divides and rounds up.
            self.steps = -(-self.micro_batches // train.accumulate)
            self.epochs = float(train.epochs)
        else:
            self.steps = train.steps
            self.micro_batches = self.steps * train.accumulate
            self.epochs = self.epochs_after(self.steps)
        # Steps ask for one batch after another, so the last epoch's order is kept.
        self._order: tuple[int, list[_Batch]] = (-1, [])
        self._warming = self._steps_of_warm_up()
        self.validation = tuple(
            self._validation_sample(i) for i, concept in enumerate(self.concepts) if concept.role == "validation"
        )

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self, k: int) -> tuple[MicroBatch, ...]:
        """Build the micro-batches of optimizer step k: `accumulate` of them, fewer at the very end."""
        if not 0 <= k < self.steps:
            raise ValueError(f"Step {k} is not part of this run of {self.steps} steps (0 to {self.steps - 1}).")
        first = k * self.train.accumulate
        last = min(first + self.train.accumulate, self.micro_batches)
        parts = [self._micro_batch(index) for index in range(first, last)]
        ends = list(accumulate(len(part.samples) for part in parts))
        return tuple(
            replace(part, first=end - len(part.samples), step_samples=ends[-1])
            for part, end in zip(parts, ends, strict=True)
        )

    def sample(self, picture: int, visit: int) -> Sample:
        """Build the sample of one visit of one picture."""
        text = self._texts[picture]
        flip, use_mask = self._draws(picture, visit)
        crop = self._crop(picture, *self._turn(picture, visit))
        return Sample(
            picture=picture,
            visit=visit,
            crop=replace(crop, flip=True) if flip else crop,
            caption=self._caption(picture, visit) if text is None else text,
            use_mask=use_mask,
            weight=self.concepts[picture].loss_weight,
            seen=self._seen(picture, visit),
        )

    def visits_in(self, picture: int, epoch: int) -> range:
        """List the visits of a picture in one epoch; empty if fractional repeats skip it."""
        return range(self._first_visit(picture, epoch), self._first_visit(picture, epoch + 1))

    def batches_in(self, epoch: int) -> int:
        """Count the micro-batches of one epoch."""
        return self._epoch_start(epoch + 1) - self._epoch_start(epoch)

    def epochs_after(self, steps: int) -> float:
        """Compute the number of finished epochs after `steps` steps."""
        epoch, number_in_epoch = self._epoch_of(min(steps * self.train.accumulate, self.micro_batches))
        return epoch + number_in_epoch / self.batches_in(epoch)

    def steps_of(self, epochs: int) -> int:
        """Compute the number of steps after which `epochs` epochs are finished."""
        return -(-self._epoch_start(epochs) // self.train.accumulate)

    # --- the whole run ----------------------------------------------------------------------------------------

    def views(self) -> set[View]:
        """List every view of the run."""
        looks = self._looks(masked=False)
        return {View(picture, crop, end) for picture, crop, _ in looks for end in self._ends}

    def masked_views(self) -> tuple[set[View], set[Size]]:
        """List every view that is trained with its mask, and the buckets of samples without a mask."""
        looks = self._looks(masked=True)
        masked = {View(picture, crop, end) for picture, crop, used in looks if used for end in self._ends}
        return masked, {crop.bucket for _, crop, used in looks if not used}

    @property
    def _ends(self) -> tuple[bool, ...]:
        return (False, True) if self.dataset.paired else (False,)

    def _looks(self, masked: bool) -> set[tuple[int, Crop, bool]]:
        """List every (picture, crop, with its mask) of the run; masked: distinguish visits with and without masks."""
        found = {(sample.picture, sample.crop, False) for sample in self.validation}
        for picture, visits in self.visits().items():
            augment = self.concepts[picture].augment
            most = len(self.resolutions[picture]) * self._parts(picture) * (augment.variants if augment else 1)
            most *= 2 if self._flips(picture) else 1
            most *= 2 if masked and self.manifest.pictures[picture].mask is not None else 1
            seen: set[tuple[int, int, int, bool, bool]] = set()
            for visit in visits:
                flip, use_mask = self._draws(picture, visit)
                seen.add((*self._turn(picture, visit), flip, use_mask and masked))
                # Every combination was there: further visits show nothing new.
                if len(seen) == most:
                    break
            for resolution, number, part, flip, use_mask in seen:
                crop = self._crop(picture, resolution, number, part)
                found.add((picture, replace(crop, flip=True) if flip else crop, use_mask))
        return found

    def captions(self, *, trained_only: bool = False, alone: bool = False) -> set[str]:
        """List every distinct final caption of the run.

        trained_only: without those of validation. alone: without those of pictures that have control pictures.
        """
        controls = [bool(picture.controls) and alone for picture in self.manifest.pictures]
        validated = () if trained_only else self.validation
        found = {sample.caption for sample in validated if not controls[sample.picture]}
        for picture, visits in self.visits().items():
            if controls[picture]:
                continue
            text = self._texts[picture]
            found |= {self._caption(picture, visit) for visit in visits} if text is None else {text}
        return found

    def captions_of(self, picture: int) -> set[str]:
        """List a few captions of a picture for each line of its text, as they are after any tag warm-up."""
        text, visits = self._texts[picture], 2 + 2 * len(self.manifest.pictures[picture].lines)
        return {self._compose(picture, visit) for visit in range(visits)} if text is None else {text}

    def usual_prompt(self) -> str:
        """Choose a prompt for what is trained: the caption of the first trained picture that has one."""
        captions = (
            plain_caption(self.manifest.pictures[i].lines, self.concepts[i].captions)
            for i in self.trained
            if self.concepts[i].role == "train"
        )
        return next(filter(None, captions), "")

    def caption_lines(self, picture: int) -> int:
        """Count the lines that captions of a picture are drawn from, 1 at least."""
        several = self.concepts[picture].captions.lines == "draw"
        return max(1, len(self.manifest.pictures[picture].lines)) if several else 1

    def visits_of(self, picture: int) -> float:
        """Compute how often a picture is visited in the run."""
        return float(self.rates[picture]) * self.epochs

    def visits(self) -> dict[int, list[int]]:
        """List the visits of each picture in the run; the last, partial epoch counts batch by batch."""
        whole, rest = self._epoch_of(self.micro_batches)
        visits = {i: list(range(n)) for i in self.trained if (n := self._first_visit(i, whole))}
        if rest:
            for _, items in self._epoch(whole)[:rest]:
                for i, visit in items:
                    visits.setdefault(i, []).append(visit)
        return visits

    def buckets(self) -> dict[Shape, set[int]]:
        """List the bucket sizes of the training pictures, sorted, and the pictures that use each."""
        found: defaultdict[Shape, set[int]] = defaultdict(set)
        for i in self.trained:
            for resolution in range(len(self.resolutions[i])):
                found[self._shape(i, resolution)].add(i)
        return dict(sorted(found.items()))

    def batch_size(self, picture: int) -> int:
        """The size of a full batch of a picture's concept."""
        return self.concepts[picture].batch_size or self.train.batch_size

    def smaller_batches(self, epoch: int) -> dict[Shape, int]:
        """Count the batches of an epoch that are not full, by bucket."""
        found: defaultdict[Shape, int] = defaultdict(int)
        for bucket, items in self._epoch(epoch):
            found[bucket] += len(items) < self.batch_size(items[0][0])
        return found

    def batch_sizes(self, epoch: int) -> dict[Shape, list[int]]:
        """List the sizes of the batches of an epoch, by bucket."""
        sizes: defaultdict[Shape, list[int]] = defaultdict(list)
        for bucket, items in self._epoch(epoch):
            sizes[bucket].append(len(items))
        return dict(sorted(sizes.items()))

    def fullest_batches(self) -> dict[Shape, int]:
        """Find the size of the largest batch of each bucket, over the whole run."""
        whole, rest = self._epoch_of(self.micro_batches)
        # Where all epochs are alike, the first tells of all.
        epochs = range(min(whole, 1) if self.same_every_epoch else whole)
        batches = [(group[0], items) for epoch in epochs for group, items in self._groups(epoch).items()]
        batches += self._epoch(whole)[:rest] if rest else []
        found: dict[Shape, int] = {}
        for bucket, items in batches:
            found[bucket] = max(found.get(bucket, 0), min(len(items), self.batch_size(items[0][0])))
        return dict(sorted(found.items()))

    def concept_names(self) -> dict[int, str]:
        """Name the trained concepts by their folders, with a number if folders have the same name."""
        names: dict[int, str] = {}
        for number in sorted({self.manifest.pictures[i].concept for i in self.trained}):
            folder = Path(self.dataset.concepts[number].folder).name.encode(errors="replace").decode()
            same = sum(name.rsplit(" #", 1)[0] == folder for name in names.values())
            names[number] = f"{folder} #{same + 1}" if same else folder
        return names

    def size(self, picture: int) -> Size:
        """The size of a picture, before any crop."""
        return self.manifest.pictures[picture].size

    def file(self, of: View | Sample) -> Picture | Control:
        """Find the file of a view: of a picture, or of the other of its pair, which is itself where it has no other."""
        entry = self.manifest.pictures[of.picture]
        return entry.other_end or entry if of.other_end else entry

    def beside(self, picture: int, crop: Crop) -> list[tuple[Control, Crop]]:
        """List the files beside a crop of a picture, and how each is cut: control pictures, the other of its pair."""
        other = self.manifest.pictures[picture].other_end
        references = [(each.control, each.crop) for each in self.references(picture, crop) if not each.length]
        return [*references, *([(other, crop)] if other else [])]

    def has_mask(self, picture: int) -> bool:
        """Tell whether a picture has a mask that its concept uses."""
        return self.concepts[picture].masks is not None and self.manifest.pictures[picture].mask is not None

    def first_crops(self, picture: int) -> list[Crop]:
        """List a picture's first variant, of its first part, at each of its resolutions."""
        return [self._crop(picture, resolution, 0, 0) for resolution in range(len(self.resolutions[picture]))]

    def shown(self, sample: Sample) -> References:
        """List the control pictures of a sample, as the model sees them; () without any."""
        return self.references(sample.picture, sample.crop, sample.seen)

    def keeps(self, sample: Sample) -> bool:
        """Tell whether the model sees the first frame of a sample without noise, in its place."""
        clips = self.concepts[sample.picture].clips
        return clips is not None and clips.keeps and bool(self.shown(sample))

    def references(self, picture: int, crop: Crop, seen: int | None = None) -> References:
        """List the control pictures of a picture, as the model sees them beside a crop of it; () without any.

        seen: of a clip, how many of its first and its last trained frame; by default the most of the run.
        """
        config, background = self.concepts[picture].controls, self.concepts[picture].background
        if config is None:
            return self._ends_of(picture, crop, max(self._ways(picture)) if seen is None else seen)
        return tuple(
            Reference(
                control=control,
                background=background,
                crop=control_crop(control.size, crop, config, self.train.bucket_step),
            )
            for control in self.manifest.pictures[picture].controls
        )

    def _ends_of(self, picture: int, crop: Crop, seen: int) -> References:
        if not seen or len(crop.frames) < 2:
            return ()
        file = self.manifest.pictures[picture]
        control = Control(path=file.path, name=file.name, digest=file.digest, width=file.width, height=file.height)
        first, last = (replace(crop, frames=(crop.frames[at],)) for at in (0, -1))
        return (
            Reference(
                control=control,
                background=self.concepts[picture].background,
                crop=first,
                length=len(crop.frames),
                last=(control, last) if seen > 1 else None,
            ),
        )

    def _ways(self, picture: int) -> set[int]:
        """List how many of the first and the last frame of a clip the model sees at its visits; {0} for a picture."""
        clips = self.concepts[picture].clips
        return clips.seen if clips and self.manifest.pictures[picture].clip else {0}

    def _seen(self, picture: int, visit: int) -> int:
        """Draw how many of the first and the last frame the model sees at a visit."""
        ways, clips = self._ways(picture), self.concepts[picture].clips
        if len(ways) == 1 or clips is None:
            return max(ways)
        return clips.seen_at(*uniforms(self.train.seed, "seen", picture, visit, count=2))

    def all_references(self) -> set[Reference]:
        """List every control picture of the run, in each way in which it is cut."""
        every = range(len(self.manifest.pictures))
        some = any(self.manifest.pictures[i].controls or max(self._ways(i)) for i in every)
        looks = self._looks(masked=False) if some else ()
        shown = ((picture, crop, seen) for picture, crop, _ in looks for seen in self._ways(picture))
        return {each for one in shown for each in self.references(*one)}

    def crop_in(self, picture: int, bucket: Shape) -> Crop:
        """Find a picture's first variant in a bucket that it uses."""
        return next(crop for crop in self.first_crops(picture) if crop.shape == bucket)

    # --- one visit --------------------------------------------------------------------------------------------

    def _turn(self, picture: int, visit: int) -> tuple[int, int, int]:
        """Compute (resolution, variant, part) of one visit."""
        resolutions, augment = len(self.resolutions[picture]), self.concepts[picture].augment
        start, other = self._starts[picture]
        if resolutions > 1 and self.train.buckets.resolution_mode == "all":
            start = 0
        # The part moves on after each lap, so that it meets every resolution, and the variant after each lap of parts.
        lap = visit // resolutions
        laps, part = divmod(self._first_parts[picture] + lap, self._parts(picture))
        return (start + visit) % resolutions, (other + laps) % augment.variants if augment else 0, part

    def _first_part(self, picture: int) -> int:
        """Draw the part of a clip that is trained first; 0 for a picture."""
        parts = self._parts(picture)
        return 0 if parts == 1 else int(uniforms(self.train.seed, "part", picture)[0] * parts)

    def _parts(self, picture: int) -> int:
        """Count the parts of a clip that take turns; 1 for a picture."""
        clip = self.manifest.pictures[picture].clip
        return 1 if clip is None else len(clip.starts)

    def _shape(self, picture: int, resolution: int) -> Shape:
        """The bucket of a picture at one of its resolutions, with the frames of a clip."""
        bucket, clip = self._buckets[picture][resolution].bucket, self.manifest.pictures[picture].clip
        return bucket if clip is None or clip.length == 1 else (*bucket, clip.length)

    def _crop(self, picture: int, resolution: int, number: int, part: int) -> Crop:
        """Build one variant of a picture, or of a part of a clip, not mirrored."""
        key = (picture, resolution, number, part)
        if key not in self._crops:
            bucket, resized = self._buckets[picture][resolution]
            cut = variant(
                self.size(picture),
                bucket,
                self.concepts[picture].augment,
                resized=resized,
                focus=self.manifest.pictures[picture].own.focus,
                seed=self.train.seed,
                picture=picture,
                index=number,
            )
            self._crops[key] = self._of_part(picture, cut, part)
        return self._crops[key]

    def _of_part(self, picture: int, crop: Crop, part: int) -> Crop:
        """Give a crop the frames of a part of a clip."""
        clip = self.manifest.pictures[picture].clip
        return crop if clip is None else replace(crop, frames=clip.part(part))

    def _validation_sample(self, picture: int) -> Sample:
        """Build the validation sample of a picture: crop about its centre or focus, plain caption, no mask."""
        bucket, resized = self._buckets[picture][0]
        crop = fit(self.size(picture), bucket, resized=resized, focus=self.manifest.pictures[picture].own.focus)
        caption = plain_caption(self.manifest.pictures[picture].lines, self.concepts[picture].captions)
        return Sample(
            picture=picture,
            visit=0,
            crop=self._of_part(picture, crop, 0),
            caption=caption,
            use_mask=False,
            weight=1.0,
            seen=self._seen(picture, 0),
        )

    def _fixed_caption(self, picture: int) -> str | None:
        """Compose the only caption of a picture, None if it varies."""
        lines = self.manifest.pictures[picture].lines
        return None if varies(self.concepts[picture].captions, lines) else self._compose(picture, 0)

    def _caption(self, picture: int, visit: int) -> str:
        """Compose the caption of one visit."""
        captions = self.concepts[picture].captions
        if captions.dropout_every_n_epochs and is_dropped(captions, self._epoch_of_visit(picture, visit)):
            return ""
        return self._compose(picture, visit, self._warming.get((picture, visit)))

    def _compose(self, picture: int, visit: int, step: int | None = None) -> str:
        captions, lines = self.concepts[picture].captions, self.manifest.pictures[picture].lines
        return compose_caption(lines, captions, seed=self.train.seed, picture=picture, visit=visit, step=step)

    def _steps_of_warm_up(self) -> dict[Item, int]:
        """Find the step of each visit that falls into the tag warm-up of any concept."""
        last = max((self.concepts[i].captions.tag_warmup_steps for i in self.trained), default=0)
        each, found = self.train.accumulate, {}
        for index in range(min(last * each, self.micro_batches)):
            epoch, number = self._epoch_of(index)
            found |= dict.fromkeys(self._epoch(epoch)[number][1], index // each)
        return found

    def _flips(self, picture: int) -> bool:
        """Tell whether a picture is mirrored at some visits; never if its caption contains left or right."""
        return self.concepts[picture].flip and not self.guarded[picture]

    def _draws(self, picture: int, visit: int) -> tuple[bool, bool]:
        """Draw (flip, use_mask) of one visit."""
        masks = self.concepts[picture].masks if self.manifest.pictures[picture].mask is not None else None
        flips = self._flips(picture)
        if not flips and (masks is None or masks.unmasked_probability == 0):
            return False, masks is not None
        flip, unmasked = uniforms(self.train.seed, "visit", picture, visit, count=2)
        return flips and flip < 0.5, masks is not None and unmasked >= masks.unmasked_probability

    # --- epochs and batches -----------------------------------------------------------------------------------

    def _micro_batch(self, index: int) -> MicroBatch:
        """Build one micro-batch from its number in the run."""
        epoch, number = self._epoch_of(index)
        bucket, items = self._epoch(epoch)[number]
        return MicroBatch(index=index, samples=tuple(self.sample(i, visit) for i, visit in items), bucket=bucket)

    def _epoch(self, epoch: int) -> list[_Batch]:
        """Build one epoch's batches: shuffle each group, cut it into batches, shuffle the batches."""
        if self._order[0] != epoch:
            seed = self.train.seed
            batches: list[_Batch] = []
            for (bucket, concept), items in sorted(self._groups(epoch).items()):
                index = (epoch, *bucket) if concept < 0 else (epoch, *bucket, concept)
                order, size = shuffled(items, generator(seed, "order", *index)), self.batch_size(items[0][0])
                batches += [(bucket, tuple(order[i : i + size])) for i in range(0, len(order), size)]
            self._order = (epoch, shuffled(batches, generator(seed, "order", epoch)))
        return self._order[1]

    def _groups(self, epoch: int) -> dict[Group, list[Item]]:
        """Group the visits of an epoch that can share a batch."""
        groups: defaultdict[Group, list[Item]] = defaultdict(list)
        for i in self.trained:
            for visit in self.visits_in(i, epoch):
                groups[self._group(i, self._turn(i, visit)[0])].append((i, visit))
        return groups

    def _group(self, picture: int, resolution: int) -> Group:
        return self._shape(picture, resolution), self._among(picture)

    def _among(self, picture: int) -> int:
        """Find the concept that a picture's batches are of, -1 where concepts mix."""
        mixed = self.train.buckets.mix_concepts and not self.concepts[picture].batch_size
        return -1 if mixed else self.manifest.pictures[picture].concept

    def _first_visit(self, picture: int, epoch: int) -> int:
        """Count the visits of a picture before an epoch: floor(epoch * rate + offset).

        The offsets k/n of n pictures spread fractional rates evenly: with rate s/n exactly s pictures an epoch
        (Hermite's identity), each in its turn.
        """
        rate, offset = self.rates[picture], self._offsets[picture]
        return (epoch * rate.numerator * offset.denominator + offset.numerator * rate.denominator) // (
            rate.denominator * offset.denominator
        )

    def _epoch_of_visit(self, picture: int, visit: int) -> int:
        """Compute the epoch of a visit of a trained picture: the last one that begins before the next visit."""
        return -(-(visit + 1 - self._offsets[picture]) // self.rates[picture]) - 1

    def _epoch_start(self, epoch: int) -> int:
        """Compute the index of an epoch's first micro-batch in the run."""
        known = self._first_batch
        while len(known) <= epoch:
            if self.same_every_epoch and len(known) > 1:
                return known[1] * epoch
            groups = self._groups(len(known) - 1).values()
            known.append(known[-1] + sum(-(-len(items) // self.batch_size(items[0][0])) for items in groups))
        return known[epoch]

    def _epoch_of(self, index: int) -> tuple[int, int]:
        """Compute (epoch, number in it) of a micro-batch."""
        if self.same_every_epoch:
            return divmod(index, self._epoch_start(1))
        while self._first_batch[-1] <= index:
            self._epoch_start(len(self._first_batch))
        epoch = bisect_right(self._first_batch, index) - 1
        return epoch, index - self._first_batch[epoch]

    def _choose_sizes(self) -> list[list[BucketChoice]]:
        """Choose the bucket of each picture at each of its resolutions."""
        options, step = self.train.buckets, self.train.bucket_step
        parsed = {text: parse_resolution(text) for each in self.resolutions for text in each}
        wanted = [[(self.size(i), text) for text in resolutions] for i, resolutions in enumerate(self.resolutions)]
        known = {(size, text) for each in wanted for size, text in each}  # a camera's pictures have few sizes
        chosen = {(size, text): shape_of(size, parsed[text], options, step) for size, text in known}
        choices = [[chosen[each] for each in own] for own in wanted]
        if options.small_buckets == "merge":
            self._merge(choices)
        return choices

    def _merge(self, choices: list[list[BucketChoice]]) -> None:
        """Move the pictures of buckets that cannot fill a batch to the nearest bucket of the same resolution."""
        clips = [picture.clip for picture in self.manifest.pictures]
        among = [(self._among(i), clip.length if clip else 1) for i, clip in enumerate(clips)]
        full = {among[i]: self.batch_size(i) for i in self.trained}
        visits: defaultdict[tuple[str, tuple[int, int]], defaultdict[Size, Fraction]] = defaultdict(
            lambda: defaultdict(Fraction)
        )
        for i in self.trained:
            for text, choice in zip(self.resolutions[i], choices[i], strict=True):
                visits[text, among[i]][choice.bucket] += self.rates[i] / len(choices[i])
        # in whole parts of a visit, so that half a visit per epoch counts exactly
        parts = math.lcm(*(n.denominator for each in visits.values() for n in each.values()))
        moves = {
            key: merge_buckets({bucket: int(n * parts) for bucket, n in each.items()}, full[key[1]] * parts)
            for key, each in visits.items()
        }
        for i in self.trained:
            for number, (text, choice) in enumerate(zip(self.resolutions[i], choices[i], strict=True)):
                if (bucket := moves[text, among[i]].get(choice.bucket)) is not None:
                    resized = cover(self.size(i), bucket)
                    if self.train.buckets.no_upscale and (resized[0] > self.size(i)[0] or resized[1] > self.size(i)[1]):
                        continue  # no_upscale takes precedence over full batches
                    choices[i][number] = BucketChoice(bucket, resized)


def build_plan(manifest: Manifest, dataset: DatasetConfig, train: TrainConfig) -> Plan:
    """Plan a run; raises ValueError without a picture to train or hold out, or for pictures too narrow for a bucket."""
    manifest, dataset = give_roles(_without_narrow(manifest, dataset, train), dataset)
    if not manifest.pictures:
        raise ValueError("The dataset has no picture; put pictures into the folders of its concepts.")
    roles = {dataset.concepts[p.concept].role for p in manifest.pictures}
    if "train" not in roles:
        raise ValueError(
            f"No concept has the role train, only {' and '.join(sorted(roles))}; set "
            f"{setting('concepts.role')} to train for one of them."
        )
    return Plan(*hold_out(manifest, dataset, train.validation_share, train.seed), train)


def _without_narrow(manifest: Manifest, dataset: DatasetConfig, train: TrainConfig) -> Manifest:
    """Leave out the pictures that no_upscale finds no bucket for; ValueError for those of concepts that stop."""
    if not train.buckets.no_upscale:
        return manifest
    found = [picture for picture in manifest.pictures if _is_narrow(picture, dataset, train)]
    stopping = [p for p in found if dataset.concepts[p.concept].on_problem == "stop"]
    if stopping:
        raise ValueError(
            f"{_describe_narrow(stopping, train)}. Set {setting('buckets.no_upscale')} to off, remove them, or set "
            f"{setting('concepts.on_problem')} to leave_out."
        )
    if not found:
        return manifest
    gone = {(p.concept, p.name) for p in found}
    return replace(
        manifest,
        pictures=tuple(p for p in manifest.pictures if (p.concept, p.name) not in gone),
        notes=(*manifest.notes, f"Left out: {_describe_narrow(found, train)}."),
        outcomes=tuple(
            replace(file, outcome="left out", why="too narrow for a bucket")
            if (file.concept, file.name) in gone
            else file
            for file in manifest.outcomes
        ),
    )


def _is_narrow(picture: Picture, dataset: DatasetConfig, train: TrainConfig) -> bool:
    """Tell whether less than one step of a picture remains at one of its resolutions."""
    resolutions = map(parse_resolution, trained_resolutions(dataset.concepts[picture.concept], train))
    size, step = picture.size, train.bucket_step
    return any(
        min(choose_sizes(size, t, [(t.width, t.height)], step=step, no_upscale=True).bucket) == 0 for t in resolutions
    )


def _describe_narrow(found: list[Picture], train: TrainConfig) -> str:
    sizes = [f"{p.name} ({p.width}x{p.height})" for p in found]
    some = count(found, "picture is", "pictures are")
    return f"{some} too narrow for no_upscale, as less than bucket_step {train.bucket_step} remains: {names(sizes)}"
