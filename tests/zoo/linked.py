"""A CLIP and a VAE for every tiny model: stand-ins that draw what real ones of that architecture would give."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo.zoo import ZOO, build, conditioning, patcher_of, settings

from lora_atelier.nodes.comfyui.connected.live import LinkedModels
from lora_atelier.nodes.comfyui.connected.model import ConnectedSource
from lora_atelier.trainer_core.config import BaseModelConfig, ConnectedConfig

KEPT = 8  # linked models
FRAMES = {"mochi": 6, "ltxv": 8, "ltxav": 8, "cosmos_t2v": 8}  # of a clip, for each step behind the first; else 4


class DrawnClip:
    """Encodes a caption of n words to tensors of n + 2 tokens, drawn by its text."""

    layer_idx = None

    def __init__(self, row: str) -> None:
        self.row = row
        self.cond_stage_model = nn.Identity()
        self.patcher = patcher_of(self.cond_stage_model)  # type: ignore[arg-type]

    def tokenize(
        self, text: str, images: Sequence[Tensor] = (), llama_template: str = ""
    ) -> dict[str, list[list[tuple[str, float]]]]:
        seen = [hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest() for image in images]
        return {"words": [[(word, 1.0) for word in ("<", *llama_template.split(), *text.split(), *seen, ">")]]}

    def encode_from_tokens_scheduled(self, tokens: dict[str, list[list[tuple[str, float]]]]) -> list[list[Any]]:
        words = [word for word, _ in tokens["words"][0]]
        seed = int(hashlib.sha256(" ".join(words).encode()).hexdigest()[:8], 16)
        fixed = self.row in ("auraflow", "anima", "hunyuan_dit")  # encoders that pad every caption to one length
        ((cross, extra),) = conditioning(self.row, seed, 0 if fixed else len(words))
        return [[cross, extra]]


class PooledVae:
    """Encodes pictures to their means over squares, spread over as many channels as the model has."""

    EFFNET = 32  # pixels per latent pixel of Stable Cascade C's encoder, for which pictures are made smaller

    vae_dtype = torch.float32
    crop_input = True

    def __init__(self, row: str) -> None:
        form = settings(row).latent_format
        self.latent_channels = form.latent_channels
        self.pixels = self.EFFNET if row == "cascade_c" else form.spacial_downscale_ratio
        self.latent_dim = form.latent_dimensions
        self.time = FRAMES.get(row, 4)
        self.first_stage_model = nn.Identity()
        self.patcher = SimpleNamespace(model=self.first_stage_model)

    def spacial_compression_encode(self) -> int:
        return self.pixels

    def temporal_compression_decode(self) -> int | None:
        return self.time if self.latent_dim == 3 else None

    def encode(self, pixels: Tensor) -> Tensor:
        means = F.avg_pool2d(pixels.movedim(-1, 1) * 2 - 1, self.pixels)
        weights = torch.linspace(-1, 1, self.latent_channels * 3).view(self.latent_channels, 3)
        latents = torch.einsum("cs,bshw->bchw", weights, means)
        if self.latent_dim != 3:
            return latents
        # As ComfyUI's VAEs of clips: a batch is a clip, its first frame stands alone, and the others are in groups.
        groups = [latents[:1], *(latents[1:].split(self.time) if len(latents) > 1 else ())]
        return torch.stack([group.mean(dim=0) for group in groups], dim=1)[None]

    def decode(self, latents: Tensor) -> Tensor:
        clip = latents.ndim == 5
        flat = latents.movedim(2, 1).flatten(0, 1) if clip else latents
        pictures = F.interpolate(flat[:, :3].sigmoid(), scale_factor=self.pixels).movedim(1, -1)
        if not clip:
            return pictures
        frames = pictures.unflatten(0, (len(latents), -1))
        return torch.cat([frames[:, :1], frames[:, 1:].repeat_interleave(self.time, 1)], 1)


def rows() -> list[str]:
    """List the architectures."""
    return list(ZOO)


_linked: list[tuple[BaseModelConfig, LinkedModels]] = []  # of the last tests


def linked(
    row: str, model: Any = None, sampled: Any = None, high: Any = None, vision: Any = None, **settings: Any
) -> BaseModelConfig:
    """Link a tiny model, its CLIP and its VAE, as Use Connected Model does; model: a patcher to use instead."""
    live = LinkedModels(model or build(row)[1], DrawnClip(row), PooledVae(row), sampled, high, vision)
    return keep(BaseModelConfig(path=row, connected=ConnectedConfig(**settings)), live)


def keep(config: BaseModelConfig, live: LinkedModels) -> BaseModelConfig:
    """Keep linked models for the functions below, and return their configuration."""
    _linked.append((config, live))
    del _linked[:-KEPT]
    return config


def live_of(base: BaseModelConfig) -> LinkedModels:
    """Find the models of a configuration that `linked` made lately."""
    return next(live for config, live in _linked if config is base)


def source_of(base: BaseModelConfig) -> ConnectedSource:
    """Build the source of a configuration that `linked` made lately."""
    return ConnectedSource(base, live_of(base))
