"""Put together what a micro-batch goes through the network with: latents, noise, timesteps, masks, conditioning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import ObjectiveConfig, RunConfig
from .encode import Encoded
from .masks import loss_mask
from .models import BaseModel, Conditioning, Conditions
from .noise import build_target, implied_latents, perturb
from .objective import draw_noise, loss_thresholds, loss_weights, timestep_probabilities
from .plan import MicroBatch, Plan, Sample
from .rng import generator
from .sample import build_conditions
from .timesteps import sample_strata, sample_timesteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch on the device; B samples of one bucket."""

    latents: Tensor  # (B, C, H, W) float32, model scale
    noise: Tensor  # (B, C, H, W) float32, to be predicted
    seen: Tensor  # (B, C, H, W) float32, the noise that the network sees: the same unless the input is perturbed
    timesteps: Tensor  # (B,) int64
    alphas: Tensor  # (B,) float32, cumulative alphas at the timesteps
    mask: Tensor | None  # (B, 1, H, W); None when no sample has one
    normalize: Tensor | None  # (B,) bool, divide the loss by the mask's mean
    prior_weight: Tensor | None  # (B,); None when no sample holds to what the frozen model predicts
    held: Tensor | None  # (B,) bool, samples that learn what the frozen model predicts; None when none does
    weights: Tensor  # (B,) concept weight x SNR weight
    huber_c: Tensor  # (B,) where the Huber losses turn from squared to absolute


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
    timesteps = _timesteps(base, micro_batch, config)
    noise = draw_noise(objective, seed, index, latents, timesteps)
    seen = perturb(noise, seed, index, objective.input_perturbation) if objective.input_perturbation else noise
    levels = alphas[timesteps]
    weights = torch.tensor([sample.weight for sample in samples])
    weights = weights * loss_weights(objective, base.prediction, levels)
    held = torch.tensor([plan.concepts[sample.picture].role == "prior_prediction" for sample in samples])
    mask, normalize, prior_weight = _masks(encoded, micro_batch, plan, config)
    return Batch(
        latents=latents.to(device),
        noise=noise.to(device),
        seen=seen.to(device),
        timesteps=timesteps.to(device),
        alphas=levels.to(device),
        mask=None if mask is None else mask.to(device),
        normalize=None if normalize is None else normalize.to(device),
        prior_weight=None if prior_weight is None else prior_weight.to(device),
        held=held.to(device) if held.any() else None,
        weights=weights.to(device),
        huber_c=loss_thresholds(objective, timesteps, levels).to(device),
    )


def loss_terms(
    kind: str, objective: ObjectiveConfig, batch: Batch, noised: Tensor, prediction: Tensor, frozen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return what `sample_losses` compares: prediction, target, mask, normalize, the frozen model's prediction, weight.

    kind: what the model predicts. frozen: the frozen model's prediction, which is the target of samples that are held.
    """
    if objective.loss_on == "x0":
        prediction = implied_latents(kind, prediction, noised, batch.alphas)
        frozen = None if frozen is None else implied_latents(kind, frozen, noised, batch.alphas)
    target = build_target("x0" if objective.loss_on == "x0" else kind, batch.latents, batch.noise, batch.alphas)
    if batch.held is not None and frozen is not None:
        target = torch.where(batch.held.view(-1, 1, 1, 1), frozen, target)
    return prediction, target, batch.mask, batch.normalize, frozen, batch.prior_weight


def _timesteps(base: BaseModel, micro_batch: MicroBatch, config: RunConfig) -> Tensor:
    """Draw the timesteps of a micro-batch, (B,) int64."""
    objective, train, count = config.objective, config.train, len(micro_batch.samples)
    strata = None
    if objective.stratified_timesteps:
        step, first = micro_batch.index // train.accumulate, micro_batch.before
        strata = sample_strata(train.seed, step, micro_batch.together)[first : first + count]
    return sample_timesteps(
        train.seed,
        micro_batch.index,
        count,
        timestep_probabilities(objective, base.zero_terminal_snr),
        objective.min_timestep,
        strata,
        micro_batch.together,
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
