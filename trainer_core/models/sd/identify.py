"""Identify files that are no supported base model, and the models that LoRA files were made for, by their tensors.

Most signatures of files are ComfyUI's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...config import ALGORITHMS
from ..architectures import ARCHITECTURES
from ..files.safetensors_file import Shapes

PREFIXES = (
    "model.diffusion_model.",
    "model.model.",
    "diffusion_model.",
    "model.",
    "net.",
    "transformer.",
)  # of whole models

# (part of a tensor's name, kind of file)
ADAPTERS = (
    ("lora_down", "a LoRA"),
    ("lora_up", "a LoRA"),
    ("lora_A", "a LoRA"),
    ("lora.down", "a LoRA"),
    *((each.sign, f"a file of {each.title}") for each in ALGORITHMS.values() if each.sign),
    ("dora_scale", "a LoRA"),
    ("emb_params", "a textual inversion embedding"),
    ("string_to_param", "a textual inversion embedding"),
    ("lora_controlnet", "a Control-LoRA"),
    ("control_model.", "a ControlNet"),
    ("controlnet_", "a ControlNet"),
    ("motion_modules.", "a motion module of AnimateDiff"),
    (".time_stack.", "a Stable Video Diffusion model"),
    ("temporal_transformer", "a video model"),
    ("ip_adapter.", "an IP-Adapter"),
    ("adapter.body.", "a T2I-Adapter"),
    ("position_net.", "a GLIGEN model"),
    ("lora_unet_", "a file of a LoRA-like network"),
    ("lora_te", "a file of a LoRA-like network"),
)
# (start of a tensor's name behind one of PREFIXES, kind of file); the more special first
MODELS = (  # whole ones, which ComfyUI's own loaders may know
    ("transformer_blocks.0.norm1_context.", "a Stable Diffusion 3 or FLUX model in diffusers' layout"),
    ("transformer.rotary_pos_emb.", "a Stable Audio model"),
    ("rotary_pos_emb.", "a Stable Audio model"),
    ("latent_in.", "a Hunyuan3D model"),
    *(mark for row in ARCHITECTURES for mark in row.in_files.items()),
    ("genre_embedder.", "an ACE-Step audio model"),
    ("blocks.0.norm1.linear.", "a CogVideoX model"),
)
OTHERS = (
    ("encoder_hid_proj.", "a Kolors model"),
    ("down_blocks.0.resnets.", "a UNet in diffusers' layout, alone"),
    ("encoder.block.0.", "a T5 text encoder"),
    ("text_model.encoder.layers.0.", "a CLIP text encoder"),
    ("encoder.layers.0.self_attn.", "a CLIP text encoder"),
    ("resblocks.0.", "an OpenCLIP text encoder"),
    ("vision_model.", "CLIP's encoder of pictures (CLIP Vision)"),
    ("layers.0.self_attn.", "a language model"),
    ("decoder.conv_in.", "an autoencoder (VAE)"),
    ("conv_first.", "an upscaler"),
    ("1.sub.0.", "an upscaler"),
)
KOLORS = ("model.diffusion_model.label_emb.0.0.weight", 5632)  # channels of its added conditioning


class Unsupported(NamedTuple):
    """The kind of a file that cannot be a Stable Diffusion checkpoint."""

    kind: str
    model: bool = False  # a whole one, which may be trained through Use Connected Model


def name_unsupported(shapes: Shapes) -> Unsupported | None:
    """Name the kind of a file that cannot be a Stable Diffusion checkpoint; None for one that may be."""
    kind = _name_adapter(shapes)
    if kind is not None:
        return Unsupported(kind)
    starts = "\n".join(["", *map(_without_prefix, shapes)])
    for marks, model in ((MODELS, True), (OTHERS, False)):
        for start, kind in marks:
            if f"\n{start}" in starts:
                return Unsupported(kind, model)
    kind = _name_other(shapes)
    return None if kind is None else Unsupported(kind)


def _name_adapter(shapes: Shapes) -> str | None:
    names = "\n".join(shapes)  # one text is searched in a tenth of the time that thousands take
    for part, kind in ADAPTERS:
        if part in names:
            return kind
    return None


def _name_other(shapes: Shapes) -> str | None:
    if set(shapes) <= {"clip_l", "clip_g"}:
        return "a textual inversion embedding"
    if shapes.get(KOLORS[0], (0, 0))[1:] == (KOLORS[1],):
        return "a Kolors model"
    if "edm_mean" in shapes or "edm_vpred.sigma_max" in shapes:
        return "an EDM model (as Playground 2.5 and CosXL), whose noise is not trained here"
    if any(key.endswith((".scale_weight", "scaled_fp8", ".weight_scale", ".comfy_quant")) for key in shapes):
        return "a checkpoint of scaled weights (fp8 with factors beside), which are not read here"
    unet = any(key.startswith(("model.diffusion_model.", "input_blocks.")) for key in shapes)
    if not unet and any(key.startswith("model_ema.") for key in shapes):
        return "a file of averaged (EMA) weights without the ordinary ones, which ComfyUI does not read"
    return None


def _without_prefix(key: str) -> str:
    """Remove the prefix of a whole model from a tensor's name."""
    for prefix in PREFIXES:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


SD1, SD2, SDXL = "Stable Diffusion 1", "Stable Diffusion 2", "Stable Diffusion XL"
TEXT_WIDTHS = {768: SD1, 1024: SD2, 2048: SDXL}
LAYER_MARKS = (
    (r"double_blocks|single_transformer_blocks|single_blocks", "FLUX or a model like it"),
    (r"joint_blocks|attn_add_[qkv]_proj|lora_te3_", "Stable Diffusion 3 or a model like it"),
    (
        r"(attentions|blocks?)(_\d+){1,2}_transformer_blocks_[1-9]|lora_te2_|text_encoder_2",
        SDXL,
    ),  # deeper than in the others
)
OUTERMOST = r"down_blocks_0_attentions|up_blocks_3_attentions|input_blocks_[12]_1_|output_blocks_(9|1\d)_1_"
DECLARED_NAMES = (  # starts of trainers' names for a base model
    (r"stable-diffusion-xl|sdxl", SDXL),
    (r"stable-diffusion-v1|sd_v?1", SD1),
    (r"stable-diffusion-v2|sd_v?2", SD2),
)


def made_for(widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """Guess the family that a LoRA file was made for from its layers, else from its metadata; "" if nothing tells.

    widths: inputs of each layer by its name in the file, 0 if unknown.
    """
    for name, width in widths.items():  # the text input of cross attention differs in width
        if width in TEXT_WIDTHS and re.search(r"attn2[._](processor[._])?to_k$", name):
            return TEXT_WIDTHS[width]
    names = [name.replace(".", "_") for name in widths]
    for pattern, model in LAYER_MARKS:
        if any(re.search(pattern, name) for name in names):
            return model
    declared = metadata.get("modelspec.architecture") or metadata.get("ss_base_model_version") or ""
    declared = next((model for pattern, model in DECLARED_NAMES if re.match(pattern, declared)), declared)
    if declared not in (SD1, SD2) and any(re.search(OUTERMOST, name) for name in names):  # where XL has no attention
        return f"{SD1} or 2"
    return declared
