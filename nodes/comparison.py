"""The grid and the table of Compare LoRAs, and which column is marked."""

from __future__ import annotations

import csv
import io as text_io
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..trainer_core.common.wording import count, table_cell
from .comfyui.comparing import LIKE, Cell, Column
from .plot import BRIGHT, DIM, GROUND, SMOOTH

Scores = Sequence[tuple[float | None, float | None]]  # of each cell: likeness to pictures, and to the prompt

SIDE = 512  # pixels: the longer side of a picture in the grid
MOST_SIDE = 12_000  # pixels, of the grid
GAP, HEAD, NAMES = 6, 44, 220  # pixels: between pictures, above them, left of them


def draw_comparison(cells: Sequence[Cell], columns: int, best: int | None) -> Image.Image:
    """Draw the pictures as a grid with a column for each LoRA and strength; best: the number of the marked column."""
    rows = len(cells) // columns
    longest = max(max(cell.picture.shape[:2]) for cell in cells)
    room = min((MOST_SIDE - NAMES) // columns, (MOST_SIDE - HEAD) // rows) - GAP
    scale = min(1.0, SIDE / longest, max(room, 16) / longest)
    width, height = (max(1, round(scale * max(cell.picture.shape[axis] for cell in cells))) for axis in (1, 0))
    image = Image.new("RGB", (NAMES + columns * (width + GAP), HEAD + rows * (height + GAP)), GROUND)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(size=13)
    for number, cell in enumerate(cells):
        column, row = divmod(number, rows)
        left, top = NAMES + column * (width + GAP), HEAD + row * (height + GAP)
        if row == 0:
            marked = column == best
            letters = max(4, width // 8)
            draw.text((left, 4), _cut(cell.column.title, letters), fill=SMOOTH if marked else BRIGHT, font=font)
            under = f"{cell.column.strength:g}" + (" - best" if marked else "")
            draw.text((left, 22), under, fill=SMOOTH if marked else DIM, font=font)
        if column == 0:
            for line, text in enumerate([*_lines(cell.row.line.prompt, 27)[:6], f"seed {cell.row.first.seed}"]):
                draw.text((8, top + 4 + 16 * line), text, fill=BRIGHT if line < 6 else DIM, font=font)
        pixels = (cell.picture.numpy() * 255).round().astype(np.uint8)
        shown = Image.fromarray(pixels)
        size = tuple(max(1, round(scale * side)) for side in shown.size)
        image.paste(shown.resize(size, Image.Resampling.LANCZOS), (left, top))  # type: ignore[arg-type]
        if column == best:
            draw.rectangle((left - 2, top - 2, left + width + 1, top + height + 1), outline=SMOOTH, width=2)
    return image


def write_table(cells: Sequence[Cell], scores: Scores) -> str:
    """Write a line for each picture as CSV."""
    written = text_io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(["lora", "strength", "prompt", "seed", *LIKE, "file"])
    for each, found in zip(cells, scores, strict=True):
        likes = ["" if like is None else f"{like:.4f}" for like in found]
        row = [each.column.title, f"{each.column.strength:g}", each.row.line.prompt, each.row.first.seed]
        table.writerow(map(table_cell, [*row, *likes, each.path.name]))
    return written.getvalue()


def best_column(columns: Sequence[Column], scores: Scores) -> tuple[int, float] | None:
    """Find the column whose mean sum of likenesses is highest, with that sum; None where nothing was measured."""
    rows = len(scores) // len(columns)
    sums = []
    for number in range(len(columns)):
        own = [sum(each for each in pair if each is not None) for pair in scores[number * rows : (number + 1) * rows]]
        sums.append(fmean(own))
    if all(each is None for pair in scores for each in pair):
        return None
    best = max(range(len(columns)), key=sums.__getitem__)
    return best, sums[best]


def describe(
    cells: Sequence[Cell],
    columns: Sequence[Column],
    scores: Scores,
    best: tuple[int, float] | None,
    *,
    wordless: bool = False,
) -> str:
    """Say how many pictures were drawn and kept, the likeness of each column, and what the mark means.

    wordless: likeness to prompts was asked for, and the vision model has no text side.
    """
    kept = sum(cell.kept for cell in cells)
    lines = [f"{count(cells, 'picture')}: {len(cells) - kept} drawn, {kept} there already."]
    rows = len(cells) // len(columns)
    for number, column in enumerate(columns):
        own = scores[number * rows : (number + 1) * rows]
        likes = [
            f"{title} {fmean(found):.3f}"
            for title, found in zip(
                LIKE, ([each for each in side if each is not None] for side in zip(*own, strict=True)), strict=True
            )
            if found
        ]
        lines.append(f"{number + 1}. {column.title} at {column.strength:g}{': ' if likes else ''}{', '.join(likes)}")
    if wordless:
        lines.append(
            "The vision model has no text side, so likeness to the prompt is left out. Link one of CLIP for it."
        )
    if best is not None:
        column = columns[best[0]]
        lines.append(
            f"Best by the sum: {column.title} at {column.strength:g} ({best[1]:.3f}). It says what the vision model "
            "sees as alike. It does not say what you like, nor whether the LoRA only repeats its pictures."
        )
    return "\n".join(lines)


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _lines(text: str, letters: int) -> list[str]:
    """Break a text into lines of so many letters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) >= letters:
            lines.append(line)
            line = ""
        line = f"{line} {_cut(word, letters)}".strip()
    return [*lines, line] if line else lines
