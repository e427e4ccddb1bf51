"""The repeated blocks of a UNet and of CLIP, and the level of gradient checkpointing that recomputes each.

Activations with the most memory per time to recompute come first. Measured on full-size models, in MB saved per GFLOP
recomputed, Stable Diffusion 1.5 at 512 px / XL at 1024 px: transformer blocks outside the widest level 1.5 / 1.1,
resnets of the outermost level 1.0 / 1.0, transformer blocks of the widest level 0.9 / 0.8, other resnets 0.5 to 0.2.
The levels follow this order; transformer blocks of the widest level, most of an XL model, are split over two levels.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..base import Unit

# The outermost layers are small and sensitive: their weights are never quantized.
UNQUANTIZED = ("conv_in", "conv_out", "time_embedding", "add_embedding")


def units(model: nn.Module) -> list[Unit]:
    """List each block of a UNet or a text encoder, and the lowest level that recomputes it."""
    config: Any = model.config
    widest = max(getattr(config, "block_out_channels", (0,)))
    last = len(getattr(config, "block_out_channels", ())) - 1
    found: list[Unit] = []
    inner = 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "CLIPEncoderLayer":
            found.append((module, 1))
        elif kind == "BasicTransformerBlock":
            outer = module.norm1.normalized_shape[0] < widest  # type: ignore[union-attr, index]
            inner += not outer
            found.append((module, 1 if outer else 3 + inner % 2))
        elif kind == "ResnetBlock2D":
            found.append((module, 2 if name.startswith(("down_blocks.0.", f"up_blocks.{last}.")) else 5))
    return found
