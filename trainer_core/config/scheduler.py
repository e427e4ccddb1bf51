"""Settings of the learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config, check_choices, check_range

LONGEST = 1_000_000_000  # maximum of any number of steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(Config):
    """The learning rate schedule, as a factor over the run; formulas in optim/schedule.py."""

    SECTION: ClassVar = "scheduler"
    NODE: ClassVar = "Scheduler"

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_soft_restarts",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
        "rex",
        "rex_restarts",
        "one_cycle",
        "expression",
        "points",
    ] = "cosine"
    warmup_steps: int = 0  # optimizer steps, or percent of the curve
    warmup_unit: Literal["steps", "percent"] = "steps"
    min_lr_ratio: float = 0.0  # floor as a share of the learning rate, 0..1
    planned_steps: int = 0  # length of the curve, which then keeps its last value; 0 = the run's steps
    cycles: int = 2  # of the curves with restarts, 1..100
    power: float = 2.0  # polynomial, above 0..100
    timescale: int = 100  # inverse_sqrt: the rate has halved after 3 x this many steps, 1..
    decay_share: float = 0.2  # warmup_stable_decay: share of the curve that falls, above 0..1
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    d: float = 0.9  # rex and rex_restarts: larger = stays high for longer, 0..0.999; 0 = a straight line
    gamma: float = 0.9  # rex_restarts: peak of a cycle as a share of the one before, 0..1
    cycle_multiplier: float = 1.0  # rex_restarts: length of a cycle as a multiple of the one before, 0.1..10
    rise_share: float = 0.3  # one_cycle: share of the curve that rises, above 0..below 1
    start: float = 0.04  # one_cycle: where it starts, as a share of the learning rate, 0..1
    expression: str = "1 - t"  # of t (0..1), step and total; allowed functions: optim/expression.py
    points: str = "0:1, 1:0"  # position:factor, positions 0..1 in order, straight lines between

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "warmup_steps", 0, 99 if self.warmup_unit == "percent" else LONGEST)
        check_range(self, "min_lr_ratio", 0, 1)
        check_range(self, "planned_steps", 0, LONGEST)
        check_range(self, "cycles", 1, 100)
        check_range(self, "power", 0.01, 100)
        check_range(self, "timescale", 1, LONGEST)
        check_range(self, "decay_share", 0.001, 1)
        check_range(self, "d", 0, 0.999)
        check_range(self, "gamma", 0, 1)
        check_range(self, "cycle_multiplier", 0.1, 10)
        check_range(self, "rise_share", 0.001, 0.999)
        check_range(self, "start", 0, 1)
