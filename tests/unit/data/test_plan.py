"""The plan loses nothing, repeats nothing and is a pure function of the step."""

import csv
import io
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.data.buckets import Size
from lora_atelier.trainer_core.data.crops import Crop
from lora_atelier.trainer_core.data.plan import MicroBatch, Plan, Sample, build_plan
from lora_atelier.trainer_core.data.scan import FileOutcome, Manifest, Picture
from lora_atelier.trainer_core.preflight.report import manifest_table, report

SHAPES = [(512, 512), (640, 384), (384, 640), (1024, 256), (576, 448)]  # each its own bucket at 512/64


def make(
    shapes: list[int], repeats: tuple[int, ...] = (1,), options: dict[str, Any] | None = None, **train: Any
) -> Plan:
    """Plan a run over pictures of the given shapes; picture i belongs to concept i modulo their number."""
    concepts = tuple(ConceptConfig(folder=f"c{i}", repeats=r, **(options or {})) for i, r in enumerate(repeats))
    masked = concepts[0].masks is not None
    pictures = tuple(
        Picture(
            path=Path(f"{i}.png"),
            name=f"{i}.png",
            concept=i % len(concepts),
            width=SHAPES[shape][0],
            height=SHAPES[shape][1],
            digest=str(i),
            lines=(f"tag{i}, red, blue, green",),
            mask=Path("m.png") if masked and i % 3 else None,
        )
        for i, shape in enumerate(shapes)
    )
    return build_plan(Manifest(pictures=pictures), DatasetConfig(concepts=concepts), TrainConfig(**train))


def micro_batches(plan: Plan) -> list[MicroBatch]:
    return [micro_batch for k in range(plan.steps) for micro_batch in plan.step(k)]


def test_the_vector_of_the_batches() -> None:
    plan = make([0] * 7 + [1] * 3 + [2] + [3] * 13, batch_size=4, epochs=1)
    assert plan.batches_in(0) == plan.steps == 8
    seen = [sample.picture for mb in micro_batches(plan) for sample in mb.samples]
    assert sorted(seen) == list(range(24))
    sizes = Counter(len(mb.samples) for mb in micro_batches(plan))
    assert sizes == {4: 4, 3: 2, 1: 2}


datasets = st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=20)


@given(
    datasets,
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
)
@examples(60)
def test_a_run_of_whole_epochs_visits_every_picture_as_often_as_it_should(
    shapes: list[int], repeats: list[int], batch: int, accumulate: int, epochs: int
) -> None:
    plan = make(shapes, tuple(repeats), batch_size=batch, accumulate=accumulate, epochs=epochs)
    batches = micro_batches(plan)
    assert plan.steps == -(-plan.batches_in(0) * epochs // accumulate)
    assert [mb.index for mb in batches] == list(range(plan.batches_in(0) * epochs))
    assert plan.epochs == epochs
    for epoch in range(epochs):
        part = batches[epoch * plan.batches_in(0) : (epoch + 1) * plan.batches_in(0)]
        visits = Counter((s.picture, s.visit) for mb in part for s in mb.samples)
        count = {i: repeats[i % len(repeats)] for i in range(len(shapes))}
        assert visits == {(i, epoch * n + r): 1 for i, n in count.items() for r in range(n)}
    for mb in batches:
        assert 1 <= len(mb.samples) <= batch
        assert {sample.crop.bucket for sample in mb.samples} == {mb.bucket}


@given(datasets, st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
@examples(40)
def test_a_step_does_not_depend_on_what_was_asked_before(shapes, batch, accumulate, steps, random) -> None:
    options = {"flip": True, "captions": CaptionConfig(shuffle=True, tag_dropout=0.3, dropout=0.2)}
    options |= {"masks": MaskConfig(unmasked_probability=0.5)}
    train = {"batch_size": batch, "accumulate": accumulate, "steps": steps, "seed": 5}
    straight = make(shapes, (2,), options, **train)
    expected = [straight.step(k) for k in range(steps)]
    order = list(range(steps)) * 2
    random.shuffle(order)
    other = make(shapes, (2,), options, **train)
    assert all(other.step(k) == expected[k] for k in order)
    assert all(len(window) == accumulate for window in expected)


@given(datasets, st.integers(1, 4), st.integers(1, 25), st.booleans(), st.sampled_from([0.0, 0.4]))
@examples(40)
def test_crops_and_captions_are_exactly_what_the_run_asks_for(shapes, batch, steps, flip, dropout) -> None:
    options = {"flip": flip, "captions": CaptionConfig(shuffle=dropout > 0, dropout=dropout)}
    plan = make(shapes, (1, 2), options, batch_size=batch, steps=steps)
    samples = [sample for mb in micro_batches(plan) for sample in mb.samples]
    assert plan.views() == {sample.view for sample in samples}
    assert plan.captions() == {sample.caption for sample in samples}


def test_windows_run_across_epochs_and_only_the_last_is_shorter() -> None:
    plan = make([0] * 5, batch_size=2, accumulate=2, epochs=3)  # 3 batches an epoch, 9 in all
    assert plan.steps == 5
    assert [[mb.index for mb in plan.step(k)] for k in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    plan = make([0] * 5, batch_size=2, accumulate=2, steps=5)
    assert [mb.index for mb in plan.step(4)] == [8, 9]
    assert plan.epochs == pytest.approx(10 / 3)


def test_a_step_outside_the_run_is_refused() -> None:
    plan = make([0], steps=3)
    for k in (-1, 3):
        with pytest.raises(ValueError, match="0 to 2"):
            plan.step(k)


def test_epochs_come_in_different_orders_and_seeds_matter() -> None:
    def order(plan: Plan, epoch: int) -> tuple[int, ...]:
        return tuple(plan.step(epoch * 20 + k)[0].samples[0].picture for k in range(20))

    plan = make([0] * 20, epochs=3)
    orders = {order(plan, 0), order(plan, 1), order(plan, 2), order(make([0] * 20, epochs=3, seed=1), 0)}
    assert len(orders) == 4


def test_what_happens_to_a_visit_does_not_depend_on_the_batch_size() -> None:
    options = {"flip": True, "captions": CaptionConfig(shuffle=True), "masks": MaskConfig(unmasked_probability=0.5)}

    def visits(batch: int) -> dict[tuple[int, int], Any]:
        plan = make([0, 1, 0, 2] * 3, (2,), options, batch_size=batch, epochs=2)
        return {(s.picture, s.visit): s for mb in micro_batches(plan) for s in mb.samples}

    assert visits(1) == visits(3)


def test_flips_and_masks_have_the_shares_they_should() -> None:
    options = {"flip": True, "masks": MaskConfig(unmasked_probability=0.25)}
    plan = make([0] * 30, (1,), options, epochs=40)
    samples = [sample for mb in micro_batches(plan) for sample in mb.samples]
    assert abs(sum(s.crop.flip for s in samples) / len(samples) - 0.5) < 0.05
    masked = [s for s in samples if s.picture % 3]
    assert not any(s.use_mask for s in samples if not s.picture % 3)
    assert abs(sum(s.use_mask for s in masked) / len(masked) - 0.75) < 0.05


def test_the_weight_is_the_concepts() -> None:
    plan = make([0, 0], (1,), {"loss_weight": 0.5}, steps=1)
    assert plan.step(0)[0].samples[0].weight == 0.5


def test_concepts_are_named_by_their_folders_and_numbered_where_these_are_equal() -> None:
    plan = make([0, 1, 2, 3, 4], repeats=(1,) * 5)
    folders = ("x/cats", "y/cats", "dogs", "z/cats", "held")
    concepts = tuple(ConceptConfig(folder=f, role="validation" if f == "held" else "train") for f in folders)
    plan = build_plan(plan.manifest, DatasetConfig(concepts=concepts), TrainConfig(epochs=3, accumulate=3))
    assert plan.concept_names() == {0: "cats", 1: "cats #2", 2: "dogs", 3: "cats #3"}
    assert [plan.epochs_after(k) for k in range(5)] == [0, 0.75, 1.5, 2.25, 3.0]


def test_an_empty_manifest_is_refused() -> None:
    with pytest.raises(ValueError, match="no picture"):
        build_plan(Manifest(pictures=()), DatasetConfig(concepts=(ConceptConfig(folder="x"),)), TrainConfig())


def test_the_report_says_what_will_happen() -> None:
    plan = make([0] * 7 + [1] * 3, (2,), {"masks": MaskConfig()}, batch_size=4, accumulate=2, epochs=3)
    text = report(plan)
    assert "10 pictures, 20 visits and 6 batches per epoch" in text
    assert "9 steps of batch 4 x 2 accumulated = 3 epochs" in text
    concept = next(line for line in text.splitlines() if "c0" in line)
    assert [cell.strip() for cell in concept.strip("|").split("|")] == [
        "c0",
        "train",
        "10",
        "2",
        "20",
        "1",
        "10",
        "6 of 10",
    ]
    bucket = next(line for line in text.splitlines() if "640x384" in line)
    assert [cell.strip() for cell in bucket.strip("|").split("|")][1:3] == ["3", "2 (1 smaller)"]
    assert "512x512" in text
    assert "640x384" in text


def test_strips_and_tiny_pictures_are_named_and_notes_are_kept() -> None:
    pictures = [("strip.png", 1, 10_000), ("tiny.png", 100, 100), ("fine.png", 512, 512)]
    manifest = Manifest(
        pictures=tuple(Picture(path=Path(n), name=n, concept=0, width=w, height=h, digest=n) for n, w, h in pictures),
        notes=("A note.",),
    )
    text = report(build_plan(manifest, DatasetConfig(concepts=(ConceptConfig(folder="x"),)), TrainConfig()))
    cropped = next(line for line in text.splitlines() if "of the area" in line)
    enlarged = next(line for line in text.splitlines() if "enlarged more" in line)
    assert "strip.png" in cropped
    assert "fine.png" not in cropped
    assert "tiny.png (5.1x)" in enlarged
    assert "fine.png" not in enlarged
    assert text.endswith("A note.")


def test_asking_for_a_step_is_no_more_work_in_a_large_dataset() -> None:
    """Counted in calls, which no load of the machine changes."""

    def calls_of_a_step(pictures: int) -> float:
        options = {"flip": True, "masks": MaskConfig()}
        plan = make([0, 1, 2] * pictures, (1,), options, batch_size=4, epochs=2)
        plan.step(0)  # an epoch is laid out once
        calls = 0

        def count(frame: object, event: str, what: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for k in range(1, 26):
                plan.step(k)
        finally:
            sys.setprofile(None)
        return calls / 25

    few, many = calls_of_a_step(100), calls_of_a_step(1000)
    assert many == pytest.approx(few, rel=0.1) and few < 1000


# --- any dataset ----------------------------------------------------------------------------------------------

AREAS = {"128": 128 * 128, "256": 256 * 256, "448x320": 448 * 320}  # so far apart that a bucket tells its resolution
ROLES = ["train", "regularisation", "validation", "prior_prediction"]
RESOLUTIONS = [(), ("128",), ("256",), ("448x320",), ("128", "256"), ("256", "448x320"), ("128", "256", "448x320")]
AUGMENT = AugmentConfig(variants=3, crop_jitter=1, zoom=0.3, rotation=10, brightness=0.2)
LINES = ("a, b, c", "seen from the left", "x, {y|z}")


@dataclass(frozen=True)
class Run:
    """A random dataset and how it is trained; equal runs make equal plans."""

    concepts: tuple[ConceptConfig, ...]
    pictures: tuple[Picture, ...]
    train: TrainConfig

    def plan(self, **train: Any) -> Plan:
        dataset = DatasetConfig(concepts=self.concepts)
        return build_plan(Manifest(pictures=self.pictures), dataset, self.train.replace(**train))

    def of(self, *roles: str) -> list[int]:
        """Return the pictures whose concept has one of the roles."""
        return [i for i, picture in enumerate(self.pictures) if self.concepts[picture.concept].role in roles]

    def rates(self) -> list[Fraction]:
        """Return the visits per epoch that the settings promise each picture, from their own definition."""
        own: list[Fraction] = []
        for picture in self.pictures:
            concept = self.concepts[picture.concept]
            each = len(concept.resolutions or self.train.buckets.resolutions or ("",))
            each = each if self.train.buckets.resolution_mode == "all" else 1
            own.append(Fraction(concept.repeats).limit_denominator(1000) * picture.repeats * each)

        def total(test: Any) -> Fraction:
            return sum((r for r, p in zip(own, self.pictures, strict=True) if test(p.concept)), Fraction())

        def wanted(number: int) -> Fraction:
            return Fraction(self.concepts[number].samples) or total(lambda c: c == number)

        used = {picture.concept for picture in self.pictures}
        trained = sum((wanted(c) for c in used if self.concepts[c].role == "train"), Fraction())

        def is_free(number: int) -> bool:
            return self.concepts[number].role == "regularisation" and not self.concepts[number].samples

        rates = []
        for rate, picture in zip(own, self.pictures, strict=True):
            concept = picture.concept
            if is_free(concept):
                rates.append(rate * trained / total(is_free))
            else:
                rates.append(rate * wanted(concept) / total(lambda c, wanted=concept: c == wanted))
        return rates


@st.composite
def runs(draw: st.DrawFn, whole: bool = False, plain: bool = False) -> Run:
    """Draw a run; whole: of whole epochs. plain: without folder repeats."""
    roles = ["train", *draw(st.lists(st.sampled_from(ROLES), max_size=3))]
    concepts = tuple(
        ConceptConfig(
            folder=f"c{i}",
            role=role,
            repeats=draw(st.sampled_from([1, 1, 2, 3, 0.5, 0.25, 1.5, 0.3, 1 / 3])),
            samples=draw(st.sampled_from([0, 0, 0, 1, 2, 5, 9])),
            resolutions=draw(st.sampled_from(RESOLUTIONS)),
            flip=draw(st.booleans()),
            loss_weight=draw(st.sampled_from([0.5, 1.0])),
            augment=draw(st.sampled_from([None, None, AUGMENT])),
            masks=draw(st.sampled_from([None, MaskConfig(unmasked_probability=0.4)])),
            captions=CaptionConfig(shuffle=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.2]))),
        )
        for i, role in enumerate(roles)
    )
    shapes = draw(st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=9))
    pictures = tuple(
        Picture(
            path=Path(f"{i}.png"),
            name=f"{i}.png",
            concept=i % len(concepts),
            width=SHAPES[shape][0],
            height=SHAPES[shape][1],
            digest=str(i),
            lines=LINES[: draw(st.integers(1, 3))],
            repeats=1 if plain else draw(st.sampled_from([1, 1, 1, 2, 3])),
            mask=draw(st.sampled_from([None, Path("m.png")])),
        )
        for i, shape in enumerate(shapes)
    )
    epochs = draw(st.integers(1, 4)) if whole or draw(st.booleans()) else 0
    train = TrainConfig(
        epochs=epochs,
        steps=draw(st.integers(1, 12)),
        batch_size=draw(st.integers(1, 4)),
        accumulate=draw(st.integers(1, 3)),
        resolution=256,
        seed=draw(st.integers(0, 5)),
        buckets=BucketConfig(
            resolutions=draw(st.sampled_from(RESOLUTIONS)),
            resolution_mode=draw(st.sampled_from(["draw", "all"])),
            small_buckets=draw(st.sampled_from(["keep", "merge"])),
            mix_concepts=draw(st.booleans()),
        ),
    )
    run = Run(concepts, pictures, train)
    if epochs and all(epochs * run.rates()[i] < 1 for i in run.of("train", "regularisation", "prior_prediction")):
        run = replace(run, train=train.replace(epochs=math.ceil(1 / max(run.rates()[i] for i in run.of("train")))))
    return run


def samples_of(batches: list[MicroBatch]) -> list[Sample]:
    return [sample for mb in batches for sample in mb.samples]


def epochs_of(plan: Plan, batches: list[MicroBatch]) -> list[list[MicroBatch]]:
    """Cut the micro-batches of a run of whole epochs into its epochs."""
    ends = [0]
    while ends[-1] < len(batches):
        ends.append(ends[-1] + plan.batches_in(len(ends) - 1))
    assert ends[-1] == len(batches)
    ends += [ends[-1]] * (int(plan.epochs) + 1 - len(ends))
    return [batches[start:end] for start, end in pairwise(ends)]


def resolution_of(bucket: Size) -> str:
    return min(AREAS, key=lambda name: abs(math.log(AREAS[name]) - math.log(bucket[0] * bucket[1])))


@given(runs(whole=True))
@examples(120)
def test_any_picture_is_visited_as_often_as_planned_and_nothing_is_dropped_or_doubled(run: Run) -> None:
    plan = run.plan()
    batches, rates, epochs = micro_batches(plan), run.rates(), run.train.epochs
    samples = samples_of(batches)
    counts = Counter(sample.picture for sample in samples)
    assert plan.rates == rates
    for i in run.of("train", "regularisation", "prior_prediction"):
        assert math.floor(epochs * rates[i]) <= counts[i] <= math.ceil(epochs * rates[i])
    assert not set(run.of("validation")) & counts.keys()
    assert Counter((s.picture, s.visit) for s in samples) == {(i, v): 1 for i in counts for v in range(counts[i])}
    for epoch, part in enumerate(epochs_of(plan, batches)):
        seen: defaultdict[int, set[int]] = defaultdict(set)
        for sample in samples_of(part):
            seen[sample.picture].add(sample.visit)
        assert seen == {i: set(v) for i in plan.trained if (v := plan.visits_in(i, epoch))}


@given(runs())
@examples(60)
def test_any_batch_holds_one_bucket_and_no_more_than_it_may(run: Run) -> None:
    plan = run.plan()
    batches = micro_batches(plan)
    smaller: Counter[tuple[int, Size, int]] = Counter()
    for mb in batches:
        assert 1 <= len(mb.samples) <= run.train.batch_size
        assert {sample.crop.bucket for sample in mb.samples} == {mb.bucket}
        concepts = {run.pictures[sample.picture].concept for sample in mb.samples}
        if not run.train.buckets.mix_concepts:
            assert len(concepts) == 1
        if len(mb.samples) < run.train.batch_size:
            group = -1 if run.train.buckets.mix_concepts else min(concepts)
            smaller[plan._epoch_of(mb.index)[0], mb.bucket, group] += 1
        for sample in mb.samples:
            assert sample.weight == plan.concepts[sample.picture].loss_weight
            assert all(size % 64 == 0 for size in mb.bucket)
    assert all(count == 1 for count in smaller.values())  # one rest in each group of an epoch


@given(runs())
@examples(60)
def test_the_arithmetic_of_any_run(run: Run) -> None:
    plan = run.plan()
    windows = [plan.step(k) for k in range(plan.steps)]
    assert [mb.index for window in windows for mb in window] == list(range(plan.micro_batches))
    assert all(len(window) == run.train.accumulate for window in windows[:-1])
    assert 1 <= len(windows[-1]) <= run.train.accumulate
    if run.train.epochs:
        assert plan.epochs == run.train.epochs
        assert sum(plan.batches_in(epoch) for epoch in range(run.train.epochs)) == plan.micro_batches
        assert plan.steps == -(-plan.micro_batches // run.train.accumulate)
    else:
        assert plan.steps == run.train.steps
        assert plan.micro_batches == run.train.steps * run.train.accumulate
        done = math.floor(plan.epochs)
        before = sum(plan.batches_in(epoch) for epoch in range(done))
        assert before <= plan.micro_batches < before + plan.batches_in(done) + (plan.batches_in(done) == 0)
        assert plan.epochs - done == pytest.approx((plan.micro_batches - before) / plan.batches_in(done))
    for epoch in range(3):
        sizes = plan.batch_sizes(epoch)
        assert sum(map(len, sizes.values())) == plan.batches_in(epoch)
        assert sum(map(sum, sizes.values())) == sum(len(plan.visits_in(i, epoch)) for i in plan.trained)
        assert sizes.keys() <= plan.buckets().keys()


@given(runs())
@examples(50)
def test_what_any_run_says_it_will_ask_for_is_what_it_asks_for(run: Run) -> None:
    plan = run.plan()
    samples = [*samples_of(micro_batches(plan)), *plan.validation]
    trained = samples[: len(samples) - len(plan.validation)]
    assert plan.views() == {sample.view for sample in samples}
    assert plan.captions() == {sample.caption for sample in samples}
    fullest: defaultdict[Size, int] = defaultdict(int)
    for micro_batch in micro_batches(plan):
        fullest[micro_batch.bucket] = max(fullest[micro_batch.bucket], len(micro_batch.samples))
    assert plan.fullest_batches() == fullest
    visits: defaultdict[int, list[int]] = defaultdict(list)
    for sample in trained:
        visits[sample.picture].append(sample.visit)
    assert {i: sorted(v) for i, v in plan.visits().items()} == {i: sorted(v) for i, v in visits.items()}
    assert [sample.picture for sample in plan.validation] == run.of("validation")
    assert all(plan.sample(sample.picture, sample.visit) == sample for sample in trained)


@given(runs(), st.integers(1, 9), st.integers(1, 3))
@examples(40)
def test_any_caption_warms_up_by_its_step_and_is_empty_in_every_nth_epoch(run: Run, steps: int, every: int) -> None:
    captions = CaptionConfig(tag_warmup_steps=steps, dropout_every_n_epochs=every)
    concepts = tuple(concept.replace(captions=captions) for concept in run.concepts)
    run = replace(run, concepts=concepts, pictures=tuple(replace(p, lines=("a, b, c, d, e",)) for p in run.pictures))
    plan = run.plan()
    samples = samples_of(micro_batches(plan))
    assert plan.captions() == {sample.caption for sample in [*samples, *plan.validation]}
    for step in range(plan.steps):
        for mb in plan.step(step):
            epoch = plan._epoch_of(mb.index)[0]
            tags = 1 + step * 4 // steps if step < steps else 5
            wanted = "" if (epoch + 1) % every == 0 else ", ".join("abcde"[:tags])
            assert [sample.caption for sample in mb.samples] == [wanted] * len(mb.samples)
    assert all(sample.caption == "a, b, c, d, e" for sample in plan.validation)
    assert all(plan.captions_of(i) == {"a, b, c, d, e"} for i in plan.trained)


@given(runs(), st.randoms(use_true_random=False))
@examples(30)
def test_any_step_is_the_same_whatever_was_asked_before(run: Run, random: Any) -> None:
    plan, other = run.plan(), run.plan()
    expected = [plan.step(k) for k in range(plan.steps)]
    order = list(range(plan.steps)) * 2
    random.shuffle(order)
    assert all(other.step(k) == expected[k] for k in order)


@given(runs(whole=True))
@examples(60)
def test_resolutions_and_variants_of_any_picture_are_used_equally_often(run: Run) -> None:
    plan = run.plan()
    crops: defaultdict[int, list[Crop]] = defaultdict(list)
    for sample in samples_of(micro_batches(plan)):
        crops[sample.picture].append(replace(sample.crop, flip=False))
    for i, each in crops.items():
        concept = run.concepts[run.pictures[i].concept]
        wanted = concept.resolutions or run.train.buckets.resolutions or ("256",)
        used = Counter(resolution_of(crop.bucket) for crop in each)
        assert used.keys() <= set(wanted)
        assert max(used.values()) - min(used[name] for name in wanted) <= 1
        variants = concept.augment.variants if concept.augment else 1
        for name, count in used.items():
            shown = Counter(crop for crop in each if resolution_of(crop.bucket) == name)
            assert len(shown) == min(variants, count)
            assert max(shown.values()) - min(shown.values()) <= 1 or len(shown) < variants


@given(runs())
@examples(30)
def test_micro_batches_know_their_place_in_the_step(run: Run) -> None:
    plan = run.plan()
    for k in range(min(plan.steps, 5)):
        parts = plan.step(k)
        sizes = [len(part.samples) for part in parts]
        assert [part.first for part in parts] == [sum(sizes[:i]) for i in range(len(parts))]
        assert {part.step_samples for part in parts} == {sum(sizes)}


@given(runs(whole=True, plain=True))
@examples(60)
def test_samples_are_exact_in_every_epoch_and_regularisation_keeps_pace(run: Run) -> None:
    plan, rates = run.plan(), run.rates()
    parts = epochs_of(plan, micro_batches(plan))
    for number, concept in enumerate(run.concepts):
        members = [i for i, picture in enumerate(run.pictures) if picture.concept == number]
        if not members or concept.role == "validation":
            continue
        total = sum((rates[i] for i in members), Fraction())
        assert not concept.samples or total == concept.samples
        for epoch, part in enumerate(parts):
            count = sum(run.pictures[sample.picture].concept == number for sample in samples_of(part))
            assert count == math.floor((epoch + 1) * total) - math.floor(epoch * total)
    free = [i for i in run.of("regularisation") if not plan.concepts[i].samples]
    assert not free or sum(rates[i] for i in free) == sum(rates[i] for i in run.of("train"))


@given(runs())
@examples(60)
def test_merging_small_buckets_keeps_every_visit_and_leaves_one_small_bucket_at_most(run: Run) -> None:
    keep, merge = (
        run.plan(buckets=run.train.buckets.replace(small_buckets=small), epochs=2, accumulate=1)
        if any(2 * rate >= 1 for rate in (run.rates()[i] for i in run.of("train")))
        else run.plan(buckets=run.train.buckets.replace(small_buckets=small))
        for small in ("keep", "merge")
    )
    assert [keep.visits_in(i, e) for i in keep.trained for e in range(3)] == [
        merge.visits_in(i, e) for i in merge.trained for e in range(3)
    ]
    size = run.train.batch_size
    kept, filled = (_visits_per_bucket(run, plan) for plan in (keep, merge))
    for group in kept:
        assert sum(kept[group].values()) == sum(filled[group].values())
        assert set(filled[group]) <= set(kept[group])
        assert sum(visits < size for visits in filled[group].values()) <= (len(filled[group]) == 1 or 0)
    for plan in (keep, merge):
        assert [crop for i in run.of("validation") for crop in plan.first_crops(i)] == [
            crop for i in run.of("validation") for crop in keep.first_crops(i)
        ]


def _visits_per_bucket(run: Run, plan: Plan) -> dict[tuple[str, int], Counter[Size]]:
    """Return the visits per epoch of each bucket, for each resolution (and concept where they do not mix)."""
    visits: defaultdict[tuple[str, int], Counter[Size]] = defaultdict(Counter)
    for i in plan.trained:
        for crop in plan.first_crops(i):
            among = -1 if run.train.buckets.mix_concepts else run.pictures[i].concept
            share = plan.rates[i] / len(plan.first_crops(i))
            visits[resolution_of(crop.bucket), among][crop.bucket] += share  # type: ignore
    return visits


# --- corners of it --------------------------------------------------------------------------------------------


def plan_of(sizes: list[Size], concept: dict[str, Any] | None = None, **train: Any) -> Plan:
    """Plan a run over pictures of these sizes in one concept."""
    pictures = tuple(
        Picture(path=Path(f"{i}.png"), name=f"{i}.png", concept=0, width=w, height=h, digest=str(i), lines=("x",))
        for i, (w, h) in enumerate(sizes)
    )
    dataset = DatasetConfig(concepts=(ConceptConfig(folder="c", **(concept or {})),))
    outcomes = tuple(FileOutcome(concept=0, name=picture.name, outcome="picture") for picture in pictures)
    return build_plan(Manifest(pictures=pictures, outcomes=outcomes), dataset, TrainConfig(**train))


def test_a_concept_has_batches_of_its_own_size() -> None:
    """Its batches hold no other concept, whether or not the others mix."""
    pictures = tuple(
        Picture(path=Path(f"{i}.png"), name=f"{i}.png", concept=i // 7, width=512, height=512, digest=str(i))
        for i in range(21)
    )
    outcomes = tuple(FileOutcome(concept=p.concept, name=p.name, outcome="picture") for p in pictures)
    for mixed in (True, False):
        concepts = tuple(ConceptConfig(folder=name, batch_size=size) for name, size in (("a", 0), ("b", 3), ("c", 0)))
        train = TrainConfig(batch_size=4, epochs=2, buckets=BucketConfig(mix_concepts=mixed))
        plan = build_plan(Manifest(pictures=pictures, outcomes=outcomes), DatasetConfig(concepts=concepts), train)
        found: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for batch in micro_batches(plan):
            of = tuple(sorted({pictures[sample.picture].concept for sample in batch.samples}))
            found[(1,) if of == (1,) else (0, 2) if mixed else of].append(len(batch.samples))
        own = {(1,): [1, 1, 3, 3, 3, 3]}
        rest = {(0, 2): [2, 2, 4, 4, 4, 4, 4, 4]} if mixed else {(0,): [3, 3, 4, 4], (2,): [3, 3, 4, 4]}
        assert {of: sorted(sizes) for of, sizes in found.items()} == own | rest
        assert plan.steps == sum(map(len, found.values())) == 2 * plan.batches_in(0)
        assert plan.smaller_batches(0) == {(512, 512): 2 if mixed else 3}
        assert plan.fullest_batches() == {(512, 512): 4}


def test_a_run_in_which_nothing_would_be_visited_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"No picture is visited in the epochs of this run; raise epochs of Train LoRA"
    ):
        plan_of([(512, 512)], {"repeats": 0.5}, epochs=1)
    assert plan_of([(512, 512)], {"repeats": 0.5}, epochs=2).steps == 1
    assert plan_of([(512, 512)], {"repeats": 0.5}, steps=3).steps == 3


def test_buckets_of_rare_pictures_are_merged_too() -> None:
    """Half a visit per epoch is no reason to stand alone."""
    sizes = [(512, 512)] * 8 + [(640, 448)]
    buckets = BucketConfig(small_buckets="merge")
    plan = plan_of(sizes, {"repeats": 0.5}, batch_size=4, epochs=2, buckets=buckets)
    assert plan.buckets().keys() == {(512, 512)}
    plan = plan_of([(512, 512)] * 7 + [(640, 448)], {"repeats": 0.5}, batch_size=4, epochs=2, buckets=buckets)
    assert plan.buckets() == {(512, 512): set(range(8))}
    exact = plan_of([(512, 512)] * 8, {"repeats": 0.5}, batch_size=4, epochs=2, buckets=buckets)
    assert exact.buckets() == {(512, 512): set(range(8))}


@given(
    st.lists(st.tuples(st.integers(70, 900), st.integers(70, 900)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["keep", "merge"]),
)
@example([(128, 128), (256, 256), (256, 256)], 2, "merge")
@examples(60)
def test_without_upscaling_no_picture_is_enlarged_even_where_buckets_merge(
    sizes: list[Size], batch: int, small: Any
) -> None:
    buckets = BucketConfig(no_upscale=True, small_buckets=small)
    plan = plan_of(sizes, resolution=512, batch_size=batch, epochs=1, buckets=buckets)
    for sample in samples_of(micro_batches(plan)):
        assert all(new <= old for new, old in zip(sample.crop.resized, sizes[sample.picture], strict=True))
    assert Counter(s.picture for s in samples_of(micro_batches(plan))) == dict.fromkeys(range(len(sizes)), 1)


@pytest.mark.parametrize("limits", [{}, {"min_side": 320, "max_side": 384}])
def test_without_upscaling_narrow_pictures_are_named_together_and_limits_ignored(limits: dict[str, int]) -> None:
    shapes = [(60, 900), (512, 512), (900, 40), (200, 300)]
    buckets = BucketConfig(no_upscale=True, **limits)
    with pytest.raises(ValueError, match=r"2 pictures are too narrow .*: 0\.png \(60x900\), 2\.png"):
        plan_of(shapes, resolution=512, buckets=buckets)
    plan = plan_of(shapes, {"on_problem": "leave_out"}, resolution=512, buckets=buckets)
    assert [picture.name for picture in plan.manifest.pictures] == ["1.png", "3.png"]
    assert set(plan.buckets()) == {(512, 512), (192, 256)}
    text = report(plan)
    assert "Left out: 2 pictures are too narrow for no_upscale" in text
    assert ("min_side and max_side are ignored" in text) == bool(limits)


def test_clipped_buckets_are_remarked_with_the_value_that_clips_none() -> None:
    def remark(side: int) -> bool:
        text = report(plan_of([(512, 512)], resolution=1024, buckets=BucketConfig(max_side=side)))
        assert ("Set it to 2048 to keep them" in text) == (f"max_side of Buckets is {side}, which clips" in text)
        return "clips" in text

    assert remark(1024) and remark(2040) and not remark(2048) and not remark(0)


def test_a_picture_in_all_resolutions_is_visited_once_in_each_in_every_epoch() -> None:
    buckets = BucketConfig(resolutions=("128", "256", "448x320"), resolution_mode="all")
    plan = plan_of([(512, 512), (640, 384)], {"repeats": 2, "augment": AUGMENT}, epochs=3, buckets=buckets)
    for part in epochs_of(plan, micro_batches(plan)):
        seen = Counter((s.picture, resolution_of(s.crop.bucket)) for s in samples_of(part))
        assert seen == {(i, name): 2 for i in range(2) for name in AREAS}


def test_fractional_repeats_spread_over_the_epochs() -> None:
    plan = plan_of([(512, 512)] * 8, {"repeats": 0.25}, epochs=8)
    parts = [Counter(s.picture for s in samples_of(part)) for part in epochs_of(plan, micro_batches(plan))]
    assert [sum(part.values()) for part in parts] == [2] * 8
    assert [set(parts[e]) for e in range(4)] == [set(parts[e + 4]) for e in range(4)]
    assert set().union(*parts[:4]) == set(range(8))


# --- chances --------------------------------------------------------------------------------------------------


def shares(probability: float, count: int) -> tuple[float, float]:
    """Return the bounds of a share at four standard errors."""
    error = 4 * math.sqrt(probability * (1 - probability) / count)
    return probability - error, probability + error


def test_unmasked_probability_and_flips_are_what_they_say_and_do_not_depend_on_each_other() -> None:
    options = {"flip": True, "masks": MaskConfig(unmasked_probability=0.1)}
    pictures = tuple(
        Picture(path=Path("x"), name=f"{i}", concept=0, width=512, height=512, digest="x", mask=Path("m"))
        for i in range(100)
    )
    dataset = DatasetConfig(concepts=(ConceptConfig(folder="c", **options),))
    plan = build_plan(Manifest(pictures=pictures), dataset, TrainConfig(epochs=200))
    samples = samples_of(micro_batches(plan))
    assert len(samples) == 20_000
    unmasked, flipped = ([not s.use_mask for s in samples], [s.crop.flip for s in samples])
    low, high = shares(0.1, 20_000)
    assert low <= sum(unmasked) / 20_000 <= high
    low, high = shares(0.5, 20_000)
    assert low <= sum(flipped) / 20_000 <= high
    low, high = shares(0.05, 20_000)
    assert low <= sum(u and f for u, f in zip(unmasked, flipped, strict=True)) / 20_000 <= high
    low, high = shares(0.1, 200)
    for i in range(100):  # 100 pictures, 5 standard errors: no picture is treated otherwise
        share = sum(not s.use_mask for s in samples if s.picture == i) / 200
        assert abs(share - 0.1) <= (high - 0.1) * 5 / 4
    low, high = shares(0.01, 19_900)
    pairs = sum(
        not plan.sample(i, v).use_mask and not plan.sample(i, v + 1).use_mask for i in range(100) for v in range(199)
    )
    assert low <= pairs / 19_900 <= high


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_the_ends_of_the_probability_are_exact(probability: float) -> None:
    plan = make([0] * 6, (1,), {"masks": MaskConfig(unmasked_probability=probability)}, epochs=50)
    masked = [sample for sample in samples_of(micro_batches(plan)) if sample.picture % 3]
    assert {sample.use_mask for sample in masked} == {probability == 0.0}


@pytest.mark.parametrize("source", ["draw", "first"])
def test_pictures_that_say_left_or_right_are_never_mirrored(source: Any) -> None:
    texts = [("a cat",), ("a left hand",), ("a cat", "from the RIGHT"), ("copyright",), ("",), ("left-handed",)]
    pictures = tuple(
        Picture(path=Path("x"), name=f"{i}", concept=0, width=512, height=512, digest="x", lines=lines)
        for i, lines in enumerate(texts)
    )
    concept = ConceptConfig(folder="c", flip=True, captions=CaptionConfig(lines=source))
    plan = build_plan(Manifest(pictures=pictures), DatasetConfig(concepts=(concept,)), TrainConfig(epochs=60))
    flips = Counter(s.picture for s in samples_of(micro_batches(plan)) if s.crop.flip)
    assert flips.keys() == {0, 3, 4}
    assert all(shares(0.5, 60)[0] <= flips[i] / 60 <= shares(0.5, 60)[1] for i in flips)
    assert "3 pictures are never mirrored, as the caption says left or right: 1, 2, 5." in report(plan)


# --- the table ------------------------------------------------------------------------------------------------


def test_the_table_holds_the_true_corner_that_sdxl_is_conditioned_on() -> None:
    """Closed form: 1000 x 500 covers 512 x 512 as 1024 x 512, of which 256 columns are cut off on the left."""
    plan = plan_of([(1000, 500), (500, 1000), (512, 512)], epochs=1, buckets=BucketConfig(resolutions=("512x512",)))
    rows = list(csv.DictReader(io.StringIO(manifest_table(plan))))
    assert [(r["width"], r["height"], r["bucket"], r["left"], r["top"]) for r in rows] == [
        ("1000", "500", "512x512", "256", "0"),
        ("500", "1000", "512x512", "0", "256"),
        ("512", "512", "512x512", "0", "0"),
    ]
    assert [(r["cropped"], r["scale"], r["visits_per_epoch"]) for r in rows] == [
        ("0.500", "1.024", "1"),
        ("0.500", "1.024", "1"),
        ("0.000", "1.000", "1"),
    ]


def test_every_row_of_the_table_is_what_is_trained() -> None:
    concept = {"flip": True, "augment": AUGMENT}
    plan = plan_of([(700, 500), (500, 900), (300, 300)], concept, epochs=1, resolution=256)
    for i, row in enumerate(csv.DictReader(io.StringIO(manifest_table(plan)))):
        sample = plan.sample(i, 0)
        (original_w, original_h), left, top, (width, height) = sample.crop.framing(plan.size(i))
        assert (row["width"], row["height"]) == (str(original_w), str(original_h))
        assert (row["left"], row["top"], row["bucket"]) == (str(left), str(top), f"{width}x{height}")
        assert (row["caption"], row["outcome"], row["file"]) == (sample.caption, "picture", f"{i}.png")


def test_the_table_names_files_that_are_not_trained_and_validation() -> None:
    pictures = tuple(
        Picture(path=Path("x"), name="a.png", concept=i, width=512, height=512, digest="x", lines=("x",))
        for i in (0, 1)
    )
    outcomes = (
        FileOutcome(concept=0, name="a.png", outcome="picture"),
        FileOutcome(concept=0, name='b,\n".png', outcome="left out", why="too small"),
        FileOutcome(concept=1, name="a.png", outcome="picture"),
    )
    dataset = DatasetConfig(
        concepts=(ConceptConfig(folder="t", repeats=2.5), ConceptConfig(folder="v", role="validation", repeats=7))
    )
    plan = build_plan(Manifest(pictures=pictures, outcomes=outcomes), dataset, TrainConfig(steps=1))
    rows = list(csv.DictReader(io.StringIO(manifest_table(plan), newline="")))
    assert [(r["concept"], r["file"], r["outcome"], r["why"]) for r in rows] == [
        ("t", "a.png", "picture", ""),
        ("t", 'b,\n".png', "left out", "too small"),
        ("v", "a.png", "picture", ""),
    ]
    assert [r["visits_per_epoch"] for r in rows] == ["2.5", "", "0"]
    assert rows[1]["bucket"] == ""


@pytest.mark.parametrize(
    ("captions", "said"),
    [
        (
            {"shuffle": True, "variants": 3},
            "Captions of 1 picture change from visit to visit: each line has 3 variants",
        ),
        ({"shuffle": True, "variants": 50}, ""),
        ({"shuffle": True, "variants": 0}, ""),
        ({"dropout": 0.5, "variants": 3}, ""),
    ],
)
def test_variants_that_come_again_are_told(captions: dict[str, Any], said: str) -> None:
    lines = ("red, green, blue, old, new, big",)
    pictures = (Picture(path=Path("x"), name="x", concept=0, width=512, height=512, digest="x", lines=lines),)
    concept = ConceptConfig(folder="c", captions=CaptionConfig(**captions))
    plan = build_plan(Manifest(pictures=pictures), DatasetConfig(concepts=(concept,)), TrainConfig(steps=40))
    assert (said in report(plan)) if said else ("used in turn" not in report(plan))
