"""Show a dataset as the run will see it: cuts, masks, buckets and captions on one sheet."""

from __future__ import annotations

import math

from PIL import Image, ImageChops, ImageDraw, ImageFont

from .buckets import Crop, Size, cut
from .config import DatasetConfig
from .masks import cut_mask, load_mask
from .plan import Plan
from .scan import load_picture

_GROUND, _PANEL, _LINE = (24, 25, 28), (36, 38, 42), (62, 65, 71)
_BRIGHT, _DIM, _ACCENT = (232, 233, 236), (152, 156, 164), (255, 176, 66)
_UNTRAINED = (226, 64, 84)  # laid over what the mask leaves out
_MARGIN, _PAD, _THUMBNAIL, _CAPTION_LINES = 14, 8, 46, 3


def render_preview(
    plan: Plan, dataset: DatasetConfig, *, columns: int = 4, limit: int = 24, tile: int = 192
) -> Image.Image:
    """Return a sheet of the first `limit` pictures, each cut exactly as it is trained at its first visit.

    Below each: a thumbnail of the whole picture with the kept rectangle, bucket, share cropped, name and
    caption. What a mask leaves out is tinted red. columns, limit and tile (pixels) are at least 1, 1 and 96.
    """
    shown = min(max(limit, 1), len(plan.manifest.pictures))
    columns = max(1, min(columns, shown))
    tile = max(tile, 96)
    small, line = ImageFont.load_default(size=12), 16
    cell = (tile + 2 * _PAD, tile + 3 * _PAD + _THUMBNAIL + 6 + _CAPTION_LINES * line)
    header = 30
    sheet = Image.new(
        "RGB",
        (
            _MARGIN + columns * (cell[0] + _MARGIN),
            header + _MARGIN + math.ceil(shown / columns) * (cell[1] + _MARGIN),
        ),
        _GROUND,
    )
    draw = ImageDraw.Draw(sheet)
    total = len(plan.manifest.pictures)
    title = f"{shown} of {total} pictures, {len(plan.bucket_sizes())} bucket sizes, {plan.steps} steps"
    title = _shorten(title, ImageFont.load_default(size=14), sheet.width - 2 * _MARGIN)
    draw.text((_MARGIN, _MARGIN - 2), title, fill=_BRIGHT, font=ImageFont.load_default(size=14))
    for i in range(shown):
        row, column = divmod(i, columns)
        corner = (_MARGIN + column * (cell[0] + _MARGIN), header + _MARGIN + row * (cell[1] + _MARGIN))
        _draw_cell(sheet, draw, plan, dataset, i, corner, cell, tile, small)
    return sheet


def _draw_cell(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    plan: Plan,
    dataset: DatasetConfig,
    index: int,
    corner: tuple[int, int],
    cell: Size,
    tile: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Draw one picture with its texts."""
    left, top = corner
    picture, sample = plan.manifest.pictures[index], plan.sample(index, 0)
    draw.rounded_rectangle((left, top, left + cell[0] - 1, top + cell[1] - 1), 8, fill=_PANEL, outline=_LINE)
    whole = load_picture(picture.path)
    trained = cut(whole, sample.crop)
    masks = dataset.concepts[picture.concept].masks
    if masks is not None and picture.mask is not None:
        trained = _tint(trained, cut_mask(load_mask(picture, masks), sample.crop))
    trained.thumbnail((tile, tile), Image.Resampling.LANCZOS)
    place = (left + _PAD + (tile - trained.width) // 2, top + _PAD + (tile - trained.height) // 2)
    sheet.paste(trained, place)
    text_top = top + tile + 2 * _PAD
    overview = _overview(whole, sample.crop)
    sheet.paste(overview, (left + _PAD + (_THUMBNAIL - overview.width) // 2, text_top))
    beside, width = left + 2 * _PAD + _THUMBNAIL, tile - _THUMBNAIL - _PAD
    facts = [f"cropped {sample.crop.crop_share:.1%}", f"scale {sample.crop.scale(whole.size):.2f}"]
    facts += ["mirrored"] if sample.crop.flip else []
    bucket = f"{sample.crop.bucket[0]} x {sample.crop.bucket[1]}"
    draw.text((beside, text_top - 2), bucket, fill=_ACCENT, font=font)
    draw.text((beside, text_top + 14), _shorten(", ".join(facts), font, width), fill=_DIM, font=font)
    draw.text((beside, text_top + 30), _shorten(picture.name, font, width), fill=_DIM, font=font)
    lines = _wrap(sample.caption, font, tile, _CAPTION_LINES) if sample.caption else ["(empty caption)"]
    for n, text in enumerate(lines):
        at = (left + _PAD, text_top + _THUMBNAIL + 6 + n * 16)
        draw.text(at, text, fill=_BRIGHT if sample.caption else _DIM, font=font)


def _tint(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Lay a translucent colour over what the mask leaves out."""
    strength = ImageChops.invert(mask).point([round(value * 0.6) for value in range(256)])
    return Image.composite(Image.new("RGB", image.size, _UNTRAINED), image, strength)


def _overview(whole: Image.Image, crop: Crop) -> Image.Image:
    """Return a thumbnail of the whole picture, dimmed outside the rectangle that is kept."""
    box = crop.source_box(whole.size)
    factor = _THUMBNAIL / max(whole.size)
    small = whole.resize((max(1, round(whole.width * factor)), max(1, round(whole.height * factor))))
    kept = [
        min(max(0, round(edge * factor)), side - 1)
        for edge, side in zip(box, (small.width + 1, small.height + 1) * 2, strict=True)
    ]
    edge = (kept[0], kept[1], max(kept[0], kept[2] - 1), max(kept[1], kept[3] - 1))
    inside = Image.new("L", small.size, 90)
    ImageDraw.Draw(inside).rectangle(edge, fill=255)
    dimmed = Image.composite(small, Image.new("RGB", small.size, _GROUND), inside)
    ImageDraw.Draw(dimmed).rectangle(edge, outline=_ACCENT)
    return dimmed


def _shorten(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Cut a text to a width in pixels, ending in three dots."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, most: int) -> list[str]:
    """Break a text into at most `most` lines of a width in pixels; the last one is shortened."""
    lines: list[str] = []
    rest = text.split()
    while rest and len(lines) < most - 1:
        taken = 1
        while taken < len(rest) and font.getlength(" ".join(rest[: taken + 1])) <= width:
            taken += 1
        lines.append(_shorten(" ".join(rest[:taken]), font, width))
        rest = rest[taken:]
    return [*lines, _shorten(" ".join(rest), font, width)] if rest else lines
