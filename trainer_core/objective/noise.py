"""Draw the noise of a micro-batch: Gaussian, the nearest of several, offset, pyramid, and more noise in the input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.axes import like
from ..common.rng import generator
from .path import path_length

POOLED = 8  # sides that latents and noises are shrunk to before they are compared
POOL = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}  # by the number of axes
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}  # torch's names, by the number of axes


def offset_growth(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Compute the noise offset of each level as a share of the last level's, (N,) float32.

    An equal offset in each diffusion step adds up to sigma_t / alpha_t^2, in units of the noise (the closed form of
    OneTrainer's "generalised offset noise"), where alpha_t^2 + sigma_t^2 is brought to 1. Undefined where the last
    alpha is 0.
    """
    alpha, sigma = alpha.double(), sigma.double()
    growth = path_length(alpha, sigma) * sigma / alpha.square()
    return (growth / growth[-1]).float()


def sample_noise(
    seed: int,
    micro_batch: int,
    shape: Sequence[int],
    offset: float | Tensor = 0.0,
    pyramid_iterations: int = 0,
    pyramid_discount: float = 0.3,
    latents: Tensor | None = None,
    choices: int = 1,
) -> Tensor:
    """Draw (B, C, *axes) float32 Gaussian noise; each sample's depends on the seed and its own index only.

    latents: (B, C, *axes), of which each sample takes the nearest of `choices` noises.

    offset: number or (B, C), factor of one Gaussian value added to each channel
    (https://www.crosslabs.org/blog/diffusion-with-offset-noise). pyramid_iterations: levels of `add_pyramid`, after
    which every sample is scaled back to a standard deviation of 1.
    """
    strengths = torch.as_tensor(offset).expand(shape[0], shape[1])
    samples = []
    for i, strength in enumerate(strengths):
        draws = generator(seed, "noise", micro_batch, i)
        if latents is None or choices == 1:
            sample = torch.randn(*shape[1:], generator=draws)
        else:
            sample = nearest_noise(latents[i], draws, choices)
        if strength.any():
            moved = strength * torch.randn(shape[1], generator=generator(seed, "offset", micro_batch, i))
            sample += like(moved, sample)
        if pyramid_iterations:
            draws = generator(seed, "pyramid", micro_batch, i)
            sample = add_pyramid(sample, draws, pyramid_iterations, pyramid_discount)
            sample /= sample.std()
        samples.append(sample)
    return torch.stack(samples)


def nearest_noise(latents: Tensor, draws: torch.Generator, choices: int) -> Tensor:
    """Draw noises of the shape of (C, *axes) latents, and take the one with the least squared distance to them.

    Neighbouring pictures then have neighbouring noises (immiscible diffusion, Li et al. 2024, arXiv 2406.12303, here
    the nearest of k). Both are averaged over POOLED cells along each axis first: noises of many pixels all lie equally
    far, and what latents and noise can share are areas.
    """
    sizes = [min(POOLED, side) for side in latents.shape[1:]]
    pool = POOL[len(sizes)]
    wanted, best, least = pool(latents.float(), sizes), latents, float("inf")
    for _ in range(choices):  # one at a time, so that memory stays that of two
        noise = torch.randn(latents.shape, generator=draws)
        distance = float((pool(noise, sizes) - wanted).square().sum())
        if distance < least:
            best, least = noise, distance
    return best


def add_pyramid(noise: Tensor, draws: torch.Generator, iterations: int, discount: float) -> Tensor:
    """Add Gaussian noise of lower and lower resolution to (C, *axes) noise, enlarged linearly; not normalised.

    Level i has sides r^i times smaller, r drawn between 2 and 4, and the weight discount^i; a level that has shrunk a
    side to one pixel is the last. https://wandb.ai/johnowhitaker/multires_noise, with the numbers of sd-scripts.
    """
    sides = noise.shape[1:]
    for i in range(iterations):
        shrink = float(2 + 2 * torch.rand((), generator=draws, dtype=torch.float64)) ** i
        size = [max(1, int(side / shrink)) for side in sides]
        level = torch.randn(1, noise.shape[0], *size, generator=draws)
        noise = noise + discount**i * F.interpolate(level, sides, mode=LINEAR[len(sides)])[0]
        if any(small == 1 < side for small, side in zip(size, sides, strict=True)):
            break
    return noise


def perturb(noise: Tensor, seed: int, micro_batch: int, strength: float) -> Tensor:
    """Add `strength` times other Gaussian noise, which the model sees but should not predict.

    Input perturbation, Ning et al. 2023, algorithm 1.
    """
    draws = [generator(seed, "perturbation", micro_batch, i) for i in range(len(noise))]
    return noise + strength * torch.stack([torch.randn(noise.shape[1:], generator=draw) for draw in draws])
