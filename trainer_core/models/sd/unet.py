"""Build a UNet whose architecture is read from the shapes of its tensors."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..files.safetensors_file import Shapes, highest_number
from ..files.tensors import Complete, empty_tensors, fill, fill_from, of_possible_shapes
from .family import SIZE_CHANNELS, Family
from .names import unet_ldm_names

MOST_DEPTH = 30  # transformer blocks of an attention layer; Stable Diffusion XL has 10
HEAD = 64  # channels of an attention head in the UNets of most families


def outline_unet(shapes: Shapes, family: Family, source: str) -> nn.Module:
    """Build a diffusers UNet on the meta device; raises ValueError unless LDM tensors of these shapes fill it."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    shape = unet_shape(shapes, family, source)
    with torch.device("meta"), of_possible_shapes(f"the UNet of {source}", ValueError):
        unet = UNet2DConditionModel(**shape)
    return fill_unet(unet, empty_tensors(shapes), source)


def fill_unet(unet: Any, tensors: dict[str, Any], source: str, *, in_file: bool = False) -> nn.Module:
    """Load LDM tensors into an outline. in_file: these are `Stored`, and matrices stay so."""
    names = unet_ldm_names(unet.state_dict(), unet.config.layers_per_block)
    return (fill_from if in_file else fill)(unet, names, tensors, f"the UNet of {source}")


def unet_shape(shapes: Shapes, family: Family, source: str = "the file") -> dict[str, Any]:
    """Read a UNet2DConditionModel configuration from LDM tensor shapes (without prefix).

    Raises ValueError, with the source, for a UNet that no such configuration describes.
    """
    shapes = Complete(shapes, f"the UNet of {source}")
    levels: list[list[int]] = [[]]  # input block numbers of each level
    for i in range(1, 1 + highest_number(shapes, r"input_blocks\.(\d{1,2})\.")):
        if f"input_blocks.{i}.0.op.weight" in shapes:
            levels.append([])
        else:
            levels[-1].append(i)
    contexts = {v[1] for k, v in shapes.items() if k.endswith("attn2.to_k.weight")}
    if len({len(level) for level in levels}) != 1 or not levels[0] or len(contexts) != 1:
        raise ValueError(
            f"The UNet of {source} has levels of different depth or several text widths; it is no {family.title} UNet."
        )
    depths = _depths(shapes, levels, source)
    channels = tuple(shapes[f"input_blocks.{level[0]}.0.out_layers.3.weight"][0] for level in levels)
    projection = next((v for k, v in shapes.items() if k.endswith("1.proj_in.weight")), ())
    shape = {
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": len(levels[0]),
        "down_block_types": tuple("CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths),
        "up_block_types": tuple("CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)),
        "cross_attention_dim": contexts.pop(),
        # diffusers' name for the number of heads
        "attention_head_dim": family.heads or tuple(max(1, width // HEAD) for width in channels),
        "transformer_layers_per_block": tuple(max(1, depth) for depth in depths),
        "use_linear_projection": len(projection) == 2,
    }
    if "label_emb.0.0.weight" in shapes:
        shape |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": SIZE_CHANNELS,
            "projection_class_embeddings_input_dim": shapes["label_emb.0.0.weight"][1],
        }
    return shape


def _depths(shapes: Shapes, levels: list[list[int]], source: str) -> list[int]:
    """Count the transformer blocks in each attention layer of a level, 0 without attention.

    Raises ValueError if the layers of a level differ, as in pruned models.
    """
    counts: defaultdict[str, set[str]] = defaultdict(set)  # by attention layer
    for key in shapes:
        block, found, rest = key.partition(".1.transformer_blocks.")
        if found:
            counts[block].add(rest.split(".")[0])
    depths = [len(counts[f"input_blocks.{level[0]}"]) for level in levels]
    if max(depths) > MOST_DEPTH:
        raise ValueError(
            f"The UNet of {source} has attention {max(depths)} blocks deep; choose an ordinary checkpoint."
        )
    n = len(levels[0]) + 1
    even = len(counts["middle_block"]) == max(1, depths[-1])
    for i, (level, depth) in enumerate(zip(levels, depths, strict=True)):
        first = n * (len(levels) - 1 - i)
        blocks = [f"input_blocks.{j}" for j in level] + [f"output_blocks.{j}" for j in range(first, first + n)]
        even = even and all(len(counts[block]) == depth for block in blocks)
    if not even:
        raise ValueError(
            f"The UNet of {source} has attention of uneven depth, as the pruned SSD-1B, Segmind Vega and Koala, which "
            "cannot be trained yet, or is incomplete; choose a complete model."
        )
    return depths
