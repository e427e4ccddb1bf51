"""The blocks of a UNet: what they are called, which layers lie in which, and numbers that are given for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..config import LoraConfig

NUMBERS = ("block_ranks", "block_alphas", "conv_block_ranks", "conv_block_alphas", "block_weights")
BASE = "BASE"  # in short lists of block_weights: text encoders, and blocks without a transformer
MOST_TIMES = 1000  # no model has so many blocks
NumberT = TypeVar("NumberT", int, float)


def block_names(unet: Any) -> list[str]:
    """Return the names of a UNet's blocks in their order, which is that of kohya's lists.

    25 for Stable Diffusion 1 and 2, where embeddings belong to the first input block and conv_out to the last output
    block; 23 for XL, where both stand apart and the middle block counts as three.
    """
    count = len(unet.config.down_block_types) * (unet.config.layers_per_block + 1)
    inside, outside = [f"IN{i:02}" for i in range(count)], [f"OUT{i:02}" for i in range(count)]
    if _is_xl(unet):
        return ["EMB", *inside, "MID0", "MID1", "MID2", *outside, "LAST"]
    return [*inside, "MID", *outside]


def block_finder(unet: Any) -> Callable[[str], str]:
    """Return what tells the block of a UNet's module from its diffusers name."""
    each, xl, names = unet.config.layers_per_block + 1, _is_xl(unet), block_names(unet)

    def find(name: str) -> str:
        part, *rest = name.split(".")
        if part in ("down_blocks", "up_blocks"):
            level, kind, place = int(rest[0]), rest[1], int(rest[2])
            number = each * level + (each - 1 if kind.endswith("samplers") else place)
            return f"IN{number + 1:02}" if part == "down_blocks" else f"OUT{number:02}"
        if part == "mid_block":
            return "MID" if not xl else "MID1" if rest[0] == "attentions" else f"MID{2 * int(rest[1])}"
        if part == "conv_in":
            return "IN00"
        return names[-1] if part in ("conv_norm_out", "conv_out") else names[0]

    return find


def short_names(unet: Any) -> list[str]:
    """Return the layout of block-weight extensions: BASE, then the blocks that have a transformer."""
    find = block_finder(unet)
    attended = {find(name) for name, _ in unet.named_modules() if re.search(r"attentions\.\d+$", name)}
    return [BASE, *(name for name in block_names(unet) if name in attended)]


def spread(unet: Any, config: LoraConfig, setting: str) -> dict[str, float]:
    """Return a setting's number for each block and for BASE, {} when it is not set.

    A list of another length whose numbers are all equal counts for every block. Raises ValueError that prints the
    layout for any other list of a wrong length.
    """
    values: Sequence[float] = getattr(config, setting)
    layouts = layouts_of(unet, setting)
    for names in layouts:
        if len(values) == len(names):
            given = dict(zip(names, values, strict=True))
            rest = given.get(BASE, 1.0)
            return {name: given.get(name, rest) for name in (*block_names(unet), BASE)}
    if len(set(values)) <= 1:
        return dict.fromkeys(block_names(unet), values[0]) if values else {}
    expected = "; or ".join(f"{len(names)} numbers, in the order {' '.join(names)}" for names in layouts)
    raise ValueError(f"{setting} has {len(values)} numbers, and this model takes {expected}.")


def layouts_of(unet: Any, setting: str) -> list[list[str]]:
    """Return the lists of blocks that a setting's numbers may stand for."""
    return [block_names(unet), *([short_names(unet)] if setting == "block_weights" else [])]


def remarks_on_blocks(unet: Any, config: LoraConfig) -> list[str]:
    """Return sentences on lists of a wrong length that count for every block."""
    return [
        f"{setting} has {len(values)} numbers where this model has {len(block_names(unet))} blocks; as they are all "
        f"equal, {values[0]:g} counts for every block."
        for setting in NUMBERS
        if (values := getattr(config, setting)) and len(values) not in map(len, layouts_of(unet, setting))
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


def _is_xl(unet: Any) -> bool:
    return unet.config.addition_embed_type == "text_time"
