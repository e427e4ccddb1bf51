"""Compare the losses of each picture with those of all pictures at the same noise levels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..common.wording import count, names

BINS = 20  # of the noise levels
SURE = 3.0  # standard deviations of chance, beyond which a picture is named
LONGEST = 60  # characters of a caption in a sentence
KIND = "fit/1"  # of these facts in the index


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How the losses of a picture compare."""

    ratio: float  # sum of its losses, divided by the sum of the mean losses of the same noise levels
    sure: float  # the difference of those sums, in standard deviations of chance
    visits: int

    @property
    def is_bad(self) -> bool:
        """Tell whether the losses are higher than chance explains."""
        return self.sure > SURE


class PictureLosses:
    """Sums of the losses of pictures, and of all losses by noise level; a resumed run has the same to the last bit."""

    def __init__(self, contents: Sequence[str]) -> None:
        """Begin with no losses. contents: digest of each picture."""
        self._of = hashlib.sha256(" ".join(contents).encode()).hexdigest()
        self._sums = np.zeros(len(contents))
        self._visits = np.zeros((len(contents), BINS), np.int32)
        self._levels = np.zeros((2, BINS))  # sums of losses and of their squares

    def add(self, picture: int, level: float, loss: float) -> None:
        """Add a loss; level: 0..1 of all levels. One that is not finite is left out."""
        if not math.isfinite(loss):
            return
        which = min(int(level * BINS), BINS - 1)
        self._sums[picture] += loss
        self._visits[picture, which] += 1
        self._levels[0, which] += loss
        self._levels[1, which] += loss * loss

    def fits(self) -> dict[int, Fit]:
        """Compare the pictures that have losses, the worst first.

        Losses of a level vary by chance about its mean, so that a picture's sum has the sum of their variances.
        """
        total = np.maximum(self._visits.sum(0), 1)
        means = self._levels[0] / total
        variances = np.maximum(self._levels[1] / total - means**2, 0)
        expected, chance = self._visits @ means, np.sqrt(self._visits @ variances)
        found = {}
        for i, number in enumerate(self._visits.sum(1).tolist()):
            if number and expected[i] > 0:
                away = float(self._sums[i] - expected[i])
                sure = away / float(chance[i]) if chance[i] > 0 else 0.0
                found[i] = Fit(ratio=float(self._sums[i] / expected[i]), sure=sure, visits=number)
        return dict(sorted(found.items(), key=lambda item: -item[1].ratio))

    def state_dict(self) -> dict[str, Any]:
        """Collect the sums, for a save."""
        sums, visits, levels = (torch.from_numpy(each) for each in (self._sums, self._visits, self._levels))
        return {"of": self._of, "sums": sums, "visits": visits, "levels": levels}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the sums of a save; those of other pictures, or none, begin anew."""
        if state is None or state["of"] != self._of:
            state = {"sums": 0, "visits": 0, "levels": 0}
        self._sums[:], self._visits[:], self._levels[:] = state["sums"], state["visits"], state["levels"]


def describe_fits(pictures: Sequence[tuple[str, str, Fit]]) -> str:
    """Name the pictures whose losses are higher than chance explains, the worst first, in a sentence; "" for none.

    pictures: name, caption and fit of each.
    """
    bad = sorted((each for each in pictures if each[2].is_bad), key=lambda each: -each[2].ratio)
    if not bad:
        return ""
    some = count(bad, "picture has", "pictures have")
    each = names(
        f"{name} {fit.ratio:.2f} times" + (f' ("{caption[:LONGEST]}")' if caption else "") for name, caption, fit in bad
    )
    return f"{some} higher losses than the others at the same noise levels, so look at them and their captions: {each}."
