"""The names of a run's samples: `step-00000020-1.png`, `step-00000020-1-ema.png`, and clips `step-00000020-1-17f.webp`.

Pages and tools learn from a name what a file shows, without opening it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PICTURE, CLIP = ".png", ".webp"  # a clip is an animated WebP
FORMATS = ("PNG", "WEBP")  # as Pillow names them
_NAME = re.compile(rf"step-([0-9]{{8,12}})-([0-9]{{1,4}})(-[a-z]{{1,20}})?(?:\{PICTURE}|-([0-9]{{1,4}})f\{CLIP})")


class SampleName(NamedTuple):
    """What the name of a sample's file tells."""

    step: int
    prompt: int  # counted from 1
    weights: str = ""  # the ending of the version that drew it, as -ema
    frames: int = 1  # of a clip; 1: a picture

    @property
    def file(self) -> str:
        """Write the file's name."""
        start = f"step-{self.step:08}-{self.prompt}{self.weights}"
        return f"{start}{PICTURE}" if self.frames == 1 else f"{start}-{self.frames}f{CLIP}"


def sample_name(file: str) -> SampleName | None:
    """Read the name of a file; None for another one's."""
    match = _NAME.fullmatch(file)
    return match and SampleName(int(match[1]), int(match[2]), match[3] or "", int(match[4] or 1))


def tag_of(file: str) -> str:
    """Name a sample beside those of other steps, as trackers do: 1-ema; another file by its name."""
    name = sample_name(file)
    return f"{name.prompt}{name.weights}" if name else file.rpartition(".")[0]
