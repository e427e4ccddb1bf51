"""The plan loses nothing, repeats nothing and is a pure function of the step."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig, TrainConfig
from lora_atelier.trainer_core.plan import MicroBatch, Plan, build_plan
from lora_atelier.trainer_core.report import report
from lora_atelier.trainer_core.scan import Manifest, Picture

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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
@settings(max_examples=40, deadline=None)
def test_crops_and_captions_are_exactly_what_the_run_asks_for(shapes, batch, steps, flip, dropout) -> None:
    options = {"flip": flip, "captions": CaptionConfig(shuffle=dropout > 0, dropout=dropout)}
    plan = make(shapes, (1, 2), options, batch_size=batch, steps=steps)
    samples = [sample for mb in micro_batches(plan) for sample in mb.samples]
    assert plan.crops() == {(sample.picture, sample.crop) for sample in samples}
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


def test_an_empty_manifest_is_refused() -> None:
    with pytest.raises(ValueError, match="no picture"):
        build_plan(Manifest(pictures=()), DatasetConfig(concepts=(ConceptConfig(folder="x"),)), TrainConfig())


def test_the_report_says_what_will_happen() -> None:
    plan = make([0] * 7 + [1] * 3, (2,), {"masks": MaskConfig()}, batch_size=4, accumulate=2, epochs=3)
    text = report(plan)
    assert "10 pictures, 20 visits and 6 batches per epoch" in text
    assert "9 steps of batch 4 x 2 accumulated = 3 epochs" in text
    concept = next(line for line in text.splitlines() if "c0" in line)
    assert [cell.strip() for cell in concept.split("|")] == ["c0", "train", "10", "2", "20", "1", "10", "6 of 10"]
    bucket = next(line for line in text.splitlines() if "640x384" in line)
    assert [cell.strip() for cell in bucket.split("|")][1:3] == ["3", "2 (1 smaller)"]
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


def test_asking_for_a_step_is_quick() -> None:
    options = {"flip": True, "masks": MaskConfig()}
    plan = make([0, 1, 2] * 100, (1,), options, batch_size=4, epochs=2)
    plan.step(0)

    def best(count: int) -> float:
        start = time.perf_counter()
        for k in range(count):
            plan.step(k)
        return (time.perf_counter() - start) / count

    assert min(best(25) for _ in range(8)) < 1e-3  # 0.1 ms on a quiet machine
