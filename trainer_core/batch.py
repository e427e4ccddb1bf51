"""Put together what a micro-batch goes through the network with: latents, noise, timesteps, masks, conditioning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import RunConfig
from .encode import Encoded
from .loss import snr_weight
from .masks import loss_mask
from .models import BaseModel, Conditioning, Conditions
from .noise import sample_noise, sample_timesteps, snr
from .plan import MicroBatch, Plan, Sample
from .rng import generator
from .sample import build_conditions


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch on the device; B samples of one bucket."""

    latents: Tensor  # (B, C, H, W) float32, model scale
    noise: Tensor  # (B, C, H, W) float32
    timesteps: Tensor  # (B,) int64
    alphas: Tensor  # (B,) float32, cumulative alphas at the timesteps
    mask: Tensor | None  # (B, 1, H, W); None when no sample has one
    normalize: Tensor | None  # (B,) bool, divide the loss by the mask's mean
    prior_weight: Tensor | None  # (B,); None when no sample holds to what the frozen model predicts
    weights: Tensor  # (B,) concept weight x SNR weight


def build_batch(
    base: BaseModel,
    encoded: Encoded,
    micro_batch: MicroBatch,
    plan: Plan,
    config: RunConfig,
    alphas: Tensor,
    device: torch.device,
) -> Batch:
    """Read a micro-batch from the store and draw its noise; every draw depends on seed and indices alone."""
    samples, seed, index, objective = (
        micro_batch.samples,
        config.train.seed,
        micro_batch.index,
        config.objective,
    )
    means, stds = zip(*(encoded.latents(sample) for sample in samples), strict=True)
    latents = torch.stack(means)
    if config.train.latent_sampling == "sample":
        draws = [torch.randn(std.shape, generator=generator(seed, "latent", index, i)) for i, std in enumerate(stds)]
        latents = latents + torch.stack(stds) * torch.stack(draws)
    noise = sample_noise(seed, index, latents.shape, objective.noise_offset)
    timesteps = sample_timesteps(seed, index, len(samples), objective.min_timestep, objective.max_timestep)
    levels = alphas[timesteps]
    weights = torch.tensor([sample.weight for sample in samples])
    weights = weights * snr_weight(snr(levels), base.prediction, objective.min_snr_gamma)
    mask, normalize, prior_weight = _masks(encoded, micro_batch, plan, config)
    return Batch(
        latents=latents.to(device),
        noise=noise.to(device),
        timesteps=timesteps.to(device),
        alphas=levels.to(device),
        mask=None if mask is None else mask.to(device),
        normalize=None if normalize is None else normalize.to(device),
        prior_weight=None if prior_weight is None else prior_weight.to(device),
        weights=weights.to(device),
    )


def _masks(
    encoded: Encoded, micro_batch: MicroBatch, plan: Plan, config: RunConfig
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss masks of a micro-batch, which of them normalise, and prior weights; None without any."""
    masks: list[Tensor | None] = [encoded.mask(sample) for sample in micro_batch.samples]
    shape = next((m.shape for m in masks if m is not None), None)
    if shape is None:
        return None, None, None
    weights, normalize, prior = [], [], []
    for sample, mask in zip(micro_batch.samples, masks, strict=True):
        settings = config.dataset.concepts[plan.manifest.pictures[sample.picture].concept].masks
        if mask is None or settings is None:
            weights.append(torch.ones(shape))
            normalize.append(False)
            prior.append(0.0)
        else:
            weights.append(loss_mask(mask[None], torch.tensor([sample.use_mask]), settings.unmasked_weight)[0])
            normalize.append(settings.normalize_masked_area)
            prior.append(settings.prior_weight if sample.use_mask else 0.0)
    return torch.stack(weights), torch.tensor(normalize), torch.tensor(prior) if any(prior) else None


def build_sample_conditions(
    base: BaseModel,
    encoded: Encoded,
    encode: Callable[[str], Conditioning],
    plan: Plan,
    samples: Sequence[Sample],
    device: torch.device,
) -> Conditions:
    """Return what the UNet is told about some samples: their captions as `encode` gives them, true crops."""
    sizes = torch.tensor([sample.crop.size_conditioning(plan.size(sample.picture)) for sample in samples])
    told = [painted for sample in samples if (painted := encoded.painted(sample)) is not None]
    each = [encode(sample.caption) for sample in samples]
    return build_conditions(base, each, sizes, device, torch.stack(told) if told else None)
