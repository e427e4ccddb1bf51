"""The levels of noise and the kind of prediction of a connected MODEL, read from the numbers of its own sampling.

Whatever a sampling is called, noise_scaling(sigma, noise, latents) is alpha latents + sigma_t noise, and
calculate_denoised(sigma, output, input) is skip input + out output. So the network's target is
(latents - skip input) / out = p latents + q noise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....trainer_core.models import NoiseModel
from ....trainer_core.models.base import Prediction

LEVELS = 1000
EXACT = 1e-6  # relative error up to which numbers of a sampling in float64 count as equal
RESIDUAL = 1e-4  # the same of sums of random pictures, which may cancel out
TRIED, LOUD = 25, (1.0, 30.0)  # levels at which they are drawn, and their standard deviations
LOUDEST = 10.0  # largest standard deviation of a network's input; some models are trained with noise 8 times as large
NODE = "Use Connected Model"


class Coefficients(NamedTuple):
    """What a sampling does to latents, noise and outputs at some sigmas, each (N,) float64."""

    alpha: Tensor
    sigma: Tensor
    p: Tensor
    q: Tensor


def noise_model(patcher: Any) -> NoiseModel:
    """Read the noise and the kind of prediction of a MODEL as it is wired; ValueError where no training follows."""
    sampling = patcher.get_model_object("model_sampling")
    alpha, sigma, p, q = numbers = _numbers(sampling, _levels(sampling))
    kind = _kind(numbers)
    affine = {"p": p.float(), "q": q.float()} if kind == "affine" else {}
    snr, ratio = (alpha / sigma).square().float(), (sigma / alpha).float()
    return NoiseModel(kind=kind, alpha=alpha.float(), sigma=sigma.float(), snr=snr, ratio=ratio, **affine)


def sigmas(patcher: Any) -> Tensor:
    """Compute the sigma that ComfyUI's apply_model is given at each level, (1000,) float64, from clean to noisy.

    No shift is in it: the levels of flow models are the times 0.001 to 1.
    """
    return _levels(patcher.get_model_object("model_sampling"))


def own_shift(patcher: Any) -> float:
    """Compute the shift of times that a flow MODEL is sampled with, from the middle of its own table; 1 for others."""
    sampling = patcher.get_model_object("model_sampling")
    table = _table(sampling)
    middle = float(table[len(table) // 2 - 1])
    return middle / (1 - middle) if _is_time(_numbers(sampling, table), table) else 1.0


def is_flow(patcher: Any) -> bool:
    """Tell whether a MODEL is a flow model, whatever the strength of its noise."""
    sampling = patcher.get_model_object("model_sampling")
    table = _table(sampling)
    numbers = _numbers(sampling, table)
    return _is_time(numbers, table) or _kind(numbers) == "flow"


def _levels(sampling: Any) -> Tensor:
    """Choose the sigmas of 1000 levels: evenly in time for flow models, else evenly from the sampling's own table."""
    table = _table(sampling)
    numbers, times = _numbers(sampling, table), torch.arange(1, LEVELS + 1, dtype=torch.float64) / LEVELS
    if _is_time(numbers, table):
        return times
    if _kind(numbers) == "flow":  # latents + s noise, where s = t / (1 - t) ends at the largest of the table
        last = float(table[-1])
        return torch.where(times < last / (1 + last), times / (1 - times), last)
    indices = torch.arange(1, LEVELS + 1) * len(table)
    return table[(indices + LEVELS - 1).div(LEVELS, rounding_mode="floor") - 1]


def _table(sampling: Any) -> Tensor:
    """Get a sampling's own table of sigmas, float64, rising."""
    table = getattr(sampling, "sigmas", None)
    if not isinstance(table, Tensor):
        raise _refused("has no table of noise levels; link it without the node that sets its sampling")
    if len(table) < LEVELS:
        raise _refused(
            f"knows {len(table)} levels of noise, as a model does that is distilled to a few steps, and training needs "
            f"{LEVELS}; link it without lcm of ModelSamplingDiscrete"
        )
    table = table.detach().cpu().double()
    if not table.isfinite().all() or (table <= 0).any() or (table.diff() < 0).any():
        raise _refused("has no rising table of noise levels; link it without the node that sets its sampling")
    return table


def _numbers(sampling: Any, sigma: Tensor) -> Coefficients:
    """Ask a sampling for its coefficients at (N,) sigmas; ValueError where no training can follow from them."""
    zero, one = (torch.full((len(sigma), 1, 1, 1), value, dtype=torch.float64) for value in (0.0, 1.0))

    def ask(function: Any, *given: Tensor) -> Tensor:
        # Copies, as some samplings add to what they are given.
        return function(sigma, *(each.clone() for each in given)).double().flatten()

    noised, clean = sampling.noise_scaling, sampling.calculate_denoised
    a, b = ask(noised, zero, one), ask(noised, one, zero)
    skip, out = ask(clean, zero, one), ask(clean, one, zero)
    sums = (noised, (b, a)), (clean, (out, skip))  # weights of what is given: noise and latents, output and input
    if not all(_is_weighted_sum(function, sigma, weights) for function, weights in sums):
        raise _refused("is no weighted sum of picture and noise; link it without the node that sets its sampling")
    if not all(each.isfinite().all() for each in (a, b, skip, out)) or (out == 0).any():
        raise _refused("makes nothing of what its network says at some levels of noise")
    if (b <= 0).any():
        raise _refused("adds no noise to its picture, as models that turn one picture into another do")
    if (a < 0).any() or (a / b).diff().gt(EXACT).any():
        raise _refused("goes from noise to picture where others go from picture to noise")
    scale = ask(sampling.calculate_input, one)
    if (scale * (a.square() + b.square()).sqrt()).max() > LOUDEST:
        raise _refused("gives its network noise at full loudness, which no model is known to be trained with")
    return Coefficients(a, b, (1 - skip * a) / out, -skip * b / out)


def _is_weighted_sum(function: Any, sigma: Tensor, weights: tuple[Tensor, Tensor]) -> bool:
    """Tell whether what a sampling makes of random pairs of pictures, quiet and loud, is the sum by its weights."""
    some = torch.linspace(0, len(sigma) - 1, TRIED).long()
    draws = torch.Generator().manual_seed(0)
    pair = torch.randn(2, TRIED, 4, 6, 6, dtype=torch.float64, generator=draws)
    for loud in LOUD:
        given = pair[0] * loud, pair[1] * loud
        found = function(sigma[some], *(each.clone() for each in given)).double()
        one, other = (each * weight[some].view(-1, 1, 1, 1) for each, weight in zip(given, weights, strict=True))
        expected = one + other
        apart, size = (each.flatten(1).norm(dim=1) for each in (found - expected, expected))
        if not (apart <= RESIDUAL * size).all():
            return False
    return True


def _is_time(numbers: Coefficients, sigma: Tensor) -> bool:
    """Tell whether sigma is the time of a flow, 0 to 1: latents weigh 1 - sigma."""
    return bool(sigma[-1] <= 1 + EXACT) and _same(numbers.alpha, 1 - sigma)


def _kind(numbers: Coefficients) -> Prediction:
    """Tell the kind of prediction whose closed form the coefficients are."""
    alpha, sigma, p, q = numbers
    length = (alpha.square() + sigma.square()).sqrt()
    zero, one = torch.zeros_like(p), torch.ones_like(p)
    forms: dict[Prediction, tuple[Tensor, Tensor]] = {
        "epsilon": (zero, one),
        "flow": (-one, one),
        "x0": (one, zero),
        "v_prediction": (-sigma / length, alpha / length),
    }
    for kind, form in forms.items():
        if _same(p, form[0]) and _same(q, form[1]):
            return kind
    return "affine"


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=EXACT, atol=EXACT)


def _refused(why: str) -> ValueError:
    """Make the error of a MODEL whose sampling cannot be trained."""
    return ValueError(f"The MODEL linked to {NODE} cannot be trained: its sampling {why}.")
