"""Tiny random models in ComfyUI's own classes: one row per architecture, with a conditioning as its text encoder's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Generator, Tensor
from zoo import odd

import zoo.comfy_here  # noqa: F401  # isort: skip
import comfy.model_patcher
import comfy.supported_models
from comfy.ldm.chroma_radiance.model import ChromaRadianceParams
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.model_sampling import StableCascadeSampling

Extra = Callable[[Generator, int], Any]  # generator and tokens of the caption -> a value of the conditioning


def random(*shape: int) -> Extra:
    """Draw one sample's tensor."""
    return lambda draws, _: torch.randn(1, *shape, generator=draws)


def ones(*shape: int) -> Extra:
    """Build a mask of float ones."""
    return lambda _, __: torch.ones(1, *shape)


def mask(_: Generator, tokens: int) -> Tensor:
    """Build an attention mask of whole numbers that hides no token."""
    return torch.ones(1, tokens, dtype=torch.long)


def always(value: Any) -> Extra:
    """Give the same value to every caption."""
    return lambda _, __: value


@dataclass(frozen=True)
class Row:
    """A tiny model of one architecture."""

    cls: str  # in comfy.supported_models
    latents: tuple[int, ...]  # channels[, frames], height, width
    text: tuple[int, int]  # tokens and width of a caption
    config: Mapping[str, Any]  # ComfyUI's unet_config
    pooled: int = 0  # width of the pooled encoding, 0 for none
    extra: Mapping[str, Extra] = field(default_factory=dict)  # further values of the conditioning
    building: Callable[[], AbstractContextManager[Any]] = nullcontext  # while the model is built
    kind: str = ""  # of its architecture; "" where its sampling is refused
    step: int = 16  # of pictures' sides, in pixels
    # Its class in diffusers, whose layers are named; "" where the names are ComfyUI's own, which it reads behind
    # "transformer." as well; or why a LoRA on all layers is not written for diffusers.
    diffusers: str = "diffusers has no such model"
    parts: Mapping[str, Any] = field(default_factory=dict)  # that the class in diffusers has on request


IMAGE = (16, 8, 12)  # latents of most image models
VIDEO = (16, 2, 8, 12)
STILL = (16, 1, 8, 12)

UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "transformer_depth": [1, 0],
    "channel_mult": [1, 2],
    "transformer_depth_output": [1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "num_heads": 4,
    "context_dim": 32,
    "use_linear_in_transformer": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "num_head_channels": -1,
}
XL = UNET | {
    "transformer_depth": [0, 0, 1, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "use_linear_in_transformer": True,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}
KOALA = XL | {"transformer_depth_middle": -2}  # without a middle block
XL_PARTS = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "transformer_layers_per_block": 1,
}
FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 32,
    "context_in_dim": 48,
    "hidden_size": 64,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
FLUX2 = FLUX | {
    "image_model": "flux2",
    "in_channels": 128,
    "out_channels": 128,
    "vec_in_dim": None,
    "mlp_ratio": 3.0,
    "axes_dim": [8, 8, 8, 8],
    "theta": 2000,
    "patch_size": 1,
    "qkv_bias": False,
    "txt_ids_dims": [3],
    "global_modulation": True,
    "mlp_silu_act": True,
    "ops_bias": False,
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
}
CHROMA = {name: value for name, value in FLUX.items() if name != "guidance_embed"} | {
    "image_model": "chroma",
    "in_channels": 64,
    "out_channels": 64,
    "in_dim": 64,
    "out_dim": 64,
    "hidden_dim": 48,
    "n_layers": 2,
    "vec_in_dim": None,
}
SD3 = {
    "in_channels": 16,
    "patch_size": 2,
    "out_channels": 16,
    "depth": 2,
    "input_size": None,
    "adm_in_channels": 32,
    "context_embedder_config": {
        "target": "torch.nn.Linear",
        "params": {"in_features": 48, "out_features": 128},
    },
    "num_patches": 256,
    "pos_embed_max_size": 16,
    "qk_norm": "rms",
    "pos_embed_scaling_factor": None,
    "x_block_self_attn_layers": [0],
}
AURAFLOW = {
    "max_seq": 64,
    "cond_seq_dim": 48,
    "global_conddim": 32,
    "n_double_layers": 1,
    "n_layers": 2,
    "n_heads": 2,
    "dim": 32,
    "patch_size": 2,
    "in_channels": 4,
}
PIXART = {
    "image_model": "pixart_sigma",
    "num_heads": 2,
    "patch_size": 2,
    "hidden_size": 32,
    "in_channels": 4,
    "depth": 2,
    "model_max_length": 16,
    "caption_channels": 48,
    "micro_condition": False,
    "input_size": 128,
    "pe_interpolation": 2,
}
CASCADE_C = {
    "stable_cascade_stage": "c",
    "c_cond": 32,
    "c_hidden": [32, 32],
    "nhead": [2, 2],
    "blocks": [[1, 2], [2, 1]],
    "c_clip_text": 48,
    "c_clip_text_pooled": 32,
    "c_clip_img": 768,
    "c_clip_seq": 2,
}
CASCADE_B = {
    "stable_cascade_stage": "b",
    "c_cond": 32,
    "c_hidden": [16, 32, 32, 32],
    "nhead": [-1, -1, 2, 2],
    "blocks": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "block_repeat": [[1, 1, 1, 1], [2, 2, 2, 2]],
    "c_clip": 32,
    "c_clip_seq": 2,
}
HUNYUAN_DIT = {
    "image_model": "hydit",
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "text_states_dim": 48,
    "text_states_dim_t5": 40,
    "text_len": 8,
    "text_len_t5": 10,
    "mlp_ratio": 2.0,
}
LUMINA2 = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 48,
    "cap_feat_dim": 40,
    "n_layers": 2,
    "qk_norm": True,
    "n_heads": 2,
    "n_kv_heads": 1,
    "axes_dims": [8, 8, 8],
    "axes_lens": [300, 512, 512],
    "rope_theta": 10000.0,
    "ffn_dim_multiplier": 4.0,
}
Z_IMAGE = LUMINA2 | {
    "dim": 256,
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "rope_theta": 256.0,
    "ffn_dim_multiplier": 1.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
QWEN_IMAGE = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "axes_dims_rope": (8, 12, 12),
}
HIDREAM = {
    "image_model": "hidream",
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "caption_channels": [48, 40],
    "text_emb_dim": 32,
    "num_routed_experts": 4,
    "num_activated_experts": 2,
    "axes_dims_rope": [8, 12, 12],
    "max_resolution": [128, 128],
    "llama_layers": [0, 1],
}
HUNYUAN_VIDEO = {
    "image_model": "hunyuan_video",
    "in_channels": 16,
    "patch_size": [1, 2, 2],
    "out_channels": 16,
    "vec_in_dim": 32,
    "axes_dim": [8, 12, 12],
    "meanflow": False,
    "context_in_dim": 48,
    "hidden_size": 64,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "theta": 256,
    "qkv_bias": True,
    "byt5": False,
    "guidance_embed": True,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
WAN = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 64,
    "ffn_dim": 128,
    "num_heads": 2,
    "num_layers": 2,
    "text_dim": 48,
    "in_dim": 16,
    "out_dim": 16,
    "freq_dim": 32,
}
LTXV = {
    "image_model": "ltxv",
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "cross_attention_dim": 32,
    "caption_channels": 48,
    "in_channels": 128,
}
COSMOS = {
    "image_model": "cosmos",
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "model_channels": 64,
    "block_config": "FA-CA-MLP",
    "concat_padding_mask": True,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": False,
    "pos_emb_interpolation": "crop",
    "block_x_format": "THWBD",
    "affline_emb_norm": True,
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
    "num_blocks": 2,
    "num_heads": 2,
    "crossattn_emb_channels": 48,
    "extra_per_block_abs_pos_emb": True,
    "rope_h_extrapolation_ratio": 1.0,
    "rope_w_extrapolation_ratio": 1.0,
    "rope_t_extrapolation_ratio": 2.0,
    "extra_per_block_abs_pos_emb_type": "learnable",
}
COSMOS_PREDICT2 = {
    name: value
    for name, value in COSMOS.items()
    if name not in ("block_config", "block_x_format", "affline_emb_norm", "extra_per_block_abs_pos_emb_type")
} | {
    "image_model": "cosmos_predict2",
    "pos_emb_learnable": True,
    "min_fps": 1,
    "max_fps": 30,
    "extra_per_block_abs_pos_emb": False,
    "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0,
    "rope_t_extrapolation_ratio": 1.0,
    "rope_enable_fps_modulation": False,
}
MOCHI = {
    "image_model": "mochi_preview",
    "depth": 2,
    "patch_size": 2,
    "num_heads": 2,
    "hidden_size_x": 64,
    "hidden_size_y": 32,
    "mlp_ratio_x": 192.0,
    "mlp_ratio_y": 192.0,
    "learn_sigma": False,
    "in_channels": 12,
    "qk_norm": True,
    "qkv_bias": False,
    "out_bias": True,
    "attn_drop": 0.0,
    "patch_embed_bias": True,
    "posenc_preserve_area": True,
    "timestep_mlp_bias": True,
    "attend_to_padding": False,
    "timestep_scale": 1000.0,
    "use_t5": True,
    "t5_feat_dim": 48,
    "t5_token_length": 8,
    "rope_theta": 10000.0,
}
OMNIGEN2 = {
    "image_model": "omnigen2",
    "axes_dim_rope": [8, 12, 12],
    "axes_lens": [1024, 1664, 1664],
    "ffn_dim_multiplier": None,
    "hidden_size": 64,
    "in_channels": 16,
    "multiple_of": 32,
    "norm_eps": 1e-5,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "out_channels": None,
    "patch_size": 2,
    "text_feat_dim": 48,
    "timestep_scale": 1000.0,
}
KANDINSKY5 = {
    "image_model": "kandinsky5",
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "in_text_dim": 48,
    "in_text_dim2": 32,
    "time_dim": 32,
    "model_dim": 64,
    "ff_dim": 128,
    "visual_embed_dim": 64,
    "patch_size": (1, 2, 2),
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (8, 12, 12),
}
ERNIE = {
    "image_model": "ernie",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_layers": 2,
    "ffn_hidden_size": 128,
    "in_channels": 128,
    "out_channels": 128,
    "text_in_dim": 48,
    "rope_axes_dim": (8, 12, 12),
}
KREA2 = {
    "image_model": "krea2",
    "features": 64,
    "tdim": 32,
    "txtdim": 48,
    "heads": 2,
    "kvheads": 1,
    "multiplier": 2,
    "layers": 2,
    "patch": 2,
    "channels": 16,
    "txtlayers": 2,
    "txtheads": 2,
    "txtkvheads": 2,
}
COGVIDEOX = {
    "image_model": "cogvideox",
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "time_embed_dim": 32,
    "num_layers": 2,
    "in_channels": 16,
    "out_channels": 16,
    "text_embed_dim": 48,
    "patch_size": 2,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 5,
    "max_text_seq_length": 8,
    "use_rotary_positional_embeddings": True,
}
CHROMA_RADIANCE = CHROMA | {
    "image_model": "chroma_radiance",
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": 8,
    "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2,
    "nerf_depth": 2,
    "nerf_max_freqs": 4,
    "nerf_tile_size": 0,
    "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32,
    "use_x0": False,
}
if "use_sequential_txt_ids" in ChromaRadianceParams.__dataclass_fields__:  # not yet in the oldest ComfyUI
    CHROMA_RADIANCE["use_sequential_txt_ids"] = False
HUNYUAN_VIDEO15 = HUNYUAN_VIDEO | {
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "guidance_embed": False,
    "depth_single_blocks": 0,
    "use_cond_type_embedding": True,
    "vision_in_dim": 24,
}
BOOGU = {
    "image_model": "boogu",
    "hidden_size": 64,
    "num_layers": 2,
    "num_double_stream_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 32,
    "axes_dim_rope": (8, 12, 12),
    "instruction_feat_dim": 48,
}
IDEOGRAM4 = {
    "image_model": "ideogram4",
    "in_channels": 128,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "intermediate_size": 96,
    "adaln_dim": 32,
    "llm_features_dim": 48,
    "mrope_section": (4, 6, 6),
}
JOYIMAGE = {
    "image_model": "joyimage",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "text_dim": 48,
    "num_layers": 2,
    "rope_dim_list": [8, 12, 12],
    "theta": 10000,
}
MAGE_FLOW = {
    "image_model": "mage_flow",
    "in_channels": 128,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "axes_dims_rope": (8, 12, 12),
}
LENS = {
    "image_model": "lens",
    "in_channels": 128,
    "out_channels": 32,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "enc_hidden_dim": 48,
    "axes_dims_rope": (8, 12, 12),
}
ZIMAGE_PIXEL = Z_IMAGE | {
    "image_model": "zimage_pixel",
    "patch_size": 8,
    "in_channels": 3,
    "decoder_in_channels": 192,
    "decoder_hidden_size": 32,
    "decoder_num_res_blocks": 2,
    "decoder_max_freqs": 2,
}
PIXELDIT = {
    "image_model": "pixeldit_t2i",
    "num_groups": 2,
    "hidden_size": 64,
    "pixel_hidden_size": 8,
    "pixel_attn_hidden_size": 32,
    "pixel_num_groups": 2,
    "patch_depth": 2,
    "pixel_depth": 2,
    "patch_size": 8,
    "txt_embed_dim": 48,
    "txt_max_length": 16,
}
HIDREAM_O1 = {
    "image_model": "hidream_o1",
    "text_config_overrides": {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_dims": [8, 4, 4],
    },
    "vision_config_overrides": {
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "depth": 1,
        "num_position_embeddings": 16,
    },
}
LTXAV = LTXV | {
    "image_model": "ltxav",
    "audio_in_channels": 128,
    "audio_cross_attention_dim": 16,
    "audio_attention_head_dim": 8,
    "audio_num_attention_heads": 2,
    "connector_attention_head_dim": 24,
    "connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": 24,
    "audio_connector_num_attention_heads": 2,
    "connector_num_layers": 1,
}


def own_sizes(cls: str) -> Callable[[], AbstractContextManager[Any]]:
    """Build a class by the sizes of its row, which it would replace by its own."""
    return lambda: patch.object(getattr(comfy.supported_models, cls), "unet_extra_config", {})


def known_noise() -> AbstractContextManager[Any]:
    """Compute Stable Cascade's table of noise once: ComfyUI fills it number by number, 10,000 for each model."""
    own = StableCascadeSampling.set_parameters

    def set_parameters(sampling: StableCascadeSampling, shift: float = 1.0, cosine_s: float = 8e-3) -> None:
        known = NOISE.get((shift, cosine_s))
        if known is None:
            own(sampling, shift, cosine_s)
            NOISE[shift, cosine_s] = sampling.sigmas.clone(), {name: vars(sampling)[name] for name in OF_NOISE}
        else:
            vars(sampling).update(known[1])
            sampling.set_sigmas(known[0].clone())

    return patch.object(StableCascadeSampling, "set_parameters", set_parameters)


OF_NOISE = ("shift", "cosine_s", "_init_alpha_cumprod", "num_timesteps")  # what the table is made of
NOISE: dict[tuple[float, float], tuple[Tensor, dict[str, Any]]] = {}


def small_adapter() -> AbstractContextManager[Any]:
    """Build Anima's text adapter small; its configuration does not name its sizes."""
    import comfy.ldm.anima.model as anima

    sizes = {"source_dim": 48, "target_dim": 48, "model_dim": 32, "num_layers": 1, "num_heads": 2}
    return patch.object(anima, "LLMAdapter", partial(anima.LLMAdapter, **sizes))


END = 99  # in the tiny vocabulary of HiDream-O1, the token that its network takes the time at


def small_vocabulary() -> AbstractContextManager[Any]:
    """Build HiDream-O1 with a small vocabulary; its configuration does not name the token of the time."""
    import comfy.ldm.hidream_o1.model as hidream

    return patch.object(hidream, "TMS_TOKEN_ID", END)


def token_ids(draws: Generator, tokens: int) -> Tensor:
    """Draw a caption's tokens, of which the last is that of the time."""
    drawn = torch.randint(0, END, (1, tokens), generator=draws)
    drawn[:, -1] = END
    return drawn


MASKED = {"attention_mask": mask}
SIZES = "the installed diffusers converts no model of these sizes"  # tiny ones; real sizes are in test_convert.py
ROWS = {
    "sd15": Row("SD15", (4, 16, 16), (8, 32), UNET, kind="sd1", step=8, diffusers="UNet2DConditionModel"),
    "sdxl": Row(
        "SDXL",
        (4, 16, 16),
        (8, 32),
        XL,
        1280,
        kind="sdxl",
        step=8,
        diffusers="UNet2DConditionModel",
        parts=XL_PARTS,
    ),
    "koala": Row(
        "KOALA_700M",
        (4, 16, 16),
        (8, 32),
        KOALA,
        1280,
        kind="sdxl",
        step=8,
        diffusers="UNet2DConditionModel",
        parts=XL_PARTS | {"mid_block_type": None},
    ),
    "flux_dev": Row(
        "Flux",
        IMAGE,
        (8, 48),
        FLUX,
        32,
        kind="flux",
        diffusers="FluxTransformer2DModel",
        parts={"guidance_embeds": True},
    ),
    "flux_schnell": Row(
        "FluxSchnell",
        IMAGE,
        (8, 48),
        FLUX | {"guidance_embed": False},
        32,
        kind="flux_schnell",
        diffusers="FluxTransformer2DModel",
    ),
    "flux2": Row("Flux2", (128, 4, 6), (8, 48), FLUX2, kind="flux2", diffusers="Flux2Transformer2DModel"),
    "flux2_klein": Row(
        "Flux2",
        (128, 4, 6),
        (8, 48),
        FLUX2 | {"guidance_embed": False},
        kind="flux2_klein",
        diffusers="Flux2Transformer2DModel",
    ),
    "longcat": Row(
        "LongCatImage",
        IMAGE,
        (8, 48),
        FLUX | {"guidance_embed": False, "vec_in_dim": None, "txt_ids_dims": [1, 2]},
        kind="longcat_image",
        diffusers="LongCatImageTransformer2DModel",
    ),
    "chroma": Row("Chroma", IMAGE, (8, 48), CHROMA, kind="chroma", diffusers="ChromaTransformer2DModel"),
    "sd3": Row(
        "SD3",
        IMAGE,
        (8, 48),
        SD3,
        32,
        kind="sd3",
        diffusers="SD3Transformer2DModel",
        parts={"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    ),
    "auraflow": Row("AuraFlow", (4, 8, 12), (8, 48), AURAFLOW, kind="auraflow", diffusers="AuraFlowTransformer2DModel"),
    "pixart_sigma": Row(
        "PixArtSigma",
        (4, 40, 48),
        (8, 48),
        PIXART,
        kind="pixart",
        diffusers="PixArtTransformer2DModel",
        parts={"caption_channels": 48},
    ),
    "pixart_alpha": Row(
        "PixArtAlpha",
        (4, 40, 48),
        (8, 48),
        PIXART | {"image_model": "pixart_alpha", "hidden_size": 36, "micro_condition": True},
        extra={"width": always(384), "height": always(320)},
        kind="pixart",
        diffusers="PixArtTransformer2DModel",
        parts={"caption_channels": 48, "use_additional_conditions": True},
    ),
    "cascade_c": Row(
        "Stable_Cascade_C",
        (16, 6, 8),
        (8, 48),
        CASCADE_C,
        32,
        building=known_noise,
        kind="cascade_c",
        step=128,
        diffusers="diffusers' StableCascadeUNet takes no LoRAs",
    ),
    "cascade_b": Row(
        "Stable_Cascade_B",
        (4, 16, 16),
        (8, 48),
        CASCADE_B,
        32,
        building=known_noise,
        kind="cascade_b",
        step=128,
        diffusers="diffusers' StableCascadeUNet takes no LoRAs",
    ),
    "hunyuan_dit": Row(
        "HunyuanDiT",
        (4, 8, 12),
        (8, 48),
        HUNYUAN_DIT,
        extra={
            "conditioning_mt5xl": random(10, 40),
            "attention_mask_mt5xl": ones(10),
            "attention_mask": lambda _, tokens: torch.ones(1, tokens),
        },
        kind="hunyuan_dit",
        diffusers="diffusers' HunyuanDiT2DModel takes no LoRAs",
    ),
    "lumina2": Row("Lumina2", IMAGE, (8, 40), LUMINA2, kind="lumina2", diffusers=SIZES),
    "z_image": Row("ZImage", IMAGE, (8, 40), Z_IMAGE, kind="z_image", diffusers="ZImageTransformer2DModel"),
    "qwen_image": Row(
        "QwenImage", STILL, (8, 48), QWEN_IMAGE, kind="qwen_image", diffusers="QwenImageTransformer2DModel"
    ),
    "hidream": Row(
        "HiDream",
        IMAGE,
        (8, 48),
        HIDREAM,
        32,
        {"conditioning_llama3": random(2, 8, 40)},
        kind="hidream",
        diffusers="HiDreamImageTransformer2DModel",
        parts={
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": [48, 40],
            "text_emb_dim": 32,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "axes_dims_rope": (8, 12, 12),
            "max_resolution": (128, 128),
            "llama_layers": (0, 1),
        },
    ),
    "hunyuan_video": Row(
        "HunyuanVideo",
        VIDEO,
        (8, 48),
        HUNYUAN_VIDEO,
        32,
        kind="hunyuan_video",
        diffusers="HunyuanVideoTransformer3DModel",
    ),
    "hunyuan_image21": Row(
        "HunyuanImage21",
        (64, 6, 8),
        (8, 48),
        HUNYUAN_VIDEO
        | {
            "in_channels": 64,
            "out_channels": 64,
            "patch_size": [1, 1],
            "axes_dim": [16, 16],
            "vec_in_dim": None,
            "guidance_embed": False,
        },
        kind="hunyuan_image",
        step=32,
        diffusers="HunyuanImageTransformer2DModel",
        parts={"text_embed_2_dim": 1472},
    ),
    "wan21_t2v": Row("WAN21_T2V", VIDEO, (8, 48), WAN, kind="wan", diffusers="WanTransformer3DModel"),
    "wan21_i2v": Row(
        "WAN21_I2V",
        VIDEO,
        (8, 48),
        WAN | {"model_type": "i2v", "in_dim": 36},
        kind="wan",
        diffusers="WanTransformer3DModel",
        parts={"image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
    "wan22_5b": Row(
        "WAN22_T2V",
        (48, 2, 8, 12),
        (8, 48),
        WAN | {"in_dim": 48, "out_dim": 48},
        kind="wan22_5b",
        step=32,
        diffusers="WanTransformer3DModel",
    ),
    "ltxv": Row(
        "LTXV",
        (128, 2, 4, 6),
        (8, 48),
        LTXV,
        extra=MASKED,
        kind="ltxv",
        step=32,
        diffusers="LTXVideoTransformer3DModel",
    ),
    "cosmos_t2v": Row("CosmosT2V", VIDEO, (8, 48), COSMOS, kind="cosmos", diffusers="CosmosTransformer3DModel"),
    "cosmos_predict2": Row(
        "CosmosT2IPredict2",
        STILL,
        (8, 48),
        COSMOS_PREDICT2,
        kind="cosmos_predict2",
        diffusers="CosmosTransformer3DModel",
    ),
    "anima": Row(
        "Anima",
        STILL,
        (8, 48),
        COSMOS_PREDICT2 | {"image_model": "anima"},
        building=small_adapter,
        extra={
            "t5xxl_ids": lambda draws, _: torch.randint(0, 100, (6,), generator=draws),
            "t5xxl_weights": always(torch.ones(6)),
        },
        kind="anima",
        diffusers="CosmosTransformer3DModel",
    ),
    "mochi": Row("GenmoMochi", (12, 2, 8, 12), (8, 48), MOCHI, extra=MASKED, kind="mochi", diffusers=SIZES),
    "omnigen2": Row("Omnigen2", IMAGE, (8, 48), OMNIGEN2, extra=MASKED, kind="omnigen2"),
    "kandinsky5_image": Row(
        "Kandinsky5Image", STILL, (8, 48), KANDINSKY5, 32, kind="kandinsky5", diffusers="Kandinsky5Transformer3DModel"
    ),
    "ernie_image": Row(
        "ErnieImage", (128, 4, 6), (8, 48), ERNIE, kind="ernie_image", diffusers="ErnieImageTransformer2DModel"
    ),
    "krea2": Row("Krea2", IMAGE, (8, 96), KREA2, kind="krea2", diffusers="Krea2Transformer2DModel"),
    "chroma_radiance": Row("ChromaRadiance", (3, 32, 48), (8, 48), CHROMA_RADIANCE, kind="chroma", step=8),
    "hunyuan_video15": Row(
        "HunyuanVideo15",
        (32, 2, 4, 6),
        (8, 48),
        HUNYUAN_VIDEO15,
        kind="hunyuan_video_15",
        diffusers="HunyuanVideo15Transformer3DModel",
    ),
    "wan21_vace": Row(
        "WAN21_Vace",
        VIDEO,
        (8, 48),
        WAN | {"model_type": "vace", "vace_layers": 1, "vace_in_dim": 96},
        kind="wan",
        diffusers="WanVACETransformer3DModel",
    ),
    "boogu": Row("Boogu", IMAGE, (8, 48), BOOGU, extra=MASKED, kind="omnigen2"),
    "ideogram4": Row(
        "Ideogram4",
        (128, 4, 6),
        (8, 48),
        IDEOGRAM4,
        building=own_sizes("Ideogram4"),
        kind="ideogram4",
        diffusers="Ideogram4Transformer2DModel",
    ),
    "joyimage": Row(
        "JoyImage",
        STILL,
        (8, 48),
        JOYIMAGE,
        building=own_sizes("JoyImage"),
        kind="joyimage",
        diffusers="diffusers' JoyImageEditTransformer3DModel takes no LoRAs",
    ),
    "mage_flow": Row("MageFlow", (128, 4, 6), (8, 48), MAGE_FLOW, kind="mageflow", diffusers=""),
    "lens": Row("Lens", (128, 4, 6), (8, 192), LENS, kind="lens"),
    "zimage_pixel": Row("ZImagePixelSpace", (3, 16, 24), (8, 40), ZIMAGE_PIXEL, kind="z_image", step=8),
    "pixeldit": Row("PixelDiTT2I", (3, 16, 24), (8, 48), PIXELDIT, extra=MASKED, kind="pixelditt2i", step=8),
    "hidream_o1": Row(
        "HiDreamO1",
        (3, 64, 96),
        (8, 1),
        HIDREAM_O1,
        building=small_vocabulary,
        extra={"text_input_ids": token_ids},
        kind="hidreamo1",
        step=32,
    ),
    "ltxav": Row(
        "LTXAV",
        (128, 2, 4, 6),
        (8, 96),
        LTXAV,
        extra=MASKED,
        kind="ltx2",
        step=32,
        diffusers="diffusers' LTX2VideoTransformer3DModel has no such layer",
    ),
    "cogvideox": Row("CogVideoX_T2V", VIDEO, (8, 48), COGVIDEOX, diffusers="CogVideoXTransformer3DModel"),
}
ODD = {  # of zoo/odd.py
    "odd_written": Row(
        "OddWritten",
        (16, 4, 6),
        (8, 24),
        {},
        extra={
            "attention_mask": lambda _, tokens: torch.arange(tokens)[None] != 1,
            "weights": lambda _, tokens: torch.linspace(0.5, 1.5, tokens)[None],
        },
        kind="oddwritten",
        step=8,
    ),
    "odd_convolutions": Row("OddConvolutions", (16, 4, 6), (8, 24), {}, kind="oddconvolutions", step=8),
    "odd_weights": Row("OddWeights", (16, 4, 6), (8, 24), {}, kind="oddweights", step=8),
}
BASES = {  # models of the rows above with channels for a mask or another picture; the tests of beside.py have them
    "sd15_inpaint": Row("SD15", (4, 16, 16), (8, 32), UNET | {"in_channels": 9}, kind="sd1", step=8),
    "sd15_ip2p": Row("SD15_instructpix2pix", (4, 16, 16), (8, 32), UNET | {"in_channels": 8}, kind="sd1", step=8),
    "sdxl_inpaint": Row("SDXL", (4, 16, 16), (8, 32), XL | {"in_channels": 9}, 1280, kind="sdxl", step=8),
    "sdxl_ip2p": Row("SDXL_instructpix2pix", (4, 16, 16), (8, 32), XL | {"in_channels": 8}, 1280, kind="sdxl", step=8),
    "flux_fill": Row("FluxInpaint", IMAGE, (8, 48), FLUX | {"in_channels": 96}, 32, kind="flux"),
    "flux_canny": Row("Flux", IMAGE, (8, 48), FLUX | {"in_channels": 32}, 32, kind="flux"),
    "wan21_fun_control": Row(
        "WAN21_FunControl2V", VIDEO, (8, 48), WAN | {"model_type": "i2v", "in_dim": 48}, kind="wan"
    ),
    # As its files: unlike Wan 2.1 it reads no CLIP vision, by which ComfyUI tells image to video.
    "wan22_i2v": Row("WAN21_T2V", VIDEO, (8, 48), WAN | {"in_dim": 36}, kind="wan"),
    "hunyuan_i2v": Row(
        "HunyuanVideoI2V", VIDEO, (8, 48), HUNYUAN_VIDEO | {"in_channels": 33}, 32, kind="hunyuan_video"
    ),
    "skyreels_i2v": Row(
        "HunyuanVideoSkyreelsI2V", VIDEO, (8, 48), HUNYUAN_VIDEO | {"in_channels": 32}, 32, kind="hunyuan_video"
    ),
}
CLIPS = {  # of the architectures above, on latents of several steps in time, which these rows lack there
    "cosmos_predict2_video": Row(
        "CosmosI2VPredict2",
        VIDEO,
        (8, 48),
        COSMOS_PREDICT2 | {"in_channels": 17},
        kind="cosmos_predict2_video",
        diffusers="CosmosTransformer3DModel",
    ),
    "kandinsky5_video": Row(
        "Kandinsky5", VIDEO, (8, 48), KANDINSKY5 | {"visual_embed_dim": 132}, 32, kind="kandinsky5"
    ),
}
BASES = {name: row for name, row in BASES.items() if hasattr(comfy.supported_models, row.cls)}
CLIPS = {name: row for name, row in CLIPS.items() if hasattr(comfy.supported_models, row.cls)}
ZOO = {name: row for name, row in ROWS.items() if hasattr(comfy.supported_models, row.cls)} | ODD  # of this ComfyUI
OF_EACH_KIND = {"epsilon": "sd15", "v_prediction": "hunyuan_dit", "affine": "cosmos_t2v", "flow": "flux_dev"}


def row_of(name: str) -> Row:
    """Find a row of the zoo, of its clips, or of its bases with further channels."""
    return ZOO.get(name) or CLIPS.get(name) or BASES[name]


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None
) -> tuple[BaseModel, ModelPatcher]:
    """Build a model with random weights on the CPU; compute: dtype of activations, where weights are cast at use."""
    with row_of(name).building():
        model = settings(name, dtype, compute).get_model({}, "", device="cpu")
    fill(model, seed)
    return model, patcher_of(model)


def settings(name: str, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None) -> Any:
    """Build ComfyUI's configuration of a model."""
    row = row_of(name)
    config = getattr(odd if name in ODD else comfy.supported_models, row.cls)(dict(row.config))
    config.set_inference_dtype(dtype, compute)
    return config


def patcher_of(model: BaseModel) -> ModelPatcher:
    """Give a model to a new patcher, as ComfyUI's loaders do."""
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


@torch.no_grad()
def fill(model: BaseModel, seed: int) -> None:
    """Draw all weights so that activations stay near 1; the same numbers in every dtype, rounded."""
    draws = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=draws)
        if parameter.ndim > 1:
            drawn = drawn / parameter[0].numel() ** 0.5
        elif name.endswith(("weight", "scale", "gamma")):
            drawn = 1 + 0.1 * drawn
        else:
            drawn = 0.05 * drawn
        parameter.copy_(drawn)
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point() or "model_sampling" in name:
            continue
        if name.endswith(("pos_embed", "y_embedding", "positional_encoding", "register_tokens")):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=draws))
        elif not buffer.isfinite().all() or buffer.abs().max() > 1e4:  # of torch.empty
            buffer.copy_(0.02 * torch.randn(buffer.shape, generator=draws))


def conditioning(name: str, seed: int = 1, tokens: int = 0) -> list[list[Any]]:
    """Draw a CONDITIONING of one caption, [[encoding (1, tokens, width), values]]; tokens: 0 for the row's own."""
    row = row_of(name)
    draws = torch.Generator().manual_seed(seed)
    count, width = tokens or row.text[0], row.text[1]
    values: dict[str, Any] = {"pooled_output": torch.randn(1, row.pooled, generator=draws) if row.pooled else None}
    values |= {key: make(draws, count) for key, make in row.extra.items()}
    return [[torch.randn(1, count, width, generator=draws), values]]


def latents(name: str, count: int = 1, seed: int = 5) -> Tensor:
    """Draw clean latents of a model, (count, *row.latents)."""
    return torch.randn(count, *row_of(name).latents, generator=torch.Generator().manual_seed(seed))
