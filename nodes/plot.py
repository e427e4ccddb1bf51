"""Draw the loss of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

SIZE, LEFT, RIGHT, TOP, BOTTOM = (960, 480), 76, 24, 44, 44
GROUND, GRID, RAW, SMOOTH = (24, 25, 28), (52, 55, 60), (104, 92, 66), (255, 176, 66)
HELD_OUT = (96, 180, 255)
BRIGHT, DIM = (232, 233, 236), (152, 156, 164)


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """Return exponential means over about `window` steps, without the pull to the start; NaN steps carry over."""
    decay, total, weight, means = 1 - 1 / window, 0.0, 0.0, []
    for loss in losses:
        if math.isfinite(loss):
            total, weight = decay * total + loss, decay * weight + 1
        means.append(total / weight if weight else math.nan)
    return means


def draw_losses(losses: Sequence[float], title: str, validation: Sequence[tuple[int, float]] = ()) -> Image.Image:
    """Draw each step's loss and its running mean, gaps where a loss was not finite; and validation losses as dots."""
    image = Image.new("RGB", SIZE, GROUND)
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(size=13), ImageFont.load_default(size=16)
    finite = sorted(loss for loss in losses if math.isfinite(loss)) or [0.0]
    # A few very high steps would flatten everything else: the axis ends at the 99th percentile.
    low, high = finite[0], finite[min(len(finite) - 1, int(len(finite) * 0.99))]
    measured = [loss for _, loss in validation if math.isfinite(loss)]
    low, high = min([low, *measured]), max([high, *measured])
    low, high = (low - 0.05 * (high - low), high + 0.05 * (high - low)) if high > low else (low - 0.5, low + 0.5)
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM

    def place(step: int, loss: float) -> tuple[float, float]:
        across = step / max(len(losses) - 1, 1)
        up = min(max((loss - low) / (high - low), 0), 1)
        return LEFT + across * width, TOP + (1 - up) * height

    for i in range(5):
        value = low + (high - low) * i / 4
        y = place(0, value)[1]
        draw.line((LEFT, y, LEFT + width, y), fill=GRID)
        draw.text((LEFT - 8, y), f"{value:.4f}", fill=DIM, font=small, anchor="rm")
        step = round((len(losses) - 1) * i / 4)
        draw.text((place(step, low)[0], TOP + height + 8), str(step + 1), fill=DIM, font=small, anchor="mt")
    window = max(1, len(losses) // 20)
    for values, colour, thickness in ((losses, RAW, 1), (smooth(losses, window), SMOOTH, 3)):
        points = [place(i, v) if math.isfinite(v) else None for i, v in enumerate(values)]
        for start, end in itertools.pairwise(points):
            if start and end:
                draw.line((*start, *end), fill=colour, width=thickness)
        if len(points) == 1 and points[0]:
            x, y = points[0]
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
    dots = [place(steps - 1 if steps else 0, loss) for steps, loss in validation if math.isfinite(loss)]
    for start, end in itertools.pairwise(dots):
        draw.line((*start, *end), fill=HELD_OUT, width=2)
    for x, y in dots:
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=HELD_OUT)
    last = smooth(losses, window)[-1] if losses else math.nan
    draw.text((LEFT, 12), title, fill=BRIGHT, font=large)
    draw.text((SIZE[0] - RIGHT, 14), f"mean loss at the end {last:.4f}", fill=SMOOTH, font=small, anchor="rt")
    if measured:
        text = f"validation {measured[0]:.4f} to {measured[-1]:.4f}"
        draw.text((SIZE[0] - RIGHT - 190, 14), text, fill=HELD_OUT, font=small, anchor="rt")
    return image
