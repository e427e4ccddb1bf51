"""Draw a LoRA: the norm of each block's change, and how its singular values fall."""

from __future__ import annotations

import math
from statistics import median

from PIL import Image, ImageDraw, ImageFont

from ..trainer_core.common.wording import count
from ..trainer_core.lora_files.inspect import Inspected
from .plot import BRIGHT, DIM, GRID, GROUND, HELD_OUT, SMOOTH

WIDTH, ROW, TOP, LEFT, BAR, MARGIN = 960, 22, 52, 230, 480, 24
CURVES = 300  # pixels: height of the plot of singular values
FLOOR = 1e-5  # of the largest singular value, where the plot ends
MOST_BLOCKS, MOST_CURVES = 120, 400


def draw_lora(found: Inspected, title: str) -> Image.Image:
    """Draw a bar for each block, then every layer's singular values relative to its largest, and their median."""
    rows = list(found.blocks.items())[:MOST_BLOCKS]
    image = Image.new("RGB", (WIDTH, TOP + ROW * len(rows) + CURVES + 3 * MARGIN), GROUND)
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(size=13), ImageFont.load_default(size=16)
    draw.text((MARGIN, 14), title[:60], fill=BRIGHT, font=large)
    draw.text((WIDTH - MARGIN, 16), count(found.layers, "layer"), fill=DIM, font=small, anchor="rt")
    most = max((norm for _, norm in rows), default=0) or 1
    for number, (block, norm) in enumerate(rows):
        top = TOP + ROW * number
        draw.text((LEFT - 10, top + ROW / 2), block[:30], fill=BRIGHT, font=small, anchor="rm")
        draw.rectangle((LEFT, top + 4, LEFT + BAR, top + ROW - 4), fill=GROUND, outline=GRID)
        if norm:
            colour = HELD_OUT if block.startswith("te") else SMOOTH
            draw.rectangle((LEFT, top + 4, LEFT + max(2, round(BAR * norm / most)), top + ROW - 4), fill=colour)
        draw.text((LEFT + BAR + 12, top + ROW / 2), f"norm {norm:.3g}", fill=DIM, font=small, anchor="lm")
    _draw_curves(draw, found, TOP + ROW * len(rows) + MARGIN, small)
    return image


def _draw_curves(draw: ImageDraw.ImageDraw, found: Inspected, top: int, font: object) -> None:
    """Draw singular values by their number, on a logarithmic scale."""
    curves = [layer.sigma[: int((layer.sigma > 0).sum())] for layer in found.layers if layer.norm > 0]
    curves = [(sigma / sigma[0]).clamp(min=FLOOR).tolist() for sigma in curves if len(sigma)]
    longest = max(map(len, curves), default=1)
    width, height = WIDTH - LEFT - MARGIN, CURVES - MARGIN
    draw.text((MARGIN, top), "singular values,", fill=BRIGHT, font=font)  # type: ignore[arg-type]
    draw.text((MARGIN, top + 18), "largest = 1", fill=DIM, font=font)  # type: ignore[arg-type]

    def pixel_of(number: int, value: float) -> tuple[float, float]:
        down = math.log(value) / math.log(FLOOR)
        return LEFT + width * number / max(1, longest - 1), top + height * down

    for power in range(int(-math.log10(FLOOR)) + 1):
        _, y = pixel_of(0, 10.0**-power)
        draw.line((LEFT, y, LEFT + width, y), fill=GRID)
        draw.text((LEFT - 10, y), f"{10.0**-power:g}", fill=DIM, font=font, anchor="rm")  # type: ignore[arg-type]
    for curve in curves[:: max(1, len(curves) // MOST_CURVES)]:
        draw.line([pixel_of(number, value) for number, value in enumerate(curve)], fill=(84, 76, 60))
    middle = [
        median(curve[number] for curve in curves if len(curve) > number) for number in range(longest if curves else 0)
    ]
    if len(middle) > 1:
        draw.line([pixel_of(number, value) for number, value in enumerate(middle)], fill=SMOOTH, width=3)
    draw.text((LEFT + width, top + height + 6), f"number {longest}", fill=DIM, font=font, anchor="rt")  # type: ignore[arg-type]
