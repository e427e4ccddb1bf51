"""Which frames of a clip are trained: pure numbers, no pixels."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ClipConfig

CLOSE = 0.01  # rates that differ by less are the same: 23.976 and 24
ROUNDING = 1e-6  # of times and of numbers of frames


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """The frames of a clip that are trained: parts of `length` frames, which take turns."""

    frames: tuple[int, ...]  # of the file, at the rate that is trained; one may come twice
    starts: tuple[int, ...]  # of the parts, in `frames`
    length: int

    def part(self, number: int) -> tuple[int, ...]:
        """List the frames of the file in a part, in their order."""
        start = self.starts[number]
        return self.frames[start : start + self.length]

    @property
    def unused(self) -> int:
        """Count the frames that are in no part."""
        covered = end = 0
        for start in self.starts:
            covered += start + self.length - max(start, end)
            end = start + self.length
        return len(self.frames) - covered


def clip_of(frames: int, rate: float, times: Sequence[float], config: ClipConfig) -> Clip:
    """Choose the frames of a file of so many frames that are trained.

    rate: of the file, per second. times: of each frame in seconds, where they are uneven. Each part has one frame more
    than a multiple of `config.step`.
    """
    found = resampled(frames, rate, times, config.rate)
    length = longest(len(found), config)
    return Clip(frames=found, starts=starts_of(len(found), length, config), length=length)


def resampled(frames: int, rate: float, times: Sequence[float], wanted: float) -> tuple[int, ...]:
    """List the frames that a file shows at each 1 / wanted seconds; all of them with wanted 0.

    Frame k of the result is the one that is seen k / wanted seconds after the first.
    """
    if wanted <= 0 or rate <= 0 or (not times and abs(wanted / rate - 1) < CLOSE):
        return tuple(range(frames))
    if not times:
        count = max(1, math.floor(frames * wanted / rate + ROUNDING))
        return tuple(min(math.floor(k * rate / wanted + ROUNDING), frames - 1) for k in range(count))
    seconds = times[-1] - times[0] + 1 / rate  # the last frame is seen as long as others are
    count = max(1, math.floor(seconds * wanted + ROUNDING))
    return tuple(bisect_right(times, times[0] + k / wanted + ROUNDING) - 1 for k in range(count))


def rounded(frames: int, step: int) -> int:
    """Round a number of frames down to one that a model takes: one more than a multiple of the step."""
    return frames - (frames - 1) % step


def longest(available: int, config: ClipConfig) -> int:
    """Choose how many frames are trained: the most of `config.frames` that there are, else as many as there are."""
    if config.take == "full":
        return rounded(min(available, config.most_frames), config.step)
    wanted = (rounded(frames, config.step) for frames in config.frames)
    return max((frames for frames in wanted if frames <= available), default=rounded(available, config.step))


def starts_of(available: int, length: int, config: ClipConfig) -> tuple[int, ...]:
    """List where the parts of a clip begin."""
    room = available - length
    if config.take == "chunk":
        return tuple(range(0, room + 1, length))
    if config.take == "slide":
        return tuple(range(0, room + 1, config.slide_frames))
    if config.take == "uniform" and config.parts > 1:
        spread = (number * room / (config.parts - 1) for number in range(config.parts))
        return tuple(dict.fromkeys(math.floor(start + 0.5) for start in spread))
    return (0,)


def fate(clip: Clip, config: ClipConfig) -> str:
    """Say in a few words what becomes of a clip."""
    parts = len(clip.starts)
    first, last = clip.frames[clip.starts[0]], clip.frames[clip.starts[-1] + clip.length - 1]
    said = f"frames {first} to {last}" if clip.length > 1 or parts > 1 else f"frame {first}, as a picture"
    said += f" in {parts} parts of {clip.length}" if parts > 1 else f", {clip.length} of them" * (clip.length > 1)
    said += f"; {clip.unused} not used" if clip.unused else ""
    return said + (f"; too short for {min(config.frames)}" if is_short(clip, config) else "")


def is_short(clip: Clip, config: ClipConfig) -> bool:
    """Tell whether a clip has fewer frames than any number that is wanted."""
    return config.take != "full" and clip.length < min(rounded(frames, config.step) for frames in config.frames)
