"""The repeated blocks of a UNet and of CLIP, and the level of gradient checkpointing that recomputes each.

The time that a saved byte costs decides the order. Counted for Stable Diffusion 1.5 at 512 px / XL at 1024 px, in
bfloat16 with LoRA on every layer, in operations for a saved byte, where a byte that an operator reads or writes counts
as 200: feed-forward parts of transformer blocks outside the widest level 1150 / 1310, the rest of these blocks
1840 / 2150, transformer blocks of the widest level 2500 / 2040, resnets of the outermost level 3460 / 3450, other
resnets 8140 / 6640. The levels follow this order; transformer blocks of the widest level, most of an XL model, are
split over two. Their feed-forward parts alone would cost what the whole blocks do.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..base import Unit

# The outermost layers are small and sensitive: their weights are never quantized.
UNQUANTIZED = ("conv_in", "conv_out", "time_embedding", "add_embedding")


def units(model: nn.Module) -> list[Unit]:
    """List each block of a UNet or a text encoder, and parts of some, with the lowest level that recomputes each.

    The levels are places in LEVELS of gradient checkpointing: 1 is "feed-forward", 2 to 5 are "1" to "4", 6 is "full".
    """
    config: Any = model.config
    widest = max(getattr(config, "block_out_channels", (0,)))
    last = len(getattr(config, "block_out_channels", ())) - 1
    found: list[Unit] = []
    inner = 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "CLIPEncoderLayer":
            found += [(module.mlp, 1), (module, 2)]  # type: ignore[list-item]
        elif kind == "BasicTransformerBlock":
            outer = module.norm1.normalized_shape[0] < widest  # type: ignore[union-attr, index]
            inner += not outer
            found += [(module.ff, 1), (module, 2)] if outer else [(module, 4 - inner % 2)]  # type: ignore[list-item]
        elif kind == "ResnetBlock2D":
            found.append((module, 5 if name.startswith(("down_blocks.0.", f"up_blocks.{last}.")) else 6))
    return found
