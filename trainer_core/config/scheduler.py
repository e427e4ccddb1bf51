"""The learning rate's shape over the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Config, check_choices, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(Config):
    """The learning rate's shape over the run."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 0  # optimizer steps
    min_lr_ratio: float = 0.0  # floor as a share of the learning rate, 0..1

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "warmup_steps", 0)
        check_range(self, "min_lr_ratio", 0, 1)
