"""Settings of the learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config
from .rows import row

SHAPES = (  # their formulas are in optim/schedule.py
    "cosine",
    "constant",
    "linear",
    "rex",
    "rex_restarts",
    "cosine_with_restarts",
    "cosine_soft_restarts",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "one_cycle",
    "expression",
    "points",
)
RESTARTS = ("rex_restarts", "cosine_with_restarts", "cosine_soft_restarts")
MOST_PERCENT = 99  # of a warm-up


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(Config):
    """The learning rate schedule, as a factor over the run; formulas in optim/schedule.py."""

    SECTION: ClassVar = "scheduler"
    NODE: ClassVar = "Scheduler"

    name: str = row(
        "cosine",
        "cosine: slow, fast, slow down; a good choice for most runs. constant: the same throughout. linear: a "
        "straight line down. rex: high for long, then fast down. rex_restarts and cosine_with_restarts start again "
        "from a peak, cosine_soft_restarts swings back up. polynomial, inverse_sqrt: steep at first. "
        "warmup_stable_decay: full until the last part. one_cycle: up, then down. expression, points: your own curve.",
        choices=SHAPES,
    )
    cycles: int = row(
        2,
        "How often the rate starts from its peak, 1 to 100. 2 = one restart.",
        span=(1, 100),
        acts_with=("name", RESTARTS),
    )
    gamma: float = row(
        0.9,
        "Each cycle's peak as a share of the one before, 0 to 1. 1 = all start as high as the first.",
        span=(0, 1, 0.01),
        round=1e-6,
        acts_with=("name", ("rex_restarts",)),
    )
    d: float = row(
        0.9,
        "How long the rate stays high, 0 to 0.999. 0 is a straight line, 0.5 as in the paper, 0.9 usual for LoRAs.",
        span=(0, 0.999, 0.01),
        round=1e-6,
        acts_with=("name", ("rex", "rex_restarts")),
    )
    cycle_multiplier: float = row(
        1.0,
        "Each cycle's length as a multiple of the one before, 0.1 to 10. 1 = all are equally long.",
        span=(0.1, 10, 0.1),
        round=1e-6,
        acts_with=("name", ("rex_restarts",)),
    )
    power: float = row(
        2.0,
        "How steeply the rate falls at first, 0.01 to 100. 1 is a straight line, 2 a parabola; below 1 it stays "
        "high and falls at the end.",
        span=(0.01, 100, 0.1),
        round=1e-6,
        acts_with=("name", ("polynomial",)),
    )
    timescale: int = row(
        100,
        "Steps that set the pace: after 3 times this many the rate has halved. 1 to 1000000.",
        span=(1, 1_000_000),
        acts_with=("name", ("inverse_sqrt",)),
    )
    decay_share: float = row(
        0.2,
        "The last share of the curve, in which the rate falls, 0.001 to 1. 0.1 to 0.2 is usual.",
        span=(0.001, 1, 0.01),
        round=1e-6,
        acts_with=("name", ("warmup_stable_decay",)),
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = row(
        "linear",
        "How the rate falls: a straight line, half a cosine, or fast and then ever slower (1-sqrt).",
        acts_with=("name", ("warmup_stable_decay",)),
    )
    rise_share: float = row(
        0.3,
        "The first share of the curve, in which the rate rises, 0.001 to 0.999. 0.3 is usual.",
        span=(0.001, 0.999, 0.01),
        round=1e-6,
        acts_with=("name", ("one_cycle",)),
    )
    start: float = row(
        0.04,
        "The first factor on the learning rate, 0 to 1. The curve ends at min_lr_ratio.",
        span=(0, 1, 0.01),
        round=1e-6,
        acts_with=("name", ("one_cycle",)),
    )
    expression: str = row(
        "1 - t",
        "A formula of the factor on the learning rate, 0 or more. It may use t (0 at the first step after the warm-"
        "up, 1 at the end), step and total (steps after the warm-up, from 0), + - * / // % **, comparisons, a if b "
        "else c, sin cos tan exp log sqrt min max abs floor ceil, pi and e.",
        open="0.5 * (1 + cos(pi * t))",  # shows more of what can be written
        acts_with=("name", ("expression",)),
    )
    points: str = row(
        "0:1, 1:0",
        "A curve of points: position:factor, separated by commas. Positions lie between 0 (first step after the "
        "warm-up) and 1 (the end), factors are 0 or more; straight lines join them. The same position twice makes a"
        " jump.",
        open="0:0, 0.1:1, 0.6:1, 1:0",
        multiline=True,
        acts_with=("name", ("points",)),
    )
    warmup_steps: int = row(
        0,
        "How long the learning rate rises from near 0, in steps or percent (warmup_unit). 0 = no warm-up; 5 to 10 "
        "percent of the run helps with high learning rates.",
        span=(0, 1_000_000),
    )
    min_lr_ratio: float = row(
        0.0,
        "The floor, as a share of the learning rate, 0 to 1: the curve runs between it and the full rate. 0 = a "
        "falling curve ends at 0.",
        span=(0, 1, 0.01),
        round=1e-6,
        advanced=True,
    )
    warmup_unit: Literal["steps", "percent"] = row(
        "steps",
        "The unit of warmup_steps: steps, or percent of the whole curve (then up to 99).",
        advanced=True,
        optional=True,
    )
    planned_steps: int = row(
        0,
        "The steps that the curve is made for. 0 = the steps of this run; where a finished run is made longer, its "
        "curve stays, and the added steps keep its last rate. For a new curve over all steps, set this to the new "
        "number of steps: the rate then rises to that curve. More steps than the run has train only the first part "
        "of a longer curve.",
        span=(0, 1_000_000),
        advanced=True,
        optional=True,
        decides="result",  # the factors of its steps are compared instead, one by one
    )

    def check(self) -> None:
        """Raise ValueError for a warm-up that leaves nothing of the curve."""
        if self.warmup_unit == "percent" and self.warmup_steps > MOST_PERCENT:
            raise ValueError(
                f"{self.named('warmup_steps')} is {self.warmup_steps} percent; set it to {MOST_PERCENT} at most."
            )
