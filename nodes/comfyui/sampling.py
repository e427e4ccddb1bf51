"""ComfyUI's samplers, prompts and latents."""

from __future__ import annotations

from typing import Any

import comfy.diffusers_load
import comfy.lora
import comfy.model_detection
import comfy.model_management
import comfy.model_sampling
import comfy.samplers
import comfy.sd
import comfy.sd1_clip
import comfy.utils
import torch
from torch import Tensor

import nodes as comfy_nodes

from .models import (
    own,
)

UPSCALE_METHODS = ["nearest-exact", "bilinear", "area", "bicubic", "bislerp"]


def sampler_names() -> list[str]:
    """List the samplers of this ComfyUI."""
    return comfy.samplers.KSampler.SAMPLERS


def scheduler_names() -> list[str]:
    """List the schedulers of this ComfyUI."""
    return comfy.samplers.KSampler.SCHEDULERS


def encode_prompt(clip: Any, text: str) -> Any:
    """Encode a prompt as CONDITIONING."""
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def empty_latents(width: int, height: int, count: int) -> Tensor:
    """Make empty latents (count, 4, height/8, width/8) to start from."""
    device = comfy.model_management.intermediate_device()
    return torch.zeros(count, 4, height // 8, width // 8, device=device)


def sample_latents(model: Any, positive: Any, negative: Any, latents: Tensor, **settings: Any) -> Tensor:
    """Sample with ComfyUI's own sampler: seed, steps, cfg, sampler_name, scheduler, denoise."""
    latent = {"samples": latents}
    (result,) = comfy_nodes.common_ksampler(model, positive=positive, negative=negative, latent=latent, **settings)
    return result["samples"]


def upscale_latents(latents: Tensor, factor: float, method: str) -> Tensor:
    """Enlarge latents; the sides are rounded to whole latent pixels."""
    width, height = (round(side * factor) for side in (latents.shape[3], latents.shape[2]))
    return comfy.utils.common_upscale(latents, width, height, method, "disabled")


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents to pictures (B, H, W, 3) in 0..1."""
    # ComfyUI's tiled decoding, which it falls back to when memory is short, gives inference tensors.
    return own(vae.decode(latents))
