"""What a model computes, in a few numbers that devices agree on but for rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .values import is_number

KEY = "computes"  # of the numbers in a run's run.json


class Computed(NamedTuple):
    """Numbers of what a model computes; without any nothing is compared."""

    numbers: tuple[float, ...] = ()
    bound: float = 0.0  # of a difference by rounding, as a share of the numbers' norm

    def differs(self, about: Mapping[str, Any]) -> bool:
        """Tell whether a run of this run.json was trained on a model that computes something else."""
        known = about.get(KEY)
        if not self.numbers or not isinstance(known, list) or not all(map(is_number, known)):
            return False
        if len(known) != len(self.numbers):
            return True
        return not math.dist(known, self.numbers) <= self.bound * math.hypot(*self.numbers)
