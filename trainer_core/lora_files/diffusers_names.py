"""What diffusers calls the layers of a transformer: asked of its own conversion of checkpoints, or from a table.

The conversion gets tensors whose rows are numbered. So the names, the slices of fused layers and their order are those
of the version that is installed. The table has what diffusers loads LoRAs for and does not convert at all sizes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.base import Slice
from .names import CONDITIONER, Named

WEIGHT = ".weight"
ADAPTER = "llm_adapter."  # of Anima's text, which is a model of its own in diffusers


class Origin(NamedTuple):
    """An architecture that diffusers converts: layers that it alone has, and its class in diffusers."""

    marks: tuple[str, ...]  # paths of layers
    kind: str
    start: str = ""  # of tensors' names in the original files


ORIGINS = (
    Origin(("blocks.0.cross_attn.o",), "WanTransformer3DModel"),
    Origin(("audio_patchify_proj",), "LTX2VideoTransformer3DModel"),
    Origin(("patchify_proj",), "LTXVideoTransformer3DModel"),
    Origin(("blocks.0.adaln_modulation_self_attn.1",), "CosmosTransformer3DModel", "net."),
    Origin(("blocks.0.attn.qkv_x",), "MochiTransformer3DModel"),
    Origin(("double_stream_modulation_img.lin",), "Flux2Transformer2DModel"),
    Origin(("cap_embedder.1", "layers.0.attention.qkv", "layers.0.adaLN_modulation.1"), "Lumina2Transformer2DModel"),
)


class NameTable(NamedTuple):
    """An architecture that diffusers has no conversion for, or one that does not work at all sizes."""

    marks: tuple[str, ...]  # paths of layers
    renamed: Sequence[tuple[str, str]]  # patterns of ComfyUI's paths, and diffusers', one after the other
    fused: Sequence[tuple[str, str, Mapping[str, int]]] = ()  # a pattern, diffusers' start, its ends with their shares
    swapped: str = ""  # path, in diffusers, of the layer whose halves have the other order there


def _streams(time: str, *marks: str) -> NameTable:
    """Name the layers of Flux and its kin; time: what diffusers calls the embeddings of the time."""
    return NameTable(
        marks,
        renamed=(
            (r"^(time|time_r|guidance|vector)_in\.", rf"{time}.\1_embedder."),
            (r"^txt_in\.(t|c)_embedder\.", r"context_embedder.time_text_embed.\1_embedder."),
            (r"\b(time|t)_embedder\b", "timestep_embedder"),
            (r"\btime_r_embedder\b", "timestep_embedder_r"),
            (r"\b(vector|c)_embedder\b", "text_embedder"),
            (r"\.in_layer$", ".linear_1"),
            (r"\.out_layer$", ".linear_2"),
            (r"^txt_in$", "context_embedder"),
            (r"^txt_in\.input_embedder$", "context_embedder.proj_in"),
            (r"^txt_in\.individual_token_refiner\.blocks\.", f"{REFINER}."),
            (r"\.self_attn\.proj$", ".attn.to_out.0"),
            (r"\.adaLN_modulation\.1$", ".norm_out.linear"),
            (r"^final_layer\.norm_out\.", "norm_out."),
            (r"^final_layer\.linear$", "proj_out"),
            (r"^img_in\b", "x_embedder"),
            (r"^byt5_in\.layernorm$", "context_embedder_2.norm"),
            (r"^byt5_in\.fc", "context_embedder_2.linear_"),
            (r"^vision_in\.proj\.0$", "image_embedder.norm_in"),
            (r"^vision_in\.proj\.1$", "image_embedder.linear_1"),
            (r"^vision_in\.proj\.3$", "image_embedder.linear_2"),
            (r"^vision_in\.proj\.4$", "image_embedder.norm_out"),
            (r"^cond_type_embedding$", "cond_type_embed"),
            (r"\.img_mod\.lin$", ".norm1.linear"),
            (r"\.txt_mod\.lin$", ".norm1_context.linear"),
            (r"\.img_attn\.norm\.query_norm$", ".attn.norm_q"),
            (r"\.img_attn\.norm\.key_norm$", ".attn.norm_k"),
            (r"\.txt_attn\.norm\.query_norm$", ".attn.norm_added_q"),
            (r"\.txt_attn\.norm\.key_norm$", ".attn.norm_added_k"),
            (r"\.img_attn\.proj$", ".attn.to_out.0"),
            (r"\.txt_attn\.proj$", ".attn.to_add_out"),
            (r"\.(?:img_)?mlp\.0$", ".ff.net.0.proj"),
            (r"\.(?:img_)?mlp\.2$", ".ff.net.2"),
            (r"\.txt_mlp\.0$", ".ff_context.net.0.proj"),
            (r"\.txt_mlp\.2$", ".ff_context.net.2"),
            (r"^double_blocks\.", "transformer_blocks."),
            (r"^single_blocks\.", "single_transformer_blocks."),
            (r"\.linear2$", ".proj_out"),
            (r"\.modulation\.lin$", ".norm.linear"),
            (r"\.norm\.query_norm$", ".attn.norm_q"),
            (r"\.norm\.key_norm$", ".attn.norm_k"),
        ),
        fused=(
            (r"^double_blocks\.(\d+)\.img_attn\.qkv$", r"transformer_blocks.\1.attn.", QKV),
            (
                r"^double_blocks\.(\d+)\.txt_attn\.qkv$",
                r"transformer_blocks.\1.attn.",
                {"add_q_proj": 1, "add_k_proj": 1, "add_v_proj": 1},
            ),
            (r"^txt_in\.individual_token_refiner\.blocks\.(\d+)\.self_attn\.qkv$", rf"{REFINER}.\1.attn.", QKV),
            (
                r"^single_blocks\.(\d+)\.linear1$",
                r"single_transformer_blocks.\1.",
                {"attn.to_q": 1, "attn.to_k": 1, "attn.to_v": 1, "proj_mlp": 4},
            ),
        ),
        swapped="norm_out.linear",
    )


REFINER = "context_embedder.token_refiner.refiner_blocks"
REFINED = "txt_in.individual_token_refiner.blocks.0.self_attn.qkv"
QKV = {"to_q": 1, "to_k": 1, "to_v": 1}
TABLES = (
    NameTable(
        ("embed_image_indicator", "llm_cond_proj", "layers.0.attention.qkv"),  # Ideogram 4
        ((r"\.attention\.o$", ".attention.to_out.0"),),
        fused=((r"^(.*)\.qkv$", r"\1.", QKV),),
    ),
    _streams("time_embed", REFINED, "vision_in.proj.1"),  # HunyuanVideo 1.5
    _streams("time_text_embed", REFINED, "vector_in.in_layer"),  # HunyuanVideo
    _streams("time_guidance_embed", REFINED),  # HunyuanImage 2.1
    _streams("time_text_embed", "txt_in", "double_blocks.0.img_mod.lin", "vector_in.in_layer"),  # FLUX.1
    _streams("", "txt_in", "img_in", "distilled_guidance_layer.in_proj"),  # Chroma, which embeds no time
    _streams("time_embed", "txt_in", "double_blocks.0.img_mod.lin", "double_blocks.0.img_mlp.0"),  # LongCat-Image
    NameTable(
        ("blocks.block0.blocks.0.block.attn.to_q.0",),  # Cosmos 1, whose conversion diffusers 0.42 never takes
        (
            (r"^blocks\.block(\d+)\.blocks\.", r"transformer_blocks.\1."),
            (r"\.0\.block\.attn\.", ".attn1."),
            (r"\.1\.block\.attn\.", ".attn2."),
            (r"\.2\.block\.layer1$", ".ff.net.0.proj"),
            (r"\.2\.block\.layer2$", ".ff.net.2"),
            (r"\.to_([qkv])\.0$", r".to_\1"),
            (r"\.to_([qk])\.1$", r".norm_\1"),
            (r"\.0\.adaLN_modulation\.([12])$", r".norm1.linear_\1"),
            (r"\.1\.adaLN_modulation\.([12])$", r".norm2.linear_\1"),
            (r"\.2\.adaLN_modulation\.([12])$", r".norm3.linear_\1"),
            (r"^final_layer\.adaLN_modulation\.([12])$", r"norm_out.linear_\1"),
            (r"^final_layer\.linear$", "proj_out"),
            (r"^t_embedder\.1\.", "time_embed.t_embedder."),
            (r"^affline_norm$", "time_embed.norm"),
            (r"^x_embedder\.proj\.1$", "patch_embed.proj"),
        ),
    ),
    NameTable(
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


REFUSING = (  # marks of architectures, and their classes in diffusers, which take no LoRAs
    (("down_blocks.0.0.channelwise.0",), "StableCascadeUNet"),
    (("blocks.0.attn1.Wqkv",), "HunyuanDiT2DModel"),
    (("double_blocks.0.attn.img_attn_qkv", "condition_embedder.time_proj"), "JoyImageEditTransformer3DModel"),
)


def diffusers_paths(rows: Mapping[str, int]) -> dict[str, list[Named]]:
    """Map paths of a transformer's layers to those of diffusers, as far as it knows the architecture.

    rows: how many rows each tensor has, by its name in ComfyUI's model: {"blocks.0.cross_attn.o.weight": 64, …}. Empty
    for architectures, versions of diffusers and sizes that its conversion of checkpoints does not know, unless they are
    in the table.
    """
    table = next((each for each in TABLES if _has(rows, each.marks)), None)
    if table is not None:
        paths = {name.removesuffix(WEIGHT): count for name, count in rows.items() if name.endswith(WEIGHT)}
        return {path: _by_table(path, count, table) for path, count in paths.items()}
    origin = next((each for each in ORIGINS if _has(rows, each.marks)), None)
    convert = None if origin is None else _conversion(origin.kind)
    if origin is None or convert is None:
        return {}
    marked: dict[str, Tensor] = {}
    starts, names, first = [], list(rows), 0
    for name in names:
        if name.startswith(ADAPTER):
            starts.append(first)
            continue
        values = torch.arange(first, first + rows[name], dtype=torch.float64)
        marked[origin.start + name] = values[:, None] if name.endswith(WEIGHT) else values
        starts.append(first)
        first += rows[name]
    try:
        converted = convert(marked)
    except (KeyError, RuntimeError, ValueError):  # other sizes or layers than those that the conversion is written for
        return {}
    adapter = [name.removesuffix(WEIGHT) for name in names if name.startswith(ADAPTER) and name.endswith(WEIGHT)]
    found = {path: [Named(CONDITIONER + path.removeprefix(ADAPTER))] for path in adapter}
    for name, values in converted.items():
        if name.endswith(WEIGHT) and values.ndim > 1:
            index = bisect_right(starts, int(values.min())) - 1
            piece = _piece(values.flatten() - starts[index], rows[names[index]])
            if piece is not None:
                found.setdefault(names[index].removesuffix(WEIGHT), []).append(Named(name.removesuffix(WEIGHT), *piece))
    return found


def why_unnamed(rows: Mapping[str, int], otherwise: str = "diffusers has no such model") -> str:
    """Say why layers of a model have no names in diffusers; rows: of its tensors, as for `diffusers_paths`.

    otherwise: what to say of an architecture that is not known here.
    """
    refusing = next((kind for marks, kind in REFUSING if _has(rows, marks)), None)
    if refusing is not None:
        return f"diffusers' {refusing} takes no LoRAs"
    origin = next((each for each in ORIGINS if _has(rows, each.marks)), None)
    if origin is None:
        return otherwise
    if diffusers_paths(rows):
        return f"diffusers' {origin.kind} has no such layer"
    return "the installed diffusers converts no model of these sizes"


def _has(rows: Mapping[str, int], marks: Sequence[str]) -> bool:
    return all(mark + WEIGHT in rows for mark in marks)


def _by_table(path: str, rows: int, table: NameTable) -> list[Named]:
    """Name a layer, or the parts of a fused one."""
    for pattern, start, ends in table.fused:
        if found := re.fullmatch(pattern, path):
            share, named, first = rows // sum(ends.values()), [], 0
            for end, shares in ends.items():
                named.append(Named(found.expand(start) + end, Slice(comfy="", start=first, length=share * shares)))
                first += share * shares
            return named
    for pattern, other in table.renamed:
        path = re.sub(pattern, other, path)
    return [Named(path, Slice(comfy="", start=0, length=rows, swapped=True) if path == table.swapped else None)]


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
