"""Learning-rate curves: the table, transformers' schedules, and behaviour after the end."""

from itertools import pairwise

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from lora_atelier.trainer_core.config import SchedulerConfig
from lora_atelier.trainer_core.schedule import check_schedule, lr_factor

TABLE = {  # value at 0, .1, .25, .5, .75, .9, .99, 1 of the run
    "linear": (1, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01, 0),
    "cosine": (1, 0.9755, 0.8536, 0.5, 0.1464, 0.0245, 0.0002, 0),
    "constant": (1,) * 8,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    positions = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
    values = [lr_factor(round(1000 * p), 1000, SchedulerConfig(name=name)) for p in positions]
    assert values == pytest.approx(TABLE[name], abs=5e-5)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("constant", lambda o, w, n: get_constant_schedule_with_warmup(o, w)),
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
    ],
)
def test_after_the_warm_up_the_curves_are_those_of_transformers(name, build):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference, config = build(optimizer, 10, 100), SchedulerConfig(name=name, warmup_steps=10)
    for step in range(100):
        if step >= 10:
            assert lr_factor(step, 100, config) == pytest.approx(reference.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        reference.step()


def test_warm_up_starts_above_zero_and_ends_at_one():
    config = SchedulerConfig(name="constant", warmup_steps=10)
    assert [lr_factor(k, 100, config) for k in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1, 1])


@pytest.mark.parametrize("name", TABLE)
def test_it_never_rises_after_the_warm_up_nor_after_the_end(name):
    config = SchedulerConfig(name=name, warmup_steps=7, min_lr_ratio=0.1)
    values = [lr_factor(k, 100, config) for k in range(7, 300)]
    assert all(later <= earlier for earlier, later in pairwise(values))
    assert min(values) >= 0.1


def test_the_floor_is_reached_exactly():
    config = SchedulerConfig(name="cosine", min_lr_ratio=0.1)
    assert [lr_factor(k, 100, config) for k in (10, 25, 50, 75, 90, 100)] == pytest.approx(
        [0.9780, 0.8682, 0.55, 0.2318, 0.1220, 0.1], abs=5e-5
    )


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps is 100, the run has 100 steps"):
        check_schedule(100, SchedulerConfig(warmup_steps=100))
