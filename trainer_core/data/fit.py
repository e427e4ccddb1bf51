"""Compare the losses of each picture with those of all pictures at the same noise levels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from ..common.wording import count, names

BINS = 20  # of the noise levels
SURE = 3.0  # standard deviations of chance, beyond which a picture is named
LONGEST = 60  # characters of a caption in a sentence
KIND = "fit/2"  # of these facts in the index
KEPT = 16  # residuals of a picture, its last ones
LOOK = 8  # visits between two looks at a picture
FEWEST = 4  # pictures of a concept, of which one can stand out
FENCE = 1.5  # ranges between the quartiles, beyond the median, from which a picture stands out
FLAT = 0.1  # of a log loss: a smaller trend is none
BYTES = 4 * BINS + 8 * KEPT + 41  # of a picture in a save
SPAN = 64  # losses of a level that its mean goes back, as all losses fall in a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How the losses of a picture compare."""

    ratio: float  # sum of its losses, divided by the sum of the mean losses of the same noise levels
    sure: float  # the difference of those sums, in standard deviations of chance
    visits: int
    residual: float | None = None  # median of log loss - mean of its level, over the last visits; None of too few
    trend: float | None = None  # the same of the later half, less that of the earlier one
    odd: bool = False  # stood out at two looks in a row
    easy: bool = False  # at the last look: in the lowest quarter, and without a trend
    weight: float = 1.0  # of its loss, beside that of its concept

    @property
    def is_bad(self) -> bool:
        """Tell whether the losses are higher than chance explains, or stand out again and again."""
        return self.sure > SURE or self.odd

    @property
    def marks(self) -> list[str]:
        """List what the watch over its picture found: odd, rising, easy; easy ones may weigh less."""
        found = {"odd": self.odd, "rising": (self.trend or 0) > FLAT, "easy": self.easy or 0 < self.weight < 1}
        return [name for name, holds in found.items() if holds]


class PictureLosses:
    """A watch over each picture: sums of its losses, and its last residuals, against those of its noise levels.

    A residual is a log loss, less the running mean of its level. At every LOOK-th visit of a picture the median of its
    residuals is compared with those of its concept. Twice in a row above median + FENCE x interquartile range: odd. In
    the lowest quarter, and without a trend: easy. A resumed run has the same to the last bit.
    """

    def __init__(
        self,
        contents: Sequence[str],
        concepts: Sequence[int] = (),
        least: float = 1.0,
        leave_out: bool = False,
    ) -> None:
        """Begin with no losses.

        contents: digest of each picture; concepts: number of that of each, by default the same. least: weight of easy
        pictures, which halves from look to look. leave_out: odd pictures weigh nothing.
        """
        self._of = hashlib.sha256(" ".join(contents).encode()).hexdigest()
        self._sums = np.zeros(len(contents))
        self._visits = np.zeros((len(contents), BINS), np.int32)
        self._levels = np.zeros((2, BINS))  # sums of losses and of their squares
        self._means = np.zeros((2, BINS))  # of log losses, and how many these are of
        self._residuals = np.zeros((len(contents), KEPT))  # the newest at its number modulo KEPT
        self._seen = np.zeros((2, len(contents)), np.int64)  # residuals so far, and looks above the fence in a row
        self._easy = np.zeros(len(contents), np.int8)
        self._weights = np.ones(len(contents))
        self._concepts = np.array(concepts or [0] * len(contents))
        self._medians = np.full(len(contents), math.nan)  # of residuals, at the last look
        self._least, self.leaves_out = least, leave_out

    def add(self, picture: int, level: float, loss: float) -> bool:
        """Add a loss; level: 0..1 of all levels. One that is not finite is left out. Tell whether it makes one odd."""
        if not math.isfinite(loss):
            return False
        which = min(int(level * BINS), BINS - 1)
        self._sums[picture] += loss
        self._visits[picture, which] += 1
        self._levels[0, which] += loss
        self._levels[1, which] += loss * loss
        return loss > 0 and self._watch(picture, which, math.log(loss))

    def weight(self, picture: int) -> float:
        """Tell what the loss of a picture is multiplied by, 0 to 1."""
        return 0.0 if self.leaves_out and self._seen[1, picture] > 1 else float(self._weights[picture])

    def _watch(self, picture: int, level: int, log: float) -> bool:
        """Keep the residual of a log loss, and look at its picture when that is due; tell whether it is odd anew."""
        mean, known = self._means[:, level]
        self._means[:, level] = mean + (log - mean) / min(known + 1, SPAN), known + 1
        if not known:  # the first loss of a level is compared with nothing
            return False
        seen = int(self._seen[0, picture])
        self._residuals[picture, seen % KEPT] = log - mean
        self._seen[0, picture] = seen + 1
        if (seen + 1) % LOOK:
            return False
        self._medians[picture] = self._median(picture)
        return self._look(picture)

    def _look(self, picture: int) -> bool:
        """Compare a picture with those of its concept; tell whether it is odd from now on."""
        others = self._medians[self._concepts == self._concepts[picture]]
        others = others[~np.isnan(others)]
        if len(others) < FEWEST:
            return False
        low, middle, high = np.percentile(others, (25, 50, 75))
        own, trend, was = self._medians[picture], self._trend(picture), self._seen[1, picture]
        self._seen[1, picture] = was + 1 if own > middle + FENCE * (high - low) else 0
        self._easy[picture] = trend is not None and own < low and abs(trend) < max(high - low, FLAT)
        weight = self._weights[picture] * (0.5 if self._easy[picture] else 1.1)
        self._weights[picture] = min(max(weight, self._least), 1.0)
        return bool(was == 1 and self._seen[1, picture] == 2)

    def _last(self, picture: int) -> list[float]:
        """List the residuals that are kept of a picture, in their order."""
        seen, kept = int(self._seen[0, picture]), self._residuals[picture].tolist()
        return kept[:seen] if seen < KEPT else kept[seen % KEPT :] + kept[: seen % KEPT]

    def _median(self, picture: int) -> float:
        return median(self._last(picture))

    def _trend(self, picture: int) -> float | None:
        last = self._last(picture)
        return median(last[KEPT // 2 :]) - median(last[: KEPT // 2]) if len(last) == KEPT else None

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
                found[i] = Fit(
                    ratio=float(self._sums[i] / expected[i]),
                    sure=sure,
                    visits=number,
                    residual=self._median(i) if self._seen[0, i] >= LOOK else None,
                    trend=self._trend(i),
                    odd=bool(self._seen[1, i] > 1),
                    easy=bool(self._easy[i]),
                    weight=self.weight(i),
                )
        return dict(sorted(found.items(), key=lambda item: -item[1].ratio))

    def state_dict(self) -> dict[str, Any]:
        """Collect the sums and residuals, for a save."""
        return {"of": self._of, **{name: torch.from_numpy(each) for name, each in self._arrays().items()}}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of a save; that of other pictures, or none, begins anew, as what an older save lacks."""
        if state is None or state["of"] != self._of:
            state = {}
        begun = {"weights": 1.0, "medians": math.nan}
        for name, each in self._arrays().items():
            each[:] = state.get(name, begun.get(name, 0))

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"sums": self._sums, "visits": self._visits, "levels": self._levels, "means": self._means}
        arrays |= {"residuals": self._residuals, "seen": self._seen, "medians": self._medians}
        return arrays | {"easy": self._easy, "weights": self._weights}


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


def describe_left_out(name: str, lines: Sequence[str], fit: Fit, step: int) -> str:
    """Tell of a picture that is left out from a step on, with its caption."""
    caption = " ".join(lines)[:LONGEST]
    return (
        f"{name} is left out after step {step}, as it stood out twice: its losses are {fit.ratio:.2f} "
        f"times those of all pictures at its noise levels. Look at it and its caption"
        + (f' ("{caption}").' if caption else ".")
    )
