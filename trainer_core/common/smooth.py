"""Running means, for losses and other values that jump from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


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


def recent(losses: Sequence[float]) -> float:
    """Average the last finite losses, at most twenty."""
    finite = [loss for loss in losses if math.isfinite(loss)][-20:]
    return sum(finite) / len(finite) if finite else math.nan
