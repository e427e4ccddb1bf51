"""Draw the noise level of each sample: distributions over a range of timesteps, and draws from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.axes import picture_axes
from ..common.rng import generator, sample_uniform
from ..config import ObjectiveConfig
from ..models.base import LevelDefaults, Side
from .path import AffinePath

HALVINGS = 60  # of an interval, until a float64 cannot be halved


def chosen_levels(config: ObjectiveConfig, family: LevelDefaults) -> LevelDefaults:
    """Fill in what the settings leave to the base model's family."""
    levels = family
    if config.timestep_distribution != "auto":
        levels = replace(levels, distribution=config.timestep_distribution)
    if config.timestep_shift:
        levels = replace(levels, shift=config.timestep_shift, by_tokens=None)
    return levels


def shift_of(levels: LevelDefaults, size: Sequence[int]) -> float:
    """Compute the shift of times for latents of a size, (*axes): exp(mu), where mu is a line over their tokens.

    A token has `token` latent pixels along each of a picture's two axes, and one along those before.
    """
    if levels.by_tokens is None:
        return levels.shift
    low, high, few, many = levels.by_tokens
    frames, sides = picture_axes(size)
    tokens = math.prod(frames) * math.prod(-(-side // levels.token) for side in sides)
    return math.exp(low + (high - low) * (tokens - few) / (many - few))


def level_probabilities(
    config: ObjectiveConfig, path: AffinePath, distribution: str = "", shift: float = 1.0
) -> Tensor:
    """Compute the cumulative probabilities of the levels min_timestep..max_timestep, float64.

    distribution: by default the configured one. shift s moves times towards noise, t -> s t / (1 + (s - 1) t), as
    samplers do (Esser et al. 2024, section 5.3.2): no level changes, only its probability.
    """
    low, high = config.min_timestep, config.max_timestep
    distribution = distribution or config.timestep_distribution
    t = unshifted(uniform(high - low + 1), shift)
    if distribution == "logit_normal":
        return logit_normal(t, config.logit_mean, config.logit_scale)
    if distribution == "sigmoid":
        return sigmoid_density(t, config.sigmoid_center, config.sigmoid_slope)
    if distribution == "beta":
        return beta(t, config.beta_a, config.beta_b)
    if distribution == "mode":
        return mode(t, config.mode_scale)
    if distribution == "cos_map":
        return cos_map(t)
    if distribution == "inverted_parabola":
        return inverted_parabola(t, config.parabola_center, config.parabola_scale)
    if distribution == "snr_uniform":
        table = snr_uniform(path.positive_snr[low : high + 1])
        return table if shift == 1 else between(table, t)
    return t


def level_shares(cumulative: Tensor, low: int, levels: int, parts: int) -> list[float]:
    """Compute how often each of `parts` equal parts of all levels is drawn; 1 = as often as if all were equally likely.

    cumulative: of the levels from `low` on; levels: count of all, a multiple of parts.
    """
    single = torch.zeros(levels, dtype=torch.float64)
    single[low : low + len(cumulative)] = cumulative.diff(prepend=cumulative.new_zeros(1))
    return (single.view(parts, -1).sum(1) * parts).tolist()


def uniform(count: int) -> Tensor:
    """Compute the cumulative probabilities of `count` equally likely timesteps, (count,) float64.

    In all distributions here entry j is the probability of the first j + 1 timesteps of the range. The continuous
    distribution over [0, 1] covers the whole range, however narrow, and no draw is rejected.
    """
    return torch.arange(1, count + 1, dtype=torch.float64) / count


def unshifted(t: Tensor, shift: float) -> Tensor:
    """Compute the times that a shift moves to t; a distribution at these is the shifted one at t."""
    return t if shift == 1 else t / (t + shift * (1 - t))


def between(cumulative: Tensor, t: Tensor) -> Tensor:
    """Read a table of cumulative probabilities at times between its own, along straight lines."""
    table = torch.cat([torch.zeros(1, dtype=torch.float64), cumulative])
    indices = t * len(cumulative)
    below = indices.floor().long().clamp(max=len(cumulative) - 1)
    return table[below].lerp(table[below + 1], indices - below)


def logit_normal(t: Tensor, mean: float, scale: float) -> Tensor:
    """Compute the cumulative probabilities of sigmoid(mean + scale z) for Gaussian z (Esser et al. 2024) at times t."""
    return torch.special.ndtr((torch.logit(t) - mean) / scale)


def sigmoid_density(t: Tensor, center: float, slope: float) -> Tensor:
    """Compute the cumulative probabilities of the density sigmoid(slope (t - center)) at times t that end at 1.

    A soft step (OneTrainer's).
    """
    values = F.softplus(slope * (torch.cat([torch.zeros(1, dtype=torch.float64), t]) - center))
    return (values[1:] - values[0]) / (values[-1] - values[0])


def beta(t: Tensor, a: float, b: float) -> Tensor:
    """Compute the cumulative probabilities of the beta distribution at times t: I_t(a, b), incomplete beta."""
    from scipy.special import betainc  # here, so that ComfyUI starts fast

    return torch.from_numpy(betainc(a, b, t.numpy()))


def mode(t: Tensor, scale: float) -> Tensor:
    """Compute the cumulative probabilities of v - scale (sin(pi v / 2)^2 - v) for uniform v, at times t.

    Mode sampling with heavy tails (Esser et al. 2024, section 3.1, with v = 1 - u). Rising for -1 <= scale <= 2 /
    (pi - 2), and inverted by halving.
    """
    low, high = torch.zeros_like(t), torch.ones_like(t)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = middle - scale * ((math.pi / 2 * middle).sin().square() - middle) <= t
        low, high = low.where(~below, middle), high.where(below, middle)
    return high


def cos_map(t: Tensor) -> Tensor:
    """Compute the cumulative probabilities of 1 - 1 / (tan(pi u / 2) + 1) for uniform u, at times t.

    The times whose log-SNR is that of a cosine schedule (Esser et al. 2024, section 3.1).
    """
    return 2 / math.pi * torch.atan2(t, 1 - t)


def inverted_parabola(t: Tensor, center: float, scale: float) -> Tensor:
    """Compute the cumulative probabilities of the density 2 - scale (t - center)^2, cut at 0, at times t that end at 1.

    OneTrainer's. scale 0: uniform; below 0: the ends most often.
    """
    half = math.sqrt(2 / scale) if scale > 0 else math.inf
    values = torch.cat([torch.zeros(1, dtype=torch.float64), t]).clamp(center - half, center + half)
    area = 2 * values - scale * (values - center).pow(3) / 3
    return (area[1:] - area[0]) / (area[-1] - area[0])


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
    side: Side | None = None,
) -> Tensor:
    """Draw (count,) int64 timesteps from their cumulative probabilities, each with its own generator.

    low: the first timestep of the range. strata: for each sample the stratum that it is drawn from, one of strata_count
    equally likely parts of the distribution. side: the timesteps that are drawn, as often among each other as without.
    """
    draws = [sample_uniform(seed, "timestep", micro_batch, i) for i in range(count)]
    if strata is not None:
        draws = [(stratum + draw) / strata_count for stratum, draw in zip(strata, draws, strict=True)]
    first, last = (0, len(cumulative) - 1) if side is None else (max(side.first - low, 0), side.last - low)
    if side is not None:
        below, mass = mass_of(side, cumulative, low)
        draws = [below + mass * draw for draw in draws]
    indices = torch.searchsorted(cumulative, torch.tensor(draws, dtype=torch.float64), right=True)
    return low + indices.clamp(first, min(last, len(cumulative) - 1))


def mass_of(side: Side, cumulative: Tensor, low: int = 0) -> tuple[float, float]:
    """Compute the probabilities of all timesteps below a side, and of the side; low: the first of the range."""
    ends = [min(max(end - low, 0), len(cumulative)) for end in (side.first, side.last + 1)]
    below, until = (float(cumulative[end - 1]) if end else 0.0 for end in ends)
    return below, until - below


def sample_strata(seed: int, step: int, count: int) -> list[int]:
    """Assign the `count` strata of a distribution at random to the samples of an optimizer step, one each.

    Each sample keeps its distribution, while all of them cover it evenly; so the mean loss varies less from step to
    step (stratified sampling).
    """
    return torch.randperm(count, generator=generator(seed, "strata", step)).tolist()
