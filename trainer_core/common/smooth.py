"""Running means, for losses and other values that jump from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .wording import Said, say

MEAN_OF = 50  # steps


class RunningMean:
    """An exponential mean over about `window` values, corrected for its start as Adam's means are."""

    def __init__(self, window: float) -> None:
        self._decay = 1 - 1 / max(1.0, window)
        self.state = 0.0, 0.0  # weighted sum of the values, sum of the weights; enough to resume

    def add(self, value: float) -> float:
        """Add a value, unless it is not finite, and return the mean; NaN before the first."""
        total, weight = self.state
        if math.isfinite(value):
            self.state = total, weight = self._decay * total + value, self._decay * weight + 1
        return total / weight if weight else math.nan


def smooth(values: Iterable[float], window: float) -> list[float]:
    """Compute the running mean at each value; a value that is not finite leaves the mean as it was."""
    mean = RunningMean(window)
    return [mean.add(value) for value in values]


def window_of(steps: int) -> int:
    """Compute the window, in steps, for smoothing the losses of a run of `steps`: a twentieth."""
    return max(1, steps // 20)


def mean_loss(losses: Sequence[float]) -> float:
    """Compute the one number that stands for a run: the mean of the finite losses of its last MEAN_OF steps."""
    finite = [loss for loss in losses[-MEAN_OF:] if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else math.nan


def say_loss(losses: Sequence[float]) -> Said:
    """Write that number with its name, as every place that shows it does; "" before the first step."""
    mean, steps = mean_loss(losses), min(len(losses), MEAN_OF)
    number = f"{mean:.4f}" if math.isfinite(mean) else say("not finite")
    if steps < 2:
        return say("loss {0} (1 step)", number) if steps else Said("")
    return say("mean loss {0} (last {1} steps)", number, steps)
