"""A first guess of settings: what the pictures, the model and the memory make of it, and why."""

import math
from pathlib import Path

import pytest

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    Defaults,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    fill,
)
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import Manifest, Picture
from lora_atelier.trainer_core.preflight.guess import GuessInputs, find_inputs, guess_settings

SMALL = Defaults(resolution=512)


def facts(pictures=12, side=800.0, **changed) -> GuessInputs:
    settings = {"visits": float(pictures), "repeats": 1.0, "rate": 1e-4, "fits": lambda resolution, batch: True}
    return GuessInputs(title="Toy", defaults=SMALL, sides=(side,) * pictures, **(settings | changed))


def values(given: GuessInputs) -> dict[str, float]:
    return {guess.setting: guess.value for guess in guess_settings(given)}


def test_few_pictures_get_small_batches_and_many_visits() -> None:
    found = guess_settings(facts())
    assert {each.setting: each.value for each in found} == {
        "resolution": 512,
        "batch_size": 1,
        "steps": 1500,
        "rank": 16,
        "learning_rate": 1e-4,
    }
    assert all(each.reason.endswith(".") and each.sentence.startswith(f"{each.setting} ") for each in found)
    assert "about 125 times" in next(each.reason for each in found if each.setting == "steps")


@pytest.mark.parametrize(
    ("pictures", "batch", "steps", "rank"), [(1, 1, 1500, 16), (16, 2, 800, 16), (40, 4, 1000, 16), (2000, 4, 5000, 64)]
)
def test_more_pictures_get_larger_batches_more_steps_and_ranks(pictures, batch, steps, rank) -> None:
    found = values(facts(pictures))
    assert (found["batch_size"], found["steps"], found["rank"]) == (batch, steps, rank)
    assert found["learning_rate"] == pytest.approx(1e-4 * math.sqrt(batch), rel=0.05)


def test_small_pictures_lower_the_resolution_but_not_far_below_the_models() -> None:
    assert values(facts(side=450.0))["resolution"] == 448
    assert values(facts(side=100.0))["resolution"] == 384  # 3/4 of 512
    assert values(facts(side=3000.0))["resolution"] == 512


def test_memory_limits_the_batch_and_then_the_resolution() -> None:
    assert values(facts(40, fits=lambda resolution, batch: batch <= 2))["batch_size"] == 2
    found = values(facts(40, fits=lambda resolution, batch: resolution <= 384 and batch == 1))
    assert (found["resolution"], found["batch_size"]) == (384, 1)
    never = values(facts(40, fits=lambda resolution, batch: False))
    assert (never["resolution"], never["batch_size"]) == (512, 1)
    assert values(facts(40, fits=None))["batch_size"] == 1  # unknown before the run


def test_what_is_decided_elsewhere_is_left_out() -> None:
    found = values(facts(sized=True, ranked=False, estimates=True, rate=1.0, by_epochs=True))
    assert found == {"batch_size": 1, "steps": 1500, "epochs": 0, "learning_rate": 1.0}


def test_repeats_regularisation_and_accumulation_count() -> None:
    plain = values(facts(20, visits=20.0))["steps"] * values(facts(20, visits=20.0))["batch_size"]
    repeated = facts(20, visits=200.0, repeats=10.0)
    assert values(repeated)["steps"] * values(repeated)["batch_size"] == plain
    mixed = facts(20, visits=40.0)  # as many for regularisation: each step has half of the pictures
    assert values(mixed)["steps"] * values(mixed)["batch_size"] == 2 * plain
    assert values(facts(20, accumulate=2))["steps"] == 500


def test_the_facts_are_those_of_the_run() -> None:
    sizes = [(512, 512), (1024, 256), (300, 300)]
    pictures = tuple(
        Picture(path=Path(f"{i}"), name=f"{i}.png", concept=int(i == 2), width=w, height=h, digest=f"{i}", lines=("x",))
        for i, (w, h) in enumerate(sizes)
    )
    concepts = (ConceptConfig(folder="a", repeats=3), ConceptConfig(folder="b", role="regularisation"))
    config = RunConfig(
        base_model=BaseModelConfig(path="x"),
        dataset=DatasetConfig(concepts=concepts),
        lora=LoraConfig(algorithm="lokr"),
        optimizer=OptimizerConfig(learning_rate=0.5),
        train=TrainConfig(epochs=2, accumulate=2),
    )
    filled = fill(config, SMALL)
    plan = build_plan(Manifest(pictures=pictures), filled.dataset, filled.train)
    found = find_inputs(config, plan, "Toy", SMALL, None)
    assert found.sides == (512.0, 512.0) and found.repeats == 3 and found.visits == 12
    assert found.rate == SMALL.learning_rate and not found.ranked and found.by_epochs and found.accumulate == 2
    prodigy = config.replace(optimizer=OptimizerConfig(name="prodigy", learning_rate=0.5))
    own = find_inputs(prodigy, plan, "Toy", SMALL, None)
    assert own.estimates and own.rate == 1.0
