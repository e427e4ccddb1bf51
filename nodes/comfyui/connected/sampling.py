"""Samples by ComfyUI's own sampler, as KSampler draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.sample
import torch
from torch import Tensor

from ....trainer_core.config import SampleConfig
from ....trainer_core.models import Conditioning
from .family import Family
from .text import conditioning


@torch.no_grad()
def draw(
    model: Any,
    family: Family,
    prompts: tuple[Conditioning, Conditioning],
    config: SampleConfig,
    number: int,
    check: Callable[[], None],
) -> Tensor:
    """Draw sample `number` with a MODEL as it is now; return latents in the VAE's scale.

    prompts: the prompt and the negative prompt. Steps and cfg of 0 are the family's.
    """
    form = model.model.latent_format
    height, width = (side // form.spacial_downscale_ratio for side in (config.height, config.width))
    shape = (1, form.latent_channels, *((1,) if form.latent_dimensions == 3 else ()), height, width)
    latents = torch.zeros(shape)
    seed = config.seed + number
    positive, negative = (_conditioning(prompt, family.sampling.guidance) for prompt in prompts)
    return comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(latents, seed),
        config.steps or family.sampling.steps,
        config.cfg or family.sampling.cfg,
        family.sampling.sampler,
        family.sampling.scheduler,
        positive,
        negative,
        latents,
        callback=lambda *_: check(),
        disable_pbar=True,
        seed=seed,
    )


def _conditioning(stored: Conditioning, guidance: float | None) -> list[list[Any]]:
    """Rebuild a CONDITIONING, with the distilled guidance that the family samples with."""
    cross, extra = conditioning(stored)
    return [[cross, extra if guidance is None else {**extra, "guidance": guidance}]]
