"""Samples by ComfyUI's own samplers, as KSampler draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.sample
import comfy.samplers
import torch
from torch import Tensor

from ....trainer_core.config import SamplePicture
from ....trainer_core.models import Conditioning
from .text import conditioning

SAMPLERS = tuple(comfy.samplers.KSampler.SAMPLERS)


@torch.no_grad()
def draw(
    model: Any,
    scheduler: str,
    prompts: tuple[Conditioning, Conditioning],
    picture: SamplePicture,
    check: Callable[[], None],
) -> Tensor:
    """Draw a sample with a MODEL as it is now; return latents in the VAE's scale.

    scheduler: of ComfyUI, spaces the steps. prompts: the prompt and the negative prompt.
    """
    form = model.model.latent_format
    height, width = (side // form.spacial_downscale_ratio for side in (picture.height, picture.width))
    shape = (1, form.latent_channels, *((1,) if form.latent_dimensions == 3 else ()), height, width)
    latents = torch.zeros(shape)
    positive, negative = (_conditioning(prompt, picture.guidance) for prompt in prompts)
    return comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(latents, picture.seed),
        picture.steps,
        picture.cfg,
        picture.sampler,
        scheduler,
        positive,
        negative,
        latents,
        callback=lambda *_: check(),
        disable_pbar=True,
        seed=picture.seed,
    )


def _conditioning(stored: Conditioning, guidance: float | None) -> list[list[Any]]:
    """Rebuild a CONDITIONING; guidance: distilled guidance, for models that take one."""
    cross, extra = conditioning(stored)
    return [[cross, extra if guidance is None else {**extra, "guidance": guidance}]]
