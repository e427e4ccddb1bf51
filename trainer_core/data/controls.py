"""Control pictures: which part of each, at which size. No pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..common.axes import Size
from ..config import ControlConfig, is_column
from .crops import Crop, fit
from .masks import folder_beside


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """One usable control picture of a picture."""

    path: Path
    name: str  # for messages
    digest: str  # sha256 of the file's bytes
    width: int  # pixels, upright
    height: int

    @property
    def size(self) -> Size:
        """Width and height."""
        return self.width, self.height


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A control picture, or the first frame of a clip, as a model sees it."""

    control: Control
    background: str  # colour behind transparent pictures
    crop: Crop
    length: int = 0  # frames of the clip that it begins; 0: it lies beside a picture
    last: tuple[Control, Crop] | None = None  # the last frame of that clip, where the model sees it, too

    @property
    def files(self) -> tuple[tuple[Control, Crop], ...]:
        """What is seen of which file: one picture, or the first and the last frame."""
        first = (self.control, self.crop)
        return (first, self.last) if self.last else (first,)


References = tuple[Reference, ...]  # of one sample, in the order in which the model sees them


def control_folders(concept_folder: Path, config: ControlConfig | None) -> list[Path]:
    """Find a concept's folders of control pictures; relative ones start at the concept's folder."""
    return [folder_beside(concept_folder, each) for each in config.folders if not is_column(each)] if config else []


def same_shape(size: Size, other: Size) -> bool:
    """Tell whether two pictures have the same aspect ratio, up to a pixel of rounding in either of them."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= max(*size, *other)


def control_crop(size: Size, crop: Crop, config: ControlConfig, step: int) -> Crop:
    """Build the crop of a control picture of a size in pixels, for a crop of its picture.

    As the picture: the same crop, as all that it says is relative to the size. Whole: of about the bucket's area,
    mirrored and coloured with the picture.
    """
    if config.fit == "as_picture":
        return crop
    return replace(whole_crop(size, crop.bucket, step), flip=crop.flip, color=crop.color)


def whole_crop(size: Size, bucket: Size, step: int) -> Crop:
    """Fit a whole picture into about the area of a bucket, in its own shape; sides are multiples of step.

    A picture of the bucket's shape gets the bucket itself, up to the step.
    """
    scale = math.sqrt(bucket[0] * bucket[1] / (size[0] * size[1]))
    width, height = (max(step, round(side * scale / step) * step) for side in size)
    return fit(size, (width, height))
