"""Know the whole run before it starts: which pictures at which crop with which caption, at each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .buckets import Crop, Size, bucket_list, choose_bucket, fit
from .captions import compose_caption, varies
from .config import DatasetConfig, TrainConfig
from .rng import generator
from .scan import Manifest, count, names

Item = tuple[int, int]  # (index of the picture, index of its repeat)
_Batch = tuple[Size, tuple[Item, ...]]

MOST_CROPPED = 0.2  # a picture that loses more of its area is named before the run
MOST_ENLARGED = 1.5  # a picture that is enlarged more is named before the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One visit of one picture."""

    picture: int  # index in Manifest.pictures
    visit: int  # epoch * repeats + repeat
    crop: Crop
    caption: str  # final text
    use_mask: bool  # False: no mask, or trained without it at this visit
    weight: float  # the concept's loss weight


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one bucket that go through the network together."""

    index: int  # running over the run
    samples: tuple[Sample, ...]
    bucket: Size


class Plan:
    """A run as a pure function of the step: built by build_plan, asked by everything else."""

    def __init__(self, manifest: Manifest, dataset: DatasetConfig, train: TrainConfig) -> None:
        self.manifest = manifest
        self.dataset = dataset
        self.train = train
        buckets = bucket_list(train.resolution, train.bucket_step)
        sizes = [(p.width, p.height) for p in manifest.pictures]
        self._crops = [fit(size, choose_bucket(size, buckets)) for size in sizes]
        self._mirrored = [replace(crop, flip=True) for crop in self._crops]
        self._concepts = [dataset.concepts[p.concept] for p in manifest.pictures]
        self._texts = [self._fixed_caption(i) for i in range(len(manifest.pictures))]
        self._items: dict[Size, list[Item]] = defaultdict(list)
        for i, crop in enumerate(self._crops):
            self._items[crop.bucket] += [(i, repeat) for repeat in range(self._concepts[i].repeats)]
        self.batches_per_epoch = sum(-(-len(items) // train.batch_size) for items in self._items.values())
        if train.epochs:
            self.micro_batches = self.batches_per_epoch * train.epochs
            self.steps = -(-self.micro_batches // train.accumulate)
        else:
            self.steps = train.steps
            self.micro_batches = self.steps * train.accumulate
        self.epochs = self.micro_batches / self.batches_per_epoch
        self._order: tuple[int, list[_Batch]] = (-1, [])

    def step(self, k: int) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of optimizer step k: `accumulate` of them, fewer at the very end."""
        if not 0 <= k < self.steps:
            raise ValueError(f"Step {k} is not part of this run of {self.steps} steps (0 to {self.steps - 1}).")
        first = k * self.train.accumulate
        last = min(first + self.train.accumulate, self.micro_batches)
        return tuple(self._micro_batch(index) for index in range(first, last))

    def sample(self, picture: int, visit: int) -> Sample:
        """Return one visit of one picture, whenever it happens."""
        text = self._texts[picture]
        flip, use_mask = self._draws(picture, visit)
        return Sample(
            picture=picture,
            visit=visit,
            crop=(self._mirrored if flip else self._crops)[picture],
            caption=self._caption(picture, visit) if text is None else text,
            use_mask=use_mask,
            weight=self._concepts[picture].loss_weight,
        )

    def bucket_sizes(self) -> tuple[Size, ...]:
        """Return the bucket sizes that hold pictures, sorted."""
        return tuple(sorted(self._items))

    def crops(self) -> set[tuple[int, Crop]]:
        """Return every (picture, crop) the run will ask for."""
        found: set[tuple[int, Crop]] = set()
        for picture, visits in self._visits().items():
            flips: set[bool] = set()
            for visit in visits:
                flips.add(self._draws(picture, visit)[0])
                if len(flips) == 1 + self._concepts[picture].flip:
                    break
            found |= {(picture, (self._mirrored if flip else self._crops)[picture]) for flip in flips}
        return found

    def captions(self) -> set[str]:
        """Return every distinct final caption the run will ask for."""
        found: set[str] = set()
        for picture, visits in self._visits().items():
            text = self._texts[picture]
            found |= {self._caption(picture, visit) for visit in visits} if text is None else {text}
        return found

    def report(self) -> str:
        """Return what a person should know before the run: length, buckets, losses of area, remarks."""
        return "\n".join([*self._head(), "", *self._table(), *self._remarks(), *self.manifest.notes])

    def _fixed_caption(self, picture: int) -> str | None:
        """Return the one caption of a picture, None if it varies."""
        return None if varies(self._concepts[picture]) else self._caption(picture, 0)

    def _caption(self, picture: int, visit: int) -> str:
        text = self.manifest.pictures[picture].caption
        return compose_caption(text, self._concepts[picture], seed=self.train.seed, picture=picture, visit=visit)

    def _draws(self, picture: int, visit: int) -> tuple[bool, bool]:
        """Return (flip, use_mask) of one visit; both are always drawn, so that neither depends on the other."""
        concept = self._concepts[picture]
        masks = concept.masks if self.manifest.pictures[picture].mask is not None else None
        if not concept.flip and (masks is None or masks.unmasked_probability == 0):
            return False, masks is not None
        draws = torch.rand(2, generator=generator(self.train.seed, "visit", picture, visit)).tolist()
        return concept.flip and draws[0] < 0.5, masks is not None and draws[1] >= masks.unmasked_probability

    def _micro_batch(self, index: int) -> MicroBatch:
        """Build one micro-batch from its place in the run."""
        epoch, place = divmod(index, self.batches_per_epoch)
        bucket, items = self._epoch(epoch)[place]
        samples = (self.sample(i, epoch * self._concepts[i].repeats + repeat) for i, repeat in items)
        return MicroBatch(index=index, samples=tuple(samples), bucket=bucket)

    def _epoch(self, epoch: int) -> list[_Batch]:
        """Return one epoch's batches: items shuffled in each bucket and cut, then the batches shuffled."""
        if self._order[0] != epoch:
            size, seed = self.train.batch_size, self.train.seed
            batches: list[_Batch] = []
            for bucket in self.bucket_sizes():
                order = _shuffled(self._items[bucket], generator(seed, "order", epoch, *bucket))
                batches += [(bucket, tuple(order[i : i + size])) for i in range(0, len(order), size)]
            self._order = (epoch, _shuffled(batches, generator(seed, "order", epoch)))
        return self._order[1]

    def _visits(self) -> dict[int, list[int]]:
        """Return which visits the run makes of each picture; the last, partial epoch counts batch by batch."""
        whole, rest = divmod(self.micro_batches, self.batches_per_epoch)
        visits = {i: list(range(whole * c.repeats)) for i, c in enumerate(self._concepts) if whole}
        for _, items in self._epoch(whole)[:rest]:
            for i, repeat in items:
                visits.setdefault(i, []).append(whole * self._concepts[i].repeats + repeat)
        return visits

    def _head(self) -> Iterator[str]:
        """Describe the length of the run."""
        train, pictures = self.train, self.manifest.pictures
        visits = sum(len(items) for items in self._items.values())
        who = count(pictures, "picture", "pictures")
        yield f"{who}, {visits} visits and {self.batches_per_epoch} batches per epoch"
        each = f"batch {train.batch_size}"
        each += f" x {train.accumulate} accumulated" if train.accumulate > 1 else ""
        yield f"{self.steps} steps of {each} = {self.epochs:.4g} epochs"
        if any(p.mask is not None for p in pictures):
            masked = sum(p.mask is not None for p in pictures)
            yield f"{masked} with a mask, {len(pictures) - masked} without"

    def _table(self) -> Iterator[str]:
        """Describe each bucket."""
        yield "   bucket | pictures | batches | largest crop | largest upscale"
        for bucket in self.bucket_sizes():
            members = [i for i, crop in enumerate(self._crops) if crop.bucket == bucket]
            lost = max(self._crops[i].crop_share for i in members)
            scale = max(self._scale(i) for i in members)
            batches = -(-len(self._items[bucket]) // self.train.batch_size)
            yield (
                f"{bucket[0]:>4}x{bucket[1]:<4} | {len(members):>8} | {batches:>7} | {lost:>11.1%} | "
                f"{f'{scale:.2f}x' if scale > 1 else 'none':>15}"
            )

    def _remarks(self) -> Iterator[str]:
        """Name pictures that lose much of their area or are enlarged much."""
        pictures = self.manifest.pictures
        cropped = [i for i, crop in enumerate(self._crops) if crop.crop_share > MOST_CROPPED]
        enlarged = [i for i in range(len(pictures)) if self._scale(i) > MOST_ENLARGED]
        if cropped:
            each = [f"{pictures[i].name} ({self._crops[i].crop_share:.0%})" for i in cropped]
            who = count(cropped, "picture loses", "pictures lose")
            yield f"{who} more than {MOST_CROPPED:.0%} of the area: {names(each)}."
        if enlarged:
            each = [f"{pictures[i].name} ({self._scale(i):.1f}x)" for i in enlarged]
            who = count(enlarged, "picture is", "pictures are")
            yield f"{who} enlarged more than {MOST_ENLARGED:g}x: {names(each)}."

    def _scale(self, picture: int) -> float:
        """Return how much a picture is enlarged (above 1) or reduced."""
        entry = self.manifest.pictures[picture]
        return self._crops[picture].scale((entry.width, entry.height))


def build_plan(manifest: Manifest, dataset: DatasetConfig, train: TrainConfig) -> Plan:
    """Plan a run; raises ValueError if there is nothing to train."""
    if not manifest.pictures:
        raise ValueError("The dataset holds no picture; put pictures in its folders.")
    return Plan(manifest, dataset, train)


def _shuffled(entries: list, draws: torch.Generator) -> list:
    """Return the entries in a random order."""
    return [entries[i] for i in torch.randperm(len(entries), generator=draws).tolist()]
