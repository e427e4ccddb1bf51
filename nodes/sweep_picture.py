"""Draw the losses of several runs in one plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

from ..trainer_core.common.smooth import smooth, window_of
from ..trainer_core.common.wording import count
from .plot import (
    BOTTOM,
    BRIGHT,
    CONCEPTS,
    GROUND,
    LEFT,
    RIGHT,
    SIZE,
    SMOOTH,
    TOP,
    LossCurve,
    draw_grid_lines,
    draw_legend,
    limits,
)


def draw_sweep(curves: Sequence[tuple[str, LossCurve]], best: int | None) -> Image.Image:
    """Draw the running mean of each run's losses, named by its value; best: the number of the one that is marked."""
    image = Image.new("RGB", SIZE, GROUND)
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(size=13), ImageFont.load_default(size=16)
    means = []
    for _, curve in curves:
        values = smooth([loss for _, loss in curve], window_of(len(curve)))
        means.append(list(zip([step for step, _ in curve], values, strict=True)))
    end = max([2, *(int(curve[-1][0]) for curve in means if curve)])
    axis = limits([loss for curve in means for _, loss in curve])
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM
    draw_grid_lines(draw, axis, None, end, small)
    colours = [SMOOTH if number == best else CONCEPTS[number % len(CONCEPTS)] for number in range(len(curves))]
    for number, curve in enumerate(means):
        points = [
            (LEFT + (step - 1) / (end - 1) * width, TOP + (1 - (loss - axis[0]) / (axis[1] - axis[0])) * height)
            for step, loss in curve
        ]
        for one, other in pairwise(points):
            draw.line((*one, *other), fill=colours[number], width=4 if number == best else 2)
    draw.text((LEFT, 12), f"loss of {count(curves, 'run')}, mean", fill=BRIGHT, font=large)
    legend = [
        (f"{value[:20]}{f' {curve[-1][1]:.4f}' if curve else ''}", colour)
        for (value, _), curve, colour in zip(curves, means, colours, strict=True)
    ]
    draw_legend(draw, legend[:14], small)
    return image
