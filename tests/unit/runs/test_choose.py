"""How a run goes on from a save of another one: its key, and its learning rate curve."""

import pytest

from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig, RunConfig, SchedulerConfig
from lora_atelier.trainer_core.optim.schedule import Curve, factor_on
from lora_atelier.trainer_core.runs import RunFolder, build_keys
from lora_atelier.trainer_core.training.joining import joins, run_curve


def config_of(**scheduler):
    return RunConfig(
        base_model=BaseModelConfig(path="model.safetensors"),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder="pictures"),)),
        scheduler=SchedulerConfig(**scheduler),
    )


def run_of(tmp_path, steps, *, curve=None, **scheduler):
    about = {"name": "n", "steps": steps, "config": {"scheduler": SchedulerConfig(**scheduler).to_dict()}}
    return RunFolder(path=tmp_path, about=about | ({"curve": curve} if curve else {}))


def test_the_planned_length_of_the_curve_makes_another_result_but_no_other_course():
    plain, planned = (build_keys(config_of(planned_steps=steps), {}, "") for steps in (0, 100))
    assert plain.run != planned.run and plain.course == planned.course
    assert build_keys(config_of(min_lr_ratio=0.1), {}, "").course != plain.course


@pytest.mark.parametrize(
    "name", ["cosine", "linear", "rex", "one_cycle", "cosine_with_restarts", "warmup_stable_decay"]
)
@pytest.mark.parametrize("curve", [None, (100, 99), [60, 59]])
def test_an_extended_run_keeps_the_curve_and_its_last_rate(tmp_path, name, curve):
    run, config = run_of(tmp_path, 100, name=name, curve=curve), config_of(name=name)
    join = joins(config, 150)(run, 100)
    kept = Curve(*(curve or (100, 99)))
    assert join.about == {"curve": kept} and not join.refusal
    factors = [factor_on(kept, step, config.scheduler) for step in range(150)]
    assert set(factors[100:]) == {factors[99]} and "For a curve over all 150 steps, set planned_st" in join.sentence
    # Once the curve is over, any save will do, else only the end: a run that was stopped gets its own curve.
    assert not join.at_end and joins(config, 150)(run, 90).at_end == (curve != [60, 59])


def test_a_curve_that_does_not_depend_on_the_length_goes_on(tmp_path):
    for name in ("constant", "inverse_sqrt"):
        assert joins(config_of(name=name), 150)(run_of(tmp_path, 100, name=name), 50) == (False, "", "", {})


def test_another_planned_length_is_asked_for_at_the_end_only(tmp_path):
    run = run_of(tmp_path, 100)
    assert joins(config_of(planned_steps=150), 150)(run, 100).at_end
    assert joins(config_of(planned_steps=150), 100)(run, 50) is None
    assert joins(config_of(planned_steps=100), 150)(run, 50) == (False, "", "", {})
    assert joins(config_of(), 100)(run_of(tmp_path, 100, planned_steps=150), 50) is None


@pytest.mark.parametrize("curve", [[0, 5], [5], "ab", [1, -1], [True, 2]])
def test_a_damaged_curve_is_no_curve(tmp_path, curve):
    config = SchedulerConfig()
    assert run_curve(run_of(tmp_path, 9, curve=curve), config) in (None, Curve(9, 8))
