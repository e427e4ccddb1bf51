"""Settings of clips: how many of their frames are trained, at which rate, and from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config
from .rows import row

OPEN_RATE = -1.0  # the rate that the model was made for
MOST_TAKEN = 1025  # frames of an excerpt


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig(Config):
    """How clips become samples of so many frames; a picture is a clip of one frame."""

    SECTION: ClassVar = "dataset.concepts.clips"
    NODE: ClassVar = "Clips"

    frames: tuple[int, ...] = row(
        (33,),
        "Frames that are trained of a clip. Several, separated by commas: each clip gets the most that it has. "
        "Rounded down to what the model takes: 5, 9, 13 … 33, or with LTX-Video 9, 17, 25, 33. A shorter clip is "
        "trained with the frames that it has, and named in the report.",
        (1, MOST_TAKEN),
    )
    rate: float = row(
        OPEN_RATE,
        "Frames per second that clips are brought to, by leaving out or repeating frames. -1: the rate that the model "
        "was made for, as 16 of Wan. 0: every frame of the file is used.",
        (0, 240, 1),
        open=OPEN_RATE,
        round=0.001,
    )
    take: Literal["head", "chunk", "slide", "uniform", "full"] = row(
        "head",
        "Which frames of a clip are trained. head: the first. chunk: one part after another, without overlap. slide: "
        "parts that begin every slide_frames. uniform: as many parts as parts says, spread evenly. full: all, up to "
        "most_frames. Parts take turns from visit to visit.",
    )
    slide_frames: int = row(
        8, "Frames from the beginning of a part to that of the next.", (1, 10_000), acts_with=("take", ("slide",))
    )
    parts: int = row(4, "Parts of each clip.", (1, 1000), acts_with=("take", ("uniform",)))
    most_frames: int = row(
        81, "Frames of a clip at most. More need more memory.", (1, MOST_TAKEN), acts_with=("take", ("full",))
    )
    # Of the model: frames beyond the first come in groups of so many; 0: it draws single pictures.
    step: int = 0
    begins: bool = False  # of the model: it draws a clip from its first frame
