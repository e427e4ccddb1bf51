"""The forward process of Stable Diffusion: schedule, noised latents, targets (maths: DDPM, eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rng import generator, sample_uniform

TIMESTEPS = 1000


def alphas_cumprod(start: float = 0.00085, end: float = 0.012, zero_terminal_snr: bool = False) -> Tensor:
    """Return the cumulative alphas of the "scaled linear" schedule, (1000,) float32, computed in float64.

    zero_terminal_snr: shift and stretch their roots so that the last one is 0 and the first stays (Lin et al. 2023,
    algorithm 1).
    """
    betas = torch.linspace(start**0.5, end**0.5, TIMESTEPS, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, dim=0)
    if zero_terminal_snr:
        roots = alphas.sqrt()
        alphas = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return alphas.float()


def snr(alphas: Tensor) -> Tensor:
    """Return the signal-to-noise ratio alpha_t^2 / sigma_t^2 of cumulative alphas, same shape."""
    return alphas / (1 - alphas)


def sample_timesteps(seed: int, micro_batch: int, count: int, low: int = 0, high: int = TIMESTEPS - 1) -> Tensor:
    """Draw (count,) int64 timesteps, uniform over low..high inclusive, each from its own generator."""
    draws = [sample_uniform(seed, "timestep", micro_batch, i) for i in range(count)]
    return torch.tensor([low + int(u * (high - low + 1)) for u in draws])


def sample_noise(seed: int, micro_batch: int, shape: Sequence[int], offset: float = 0.0) -> Tensor:
    """Draw (B, C, H, W) float32 Gaussian noise; `offset` adds one Gaussian value per sample and channel.

    Noise offset: https://www.crosslabs.org/blog/diffusion-with-offset-noise.
    """
    noise = torch.stack(
        [torch.randn(*shape[1:], generator=generator(seed, "noise", micro_batch, i)) for i in range(shape[0])]
    )
    if offset:
        for i, sample in enumerate(noise):
            sample += offset * torch.randn(shape[1], 1, 1, generator=generator(seed, "offset", micro_batch, i))
    return noise


def add_noise(latents: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return sqrt(alpha) * latents + sqrt(1 - alpha) * noise for (B,) cumulative alphas."""
    alphas = alphas.view(-1, 1, 1, 1)
    return alphas.sqrt() * latents + (1 - alphas).sqrt() * noise


def build_target(prediction: str, latents: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return what the model shall predict: the noise, or v = sqrt(alpha) noise - sqrt(1 - alpha) latents.

    Salimans and Ho 2022, "Progressive distillation", appendix D.
    """
    if prediction == "epsilon":
        return noise
    alphas = alphas.view(-1, 1, 1, 1)
    return alphas.sqrt() * noise - (1 - alphas).sqrt() * latents
