"""The loss on pictures that are never trained: the same weights always give the same number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .batch import build_sample_conditions
from .callbacks import Callbacks
from .config import RunConfig
from .encode import Encoded
from .loss import sample_losses
from .models import BaseModel, Conditioning, predict
from .noise import TIMESTEPS, add_noise, build_target
from .plan import Plan
from .rng import generator

CLEAR = 0.5  # mean squared error below which a prediction is of that kind
MIDDLE = TIMESTEPS // 2  # where noise and v differ, and a model can tell both
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)  # noise levels, as shares of all timesteps


@torch.no_grad()
def validation_loss(
    base: BaseModel,
    encoded: Encoded,
    encode: Callable[[str], Conditioning],
    plan: Plan,
    config: RunConfig,
    alphas: Tensor,
    device: torch.device,
    callbacks: Callbacks,
) -> float:
    """Return the mean squared error over the validation pictures at TIMES, each with its own fixed noise.

    Plain: no mask, no weight, no variation; the same weights always give the same number.
    """
    timesteps = torch.tensor([int(t * TIMESTEPS) for t in TIMES])
    size, total = config.train.batch_size, torch.zeros((), device=device)
    for sample in plan.validation:
        latents = encoded.latents(sample)[0][None]
        for first in range(0, len(timesteps), size):
            callbacks.check()
            part = range(first, min(first + size, len(timesteps)))
            draws = [generator(config.train.seed, "validation", sample.picture, i) for i in part]
            noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(device)
            clean, levels = latents.expand(len(part), -1, -1, -1).to(device), alphas[timesteps[list(part)]].to(device)
            conditions = build_sample_conditions(base, encoded, encode, plan, [sample] * len(part), device)
            prediction = predict(base, add_noise(clean, noise, levels), timesteps[list(part)].to(device), conditions)
            total += sample_losses(prediction, build_target(base.prediction, clean, noise, levels)).sum()
    return float(total) / (len(plan.validation) * len(timesteps))


@torch.no_grad()
def check_prediction(
    base: BaseModel,
    encoded: Encoded,
    encode: Callable[[str], Conditioning],
    plan: Plan,
    config: RunConfig,
    alphas: Tensor,
    device: torch.device,
) -> list[str]:
    """Return a sentence when what the model gives for the first batch is clearly of the other kind than the run's."""
    samples, seed = plan.step(0)[0].samples, config.train.seed
    latents = torch.stack([encoded.latents(sample)[0] for sample in samples]).to(device)
    draws = [generator(seed, "kind", i) for i in range(len(samples))]
    noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(device)
    timesteps = torch.full((len(samples),), MIDDLE, device=device)
    levels = alphas.to(device)[timesteps]
    conditions = build_sample_conditions(base, encoded, encode, plan, samples, device)
    prediction = predict(base, add_noise(latents, noise, levels), timesteps, conditions)
    errors = {
        kind: float(sample_losses(prediction, build_target(kind, latents, noise, levels)).mean())
        for kind in ("epsilon", "v_prediction")
    }
    chosen = errors.pop(base.prediction)
    ((kind, other),) = errors.items()
    if not (other < CLEAR and chosen > 2 * other):
        return []
    return [
        f"{base.name} behaves like a model that predicts {kind}, not {base.prediction} (error {other:.2f} against "
        f"{chosen:.2f}): unless that is meant, stop and set prediction to {kind}."
    ]
