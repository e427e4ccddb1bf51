"""LoRA Config's lists of numbers, one for each block of the denoiser: read, check and assign them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..common.wording import count
from ..config import LoraConfig
from ..config.base import LONGEST_TEXT
from ..models.base import BASE, BaseModel

NUMBERS = ("block_ranks", "block_alphas", "conv_block_ranks", "conv_block_alphas", "block_weights")
MAX_REPEATS = 1000  # no model has so many blocks
NumberT = TypeVar("NumberT", int, float)


def numbers_by_block(base: BaseModel, config: LoraConfig, setting: str) -> dict[str, float]:
    """Map each block, and BASE, to its number of a setting; {} when it is not set.

    A list of a wrong length counts for every block if its numbers are equal. Raises ValueError, with the right layout,
    if they are not.
    """
    values: Sequence[float] = getattr(config, setting)
    layouts = base.layers.layouts(setting)
    for names in layouts:
        if len(values) == len(names):
            given = dict(zip(names, values, strict=True))
            rest = given.get(BASE, 1.0)
            return {name: given.get(name, rest) for name in (*base.layers.blocks, BASE)}
    if len(set(values)) <= 1:
        return dict.fromkeys(base.layers.blocks, values[0]) if values else {}
    expected = "; or ".join(f"{len(names)} numbers, in the order {' '.join(names)}" for names in layouts)
    raise ValueError(f"{setting} has {len(values)} numbers, and this model takes {expected}.")


def remarks_on_blocks(base: BaseModel, config: LoraConfig) -> list[str]:
    """Warn of lists of a wrong length that count for every block."""
    return [
        f"{setting} has {count(values, 'number')} where this model has {count(base.layers.blocks, 'block')}; as they "
        f"are all equal, {values[0]:g} counts for every block."
        for setting in NUMBERS
        if (values := getattr(config, setting)) and len(values) not in map(len, base.layers.layouts(setting))
    ]


def parse_numbers(text: str, setting: str, kind: Callable[[str], NumberT]) -> tuple[NumberT, ...]:
    """Read numbers separated by commas; `16*9` is nine times 16. Raises ValueError for anything else."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{setting} has {len(text)} characters; give at most {LONGEST_TEXT}.")
    numbers: list[NumberT] = []
    for part in text.split(",") if text.strip() else ():
        value, star, times = (piece.strip() for piece in part.partition("*"))
        try:
            count = int(times) if star else 1
            if not 1 <= count <= MAX_REPEATS:
                raise ValueError(times)
            numbers += [kind(value)] * count
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ValueError(
                f"{setting} has {part.strip()[:50]!r}, which is not understood; give {what} separated by commas, for "
                "example 16*9, 32, 16*15."
            ) from None
    return tuple(numbers)
