"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from .config import SchedulerConfig


def lr_factor(step: int, steps: int, config: SchedulerConfig) -> float:
    """Return the factor on the learning rate at optimizer step 0..steps-1.

    Warm-up reaches 1 at its last step and starts above 0; after `steps` the factor stays at its last value.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    position = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * _shape(config.name, position)


def _shape(name: str, position: float) -> float:
    """Return the shape's value in 0..1 at a position 0..1."""
    if name == "linear":
        return 1 - position
    if name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * position))
    return 1.0


def check_schedule(steps: int, config: SchedulerConfig) -> None:
    """Refuse a warm-up that leaves no step at the full learning rate."""
    if config.warmup_steps >= steps:
        raise ValueError(
            f"warmup_steps is {config.warmup_steps}, the run has {steps} steps; use a warm-up shorter than the run."
        )
