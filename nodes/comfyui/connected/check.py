"""Refuse models that cannot be trained here, in a sentence each, before anything heavy."""

from __future__ import annotations

import re
from types import NoneType
from typing import Any

import comfy.lora
import comfy.model_base
import comfy.model_patcher
import comfy.utils
import torch

from ....trainer_core.common.wording import names
from ....trainer_core.networks.layers.shape import weight_shape
from .architecture import architecture_of, distilled, file_of
from .beside import beside_of, continues
from .layers import list_layers
from .noise import noise_model
from .vision import reads_of

NODE = "Use Connected Model"
UNFED = {  # classes of MODELs -> what they draw from, and what to link instead
    "WAN21_Vace": ("control frames and their masks", "Wan 2.1 text to video, whose LoRAs it takes"),
    "StableCascade_B": ("the small picture of stage C", "the MODEL of stage C"),
}
EDITS = re.compile(r"hidream.?e1", re.I)  # in the name of a file; its class is that of HiDream I1
COMPILED = "torch.compile"  # the key of ComfyUI's wrapper that compiles
WRAPS = ("_orig_mod", "_torchdynamo_orig_callable")  # attributes of what torch.compile gives
SHOWN = 3  # names in a message
PLAIN = (str, int, float, bool, NoneType, torch.dtype)  # values of attributes that a node may set


def check_connected(model: Any, clip: Any, vae: Any) -> None:
    """Raise ValueError for a MODEL, CLIP or VAE that training cannot use."""
    denoiser = getattr(getattr(model, "model", None), "diffusion_model", None)
    if not isinstance(denoiser, torch.nn.Module) or not isinstance(model.model, comfy.model_base.BaseModel):
        raise ValueError(f"The MODEL linked to {NODE} is no diffusion model; link one that KSampler could use.")
    architecture = architecture_of(model)
    if unfed := _unfed(model):
        raise ValueError(f"The MODEL linked to {NODE} {unfed}.")
    _check_uncompiled("MODEL", model)
    _check_unchanged("MODEL", model)
    _check_shapes(model)
    noise_model(model)
    form = model.model.latent_format
    if form.latent_dimensions not in (2, 3):
        raise ValueError(f"The MODEL linked to {NODE} makes no pictures; link a model of pictures.")
    if getattr(vae, "first_stage_model", None) is None:
        raise ValueError(f"The VAE linked to {NODE} is none; link the one that belongs to the MODEL.")
    if vae.latent_channels != form.latent_channels:
        raise ValueError(
            f"The VAE linked to {NODE} has {vae.latent_channels} channels and the MODEL {form.latent_channels}; link "
            "the VAE that belongs to the MODEL."
        )
    pixels = vae.spacial_compression_encode()
    if pixels != form.spacial_downscale_ratio and not architecture.pixels:
        raise ValueError(
            f"The VAE linked to {NODE} makes one latent pixel of {pixels} pixels, and the MODEL is made for "
            f"{form.spacial_downscale_ratio}; link the VAE that belongs to the MODEL."
        )
    if getattr(clip, "cond_stage_model", None) is None:
        raise ValueError(f"The CLIP linked to {NODE} is none; link the one that belongs to the MODEL.")
    _check_uncompiled("CLIP", clip.patcher)
    _check_unchanged("CLIP", clip.patcher)


def _unfed(patcher: Any) -> str:
    """Say what a MODEL draws from that no dataset gives, so that it would train on empty pictures; "" for others."""
    model = patcher.model
    for kind, (reads, instead) in UNFED.items():
        if isinstance(model, getattr(comfy.model_base, kind, ())):
            return f"draws from {reads}, which no dataset gives; link {instead}"
    if getattr(model, "concat_keys", ()) == ("mask_inverted",) and not continues(model):
        return "continues a picture or clip, which no dataset gives; link the MODEL of its family that draws from text"
    if EDITS.search(file_of(patcher)):
        return "edits a picture that it is shown, which training does not show it; link HiDream I1"
    return ""


def check_partner(sampled: Any, model: Any) -> None:
    """Raise ValueError for a sample_model that cannot take the MODEL's LoRA; None is none."""
    if sampled is None:
        return
    shapes = [
        {layer.path: weight_shape(layer.module) for layer in list_layers(each.model) if layer.block}
        if isinstance(getattr(each, "model", None), comfy.model_base.BaseModel)
        else {}
        for each in (sampled, model)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"The sample_model linked to {NODE} has other blocks than its model; link one of the same architecture, "
            "or none."
        )


def check_vision(vision: Any, model: Any) -> None:
    """Raise ValueError for a CLIP_VISION that the MODEL does not read; None is none."""
    if vision is None:
        return
    if not isinstance(getattr(vision, "model", None), torch.nn.Module):
        raise ValueError(f"What is linked to clip_vision of {NODE} is no CLIP vision model; link Load CLIP Vision.")
    reads = reads_of(model.model, beside_of(model.model))
    if reads is None:
        raise ValueError(f"The MODEL linked to {NODE} sees no first frame by CLIP vision; unlink clip_vision.")
    width = next(getattr(model.model.diffusion_model, reads.part).parameters()).shape[-1]
    if vision.config["hidden_size"] != width:
        raise ValueError(
            f"The clip_vision linked to {NODE} is {vision.config['hidden_size']} numbers wide and the MODEL reads "
            f"{width}; link the CLIP vision that belongs to the MODEL."
        )


def _check_uncompiled(kind: str, patcher: Any) -> None:
    """Raise ValueError for a model whose modules are compiled: their layers have other names, or none that is seen.

    Functions that its code compiles run as they are written (`gradients.session`). kind: of the socket.
    """
    modules = [*getattr(patcher, "object_patches", {}).items(), *patcher.model.named_modules()]
    found = [name for name, module in modules if _is_compiled(module)]
    if any(COMPILED in wrappers for wrappers in getattr(patcher, "wrappers", {}).values()):
        found += ["diffusion_model"]
    if found:
        raise ValueError(
            f"The {kind} linked to {NODE} is compiled ({names(dict.fromkeys(found), SHOWN)}), so that its layers are "
            f"not called by their names; link the {kind} without the node that compiles it."
        )


def _is_compiled(module: Any) -> bool:
    """Tell whether torch.compile has wrapped a module or a method, or torch.jit has made a module."""
    return isinstance(module, torch.jit.ScriptModule) or any(hasattr(module, name) for name in WRAPS)


def _check_unchanged(kind: str, patcher: Any) -> None:
    """Raise ValueError for a model whose passes other nodes change. kind: of the socket."""
    options = patcher.model_options
    transformer = options.get("transformer_options", {})
    found = [name for name in ("patches", "patches_replace", "wrappers", "callbacks") if transformer.get(name)]
    found += [name for name in ("model_function_wrapper", "sampler_calc_cond_batch_function") if options.get(name)]
    found += ["hooks"] if getattr(patcher, "hook_patches", None) or getattr(patcher, "forced_hooks", None) else []
    found += [name for name in ("wrappers", "injections") if any(getattr(patcher, name, {}).values())]
    objects = getattr(patcher, "object_patches", {})
    found += [name for name, value in objects.items() if name != "model_sampling" and not isinstance(value, PLAIN)]
    if found:
        raise ValueError(
            f"The {kind} linked to {NODE} is changed while it runs ({', '.join(found)}), by a node that wraps it; link "
            f"the {kind} without that node."
        )


def _check_shapes(patcher: Any) -> None:
    """Raise ValueError for a MODEL whose patches give its weights another shape: it reads other things then."""
    for key, patches in patcher.patches.items():
        weight = patcher.backup[key].weight if key in patcher.backup else comfy.utils.get_attr(patcher.model, key)
        if tuple(comfy.lora.calculate_shape(patches, weight, key)) != tuple(weight.shape):
            raise ValueError(
                f"A LoRA on the MODEL linked to {NODE} gives it channels for another picture, as those of FLUX.1 Canny "
                "and Depth do; link the MODEL without it, or the control model itself."
            )


def check_distilled(model: Any, *, confirmed: bool) -> None:
    """Raise ValueError for a model distilled to few steps, unless the person wants it."""
    sentence = distilled(model)
    if sentence and not confirmed:
        raise ValueError(f"{sentence} To train on it all the same, set train_distilled of {NODE} to true.")
