"""Draw a dataset as it will be trained: crops, masks, buckets and captions on one sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps

from ..common.wording import count
from ..data.crops import Crop
from ..data.films import load_shown
from ..data.images import cut, load_picture
from ..data.masks import cut_mask, load_mask, load_shown_masks
from ..data.plan import Plan, Sample

_GROUND, _PANEL, _LINE = (24, 25, 28), (36, 38, 42), (62, 65, 71)
_BRIGHT, _DIM, _ACCENT = (232, 233, 236), (152, 156, 164), (255, 176, 66)
_UNTRAINED = (226, 64, 84)  # tint of the area outside the mask
_FRAMES = 3  # of a clip, side by side
_MARGIN, _HEADER, _PAD, _THUMBNAIL, _CAPTION_LINES, _LINE_HEIGHT = 14, 44, 8, 46, 3, 16  # pixels, lines


def render_preview(
    plan: Plan,
    *,
    epoch: int = 0,
    columns: int = 4,
    limit: int = 24,
    tile: int = 192,
    alike: Mapping[int, float] | None = None,
) -> Image.Image:
    """Draw a sheet of the first `limit` pictures, each cropped exactly as at its first visit in an epoch.

    Below each: a thumbnail of the whole picture with its crop, bucket, share cropped, scale, name and caption. The
    area outside a mask is tinted red, and control pictures lie at the lower edge. columns, limit and tile (pixels)
    are raised to at least 1, 1 and 96. A picture without a visit in the epoch, by a fractional repeat, is shown as at
    its next visit. Of a clip the first, middle and last of its trained frames are shown. alike: how alike pictures
    are to their captions, shown before these.
    """
    total = len(plan.manifest.pictures)
    shown = min(max(limit, 1), total)
    columns = max(1, min(columns, shown))
    cells = [_cell(plan, i, epoch, max(tile, 96), (alike or {}).get(i)) for i in range(shown)]
    width, height = cells[0].width + _MARGIN, cells[0].height + _MARGIN
    rows = math.ceil(shown / columns)
    sheet = Image.new("RGB", (_MARGIN + columns * width, _HEADER + rows * height), _GROUND)
    font = ImageFont.load_default(size=14)
    title = f"{shown} of {count(total, 'picture')}, {count(plan.buckets(), 'bucket size')}, epoch {epoch}"
    title = _shorten(title, font, sheet.width - 2 * _MARGIN)
    ImageDraw.Draw(sheet).text((_MARGIN, _MARGIN - 2), title, fill=_BRIGHT, font=font)
    for i, cell in enumerate(cells):
        row, column = divmod(i, columns)
        sheet.paste(cell, (_MARGIN + column * width, _HEADER + row * height))
    return sheet


def _cell(plan: Plan, index: int, epoch: int, tile: int, alike: float | None) -> Image.Image:
    """Draw one picture with its texts, on a panel."""
    picture, concept = plan.manifest.pictures[index], plan.concepts[index]
    sample, remark = sample_in_epoch(plan, index, epoch)
    size = (tile + 2 * _PAD, tile + 3 * _PAD + _THUMBNAIL + 6 + _CAPTION_LINES * _LINE_HEIGHT)
    cell = Image.new("RGB", size, _GROUND)
    draw = ImageDraw.Draw(cell)
    draw.rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), 8, fill=_PANEL, outline=_LINE)

    frames = load_shown(picture.path, sample.crop.frames, _FRAMES, concept.background)
    whole, parts = frames[0], [cut(frame, sample.crop) for frame in frames]
    if concept.masks is not None and picture.mask is not None and sample.use_mask:
        if picture.mask_moves:
            masks = load_shown_masks(picture.mask, sample.crop.frames, _FRAMES, concept.masks)
        else:
            masks = [load_mask(picture.mask, whole.size, concept.masks)] * len(parts)
        parts = [_tint(part, cut_mask(mask, sample.crop)) for part, mask in zip(parts, masks, strict=True)]
    trained = _strip(parts)
    trained.thumbnail((tile, tile), Image.Resampling.LANCZOS)
    cell.paste(trained, (_PAD + (tile - trained.width) // 2, _PAD + (tile - trained.height) // 2))
    for n, (control, crop) in enumerate(plan.beside(index, sample.crop)):
        shown = cut(load_picture(control.path, concept.background), crop)
        shown.thumbnail((tile // 3 - _PAD, tile // 3 - _PAD), Image.Resampling.LANCZOS)
        framed = ImageOps.expand(shown, 1, _ACCENT)
        cell.paste(framed, (_PAD + n * tile // 3, _PAD + tile - framed.height))
    top = tile + 2 * _PAD
    overview = _overview(whole, sample.crop)
    cell.paste(overview, (_PAD + (_THUMBNAIL - overview.width) // 2, top))

    font = ImageFont.load_default(size=12)
    facts = f"{sample.crop.crop_share(whole.size):.0%} cut, {sample.crop.scale(whole.size):.2f}x"
    facts += ", mirrored" if sample.crop.flip else ""
    facts += f", {remark}" if remark else ""
    taken = f", {len(sample.crop.frames)} frames" if len(sample.crop.frames) > 1 else ""
    texts = (f"{sample.crop.bucket[0]} x {sample.crop.bucket[1]}{taken}", facts, picture.name)
    for n, text in enumerate(texts):
        at = (2 * _PAD + _THUMBNAIL, top - 2 + n * _LINE_HEIGHT)
        text = _shorten(text, font, tile - _THUMBNAIL - _PAD)
        draw.text(at, text, fill=_DIM if n else _ACCENT, font=font)
    without = "(caption left out at this visit)" if plan.captions_of(index) - {""} else "(empty caption)"
    caption = (sample.caption or without) if alike is None else f"[{alike:.3f}] {sample.caption or without}"
    for n, text in enumerate(_wrap(caption, font, tile, _CAPTION_LINES)):
        at = (_PAD, top + _THUMBNAIL + 6 + n * _LINE_HEIGHT)
        draw.text(at, text, fill=_BRIGHT if sample.caption else _DIM, font=font)
    return cell


def sample_in_epoch(plan: Plan, index: int, epoch: int) -> tuple[Sample, str]:
    """Choose the sample of a picture in an epoch, and a remark on it."""
    if plan.concepts[index].role == "validation":
        return next(sample for sample in plan.validation if sample.picture == index), "validation"
    visits = plan.visits_in(index, epoch)
    remark = "not in this epoch" if not visits else plan.concepts[index].role.replace("train", "")
    sample = plan.sample(index, visits.start)
    masked = plan.manifest.pictures[index].mask is not None
    return sample, remark or ("mask off" if masked and not sample.use_mask else "")


def _strip(parts: Sequence[Image.Image]) -> Image.Image:
    """Join frames of a clip side by side; a single one stays as it is."""
    if len(parts) == 1:
        return parts[0]
    width, height = parts[0].size
    strip = Image.new("RGB", (width * len(parts), height))
    for number, part in enumerate(parts):
        strip.paste(part, (number * width, 0))
    return strip


def _tint(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Lay a translucent colour over the area outside the mask."""
    strength = ImageChops.invert(mask).point([round(value * 0.6) for value in range(256)])
    return Image.composite(Image.new("RGB", image.size, _UNTRAINED), image, strength)


def _overview(whole: Image.Image, crop: Crop) -> Image.Image:
    """Draw a thumbnail of the whole picture, dimmed outside the crop."""
    factor = _THUMBNAIL / max(whole.size)
    small = whole.resize((max(1, round(whole.width * factor)), max(1, round(whole.height * factor))))
    edge = [
        (min(max(0, round(x * factor)), small.width - 1), min(max(0, round(y * factor)), small.height - 1))
        for x, y in crop.corners(whole.size)
    ]
    inside = Image.new("L", small.size, 90)
    ImageDraw.Draw(inside).polygon(edge, fill=255, outline=255)
    dimmed = Image.composite(small, Image.new("RGB", small.size, _GROUND), inside)
    ImageDraw.Draw(dimmed).polygon(edge, outline=_ACCENT)
    return dimmed


def _shorten(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Cut a text to a width in pixels, ending in three dots."""
    start = text[:width]  # so that it takes no longer for a longer text: few characters are narrower than a pixel
    if start == text and font.getlength(text) <= width:
        return text
    while start and font.getlength(start + "...") > width:
        start = start[:-1]
    return start.rstrip() + "..."


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, most: int) -> list[str]:
    """Break a text into at most `most` lines of a width in pixels; the last one is shortened."""
    lines: list[str] = []
    rest = text.split()
    while rest and len(lines) < most - 1:
        words = 1
        while words < len(rest) and font.getlength(" ".join(rest[: words + 1])) <= width:
            words += 1
        lines.append(_shorten(" ".join(rest[:words]), font, width))
        rest = rest[words:]
    return [*lines, _shorten(" ".join(rest), font, width)] if rest else lines
