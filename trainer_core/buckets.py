"""Decide at which size and crop a picture is trained, and cut its pixels accordingly."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

Size = tuple[int, int]  # (width, height) pixels


def bucket_list(
    resolution: int, step: int, max_aspect: float = 4.0, min_area_fraction: float = 0.9
) -> tuple[Size, ...]:
    """Return all bucket sizes of about resolution x resolution pixels, sorted; sides are multiples of step.

    Heights are rounded down, so no bucket needs more memory than the square (sd-scripts' generator, with the
    two filters on aspect and area instead of side limits).
    """
    area = resolution * resolution
    side = step * (resolution // step)
    if side == 0:
        raise ValueError(f"The resolution {resolution} is below the bucket step {step}; raise it to {step} or more.")
    sizes = {(side, side)}
    for width in range(step, area // step + 1, step):
        height = step * (area // (width * step))
        if height == 0:
            break
        aspect = max(width, height) / min(width, height)
        if aspect <= max_aspect and width * height >= min_area_fraction * area:
            sizes |= {(width, height), (height, width)}
    return tuple(sorted(sizes))


def choose_bucket(size: Size, buckets: Iterable[Size]) -> Size:
    """Return the bucket whose aspect is nearest on a log scale; ties go to the larger area, then the longer.

    The log metric treats upright and lying pictures alike, and so do the ties: 3:1 lies exactly between 960x256
    and 768x320, 1:3 between their transposes. Distances closer than 1e-12 count as a tie.
    """
    aspect = math.log(size[0]) - math.log(size[1])

    def rank(bucket: Size) -> tuple[float, int, int, int]:
        distance = abs(math.log(bucket[0]) - math.log(bucket[1]) - aspect)
        return round(distance, 12), -bucket[0] * bucket[1], -max(bucket), -bucket[0]

    return min(buckets, key=rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """How a picture becomes a bucket-sized one: resize, cut a rectangle out, mirror."""

    resized: Size
    offset: Size  # (left, top) of the rectangle, in resized pixels
    bucket: Size
    flip: bool = False

    @property
    def crop_share(self) -> float:
        """Return the share of the picture's area that is lost, 0..1."""
        return 1.0 - (self.bucket[0] * self.bucket[1]) / (self.resized[0] * self.resized[1])

    def scale(self, original: Size) -> float:
        """Return the factor from original pixels to resized ones; above 1 the picture is enlarged."""
        return max(self.bucket[0] / original[0], self.bucket[1] / original[1])

    def source_box(self, original: Size) -> tuple[float, float, float, float]:
        """Return the rectangle (left, top, right, bottom) that is kept, in original pixels."""
        x, y = original[0] / self.resized[0], original[1] / self.resized[1]
        left, top = self.offset
        return (
            left * x,
            top * y,
            min((left + self.bucket[0]) * x, original[0]),
            min((top + self.bucket[1]) * y, original[1]),
        )


def fit(size: Size, bucket: Size) -> Crop:
    """Return the smallest enlargement (or largest reduction) that covers the bucket, cut at the centre.

    s = max(W/w, H/h), resized = floor(side * s + 1/2), offset = floor((resized - bucket) / 2), all in integers.
    """
    (width, height), (bucket_width, bucket_height) = size, bucket
    if bucket_width * height >= bucket_height * width:
        resized = (bucket_width, max(bucket_height, (2 * height * bucket_width + width) // (2 * width)))
    else:
        resized = (max(bucket_width, (2 * width * bucket_height + height) // (2 * height)), bucket_height)
    offset = ((resized[0] - bucket_width) // 2, (resized[1] - bucket_height) // 2)
    return Crop(resized=resized, offset=offset, bucket=bucket)


def open_upright(source: Path | BinaryIO) -> Image.Image:
    """Open and fully decode a picture's first frame, upright by its EXIF orientation, 8 bits per channel.

    Raises what Pillow raises on a broken file. Every other mode is left as it is: alpha and palette stay.
    """
    with Image.open(source) as opened:
        opened.load()
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # 16-bit grey; mode I holds 16-bit values, too
        values = np.asarray(image).astype(np.float64)
        return Image.fromarray((values.clip(0, 65535) / 257 + 0.5).astype(np.uint8))
    if image.mode == "F":
        values = np.asarray(image)
        values = values * 255 if values.size and values.max() <= 1 else values
        return Image.fromarray((np.nan_to_num(values).clip(0, 255) + 0.5).astype(np.uint8))
    return image


def cut(image: Image.Image, crop: Crop) -> Image.Image:
    """Resize, cut and mirror a picture: exactly the pixels that are trained, of size crop.bucket.

    Shrinking averages the covered area, growing uses Lanczos. Only the rectangle that is kept is computed.
    """
    if crop.resized == image.size:
        left, top = crop.offset
        result = image.crop((left, top, left + crop.bucket[0], top + crop.bucket[1]))
    elif crop.resized[0] <= image.width and crop.resized[1] <= image.height:
        result = _shrink(image, crop)
    else:
        result = image.resize(crop.bucket, Image.Resampling.LANCZOS, box=crop.source_box(image.size))
    return ImageOps.mirror(result) if crop.flip else result


def _shrink(image: Image.Image, crop: Crop) -> Image.Image:
    """Average the exact area below each new pixel (Pillow's BOX counts only whole pixels, which shows)."""
    pixels = np.asarray(image)
    for side in (1, 0):  # rows first, so that the columns are already few
        edges = (crop.offset[side] + np.arange(crop.bucket[side] + 1)) * (image.size[side] / crop.resized[side])
        pixels = np.moveaxis(_area_mean(np.moveaxis(pixels, 1 - side, 0), edges), 0, 1 - side)
    return Image.fromarray((pixels + 0.5).clip(0, 255).astype(np.uint8))


def _area_mean(pixels: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean of the pixels between neighbouring edges along the first axis, as float32.

    A pixel that an edge divides counts on each side by its share.
    """
    rows = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
    means = np.empty((len(edges) - 1, rows.shape[1]), np.float32)
    for i, (start, stop) in enumerate(pairwise(edges)):
        first, last = int(start), min(math.ceil(stop), len(rows))
        at = np.arange(first, last)
        share = (np.minimum(at + 1, stop) - np.maximum(at, start)) / (stop - start)
        means[i] = share.astype(np.float32) @ rows[first:last].astype(np.float32, copy=False)
    return means.reshape(-1, *pixels.shape[1:])
