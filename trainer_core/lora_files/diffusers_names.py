"""What diffusers calls the layers of a transformer: asked of its own conversion of checkpoints, or from a table.

The conversion gets tensors whose rows are numbered. So the names, the slices of fused layers and their order are those
of the version that is installed. The table has what diffusers loads LoRAs for and does not convert.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.base import Slice
from .names import Named

WEIGHT = ".weight"
Replacement = str | Callable[[re.Match[str]], str]


class Origin(NamedTuple):
    """An architecture: layers that it alone has, its class in diffusers, and how its original files name layers."""

    marks: tuple[str, ...]  # paths of layers
    kind: str
    start: str = ""  # of tensors' names in the original files
    renamed: Sequence[tuple[str, Replacement]] = ()  # patterns of ComfyUI's paths, and the original's


ORIGINS = (
    Origin(("blocks.0.cross_attn.o",), "WanTransformer3DModel"),
    Origin(("audio_patchify_proj",), "LTX2VideoTransformer3DModel"),
    Origin(("patchify_proj",), "LTXVideoTransformer3DModel"),
    Origin(("blocks.0.adaln_modulation_self_attn.1",), "CosmosTransformer3DModel", "net."),
    Origin(("blocks.0.attn.qkv_x",), "MochiTransformer3DModel"),
    Origin(
        ("vector_in.in_layer", "txt_in.individual_token_refiner.blocks.0.self_attn.qkv"),
        "HunyuanVideoTransformer3DModel",
        renamed=(
            (r"mlp\.0$", "mlp.fc1"),
            (r"mlp\.2$", "mlp.fc2"),
            (r"_attn\.norm\.(query|key)_norm$", r"_attn_\1_norm"),
            (r"\.norm\.(query|key)_norm$", r".\1_norm"),
            (r"(query|key)_norm$", lambda found: f"{found[1][0]}_norm"),
            (r"(txt_in\.t_embedder|time_in|guidance_in)\.in_layer", r"\1.mlp.0"),
            (r"(txt_in\.t_embedder|time_in|guidance_in)\.out_layer", r"\1.mlp.2"),
            (r"(txt_in\.c_embedder)\.in_layer", r"\1.linear_1"),
            (r"(txt_in\.c_embedder)\.out_layer", r"\1.linear_2"),
            (r"(_mod|\.modulation)\.lin$", r"\1.linear"),
            (r"_attn\.(qkv|proj)$", r"_attn_\1"),
        ),
    ),
    Origin(("double_stream_modulation_img.lin",), "Flux2Transformer2DModel"),
    Origin(("distilled_guidance_layer.in_proj",), "ChromaTransformer2DModel"),
    Origin(("cap_embedder.1", "layers.0.attention.qkv"), "Lumina2Transformer2DModel"),
)


class Table(NamedTuple):
    """An architecture that diffusers has no conversion for; a test compares the outputs of both models."""

    marks: tuple[str, ...]  # paths of layers
    renamed: Sequence[tuple[str, str]]  # patterns of ComfyUI's paths, and diffusers'
    fused: str = ""  # end of the paths of layers that hold query, key and value


TABLES = (
    Table(
        ("embed_image_indicator", "llm_cond_proj", "layers.0.attention.qkv"),  # Ideogram 4
        ((r"\.attention\.o$", ".attention.to_out.0"),),
        fused=".qkv",
    ),
    Table(
        ("time_embedding_linear_1", "blocks.0.ff_proj"),  # CogVideoX
        (
            (r"^blocks\.(\d+)\.([qkv])$", r"blocks.\1.attn1.to_\2"),
            (r"\.(norm_[qk])$", r".attn1.\1"),
            (r"\.attn_out$", ".attn1.to_out.0"),
            (r"\.ff_proj$", ".ff.net.0.proj"),
            (r"\.ff_out$", ".ff.net.2"),
            (r"^(time|ofs)_embedding_linear_", r"\1_embedding.linear_"),
            (r"^blocks\.", "transformer_blocks."),
        ),
    ),
)


def diffusers_paths(rows: Mapping[str, int]) -> dict[str, list[Named]]:
    """Map paths of a transformer's layers to those of diffusers, as far as it knows the architecture.

    rows: how many rows each tensor has, by its name in ComfyUI's model: {"blocks.0.cross_attn.o.weight": 64, …}. Empty
    for architectures, versions of diffusers and sizes that its conversion of checkpoints does not know, unless they are
    in the table.
    """
    table = next((each for each in TABLES if all(mark + WEIGHT in rows for mark in each.marks)), None)
    if table is not None:
        paths = {name.removesuffix(WEIGHT): count for name, count in rows.items() if name.endswith(WEIGHT)}
        return {path: _by_table(path, count, table) for path, count in paths.items()}
    origin = next((each for each in ORIGINS if all(mark + WEIGHT in rows for mark in each.marks)), None)
    convert = None if origin is None else _conversion(origin.kind)
    if origin is None or convert is None:
        return {}
    marked: dict[str, Tensor] = {}
    starts, names, first = [], list(rows), 0
    for name in names:
        values = torch.arange(first, first + rows[name], dtype=torch.float64)
        marked[origin.start + _original(name, origin)] = values[:, None] if name.endswith(WEIGHT) else values
        starts.append(first)
        first += rows[name]
    try:
        converted = convert(marked)
    except (KeyError, RuntimeError, ValueError):  # other sizes or layers than those that the conversion is written for
        return {}
    found: dict[str, list[Named]] = {}
    for name, values in converted.items():
        if name.endswith(WEIGHT) and values.ndim > 1:
            place = bisect_right(starts, int(values.min())) - 1
            piece = _piece(values.flatten() - starts[place], rows[names[place]])
            if piece is not None:
                found.setdefault(names[place].removesuffix(WEIGHT), []).append(Named(name.removesuffix(WEIGHT), *piece))
    return found


def _by_table(path: str, rows: int, table: Table) -> list[Named]:
    """Name a layer, or the three parts of a fused one."""
    if table.fused and path.endswith(table.fused):
        start, size = path.removesuffix(table.fused), rows // 3
        cuts = [Slice(comfy="", start=size * number, length=size) for number in range(3)]
        return [Named(f"{start}.to_{part}", cut) for part, cut in zip("qkv", cuts, strict=True)]
    for pattern, other in table.renamed:
        path = re.sub(pattern, other, path)
    return [Named(path)]


def _original(name: str, origin: Origin) -> str:
    """Give a tensor the name that it has in the original files."""
    path, _, kind = name.rpartition(".")
    for pattern, other in origin.renamed:
        path = re.sub(pattern, other, path)
    return f"{path}.{kind}" if path else kind


def _conversion(kind: str) -> Any:
    """Find diffusers' conversion of original checkpoints to a class; None where this version has none."""
    from diffusers.loaders import single_file_model  # here, as diffusers takes seconds to import

    return single_file_model.SINGLE_FILE_LOADABLE_CLASSES.get(kind, {}).get("checkpoint_mapping_fn")


def _piece(rows: Tensor, whole: int) -> tuple[Slice | None] | None:
    """Read which rows of a weight a tensor holds: all, or a slice, perhaps with its halves swapped; None for others."""
    start, length = int(rows.min()), len(rows)
    expected = torch.arange(start, start + length, dtype=rows.dtype)
    if swapped := not rows.equal(expected):
        expected = torch.cat(expected.chunk(2)[::-1])
    if not rows.equal(expected):
        return None
    if length == whole and not swapped:
        return (None,)
    return (Slice(comfy="", start=start, length=length, swapped=swapped),)
