"""Settings of clips: how many of their frames are trained, at which rate, and from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config
from .rows import row

OPEN_RATE = -1.0  # the rate that the model was made for
LATEST = 1 - 2**-24  # the largest draw
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
    first_frame: float = row(
        0.0,
        "Share of the visits at which a model that draws clips from captions or from a picture, as Wan 2.2 5B and "
        "LTX-Video, keeps the first frame: it sees it without noise, and the loss leaves it out. A model of image to "
        "video sees it always.",
        (0, 1, 0.05),
    )
    last_frame: float = row(
        0.0,
        "Share of the visits at which an image-to-video model of Wan sees the last frame beside the first one, as by "
        "ComfyUI's node WanFirstLastFrameToVideo.",
        (0, 1, 0.05),
    )
    # Of the model: frames beyond the first come in groups of so many; 0: it draws single pictures.
    step: int = 0
    begins: bool = False  # of the model: it draws a clip from its first frame
    keeps: bool = False  # of the model: it may keep a clip's first frame

    @property
    def most(self) -> int:
        """The most frames of a sample."""
        return self.most_frames if self.take == "full" else max(self.frames)

    def seen_at(self, first: float, last: float) -> int:
        """Count the frames of a clip, the first and the last, that the model sees at a visit, by draws in 0..1."""
        if not self.begins:
            return int(self.keeps and first < self.first_frame)
        return 2 if last < self.last_frame else 1

    @property
    def seen(self) -> set[int]:
        """The numbers of frames that it sees at some visits."""
        return {self.seen_at(first, last) for first in (0.0, LATEST) for last in (0.0, LATEST)}
