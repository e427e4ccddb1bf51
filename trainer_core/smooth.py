"""Running means of what jumps from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterable


class RunningMean:
    """An exponential mean over about `window` values, without the pull to the start."""

    def __init__(self, window: float) -> None:
        self._decay = 1 - 1 / max(1.0, window)
        self.state = 0.0, 0.0  # all that it goes on with: the weighted sum of the values, and of their weights

    def add(self, value: float) -> float:
        """Take a value in, unless it is not finite, and return the mean; NaN before the first."""
        total, weight = self.state
        if math.isfinite(value):
            self.state = total, weight = self._decay * total + value, self._decay * weight + 1
        return total / weight if weight else math.nan


def smooth(values: Iterable[float], window: float) -> list[float]:
    """Return the running mean at each value; where one is not finite the mean stays."""
    mean = RunningMean(window)
    return [mean.add(value) for value in values]


def window_of(steps: int) -> int:
    """Return over how many steps the losses of a run of so many are smoothed: a twentieth."""
    return max(1, steps // 20)
