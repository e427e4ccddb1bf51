"""Pictures through a connected VAE, in the scale of the connected MODEL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from typing import Any, NoReturn

import comfy.model_management
import comfy.utils
import torch
from comfy.ldm.lightricks.vae import causal_video_autoencoder as ltx
from torch import Tensor, nn

from ....trainer_core.common.cancel import look


class VaeHandle(nn.Module):
    """Pass a VAE that ComfyUI moves and casts through the core, as a module without parameters."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.__dict__["vae"] = vae


@torch.no_grad()
def encode(model: Any, vae: Any, pixels: Tensor, each: Fraction | None = None) -> Tensor:
    """Encode (B, 3, H, W) pixels in -1..1: (B, C, h, w) float32 latents in the MODEL's scale.

    Pixels (1, 3, T, H, W) of a clip become (1, C, t, h, w). each: pixels per latent pixel, where they are not the VAE's
    own; pictures are then scaled first, as ComfyUI does.
    """
    if each:
        height, width = (int(side // each) * vae.spacial_compression_encode() for side in pixels.shape[2:])
        pixels = comfy.utils.common_upscale(pixels, width, height, "bicubic", "disabled")
    latents = model.process_latent_in(with_time(model, encode_plain(vae, pixels)))
    return without_time(latents).float().clone()


@torch.no_grad()
def encode_plain(vae: Any, pixels: Tensor) -> Tensor:
    """Encode (B, 3, H, W) pixels in -1..1, or (1, 3, T, H, W): float32 latents in the VAE's own scale.

    ComfyUI's VAEs of clips take the pictures of a batch for the frames of one clip. Those that are causal encode it in
    chunks of time, so that a long clip needs no more memory; a Cancel ends each within them. Where memory runs out,
    they take the smallest chunks. Raises torch.OutOfMemoryError where these do not fit, either.
    """
    if pixels.ndim == 5:
        pixels = pixels[0].movedim(1, 0)
    with _looking(vae.first_stage_model), _without_tiles(vae):
        return without_time(_encoded(vae, ((pixels + 1) / 2).movedim(1, -1).cpu())).float().clone()


def _encoded(vae: Any, pictures: Tensor) -> Tensor:
    try:
        return vae.encode(pictures)
    except torch.OutOfMemoryError:
        pass  # outside of the handler nothing holds the tensors of the failed work
    comfy.model_management.soft_empty_cache()
    with _in_smallest_chunks(vae.first_stage_model):
        return vae.encode(pictures)


@contextmanager
def _without_tiles(vae: Any) -> Iterator[None]:
    """Let a VAE raise torch.OutOfMemoryError where ComfyUI would encode in tiles, which give other latents."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise torch.OutOfMemoryError("a linked VAE ran out of memory")

    with ExitStack() as stack:
        for name in dir(vae):
            if "encode_tiled" in name:
                stack.enter_context(_replaced(vae, name, refuse))
        yield


@contextmanager
def _in_smallest_chunks(network: nn.Module) -> Iterator[None]:
    """Let a VAE of clips encode as few frames at a time as it can without a change to what it gives.

    Wan's always does, and in HunyuanVideo's first one each chunk is normalised by itself. Of HunyuanVideo 1.5 a chunk
    is then one step of latents instead of two, and of LTX two frames.
    """
    encoder: Any = getattr(network, "encoder", None)
    with ExitStack() as stack:
        if getattr(encoder, "refiner_vae", False) and encoder.ffactor_temporal > 1:
            stack.enter_context(_replaced(encoder, "ffactor_temporal", encoder.ffactor_temporal // 2))
        if isinstance(network, ltx.VideoVAE):  # which takes as many as a part of the device's memory holds
            stack.enter_context(_replaced(ltx, "get_max_chunk_size", lambda _: 0))
        yield


@contextmanager
def _replaced(of: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute, and take it back."""
    had, own = name in vars(of), getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, own) if had else delattr(of, name)


@contextmanager
def _looking(network: nn.Module) -> Iterator[None]:
    """Look for a Cancel before each layer of a VAE: a clip takes minutes on a CPU."""
    with ExitStack() as stack:
        for module in network.modules():
            stack.callback(module.register_forward_pre_hook(lambda *_: look()).remove)
        yield


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents in the VAE's own scale to (B, H, W, 3) pictures in 0..1, or to all frames of clips."""
    pictures = vae.decode(latents)
    return pictures.reshape(-1, *pictures.shape[-3:]).float().clone()


def frames_per_step(vae: Any) -> int:
    """Tell how many frames of a clip one step of its latents holds, behind the first, which holds one; else 1."""
    return vae.temporal_compression_decode() or 1


def with_time(model: Any, latents: Tensor) -> Tensor:
    """Give latents of pictures, (B, C, h, w), the frame axis of length 1 that some models have; clips have theirs."""
    return latents.unsqueeze(2) if latents.ndim - 2 < model.latent_format.latent_dimensions else latents


def without_time(latents: Tensor) -> Tensor:
    """Take the frame axis of single pictures away; clips of more frames keep theirs."""
    return latents.squeeze(2) if latents.ndim == 5 else latents
