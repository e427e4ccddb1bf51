"""Draw a network's ranks and parameters by block of the model."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

from ..trainer_core.common.wording import count
from ..trainer_core.preflight.network import NetworkSize, PartSize, count_numbers
from .plot import BRIGHT, DIM, GRID, GROUND, HELD_OUT, SMOOTH

WIDTH, ROW, TOP, LEFT, BAR, MARGIN = 960, 24, 52, 200, 420, 24


def draw_network(size: NetworkSize, title: str) -> Image.Image:
    """Draw a bar for each block of the denoiser, then for each text encoder: ranks, parameters, share of the former's.

    All bars have the scale of the largest block; a text encoder's is cut at its end.
    """
    texts = size.models[1:] if size.blocks else size.models
    rows = [*size.blocks, *texts]
    height = TOP + ROW * len(rows) + MARGIN
    image = Image.new("RGB", (WIDTH, height), GROUND)
    draw = ImageDraw.Draw(image)
    small, large = ImageFont.load_default(size=13), ImageFont.load_default(size=16)
    parameters = sum(model.parameters for model in size.models)
    draw.text((MARGIN, 14), title, fill=BRIGHT, font=large)
    layers = sum(model.layers for model in size.models)
    draw.text(
        (WIDTH - MARGIN, 16),
        f"{count(layers, 'layer')}, {count_numbers(parameters)} parameters",
        fill=DIM,
        font=small,
        anchor="rt",
    )
    most = max((block.parameters for block in size.blocks or texts), default=0) or 1
    whole = sum(block.parameters for block in size.blocks)
    for i, part in enumerate(rows):
        top, block = TOP + ROW * i, i < len(size.blocks)
        draw.text((LEFT - 10, top + ROW / 2), part.name, fill=BRIGHT if part.layers else DIM, font=small, anchor="rm")
        draw.rectangle((LEFT, top + 4, LEFT + BAR, top + ROW - 5), fill=GRID if part.layers else GROUND, outline=GRID)
        if part.parameters:
            length = max(2, round(BAR * min(1, part.parameters / most)))
            draw.rectangle((LEFT, top + 4, LEFT + length, top + ROW - 5), fill=SMOOTH if block else HELD_OUT)
        share = f", {part.parameters / whole:.1%}" if block and whole else ""
        text = f"{_ranks(part)}{count_numbers(part.parameters)}{share}{_rates(part)}" if part.layers else "not trained"
        draw.text((LEFT + BAR + 12, top + ROW / 2), text, fill=BRIGHT if part.layers else DIM, font=small, anchor="lm")
    return image


def _ranks(part: PartSize) -> str:
    return f"rank {', '.join(map(str, part.ranks))}: " if part.ranks else ""


def _rates(part: PartSize) -> str:
    return "" if part.lr_factors == (1.0,) else f", rate x {', '.join(f'{factor:g}' for factor in part.lr_factors)}"
