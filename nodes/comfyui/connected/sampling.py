"""Samples by ComfyUI's own samplers, as KSampler draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.sample
import comfy.samplers
import torch
from torch import Tensor

from ....trainer_core.config import SamplePicture
from ....trainer_core.models import Conditioning
from .beside import beside_of, kept, shown
from .text import conditioning
from .vae import with_time

ROUNDING = 1e-6  # of a sampler's sigmas, in float32
SAMPLERS = tuple(comfy.samplers.KSampler.SAMPLERS)


@torch.no_grad()
def draw(
    model: Any,
    prompts: tuple[Conditioning, Conditioning],
    picture: SamplePicture,
    check: Callable[[], None],
    references: Sequence[Tensor] = (),
    painted: Tensor | None = None,
    *,
    time: int = 1,
    high: tuple[Any, float] | None = None,
) -> Tensor:
    """Draw a sample with a MODEL as it is now; return latents in the VAE's scale.

    prompts: the prompt and the negative prompt. Both get the references, latents (C, h, w) of control pictures in the
    VAE's scale, and painted, (1, C, h, w) for an inpainting MODEL. time: frames of a clip for each step of its latents.
    high: a MODEL that draws until the noise is below this sigma, as two KSampler (Advanced) in a row do.
    """
    form = model.model.latent_format
    height, width = (side // form.spacial_downscale_ratio for side in (picture.height, picture.width))
    clip = ((picture.frames - 1) // time + 1,) if picture.frames > 1 else ()
    latents = with_time(model.model, torch.zeros(1, form.latent_channels, *clip, height, width))
    given: dict[str, Any] = {} if picture.guidance is None else {"guidance": picture.guidance}
    beside = beside_of(model.model)  # a partner may read other things
    given |= shown(model.model, beside, references)
    clean = kept(model.model, references)
    latents, mask = (latents, None) if clean is None else clean
    given |= {} if painted is None or not beside.paints else {"noise_concat": painted}
    positive, negative = (_conditioning(prompt, given) for prompt in prompts)
    noise: Any = comfy.sample.prepare_noise(latents, picture.seed)

    def sample(drawing: Any, latents: Tensor, noise: Tensor, **steps: Any) -> Tensor:
        return comfy.sample.sample(
            drawing,
            noise,
            picture.steps,
            picture.cfg,
            picture.sampler,
            picture.scheduler,
            positive,
            negative,
            latents,
            callback=lambda *_: check(),
            disable_pbar=True,
            noise_mask=mask,
            seed=picture.seed,
            **steps,
        )

    first = 0 if high is None else steps_above(model, picture, high[1])
    if high is None or not first:
        return sample(model, latents, noise)
    if first == picture.steps:
        return sample(high[0], latents, noise)
    half = sample(high[0], latents, noise, start_step=0, last_step=first)
    return sample(model, half, torch.zeros_like(noise), disable_noise=True, start_step=first)


def steps_above(model: Any, picture: SamplePicture, sigma: float) -> int:
    """Count the sampler's steps that begin at this sigma or above it."""
    sampling = model.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, picture.scheduler, picture.steps)
    return int((sigmas[:-1] >= sigma * (1 - ROUNDING)).sum())


def _conditioning(stored: Conditioning, given: Mapping[str, Any]) -> list[list[Any]]:
    """Rebuild a CONDITIONING; given: values that it gets beside the text encoders' own."""
    cross, extra = conditioning(stored)
    return [[cross, {**extra, **given}]]
