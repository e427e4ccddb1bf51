"""The noise schedule that Stable Diffusion was trained with."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..base import NoiseModel, Prediction

TIMESTEPS = 1000


def alphas_cumprod(start: float = 0.00085, end: float = 0.012, zero_terminal_snr: bool = False) -> Tensor:
    """Compute the cumulative alphas of the "scaled linear" schedule, (1000,) float32, in float64.

    zero_terminal_snr: shift and scale their roots so that the last is 0 and the first is unchanged (Lin et al. 2023,
    algorithm 1).
    """
    betas = torch.linspace(start**0.5, end**0.5, TIMESTEPS, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, dim=0)
    if zero_terminal_snr:
        roots = alphas.sqrt()
        alphas = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    return alphas.float()


@functools.lru_cache(maxsize=4)
def noise_model(prediction: Prediction, zero_terminal_snr: bool) -> NoiseModel:
    """Build the noise of a model that predicts "epsilon" or "v_prediction" (DDPM, Ho et al. 2020, eq. 4)."""
    alphas = alphas_cumprod(zero_terminal_snr=zero_terminal_snr)
    return NoiseModel(
        kind=prediction,
        alpha=alphas.sqrt(),
        sigma=(1 - alphas).sqrt(),
        snr=alphas / (1 - alphas),
        ratio=((1 - alphas) / alphas).sqrt(),
    )
