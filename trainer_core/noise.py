"""The forward process of Stable Diffusion: schedule, noised latents, targets (maths: DDPM, eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .rng import generator

TIMESTEPS = 1000
LEAST_ALPHA = 4.8973451890853435e-08  # stands for pure noise where its ratio must not be 0, as in ComfyUI's samplers


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


def offset_growth(alphas: Tensor) -> Tensor:
    """Return how a noise offset of 1 at the last of all cumulative alphas grows up to there, (1000,) float32.

    An offset that each diffusion step adds alike reaches, in units of the noise, sigma_t / alpha_t^2 of the last one's
    (the closed form of OneTrainer's "generalised offset noise"). Not defined for zero terminal SNR.
    """
    growth = (1 - alphas.double()).sqrt() / alphas.double()
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


def add_noise(latents: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return sqrt(alpha) * latents + sqrt(1 - alpha) * noise for (B,) cumulative alphas."""
    alphas = alphas.view(-1, 1, 1, 1)
    return alphas.sqrt() * latents + (1 - alphas).sqrt() * noise


def build_target(prediction: str, latents: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return what the model shall predict: the noise, v = sqrt(alpha) noise - sqrt(1 - alpha) latents, or x0 itself.

    Salimans and Ho 2022, "Progressive distillation", appendix D.
    """
    if prediction == "epsilon":
        return noise
    if prediction == "x0":
        return latents
    alphas = alphas.view(-1, 1, 1, 1)
    return alphas.sqrt() * noise - (1 - alphas).sqrt() * latents


def implied_latents(prediction: str, predicted: Tensor, noised: Tensor, alphas: Tensor) -> Tensor:
    """Return the clean latents that a prediction of epsilon or v implies, float32; alphas > 0 for epsilon."""
    alphas, predicted = alphas.view(-1, 1, 1, 1), predicted.float()
    if prediction == "epsilon":
        return (noised - (1 - alphas).sqrt() * predicted) / alphas.sqrt()
    return alphas.sqrt() * noised - (1 - alphas).sqrt() * predicted
