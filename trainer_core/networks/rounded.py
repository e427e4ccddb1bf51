"""Which frozen layers of a base model may multiply in 8 bits."""

from __future__ import annotations

from typing import Any

from ..memory import takes_sides
from ..models import BaseModel
from .layers.shape import is_linear, weight_shape


def rounding_layers(base: BaseModel) -> dict[str, list[Any]]:
    """List the linear layers of the denoiser that may multiply in 8 bits, by their block.

    Not those before the first block and after the last one, modulations, and what the model never quantizes.
    """
    found: dict[str, list[Any]] = {name: [] for name in base.layers.blocks}
    for layer in base.layers.listed():
        ours = layer.part == base.parts[0].prefix and layer.block in found and is_linear(layer.module)
        quiet = layer.kind == "modulation" or layer.path.startswith(base.denoiser.unquantized)
        if ours and not quiet and takes_sides(*weight_shape(layer.module)):
            found[layer.block].append(layer.module)
    return {name: layers for name, layers in found.items() if layers}
