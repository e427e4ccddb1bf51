"""The geometry of a crop: how a picture is scaled, rotated and cut to its bucket. Numbers alone; images.py cuts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..common.axes import Framing, Shape, Size
from ..common.rng import generator
from ..config import AugmentConfig
from .buckets import NEUTRAL, Color, Point, cover


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """The steps from a picture to one of bucket size: rotate, resize, cut out a rectangle, mirror, change colours.

    A rotated picture is first reduced to the largest upright rectangle of its own aspect ratio inside it; `resized`
    is the size of that rectangle.
    """

    resized: Size
    offset: Size  # (left, top) of the rectangle, in resized pixels
    bucket: Size
    flip: bool = False
    angle: float = 0.0  # degrees counter-clockwise about the centre, -90..90
    color: Color = NEUTRAL
    frames: tuple[int, ...] = ()  # of a film, which are cut alike; () for a picture

    @property
    def shape(self) -> Shape:
        """The bucket, with the number of frames where there are several."""
        return (*self.bucket, len(self.frames)) if len(self.frames) > 1 else self.bucket

    def crop_share(self, original: Size) -> float:
        """Compute the share of the original's area that is cut off, 0..1."""
        kept = (self.bucket[0] * self.bucket[1]) / (self.resized[0] * self.resized[1])
        return 1.0 - kept * _upright_share(original, self.angle) ** 2

    def scale(self, original: Size) -> float:
        """Compute the factor from original to trained pixels; above 1 the picture is enlarged.

        It is measured along the side that decides the fit; the other one is rounded.
        """
        side = 0 if self.bucket[0] * original[1] >= self.bucket[1] * original[0] else 1
        return self.resized[side] / (original[side] * _upright_share(original, self.angle))

    def source_box(self, original: Size) -> tuple[float, float, float, float]:
        """Compute the kept rectangle (left, top, right, bottom) in original pixels.

        For a rotated picture it is the upright rectangle around the kept one.
        """
        if self.angle:
            across, down = zip(*self.corners(original), strict=True)
            return min(across), min(down), max(across), max(down)
        x, y = original[0] / self.resized[0], original[1] / self.resized[1]
        left, top = self.offset
        return (
            left * x,
            top * y,
            min((left + self.bucket[0]) * x, original[0]),
            min((top + self.bucket[1]) * y, original[1]),
        )

    def corners(self, original: Size) -> tuple[Point, Point, Point, Point]:
        """Compute the corners of the trained picture, in original pixels.

        Top left, top right, bottom right, bottom left, as they are before mirroring.
        """
        (width, height), (left, top) = original, self.offset
        share = _upright_share(original, self.angle)
        cosine, sine = math.cos(math.radians(self.angle)), math.sin(math.radians(self.angle))

        def at(x: int, y: int) -> Point:
            across = (x / self.resized[0] - 0.5) * width * share
            down = (y / self.resized[1] - 0.5) * height * share
            return width / 2 + cosine * across - sine * down, height / 2 + sine * across + cosine * down

        right, bottom = left + self.bucket[0], top + self.bucket[1]
        return at(left, top), at(right, top), at(right, bottom), at(left, bottom)

    def framing(self, original: Size) -> Framing:
        """Tell how a picture of a size is framed, also a mirrored one."""
        left, top = self.offset
        if self.flip:
            left = self.resized[0] - left - self.bucket[0]
        return Framing(original, left, top, self.shape)


def _upright_share(size: Size, angle: float) -> float:
    """Compute the share of each side that the largest upright rectangle of the same aspect keeps after rotation."""
    if not angle:
        return 1.0
    turn = math.radians(abs(angle))
    return 1 / (math.cos(turn) + max(size) / min(size) * math.sin(turn))


def fit(
    size: Size,
    bucket: Size,
    *,
    resized: Size | None = None,
    shift: Point = (0.0, 0.0),
    zoom: float = 1.0,
    angle: float = 0.0,
    color: Color = NEUTRAL,
    flip: bool = False,
    focus: Point | None = None,
) -> Crop:
    """Build the crop of a picture: resized to cover the bucket, cut at the centre, or as near the focus as it goes.

    resized: replaces the covering size (see `choose_sizes`). zoom: enlarges it, at least 1. shift: moves the cut from
    there, as a share -1..1 of the room to the left or top (negative) or to the right or bottom. focus: a point of the
    picture as shares 0..1 of its sides.
    """
    whole = resized or cover(size, bucket)
    if zoom != 1.0:
        whole = (math.floor(whole[0] * zoom + 0.5), math.floor(whole[1] * zoom + 0.5))
    room = (whole[0] - bucket[0], whole[1] - bucket[1])
    if min(room) < 0:
        raise ValueError(f"{whole[0]}x{whole[1]} pixels do not cover the bucket {bucket[0]}x{bucket[1]}; enlarge them.")
    offset = (math.floor(room[0] * (1 + shift[0]) / 2), math.floor(room[1] * (1 + shift[1]) / 2))
    crop = Crop(resized=whole, offset=offset, bucket=bucket, flip=flip, angle=angle, color=color)
    return crop if focus is None else replace(crop, offset=_about(focus, crop, size, shift))


def _about(focus: Point, crop: Crop, original: Size, shift: Point) -> Size:
    """Compute the offset of a crop whose centre is as near a point of the picture as its edges allow, then shifted."""
    across, down = ((share - 0.5) * side for share, side in zip(focus, original, strict=True))
    cosine, sine = math.cos(math.radians(crop.angle)), math.sin(math.radians(crop.angle))
    kept = _upright_share(original, crop.angle)
    turned = (cosine * across + sine * down, cosine * down - sine * across)  # the inverse of `corners`

    def start(side: int) -> int:
        room = crop.resized[side] - crop.bucket[side]
        middle = (turned[side] / (original[side] * kept) + 0.5) * crop.resized[side]
        nearest = min(max(middle - crop.bucket[side] / 2, 0), room)
        return min(max(math.floor(nearest + room * shift[side] / 2), 0), room)

    return start(0), start(1)


def variant(
    size: Size,
    bucket: Size,
    augment: AugmentConfig | None,
    *,
    seed: int,
    picture: int,
    index: int,
    resized: Size | None = None,
    focus: Point | None = None,
) -> Crop:
    """Build one of a picture's augmented crops, a pure function of (seed, picture, index).

    Each setting has its own draw, so that changing one setting does not change the others' effect.
    """
    if augment is None:
        return fit(size, bucket, resized=resized, focus=focus)
    draws = torch.rand(8, generator=generator(seed, "variant", picture, index), dtype=torch.float64).tolist()

    def within(amount: float, draw: int, middle: float = 0.0) -> float:
        return middle + amount * (2 * draws[draw] - 1)

    return fit(
        size,
        bucket,
        resized=resized,
        focus=focus,
        shift=(within(augment.crop_jitter, 0), within(augment.crop_jitter, 1)),
        zoom=1 + augment.zoom * draws[2],
        angle=within(augment.rotation, 3),
        color=(
            within(augment.brightness, 4, 1.0),
            within(augment.contrast, 5, 1.0),
            within(augment.saturation, 6, 1.0),
            within(augment.hue, 7),
        ),
    )
