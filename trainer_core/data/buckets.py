"""Choose the size that each picture is trained at (its bucket): pure numbers, no pixels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..common.axes import Size
from ..config import node

Point = tuple[float, float]  # (x, y) pixels
Color = tuple[float, float, float, float]  # factors of brightness, contrast and saturation; hue shift in turns

NEUTRAL: Color = (1.0, 1.0, 1.0, 0.0)


# --- bucket sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """A resolution to train at: buckets of about its area, or exactly its size."""

    width: int
    height: int
    fixed: bool = False  # exactly this size, for pictures of any aspect

    @property
    def area(self) -> int:
        """The area in pixels."""
        return self.width * self.height


def parse_resolution(text: str) -> Resolution:
    """Read "512" (buckets of about 512 x 512 pixels) or "640x384" (exactly this size); raises ValueError."""
    sides = text.strip().lower().split("x")
    if len(sides) > 2 or not all(re.fullmatch("[0-9]{1,9}", side) and int(side) for side in sides):
        raise ValueError(f"The resolution {text[:40]!r} is invalid; write a number as 512 or a size as 640x384.")
    return Resolution(width=int(sides[0]), height=int(sides[-1]), fixed=len(sides) == 2)


def buckets_of(resolution: Resolution, step: int, *, min_side: int = 0, max_side: int = 0) -> tuple[Size, ...]:
    """List the bucket sizes of a resolution; one for a fixed size."""
    if resolution.fixed:
        return ((resolution.width, resolution.height),)
    return bucket_list((resolution.width, resolution.height), step, min_side=min_side, max_side=max_side)


def bucket_list(
    resolution: Size,
    step: int,
    max_aspect: float = 4.0,
    min_area_fraction: float = 0.9,
    min_side: int = 0,
    max_side: int = 0,
) -> tuple[Size, ...]:
    """List all bucket sizes of about the resolution's area, sorted; sides are multiples of step.

    Heights are rounded down, so no bucket needs more memory than the resolution (sd-scripts' generator, with the
    two filters on aspect and area). Heights above max_side are clipped to it, as sd-scripts does, whatever area
    remains. A side limit of 0 limits nothing. Raises ValueError if no bucket is left.
    """
    area = resolution[0] * resolution[1]
    side = step * (math.isqrt(area) // step)
    if side == 0:
        raise ValueError(
            f"The resolution {resolution[0]}x{resolution[1]} is below bucket_step {step}; set it to {step} or more."
        )
    most = _down(max_side, step) if max_side else area
    sizes = {(side, side)}
    for width in range(step, min(most, area // step) + 1, step):
        whole = step * (area // (width * step))
        height = min(whole, most)
        aspect = max(width, height) / max(1, min(width, height))
        if aspect <= max_aspect and (whole > most or width * height >= min_area_fraction * area):
            sizes |= {(width, height), (height, width)}
    left = sorted(size for size in sizes if min(size) >= min_side and max(size) <= most)
    if not left:
        limits = [f"min_side {min_side}"] * bool(min_side) + [f"max_side {max_side}"] * bool(max_side)
        raise ValueError(
            f"No bucket of the resolution {resolution[0]}x{resolution[1]} fits {' and '.join(limits)} of "
            f"{node('buckets')}; change the limits, so that {side}x{side} fits."
        )
    return tuple(left)


# --- the bucket of a picture ----------------------------------------------------------------------------------


class BucketChoice(NamedTuple):
    """The bucket of a picture, and the size that it is resized to before the bucket is cut out."""

    bucket: Size
    resized: Size


def choose_bucket(size: Size, buckets: Iterable[Size]) -> Size:
    """Choose the bucket with the nearest aspect on a log scale; ties go to the larger area, then the longer side.

    The log metric treats upright and lying pictures alike, and so do the ties: 3:1 lies exactly between 960x256
    and 768x320, 1:3 between their transposes. Distances closer than 1e-12 count as a tie.
    """
    return min(buckets, key=lambda bucket: (_distance(size, bucket), -bucket[0] * bucket[1], -max(bucket), -bucket[0]))


def _distance(size: Size, bucket: Size) -> float:
    """Measure the distance of two aspects on a log scale."""
    return round(abs(math.log(bucket[0] * size[1]) - math.log(bucket[1] * size[0])), 12)


def cover(size: Size, bucket: Size) -> Size:
    """Compute the size of the smallest enlargement (or largest reduction) that covers the bucket.

    s = max(W/w, H/h), resized = floor(side * s + 1/2), all in integers.
    """
    (width, height), (bucket_width, bucket_height) = size, bucket
    if bucket_width * height >= bucket_height * width:
        return bucket_width, max(bucket_height, _other(bucket_width, width, height))
    return max(bucket_width, _other(bucket_height, height, width)), bucket_height


def _other(side: int, original: int, other: int) -> int:
    """Scale the other side by side / original, rounded to whole pixels."""
    return (2 * other * side + original) // (2 * original)


def choose_sizes(
    size: Size,
    resolution: Resolution,
    buckets: Iterable[Size],
    *,
    step: int,
    no_upscale: bool = False,
) -> BucketChoice:
    """Choose bucket and resized size of a picture; with no_upscale it is never enlarged.

    With no_upscale a fixed size is used for the pictures that cover it.
    """
    if no_upscale and not (resolution.fixed and size[0] >= resolution.width and size[1] >= resolution.height):
        return no_upscale_bucket(size, resolution.area, step)
    bucket = choose_bucket(size, buckets)
    return BucketChoice(bucket, cover(size, bucket))


def no_upscale_bucket(size: Size, area: int, step: int, *, logarithmic: bool = True) -> BucketChoice:
    """Choose the sizes of a picture that is never enlarged: its own size rounded down to the step.

    A picture of more than `area` pixels is reduced so that one side is a multiple of the step: the side whose
    bucket has the smaller aspect error. A side of the bucket is 0 where less than one step remains.
    """
    width, height = size
    resized = size
    if width * height > area:  # as sd-scripts, whose error is not logarithmic, and so not the same for transposes
        wide = _down(_root(area * width, height), step)
        high = _down(_root(area * height, width), step)
        candidates = [(wide, _other(wide, width, height)), (_other(high, height, width), high)]
        if logarithmic:
            resized = min(candidates, key=lambda c: _error(size, c, step))
        else:  # of two equal ones the second
            resized = min(reversed(candidates), key=lambda c: abs(_aspect(c, step) - width / height))
    return BucketChoice((_down(resized[0], step), _down(resized[1], step)), resized)


def _down(side: int, step: int) -> int:
    return side - side % step


def _root(numerator: int, denominator: int) -> int:
    """Compute the square root of a fraction, rounded exactly to a whole number."""
    return (math.isqrt(4 * numerator // denominator) + 1) // 2


def _aspect(resized: Size, step: int) -> float:
    width, height = (_down(side, step) for side in resized)
    return width / height if height else math.inf


def _error(size: Size, resized: Size, step: int) -> tuple[float, int, int, int, int]:
    """Rank a reduced size by the aspect error of its bucket; ties as in choose_bucket, then the larger size."""
    bucket = (_down(resized[0], step), _down(resized[1], step))
    error = _distance(size, bucket) if min(bucket) else math.inf
    return error, -bucket[0] * bucket[1], -max(bucket), -resized[0] * resized[1], -bucket[0]


def merge_buckets(counts: Mapping[Size, int], batch_size: int) -> dict[Size, Size]:
    """Merge buckets with fewer items than a batch into others, as {from: to}; at most one stays that small.

    The smallest goes first: to the nearest aspect (ties as in choose_bucket) that then holds a whole batch, or, if
    there is none, to the fullest bucket. A merged bucket counts with its new items, and may be merged again.
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
