"""Names of layers in LoRA files, looked up in ComfyUI's own map of them; and the family that a file is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import comfy.lora
import comfy.sd
import torch
from torch import Tensor

from ....trainer_core.lora_files.match import flat_name
from ....trainer_core.models.base import Slice
from ....trainer_core.models.sd.identify import made_for as made_for_unet
from ....trainer_core.networks.layers.shape import weight_shape

WEIGHT = ".weight"
DENOISER = "diffusion_model."  # start of its modules' names in ComfyUI's models
# Starts of the denoiser's own paths in files: of kohya and musubi, ai-toolkit, Wan Fun, diffusers, OneTrainer, LyCORIS.
PREFIXES = (
    *("lora_unet_", "diffusion_model_", "model_diffusion_model_", "lora_unet__"),
    *("transformer_", "lora_transformer_", "lycoris_", "unet_", ""),
)
# A mark in the names of a file's layers, with underscores for dots, and the family it is for; the more special first.
MARKS = (
    (r"double_stream_modulation|to_qkv_mlp_proj", "FLUX.2"),
    (r"distilled_guidance_layer", "Chroma"),
    (r"individual_token_refiner", "HunyuanVideo or HunyuanImage"),
    (r"double_stream_blocks", "HiDream"),
    (r"visual_transformer_blocks", "Kandinsky 5"),
    (r"single_transformer_blocks|single_blocks_\d|double_blocks_\d", "FLUX"),
    (r"joint_transformer_blocks|double_layers", "AuraFlow"),
    (r"joint_blocks", "Stable Diffusion 3"),
    (r"(img|txt)_mlp_net", "Qwen-Image"),
    (r"txtfusion|text_fusion|blocks_\d+_attn_w[qkvo]$", "Krea 2"),
    (r"(noise|context)_refiner|layers_\d+_attention_(qkv|out|to_)", "Z-Image or Lumina 2"),
    (r"adaln_modulation_|cross_attn_output_proj", "Cosmos or Anima"),
    (r"blocks_\d+_(self|cross)_attn_[qkvo]$", "Wan"),
    (r"attn1_Wqkv|default_modulation", "HunyuanDiT"),
    (r"attn_qkv_[xy]$", "Mochi"),
    (r"(down|up)_blocks_\d_\d+_(channelwise|attention_attn|mapper)", "Stable Cascade"),
    (r"adaln_single|patchify_proj", "PixArt or LTX"),
)


def aliases(model: Any) -> tuple[dict[str, list[str]], dict[str, dict[str, Slice]]]:
    """Map paths of a denoiser's modules to their names in LoRA files, and to those of their slices.

    model: ComfyUI's BaseModel. Names have underscores for dots. One that ComfyUI gives to several places is left out.
    """
    keys = (key for key in model.state_dict() if key.startswith(DENOISER) and key.endswith(WEIGHT))
    paths = [key[len(DENOISER) : -len(WEIGHT)] for key in keys]
    known = set(paths)
    places: dict[str, set[tuple[str, Slice | None]]] = {}
    for key, target in comfy.lora.model_lora_keys_unet(model, {}).items():
        place = _place(model, key, target, known)
        if place is not None:
            places.setdefault(flat_name(key), set()).add(place)
    for prefix in PREFIXES:
        for path in paths:
            places.setdefault(flat_name(prefix + path), {(path, None)})
    whole: dict[str, list[str]] = {}
    slices: dict[str, dict[str, Slice]] = {}
    for name, found in places.items():
        path, piece = next(iter(found))
        if len({(path, piece and piece[1:]) for path, piece in found}) > 1:
            continue
        if piece is None:
            whole.setdefault(path, []).append(name)
        else:
            slices.setdefault(path, {})[name] = piece
    return whole, slices


def _place(model: Any, key: str, target: Any, known: set[str]) -> tuple[str, Slice | None] | None:
    """Read what a key of ComfyUI's map stands for: (path, slice); None for what no layer of a LoRA can change.

    target: a weight's name, or (name, (axis, start, length) or None[, function of the change]).
    """
    weight, *part = (target,) if isinstance(target, str) else target
    path = weight[len(DENOISER) : -len(WEIGHT)]
    if not (weight.startswith(DENOISER) and weight.endswith(WEIGHT) and path in known):
        return None
    if not part:
        return path, None
    function = part[1] if len(part) > 1 else None
    rows = weight_shape(model.get_submodule(DENOISER + path))[0]
    axis, start, length = part[0] or (0, 0, rows)
    if axis != 0 or (function is not None and function(torch.arange(4, device="cpu")).tolist() != [2, 3, 0, 1]):
        return None
    return path, Slice(comfy=key, start=start, length=length, swapped=function is not None)


def put_beneath(patcher: Any, tensors: Mapping[str, Tensor], strength: float) -> Any:
    """Clone a MODEL with a LoRA on it that `comfy_tensors` has read."""
    return comfy.sd.load_lora_for_models(patcher, None, dict(tensors), strength, 0.0)[0]


def made_for(widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
    """Guess the family that a LoRA file was made for; "" if nothing tells.

    widths: inputs of each layer by its name in the file, 0 if unknown.
    """
    found = [flat_name(name) for name in widths]
    marked = (family for mark, family in MARKS if any(re.search(mark, name) for name in found))
    return next(marked, "") or made_for_unet(widths, metadata)
