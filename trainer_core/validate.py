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
            conditions = build_sample_conditions(base, encode, plan, [sample] * len(part), device)
            prediction = predict(base, add_noise(clean, noise, levels), timesteps[list(part)].to(device), conditions)
            total += sample_losses(prediction, build_target(base.prediction, clean, noise, levels)).sum()
    return float(total) / (len(plan.validation) * len(timesteps))
