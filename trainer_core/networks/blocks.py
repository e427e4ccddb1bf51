"""Numbers for each block of the denoiser, as LoRA Config takes them: read, checked and spread over the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..config import LoraConfig
from ..models.base import BASE, BaseModel

NUMBERS = ("block_ranks", "block_alphas", "conv_block_ranks", "conv_block_alphas", "block_weights")
MOST_TIMES = 1000  # no model has so many blocks
NumberT = TypeVar("NumberT", int, float)


def spread(base: BaseModel, config: LoraConfig, setting: str) -> dict[str, float]:
    """Return a setting's number for each block and for BASE, {} when it is not set.

    A list of another length whose numbers are all equal counts for every block. Raises ValueError that prints the
    layout for any other list of a wrong length.
    """
    values: Sequence[float] = getattr(config, setting)
    layouts = base.block_layouts(setting)
    for names in layouts:
        if len(values) == len(names):
            given = dict(zip(names, values, strict=True))
            rest = given.get(BASE, 1.0)
            return {name: given.get(name, rest) for name in (*base.blocks, BASE)}
    if len(set(values)) <= 1:
        return dict.fromkeys(base.blocks, values[0]) if values else {}
    expected = "; or ".join(f"{len(names)} numbers, in the order {' '.join(names)}" for names in layouts)
    raise ValueError(f"{setting} has {len(values)} numbers, and this model takes {expected}.")


def remarks_on_blocks(base: BaseModel, config: LoraConfig) -> list[str]:
    """Return sentences on lists of a wrong length that count for every block."""
    return [
        f"{setting} has {len(values)} numbers where this model has {len(base.blocks)} blocks; as they are all "
        f"equal, {values[0]:g} counts for every block."
        for setting in NUMBERS
        if (values := getattr(config, setting)) and len(values) not in map(len, base.block_layouts(setting))
    ]


def parse_numbers(text: str, setting: str, kind: Callable[[str], NumberT]) -> tuple[NumberT, ...]:
    """Read numbers with commas between them; `16*9` is nine times 16. Raises ValueError for anything else."""
    numbers: list[NumberT] = []
    for part in text.split(",") if text.strip() else ():
        value, star, times = (piece.strip() for piece in part.partition("*"))
        try:
            count = int(times) if star else 1
            if not 1 <= count <= MOST_TIMES:
                raise ValueError(times)
            numbers += [kind(value)] * count
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ValueError(
                f"{setting} has {part.strip()!r}, which is not understood; give {what} with commas between them, for "
                "example 16*9, 32, 16*15."
            ) from None
    return tuple(numbers)
