"""Decide at which size and crop a picture is trained: pure numbers, no pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .config import AugmentConfig
from .rng import generator

Size = tuple[int, int]  # (width, height) pixels
Point = tuple[float, float]  # (x, y) pixels
Color = tuple[float, float, float, float]  # factors of brightness, contrast and saturation; hue shift in turns

NEUTRAL: Color = (1.0, 1.0, 1.0, 0.0)


# --- which sizes there are ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A resolution to train at: buckets of about its area, or exactly its size."""

    width: int
    height: int
    fixed: bool = False  # exactly this size, for pictures of any aspect

    @property
    def area(self) -> int:
        """Return width x height in pixels."""
        return self.width * self.height


def parse_resolution(text: str) -> Target:
    """Read "512" (buckets of about 512 x 512 pixels) or "640x384" (exactly this size); raises ValueError."""
    sides = text.strip().lower().split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdecimal() and int(side) for side in sides):
        raise ValueError(f"The resolution {text!r} is not understood; give a number as 512 or a size as 640x384.")
    return Target(width=int(sides[0]), height=int(sides[-1]), fixed=len(sides) == 2)


def buckets_of(target: Target, step: int, *, min_side: int = 0, max_side: int = 0) -> tuple[Size, ...]:
    """Return the bucket sizes of a target: its list, or the one size that is asked for."""
    if target.fixed:
        return ((target.width, target.height),)
    return bucket_list((target.width, target.height), step, min_side=min_side, max_side=max_side)


def bucket_list(
    target: Size,
    step: int,
    max_aspect: float = 4.0,
    min_area_fraction: float = 0.9,
    min_side: int = 0,
    max_side: int = 0,
) -> tuple[Size, ...]:
    """Return all bucket sizes of about the target's area, sorted; sides are multiples of step.

    Heights are rounded down, so no bucket needs more memory than the target (sd-scripts' generator, with the
    two filters on aspect and area). A side limit of 0 limits nothing. Raises ValueError if no bucket is left.
    """
    area = target[0] * target[1]
    side = step * (math.isqrt(area) // step)
    if side == 0:
        raise ValueError(
            f"The resolution {target[0]}x{target[1]} is below the bucket step {step}; raise it to {step} or more."
        )
    sizes = {(side, side)}
    for width in range(step, area // step + 1, step):
        height = step * (area // (width * step))
        aspect = max(width, height) / max(1, min(width, height))
        if aspect <= max_aspect and width * height >= min_area_fraction * area:
            sizes |= {(width, height), (height, width)}
    left = sorted(size for size in sizes if min(size) >= min_side and (not max_side or max(size) <= max_side))
    if not left:
        limits = [f"min_side {min_side}"] * bool(min_side) + [f"max_side {max_side}"] * bool(max_side)
        raise ValueError(
            f"No bucket of the resolution {target[0]}x{target[1]} keeps within {' and '.join(limits)}; "
            f"the square one is {side}x{side}."
        )
    return tuple(left)


# --- which size a picture gets --------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Where a picture is trained: its bucket, and the size it is resized to before the bucket is cut out."""

    bucket: Size
    resized: Size


def choose_bucket(size: Size, buckets: Iterable[Size]) -> Size:
    """Return the bucket whose aspect is nearest on a log scale; ties go to the larger area, then the longer.

    The log metric treats upright and lying pictures alike, and so do the ties: 3:1 lies exactly between 960x256
    and 768x320, 1:3 between their transposes. Distances closer than 1e-12 count as a tie.
    """
    return min(buckets, key=lambda bucket: (_distance(size, bucket), -bucket[0] * bucket[1], -max(bucket), -bucket[0]))


def _distance(size: Size, bucket: Size) -> float:
    """Return how far two aspects are apart on a log scale."""
    return round(abs(math.log(bucket[0] * size[1]) - math.log(bucket[1] * size[0])), 12)


def cover(size: Size, bucket: Size) -> Size:
    """Return the size of the smallest enlargement (or largest reduction) that covers the bucket.

    s = max(W/w, H/h), resized = floor(side * s + 1/2), all in integers.
    """
    (width, height), (bucket_width, bucket_height) = size, bucket
    if bucket_width * height >= bucket_height * width:
        return bucket_width, max(bucket_height, _other(bucket_width, width, height))
    return max(bucket_width, _other(bucket_height, height, width)), bucket_height


def _other(side: int, original: int, other: int) -> int:
    """Return the other side that keeps the aspect when `original` becomes `side`, rounded to whole pixels."""
    return (2 * other * side + original) // (2 * original)


def place(
    size: Size,
    target: Target,
    buckets: Iterable[Size],
    *,
    step: int,
    no_upscale: bool = False,
    min_side: int = 0,
    max_side: int = 0,
) -> Placement:
    """Place a picture among the buckets of a target, or with no_upscale where it need not be enlarged.

    Under no_upscale a fixed size holds for the pictures that cover it. Raises ValueError (to be put behind the
    picture's name) where nothing fits.
    """
    bucket = choose_bucket(size, buckets)
    if not no_upscale or (target.fixed and size[0] >= bucket[0] and size[1] >= bucket[1]):
        return Placement(bucket, cover(size, bucket))
    resized, bucket = no_upscale_bucket(size, target.area, step, min_side=min_side, max_side=max_side)
    return Placement(bucket, resized)


def no_upscale_bucket(size: Size, area: int, step: int, *, min_side: int = 0, max_side: int = 0) -> tuple[Size, Size]:
    """Return (resized, bucket) of a picture that is never enlarged: its own size rounded down to the step.

    A picture of more than `area` pixels is reduced so that one side is a multiple of the step: the side whose
    bucket has the smaller aspect error. Raises ValueError if less than one step, or than min_side, remains.
    """
    width, height = size
    resized = size
    if width * height > area:  # as sd-scripts, but the error is measured on a log scale, the same for transposes
        wide = _down(_root(area * width, height), step)
        high = _down(_root(area * height, width), step)
        candidates = [(wide, _other(wide, width, height)), (_other(high, height, width), high)]
        resized = min(candidates, key=lambda c: _error(size, c, step))
    if max_side and _down(max(resized), step) > max_side:
        limit = _down(max_side, step)
        resized = (limit, _other(limit, width, height)) if width >= height else (_other(limit, height, width), limit)
    bucket = (_down(resized[0], step), _down(resized[1], step))
    if min(bucket) < max(min_side, step):
        raise ValueError(
            f"{width}x{height} pixels leave a bucket of {bucket[0]}x{bucket[1]} where no side may be below "
            f"{max(min_side, step)}; allow enlarging (no_upscale off) or leave the picture out."
        )
    return resized, bucket


def _down(side: int, step: int) -> int:
    return side - side % step


def _root(numerator: int, denominator: int) -> int:
    """Return the square root of a fraction, rounded to a whole number exactly."""
    return (math.isqrt(4 * numerator // denominator) + 1) // 2


def _error(size: Size, resized: Size, step: int) -> tuple[float, int, int, int, int]:
    """Rank a reduced size by the aspect error of its bucket; ties as in choose_bucket, then the larger size."""
    bucket = (_down(resized[0], step), _down(resized[1], step))
    error = _distance(size, bucket) if min(bucket) else math.inf
    return error, -bucket[0] * bucket[1], -max(bucket), -resized[0] * resized[1], -bucket[0]


def merge_buckets(counts: Mapping[Size, int], batch_size: int) -> dict[Size, Size]:
    """Return where buckets with fewer items than a batch go, {from: to}; afterwards at most one is that small.

    The smallest goes first: to the nearest aspect (ties as in choose_bucket) that then holds a whole batch, or,
    if none would, to the fullest one. What it joins counts with it from then on and may move on with it.
    """
    left = {bucket: count for bucket, count in counts.items() if count > 0}
    moves: dict[Size, Size] = {}
    while len(left) > 1:
        smallest = min(left, key=lambda bucket: (left[bucket], bucket))
        items = left.pop(smallest)
        if items >= batch_size:
            break
        enough = [bucket for bucket, count in left.items() if count + items >= batch_size]
        goal = choose_bucket(smallest, enough or [b for b, count in left.items() if count == max(left.values())])
        left[goal] += items
        moves |= {bucket: goal for bucket, to in moves.items() if to == smallest} | {smallest: goal}
    return moves


# --- what is cut out of it ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """How a picture becomes a bucket-sized one: turn, resize, cut a rectangle out, mirror, change colours.

    A turned picture is first reduced to the largest upright rectangle of its own aspect ratio that lies inside
    it; that rectangle is what `resized` is the size of.
    """

    resized: Size
    offset: Size  # (left, top) of the rectangle, in resized pixels
    bucket: Size
    flip: bool = False
    angle: float = 0.0  # degrees counter-clockwise about the centre, -90..90
    color: Color = NEUTRAL

    def crop_share(self, original: Size) -> float:
        """Return the share of the original's area that is lost, 0..1."""
        kept = (self.bucket[0] * self.bucket[1]) / (self.resized[0] * self.resized[1])
        return 1.0 - kept * _upright_share(original, self.angle) ** 2

    def scale(self, original: Size) -> float:
        """Return the factor from original pixels to trained ones; above 1 the picture is enlarged.

        It is measured along the side that decides the fit; the other one is rounded.
        """
        side = 0 if self.bucket[0] * original[1] >= self.bucket[1] * original[0] else 1
        return self.resized[side] / (original[side] * _upright_share(original, self.angle))

    def source_box(self, original: Size) -> tuple[float, float, float, float]:
        """Return the rectangle (left, top, right, bottom) that is kept, in original pixels.

        Of a turned picture it is the upright rectangle around what is kept.
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
        """Return where the trained picture's corners lie in original pixels.

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

    def size_conditioning(self, original: Size) -> tuple[int, int, int, int, int, int]:
        """Return SDXL's (orig_h, orig_w, crop_top, crop_left, target_h, target_w), true for mirrored pictures too."""
        left, top = self.offset
        if self.flip:
            left = self.resized[0] - left - self.bucket[0]
        return original[1], original[0], top, left, self.bucket[1], self.bucket[0]


def _upright_share(size: Size, angle: float) -> float:
    """Return how much of each side the largest upright rectangle of the same aspect keeps in a turned picture."""
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
) -> Crop:
    """Return the crop of a picture: resized to cover the bucket, cut at the centre.

    resized replaces the covering size (see `place`). zoom, at least 1, enlarges it. shift moves the cut from the
    centre, -1..1 of the room there is to the left or top (negative) or the right or bottom.
    """
    whole = resized or cover(size, bucket)
    if zoom != 1.0:
        whole = (math.floor(whole[0] * zoom + 0.5), math.floor(whole[1] * zoom + 0.5))
    room = (whole[0] - bucket[0], whole[1] - bucket[1])
    if min(room) < 0:
        raise ValueError(f"{whole[0]}x{whole[1]} pixels do not cover the bucket {bucket[0]}x{bucket[1]}; enlarge them.")
    offset = (math.floor(room[0] * (1 + shift[0]) / 2), math.floor(room[1] * (1 + shift[1]) / 2))
    return Crop(resized=whole, offset=offset, bucket=bucket, flip=flip, angle=angle, color=color)


def variant(
    size: Size,
    bucket: Size,
    augment: AugmentConfig | None,
    *,
    seed: int,
    picture: int,
    index: int,
    resized: Size | None = None,
) -> Crop:
    """Return one of a picture's varied crops, a pure function of (seed, picture, index).

    Each setting has a draw of its own, so that changing one leaves what the others do.
    """
    if augment is None:
        return fit(size, bucket, resized=resized)
    draws = torch.rand(8, generator=generator(seed, "variant", picture, index), dtype=torch.float64).tolist()

    def within(amount: float, draw: int, middle: float = 0.0) -> float:
        return middle + amount * (2 * draws[draw] - 1)

    return fit(
        size,
        bucket,
        resized=resized,
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
