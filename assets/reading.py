"""Read shape, colour and background off a plain picture: the judge of what the tiny base draws."""

from __future__ import annotations

from functools import lru_cache

import drawing
import numpy as np
from PIL import Image


def nearest_colour(rgb: np.ndarray) -> str:
    """Name the palette colour nearest to an sRGB value (3,), 0..255."""
    return min(drawing.COLOURS, key=lambda name: float(np.square(rgb - np.array(drawing.COLOURS[name])).sum()))


def read_picture(picture: np.ndarray) -> tuple[str, str, str]:
    """Name the (shape, colour, background) of a plain picture (H, W, 3) uint8; shape and colour "" if it is empty.

    Background: median of a frame of 1/16 of the side. Figure: what differs from it by more than 60 in RGB; its colour
    is the median, its shape the outline with the largest intersection over union when both fill their boxes.
    """
    values = picture.astype(np.float64)
    edge = max(1, len(values) // 16)
    inner = np.zeros(values.shape[:2], dtype=bool)
    inner[edge:-edge, edge:-edge] = True
    background = np.median(values[~inner], axis=0)
    ground = nearest_colour(background)
    figure = np.sqrt(np.square(values - background).sum(-1)) > 60
    if figure.mean() < 0.02:
        return "", "", ground
    colour = nearest_colour(np.median(values[figure], axis=0))
    rows, columns = (np.flatnonzero(figure.mean(axis) > 0.015) for axis in (1, 0))
    if len(rows) < 4 or len(columns) < 4:
        return "", colour, ground
    box = figure[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    found = np.asarray(Image.fromarray(box.astype(np.uint8) * 255).resize((48, 48))) > 127
    overlaps = {shape: max(_overlap(found, mask) for mask in masks) for shape, masks in _outlines().items()}
    return max(overlaps, key=overlaps.get), colour, ground


@lru_cache
def _outlines() -> dict[str, list[np.ndarray]]:
    """Return each shape's masks (48, 48) at tilts of -8, 0 and 8 degrees, cut to their boxes."""
    outlines = {}
    for shape in drawing.SHAPES:
        masks = [drawing.shape_mask((192, 192), shape, 96, 96, 80, tilt) for tilt in (-8, 0, 8)]
        outlines[shape] = [np.asarray(mask.crop(mask.getbbox()).resize((48, 48))) > 127 for mask in masks]
    return outlines


def _overlap(first: np.ndarray, second: np.ndarray) -> float:
    return float((first & second).sum() / (first | second).sum())
