"""Draw a run's losses and samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..trainer_core.common.smooth import smooth, window_of

SIZE, LEFT, RIGHT, TOP, BOTTOM = (960, 480), 76, 76, 80, 58
GROUND, GRID, RAW, SMOOTH = (24, 25, 28), (52, 55, 60), (84, 76, 60), (255, 176, 66)
HELD_OUT = (96, 180, 255)
BRIGHT, DIM = (232, 233, 236), (152, 156, 164)
CONCEPTS = [(126, 211, 120), (240, 120, 150), (190, 150, 255), (90, 210, 200), (220, 220, 110), (235, 130, 90)]
POINTS = 600  # of a curve at most: more than the eye tells apart
SHEET = 1024  # pixels: the longer side of samples side by side
MOST_SAMPLES = 64  # on a sheet

LossCurve = Sequence[tuple[float, float]]  # (step, loss)
Limits = tuple[float, float]  # of an axis
Colour = tuple[int, int, int]
Font = Any  # of Pillow, whose class depends on how it was built


def draw_losses(
    losses: Sequence[float],
    title: str,
    validation: Sequence[tuple[int, float]] = (),
    concepts: Mapping[str, Sequence[float]] | None = None,
    best: int | None = None,
) -> Image.Image:
    """Draw each step's loss, its running mean, that of each concept, and the validation loss on a second axis.

    validation: (steps finished, loss); concepts: losses of each, NaN in a step without it, drawn where there are
    several; best: the step whose validation loss is marked. Losses that are not finite are left out.
    """
    image = Image.new("RGB", SIZE, GROUND)
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(size=13), ImageFont.load_default(size=16)
    window, end = window_of(len(losses)), max(len(losses), 2)
    raw = thin(enumerate(losses, 1), end)
    mean = thin(enumerate(smooth(losses, window), 1), end)
    several = concepts if concepts and len(concepts) > 1 else {}
    each = {name: thin(visited(values, window), end) for name, values in several.items()}
    held_out = [(max(step, 1), loss) for step, loss in validation if math.isfinite(loss)]

    # A few very high steps would flatten everything else: the axis ends at the 99th percentile.
    values = sorted(loss for loss in losses if math.isfinite(loss))
    shown = [loss for curve in (mean, *each.values()) for _, loss in curve]
    left = limits([*values[: max(1, int(len(values) * 0.99))], *shown])
    right = limits([loss for _, loss in held_out])
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM

    def pixel_of(point: tuple[float, float], axis: Limits) -> tuple[float, float]:
        step, loss = point
        up = min(max((loss - axis[0]) / (axis[1] - axis[0]), 0), 1)
        return LEFT + (step - 1) / (end - 1) * width, TOP + (1 - up) * height

    def line(curve: LossCurve, axis: Limits, colour: Colour, thickness: int) -> None:
        points = [pixel_of(point, axis) for point in curve]
        if len(points) == 1:
            dot(points[0], colour, 3)
        for one, other in itertools.pairwise(points):
            draw.line((*one, *other), fill=colour, width=thickness)

    def dot(at: tuple[float, float], colour: Colour, radius: int, filled: bool = True) -> None:
        box = (at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius)
        draw.ellipse(box, fill=colour if filled else None, outline=colour, width=2)

    draw_grid_lines(draw, left, right if held_out else None, end, small)
    line(raw, left, RAW, 1)
    colours = list(zip(each.items(), CONCEPTS, strict=False))  # as many as can be told apart
    for (_, curve), colour in colours:
        line(curve, left, colour, 2)
    line(mean, left, SMOOTH, 3)
    line(held_out, right, HELD_OUT, 2)
    for step, loss in held_out:
        dot(pixel_of((step, loss), right), HELD_OUT, 3)

    draw.text((LEFT, 12), title, fill=BRIGHT, font=large)
    last = f" {mean[-1][1]:.4f}" if mean else ""
    legend = [(f"training, mean{last}", SMOOTH)]
    legend += [(f"{label(name)} {curve[-1][1]:.4f}", colour) for (name, curve), colour in colours if curve]
    if len(each) > len(colours):
        legend.append((f"and {len(each) - len(colours)} more", DIM))
    if held_out:  # its numbers stand at the right, as its axis does
        text = f"validation {held_out[0][1]:.4f} to {held_out[-1][1]:.4f}"
        for at in [point for point in held_out if point[0] == best]:
            dot(pixel_of(at, right), BRIGHT, 8, filled=False)
            text += f", lowest {at[1]:.4f} after step {best}"
        draw.text((LEFT + width, 14), text, fill=HELD_OUT, font=small, anchor="rt")
    draw_legend(draw, legend, small)
    return image


def draw_grid_lines(draw: ImageDraw.ImageDraw, left: Limits, right: Limits | None, end: int, font: Font) -> None:
    """Draw the grid and the numbers of its axes: losses at the left, validation at the right, steps 1 to `end`."""
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM
    for i in range(5):
        x, y = LEFT + round((end - 1) * i / 4) / (end - 1) * width, TOP + height * (1 - i / 4)
        draw.line((LEFT, y, LEFT + width, y), fill=GRID)
        draw.text((LEFT - 8, y), f"{left[0] + (left[1] - left[0]) * i / 4:.4f}", fill=DIM, font=font, anchor="rm")
        if right:
            value = f"{right[0] + (right[1] - right[0]) * i / 4:.4f}"
            draw.text((LEFT + width + 8, y), value, fill=HELD_OUT, font=font, anchor="lm")
        step = str(1 + round((end - 1) * i / 4))
        draw.text((x, TOP + height + 8), step, fill=DIM, font=font, anchor="mt")
    draw.text((LEFT + width / 2, SIZE[1] - 12), "step", fill=DIM, font=font, anchor="mb")


def draw_legend(draw: ImageDraw.ImageDraw, legend: Sequence[tuple[str, Colour]], font: Font) -> None:
    """Draw the names of curves in their colours, in as many lines as they need."""
    x, y = float(LEFT), 44
    for text, colour in legend:
        if x + 20 + (long := draw.textlength(text, font=font)) > SIZE[0]:
            x, y = float(LEFT), y + 18
        draw.line((x, y, x + 14, y), fill=colour, width=3)
        draw.text((x + 20, y), text, fill=colour, font=font, anchor="lm")
        x += 36 + long


def draw_grid(pictures: Sequence[Image.Image]) -> Image.Image:
    """Draw pictures side by side, row by row, on a sheet about as wide as high; they are made smaller where needed."""
    pictures = pictures[:MOST_SAMPLES]
    columns = math.ceil(math.sqrt(len(pictures)))
    width, height = (max(sides) for sides in zip(*(picture.size for picture in pictures), strict=True))
    shrink = min(1.0, SHEET / (columns * max(width, height)))
    cell = (max(1, int(width * shrink)), max(1, int(height * shrink)))
    sheet = Image.new("RGB", (columns * cell[0], math.ceil(len(pictures) / columns) * cell[1]), GROUND)
    for i, picture in enumerate(pictures):
        sheet.paste(ImageOps.contain(picture, cell), (i % columns * cell[0], i // columns * cell[1]))
    return sheet


def thin(points: Iterable[tuple[float, float]], steps: int) -> list[tuple[float, float]]:
    """Thin out a long curve to about POINTS finite points, the last one among them."""
    finite = [point for point in points if math.isfinite(point[1])]
    every = max(1, steps // POINTS)
    return finite[(len(finite) - 1) % every :: every] if finite else []


def visited(values: Sequence[float], window: int) -> list[tuple[float, float]]:
    """Compute a concept's running mean at the steps that had a sample of it."""
    steps = [step for step, value in enumerate(values, 1) if math.isfinite(value)]
    share = len(steps) / max(1, len(values))
    return list(zip(steps, smooth((values[step - 1] for step in steps), window * share), strict=True))


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Choose the ends of an axis that shows all values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    edge = 0.05 * (high - low) or 0.5
    return low - edge, high + edge


def label(name: str) -> str:
    """Shorten a name so that others have room."""
    return name if len(name) <= 16 else f"{name[:15]}…"
