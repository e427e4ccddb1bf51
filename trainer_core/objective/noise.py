"""The noise of a micro-batch: Gaussian, with offsets, of several resolutions, perturbed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.rng import generator


def offset_growth(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Compute how a noise offset of 1 at the last level grows up to each level, (N,) float32.

    An offset that each diffusion step adds alike reaches, in units of the noise, sigma_t / alpha_t^2 of the last one's
    (the closed form of OneTrainer's "generalised offset noise"). Not defined where the last alpha is 0.
    """
    growth = sigma.double() / alpha.double().square()
    return (growth / growth[-1]).float()


def sample_noise(
    seed: int,
    micro_batch: int,
    shape: Sequence[int],
    offset: float | Tensor = 0.0,
    pyramid_iterations: int = 0,
    pyramid_discount: float = 0.3,
) -> Tensor:
    """Draw (B, C, H, W) float32 Gaussian noise; each sample's depends on nothing but its own place.

    offset: number or (B, C, 1, 1); so many times one Gaussian value is added to each channel
    (https://www.crosslabs.org/blog/diffusion-with-offset-noise). pyramid_iterations: adds noise of lower and lower
    resolution, see `add_pyramid`, and brings every sample back to a standard deviation of 1.
    """
    strengths = torch.as_tensor(offset).expand(shape[0], shape[1], 1, 1)
    samples = []
    for i, strength in enumerate(strengths):
        sample = torch.randn(*shape[1:], generator=generator(seed, "noise", micro_batch, i))
        if strength.any():
            sample += strength * torch.randn(shape[1], 1, 1, generator=generator(seed, "offset", micro_batch, i))
        if pyramid_iterations:
            draws = generator(seed, "pyramid", micro_batch, i)
            sample = add_pyramid(sample, draws, pyramid_iterations, pyramid_discount)
            sample /= sample.std()
        samples.append(sample)
    return torch.stack(samples)


def add_pyramid(noise: Tensor, draws: torch.Generator, iterations: int, discount: float) -> Tensor:
    """Add Gaussian noise of lower and lower resolution to (C, H, W) noise, bilinearly enlarged; not normalised.

    Level i has sides r^i times smaller for an r drawn between 2 and 4, and weighs discount^i; the level at which a
    side is one pixel is the last. https://wandb.ai/johnowhitaker/multires_noise, with the numbers of sd-scripts.
    """
    height, width = noise.shape[1:]
    for i in range(iterations):
        shrink = float(2 + 2 * torch.rand((), generator=draws, dtype=torch.float64)) ** i
        size = max(1, int(height / shrink)), max(1, int(width / shrink))
        level = torch.randn(1, noise.shape[0], *size, generator=draws)
        noise = noise + discount**i * F.interpolate(level, (height, width), mode="bilinear")[0]
        if 1 in size:
            break
    return noise


def perturb(noise: Tensor, seed: int, micro_batch: int, strength: float) -> Tensor:
    """Return noise plus `strength` times other Gaussian noise: what the network sees and shall not predict.

    Input perturbation, Ning et al. 2023, algorithm 1.
    """
    draws = [generator(seed, "perturbation", micro_batch, i) for i in range(len(noise))]
    return noise + strength * torch.stack([torch.randn(noise.shape[1:], generator=draw) for draw in draws])
