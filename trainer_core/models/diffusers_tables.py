"""How diffusers names the layers of transformers: by its own conversion of checkpoints, or by a table here.

The layers name the architecture: a model that has all `marks` is of it. The rows of `architectures.py` point
here. A table is for what diffusers loads LoRAs for and does not convert, or not at all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Conversion(NamedTuple):
    """An architecture that diffusers converts itself."""

    kind: str  # its class in diffusers
    marks: tuple[str, ...]  # paths of layers that it alone has
    start: str = ""  # of tensors' names in the original files


class NoLoras(NamedTuple):
    """An architecture whose class in diffusers takes no LoRAs."""

    kind: str
    marks: tuple[str, ...]


class NameTable(NamedTuple):
    """An architecture that diffusers does not convert, or not at all sizes."""

    marks: tuple[str, ...]  # paths of layers
    renamed: Sequence[tuple[str, str]]  # patterns of ComfyUI's paths, and diffusers', one after the other
    fused: Sequence[tuple[str, str, Mapping[str, int]]] = ()  # a pattern, diffusers' start, its ends with their shares
    swapped: str = ""  # path, in diffusers, of the layer whose halves have the other order there


REFINER = "context_embedder.token_refiner.refiner_blocks"
REFINED = "txt_in.individual_token_refiner.blocks.0.self_attn.qkv"
QKV = {"to_q": 1, "to_k": 1, "to_v": 1}


def streams(time: str, *marks: str) -> NameTable:
    """Name the layers of FLUX and its kin; time: what diffusers calls the embeddings of the time."""
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


IDEOGRAM_4 = NameTable(
    ("embed_image_indicator", "llm_cond_proj", "layers.0.attention.qkv"),
    ((r"\.attention\.o$", ".attention.to_out.0"),),
    fused=((r"^(.*)\.qkv$", r"\1.", QKV),),
)
HUNYUAN_VIDEO_15 = streams("time_embed", REFINED, "vision_in.proj.1")
HUNYUAN_VIDEO = streams("time_text_embed", REFINED, "vector_in.in_layer")
HUNYUAN_IMAGE = streams("time_guidance_embed", REFINED)
FLUX_1 = streams("time_text_embed", "txt_in", "double_blocks.0.img_mod.lin", "vector_in.in_layer")
CHROMA = streams("", "txt_in", "img_in", "distilled_guidance_layer.in_proj")  # which embeds no time
LONGCAT_IMAGE = streams("time_embed", "txt_in", "double_blocks.0.img_mod.lin", "double_blocks.0.img_mlp.0")
COSMOS_1 = NameTable(  # its conversion diffusers 0.42 never takes
    ("blocks.block0.blocks.0.block.attn.to_q.0",),
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
)
COGVIDEOX = NameTable(
    ("time_embedding_linear_1", "blocks.0.ff_proj"),
    (
        (r"^blocks\.(\d+)\.([qkv])$", r"blocks.\1.attn1.to_\2"),
        (r"\.(norm_[qk])$", r".attn1.\1"),
        (r"\.attn_out$", ".attn1.to_out.0"),
        (r"\.ff_proj$", ".ff.net.0.proj"),
        (r"\.ff_out$", ".ff.net.2"),
        (r"^(time|ofs)_embedding_linear_", r"\1_embedding.linear_"),
        (r"^blocks\.", "transformer_blocks."),
    ),
)
