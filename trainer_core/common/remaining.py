"""How fast a run is, and how long it still takes.

One rule for the page, a shell, who follows a run elsewhere, and the forecast of `plan`.
"""

from __future__ import annotations

from collections import deque

from .wording import clock, say, speed

WINDOW = 200  # steps whose durations count: a run's speed changes, and what it did an hour ago says little


class Remaining:
    """Tells the pace of the last steps, and from it the time that is left."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)  # (steps finished, seconds of any clock)

    def add(self, finished: int, seconds: float, took: float = 0.0) -> None:
        """Note when so many steps were finished; a run that went back begins anew.

        took: seconds of the last one, where they are known; the first step then counts, too.
        """
        if self._seen and finished <= self._seen[-1][0]:
            self._seen.clear()
        if took and not self._seen:
            self._seen.append((finished - 1, seconds - took))
        self._seen.append((finished, seconds))

    @property
    def pace(self) -> float | None:
        """Seconds that a step takes; None before a whole step was seen."""
        if len(self._seen) < 2:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return max(0.0, ended - began) / (last - first)

    def seconds(self, steps: int) -> float | None:
        """Compute the seconds that so many more steps take; None before a whole step was seen."""
        return None if self.pace is None else self.pace * max(0, steps)

    def texts(self, steps: int) -> list[str]:
        """Write the time that is left of so many steps, and the speed; nothing before a whole step was seen."""
        if (pace := self.pace) is None or (left := self.seconds(steps - self._seen[-1][0])) is None:
            return []
        return [say("{0} left", clock(left)), speed(pace)]
