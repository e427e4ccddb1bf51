"""Held-out pictures: the share, by content and seed alone, never a concept's last, and planned as validation."""

import csv
import io
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import ConceptConfig, DatasetConfig, TrainConfig
from lora_atelier.trainer_core.data.holdout import hold_out
from lora_atelier.trainer_core.data.looks import Look
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import FileOutcome, Manifest, Picture
from lora_atelier.trainer_core.preflight.report import manifest_table, report


def made(*concepts: list[str], roles: tuple[str, ...] = ()) -> tuple[Manifest, DatasetConfig]:
    """Describe concepts by the contents of their pictures."""
    pictures = tuple(
        Picture(path=Path(name), name=f"{number}.png", concept=c, width=64, height=64, digest=name)
        for c, contents in enumerate(concepts)
        for number, name in enumerate(contents)
    )
    outcomes = tuple(FileOutcome(concept=p.concept, name=p.name, outcome="picture") for p in pictures)
    configs = tuple(
        ConceptConfig(folder=f"c{c}", role=roles[c] if roles else "train")
        for c in range(len(concepts))  # type: ignore[arg-type]
    )
    return Manifest(pictures=pictures, outcomes=outcomes), DatasetConfig(concepts=configs)


def held(manifest: Manifest, dataset: DatasetConfig) -> list[str]:
    return [p.digest for p in manifest.pictures if dataset.concepts[p.concept].role == "validation"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.integers(0, 9))
def test_the_share_is_held_out_and_every_concept_keeps_a_picture(sizes: list[int], share: float, seed: int) -> None:
    contents = [[f"{c}-{i}" for i in range(size)] for c, size in enumerate(sizes)]
    before = [0, *(sum(sizes[: c + 1]) for c in range(len(sizes)))]
    wanted = [round(share * before[c + 1]) - round(share * before[c]) for c in range(len(sizes))]
    wanted = [min(number, size - 1) for number, size in zip(wanted, sizes, strict=True)]
    if not sum(wanted):
        with pytest.raises(ValueError, match="leaves no picture to validate and one to train; set validation_share of"):
            hold_out(*made(*contents), share, seed)
        return
    found = Counter(int(digest.partition("-")[0]) for digest in held(*hold_out(*made(*contents), share, seed)))
    assert [found[c] for c in range(len(sizes))] == wanted


def test_which_ones_depends_on_content_and_seed_not_on_order_or_names() -> None:
    contents = [f"content {i}" for i in range(40)]
    one, other = made(contents), made(contents[::-1])
    assert sorted(held(*hold_out(*one, 0.25, 3))) == sorted(held(*hold_out(*other, 0.25, 3)))
    assert len({tuple(held(*hold_out(*one, 0.25, seed))) for seed in range(4)}) == 4
    more = made([*contents, "new"])
    assert len(set(held(*hold_out(*one, 0.25, 3))) & set(held(*hold_out(*more, 0.25, 3)))) >= 9  # of 10


def test_copies_of_a_picture_are_on_the_same_side() -> None:
    manifest, dataset = hold_out(*made(["a", "b", "a", "c"], ["a", "d", "b"]), 0.5, 0)
    sides = {(p.digest, dataset.concepts[p.concept].role) for p in manifest.pictures}
    assert len(sides) == 4 and {role for _, role in sides} == {"train", "validation"}


def with_hashes(parts: tuple[Manifest, DatasetConfig], hashes: list[str]) -> tuple[Manifest, DatasetConfig]:
    """Give pictures their looks, in order."""
    pairs = zip(parts[0].pictures, hashes, strict=True)
    return replace(parts[0], pictures=tuple(replace(p, look=Look(hash=text)) for p, text in pairs)), parts[1]


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_near_duplicates_are_on_the_same_side_whatever_their_order(share: float, seed: int) -> None:
    # Three chains: each picture is 5 bits from the next, so that the ends of a chain are 10 apart.
    hashes = [f"{(0xF0F0F0F << (20 * chain)) ^ ((1 << 5 * link) - 1):016x}" for chain in range(3) for link in range(3)]
    contents = [f"{number}" for number in range(9)] + [f"alone {number}" for number in range(6)]
    hashes += [""] * 6
    found = []
    for order in (range(15), range(14, -1, -1), [*range(1, 15, 2), *range(0, 15, 2)]):
        parts = with_hashes(made([contents[i] for i in order]), [hashes[i] for i in order])
        out = set(held(*hold_out(*parts, share, seed)))
        assert all(len(out & {contents[3 * chain + i] for i in range(3)}) in (0, 3) for chain in range(3))
        assert 0 < len(out) <= round(share * 15)
        found.append(out)
    assert found[0] == found[1] == found[2]


def test_a_group_larger_than_the_share_is_held_out_whole_unless_nothing_would_be_left() -> None:
    pairs = with_hashes(made([f"{i}" for i in range(6)]), [f"{i // 2 * 0x1111111111111111:016x}" for i in range(6)])
    assert len(held(*hold_out(*pairs, 0.2, 0))) == 2
    alone = with_hashes(made(["a", "b"]), ["00ff00ff00ff00ff"] * 2)
    with pytest.raises(ValueError, match=r"leaves no picture to validate.*Near-duplicates stay together\.$"):
        hold_out(*alone, 0.5, 0)
    over_two = with_hashes(made(["a", "b", "c"], ["d"]), ["00ff00ff00ff00ff", "", "", "00ff00ff00ff00ff"])
    assert all("d" not in held(*hold_out(*over_two, 0.4, seed)) for seed in range(6))  # its concept would be empty


def test_only_pictures_of_the_role_train_are_held_out() -> None:
    contents = [f"{i}" for i in range(10)]
    parts = made(contents, contents, contents, roles=("train", "regularisation", "prior_prediction"))
    manifest, _ = hold_out(*parts, 0.5, 0)
    assert sum(p.concept == 3 for p in manifest.pictures) == 5
    assert [sum(p.concept == c for p in manifest.pictures) for c in (1, 2)] == [10, 10]


def test_no_share_changes_nothing() -> None:
    manifest, dataset = made(["a"])
    assert hold_out(manifest, dataset, 0.0, 0) == (manifest, dataset)


def test_held_out_pictures_are_planned_as_validation_and_named() -> None:
    manifest, dataset = made([f"{i}" for i in range(10)], [f"b{i}" for i in range(4)])
    train = TrainConfig(epochs=2, resolution=64, validation_share=0.3)
    plan = build_plan(manifest, dataset, train)
    trained = {sample.picture for step in range(plan.steps) for mb in plan.step(step) for sample in mb.samples}
    validated = {sample.picture for sample in plan.validation}
    assert len(validated) == 4 and trained == set(range(14)) - validated
    text = report(plan)
    assert "10 pictures (and 4 for validation)" in text and "Validation holds out 4 pictures, which are not" in text
    rows = csv.DictReader(io.StringIO(manifest_table(plan)))
    told = {(row["concept"], row["file"]) for row in rows if row["why"] == "held out for validation"}
    assert told == {(f"c{manifest.pictures[i].concept}", manifest.pictures[i].name) for i in validated}
    same = build_plan(manifest, dataset, train.replace(validation_share=0.0))
    assert not same.validation and len(same.trained) == 14
    assert build_plan(replace(manifest, outcomes=()), dataset, train).validation == plan.validation
