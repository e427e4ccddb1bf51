"""Draw the noise level of each sample: distributions over a range of timesteps, and draws from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.rng import generator, sample_uniform
from ..config import ObjectiveConfig
from .path import Path

FRACTION_TERMS = 300  # of the continued fraction below; converged to 1e-12 for parameters of at most 100


def level_probabilities(config: ObjectiveConfig, path: Path) -> Tensor:
    """Compute the cumulative probabilities of the levels min_timestep..max_timestep, float64."""
    low, high = config.min_timestep, config.max_timestep
    count = high - low + 1
    if config.timestep_distribution == "logit_normal":
        return logit_normal(count, config.logit_mean, config.logit_scale)
    if config.timestep_distribution == "sigmoid":
        return sigmoid_density(count, config.sigmoid_center, config.sigmoid_slope)
    if config.timestep_distribution == "beta":
        return beta(count, config.beta_a, config.beta_b)
    if config.timestep_distribution == "snr_uniform":
        return snr_uniform(path.positive_snr[low : high + 1])
    return uniform(count)


def uniform(count: int) -> Tensor:
    """Compute the cumulative probabilities of `count` equally likely timesteps, (count,) float64.

    In all distributions here entry j is the probability of the first j + 1 timesteps of the range. The continuous
    distribution over [0, 1] covers the whole range, however narrow, and no draw is rejected.
    """
    return torch.arange(1, count + 1, dtype=torch.float64) / count


def logit_normal(count: int, mean: float, scale: float) -> Tensor:
    """Compute the cumulative probabilities of sigmoid(mean + scale z) for Gaussian z (Esser et al. 2024)."""
    return torch.special.ndtr((torch.logit(uniform(count)) - mean) / scale)


def sigmoid_density(count: int, center: float, slope: float) -> Tensor:
    """Compute the cumulative probabilities of the density sigmoid(slope (t - center)): a soft step (OneTrainer's)."""
    values = F.softplus(slope * (torch.cat([torch.zeros(1, dtype=torch.float64), uniform(count)]) - center))
    return (values[1:] - values[0]) / (values[-1] - values[0])


def beta(count: int, a: float, b: float) -> Tensor:
    """Compute the cumulative probabilities of the beta distribution: I_t(a, b), regularised incomplete beta.

    Its continued fraction (DLMF 8.17.22, evaluated from its end) converges fast below the mean; above it
    I_t(a, b) = 1 - I_{1-t}(b, a).
    """
    t = uniform(count)
    below = t < (a + 1) / (a + b + 2)
    return torch.where(below, _incomplete_beta(t, a, b), 1 - _incomplete_beta(1 - t, b, a))


def _incomplete_beta(t: Tensor, a: float, b: float) -> Tensor:
    """Compute I_t(a, b) for t below the mean; above it the result is undefined."""
    rest = torch.ones_like(t)
    for n in range(FRACTION_TERMS, 0, -1):
        m, odd = divmod(n, 2)
        if odd:
            d = -(a + m) * (a + b + m) * t / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * t / ((a + 2 * m - 1) * (a + 2 * m))
        rest = 1 + d / rest
    constant = torch.lgamma(torch.tensor([a + b, a, b], dtype=torch.float64))
    log_front = constant[0] - constant[1] - constant[2] + a * t.log() + b * torch.log1p(-t)
    return log_front.exp() / (a * rest)


def snr_uniform(snr: Tensor) -> Tensor:
    """Compute the cumulative probabilities that spread samples evenly over the logarithm of the ratios.

    snr: (count,) falling and above 0. A timestep's probability is proportional to the fall of log snr before it.
    """
    if len(snr) == 1:
        return uniform(1)
    falls = -snr.double().log().diff()
    falls = torch.cat([falls[:1], falls])
    return falls.cumsum(0) / falls.sum()


def sample_timesteps(
    seed: int,
    micro_batch: int,
    count: int,
    cumulative: Tensor,
    low: int = 0,
    strata: Sequence[int] | None = None,
    strata_count: int = 1,
) -> Tensor:
    """Draw (count,) int64 timesteps from their cumulative probabilities, each with its own generator.

    low: the first timestep of the range. strata: for each sample the stratum that it is drawn from, one of strata_count
    equally likely parts of the distribution.
    """
    draws = [sample_uniform(seed, "timestep", micro_batch, i) for i in range(count)]
    if strata is not None:
        draws = [(stratum + draw) / strata_count for stratum, draw in zip(strata, draws, strict=True)]
    places = torch.searchsorted(cumulative, torch.tensor(draws, dtype=torch.float64), right=True)
    return low + places.clamp(max=len(cumulative) - 1)


def sample_strata(seed: int, step: int, count: int) -> list[int]:
    """Assign the `count` strata of a distribution at random to the samples of an optimizer step, one each.

    Each sample keeps its distribution, while all of them cover it evenly; so the mean loss varies less from step to
    step (stratified sampling).
    """
    return torch.randperm(count, generator=generator(seed, "strata", step)).tolist()
