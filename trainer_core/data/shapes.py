"""The shapes that other trainers cut pictures to: which there are, and which one a picture gets. Pure numbers."""

from __future__ import annotations

import functools
import itertools
import math

from ..common.axes import Size
from ..config import BucketConfig
from .buckets import BucketChoice, Resolution, buckets_of, choose_sizes, cover, no_upscale_bucket

SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}  # of SimpleTuner, by about their megapixels
ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)  # of OneTrainer's shapes


def shape_of(size: Size, resolution: Resolution, options: BucketConfig, step: int) -> BucketChoice:
    """Choose the bucket and the resized size of a picture by the rule of `options.shapes`."""
    rule, limits = options.shapes, (0, 0) if options.no_upscale else (options.min_side, options.max_side)
    if rule == "atelier" or resolution.fixed:
        sizes = _shapes("atelier", resolution, step, *limits)
        return choose_sizes(size, resolution, sizes, step=step, no_upscale=options.no_upscale)
    if rule == "ai_toolkit":
        bucket = _of_area(size, resolution.area, step)
    elif rule == "simpletuner":
        bucket = _of_aspect(size, resolution.area, step)
    elif rule == "sd_scripts" and options.no_upscale:
        return no_upscale_bucket(size, resolution.area, step, logarithmic=False)
    elif rule == "musubi" and options.no_upscale and size[0] * size[1] <= resolution.area:
        bucket = (max(step, size[0] - size[0] % step), max(step, size[1] - size[1] % step))
    else:
        bucket = _nearest(size, _shapes(rule, resolution, step, *limits), upright=rule == "onetrainer")
    return BucketChoice(bucket, cover(size, bucket))


@functools.lru_cache(maxsize=64)
def _shapes(rule: str, resolution: Resolution, step: int, least: int, most: int) -> tuple[Size, ...]:
    """List the shapes of a rule, sorted."""
    if rule == "atelier":
        return buckets_of(resolution, step, min_side=least, max_side=most)
    area, side = resolution.area, math.isqrt(resolution.area)
    sizes: set[Size] = set()
    if rule == "onetrainer":  # a few aspects, rounded to the step
        for aspect in ASPECTS:
            short, long = (round(each * math.sqrt(area) / step) * step for each in (aspect**-0.5, aspect**0.5))
            sizes |= {(short, long), (long, short)}
    elif rule == "musubi":  # from half the side on
        for width in range(side // 2 // step * step, side + step, step):
            height = area // width // step * step if width else 0
            sizes |= {(width, height), (height, width)}
    else:  # every width between the limits, however small the area that remains
        sizes.add((side // step * step, side // step * step))
        for width in range(least or step, (most or area // step) + 1, step):
            height = min(most or area, area // width // step * step)
            if height >= max(least, 1):
                sizes |= {(width, height), (height, width)}
    return tuple(sorted(each for each in sizes if min(each) > 0)) or ((step, step),)


def _nearest(size: Size, shapes: tuple[Size, ...], *, upright: bool) -> Size:
    """Find the nearest aspect, width by height, or height by width where upright; a shape as it stands is kept."""
    one, other = (1, 0) if upright else (0, 1)
    if size in shapes and not upright:
        return size
    return min(shapes, key=lambda shape: abs(shape[one] / shape[other] - size[one] / size[other]))


def _of_area(size: Size, area: int, step: int) -> Size:
    """Round both sides, of a picture that is never enlarged, up or down, to the nearest area that is not too large."""
    goal = min(size[0] * size[1], area)
    scale = math.sqrt(goal / (size[0] * size[1]))
    widths, heights = ((math.floor(side * scale / step) * step, math.ceil(side * scale / step) * step) for side in size)
    shapes: list[Size] = [*itertools.product(widths, heights)]
    fitting = [shape for shape in shapes if min(shape) > 0 and math.prod(shape) <= area]
    smallest = (max(step, widths[0]), max(step, heights[0]))
    return min(fitting or [smallest], key=lambda shape: abs(math.prod(shape) - goal))


def _of_aspect(size: Size, area: int, step: int) -> Size:
    """Round both sides for an aspect of two decimals, from the side of a square that is rounded before.

    Squares themselves are of a few sizes where their area is near to one of them.
    """
    side = _rounded(math.isqrt(area), step)
    root = math.sqrt(max(0.01, round(size[0] / size[1], 2)))
    width, height = _rounded(side * root, step), _rounded(side / root, step)
    if round(width / height, 2) != 1:
        return width, height
    square = _rounded(next((own for about, own in SQUARES.items() if abs(area / 1e6 - about) < 0.05), side), step)
    return square, square


def _rounded(side: float, step: int) -> int:
    return max(step, round(side / step) * step)
