"""Samplers: ways from noise to a picture, which give what ComfyUI's of the same names give.

x is the noised sample divided by alpha_t, of the noise level sigma = sigma_t / alpha_t, and D(x, sigma) what the model
takes for the clean one. dx/dsigma = (x - D) / sigma leads to the picture (Karras et al. 2022, equations 1 and 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from ..objective import AffinePath
from ..objective.path import LEAST_ALPHA

Denoise = Callable[[Tensor, float], Tensor]  # (x, sigma) -> D
Noise = Callable[[], Tensor]  # fresh noise, in the shape of x
Solver = Callable[[Denoise, Tensor, Sequence[float], Noise], Tensor]  # (D, x, sigmas falling to 0, noise) -> picture
PAST = 4  # slopes that a multistep sampler uses
# For `order` slopes, the newest first (Adams and Bashforth).
ADAMS = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def _slope(x: Tensor, clean: Tensor, sigma: float) -> Tensor:
    return (x - clean) / sigma


def ancestral(sigma: float, following: float) -> tuple[float, float]:
    """Divide a step: the level to fall to, and the noise to add there, so that both make up `following`."""
    added = min(following, (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5)
    return (following**2 - added**2) ** 0.5, added


def euler(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """Follow the slope at the beginning of each step."""
    for sigma, following in pairwise(sigmas):
        x = x + _slope(x, denoise(x, sigma), sigma) * (following - sigma)
    return x


def euler_ancestral(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """Fall further than a step asks for, then add noise."""
    for sigma, following in pairwise(sigmas):
        down, added = ancestral(sigma, following)
        x = x + _slope(x, denoise(x, sigma), sigma) * (down - sigma)
        x = x + noise() * added if following else x
    return x


def heun(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """Follow the mean of the slopes at both ends of a step (Karras et al. 2022, algorithm 1 without churn)."""
    for sigma, following in pairwise(sigmas):
        first = _slope(x, denoise(x, sigma), sigma)
        ahead = x + first * (following - sigma)
        if following:
            second = _slope(ahead, denoise(ahead, following), following)
            ahead = x + (first + second) / 2 * (following - sigma)
        x = ahead
    return x


def _midpoint(denoise: Denoise, x: Tensor, sigma: float, target: float) -> Tensor:
    """Follow the slope in the middle of a step, in the logarithm of sigma (DPM-Solver-2, Lu et al. 2022)."""
    first = _slope(x, denoise(x, sigma), sigma)
    if not target:
        return x + first * (target - sigma)
    middle = math.sqrt(sigma * target)
    ahead = x + first * (middle - sigma)
    return x + _slope(ahead, denoise(ahead, middle), middle) * (target - sigma)


def dpm_2(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """DPM-Solver-2."""
    for sigma, following in pairwise(sigmas):
        x = _midpoint(denoise, x, sigma, following)
    return x


def dpm_2_ancestral(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """DPM-Solver-2 that falls further, then adds noise."""
    for sigma, following in pairwise(sigmas):
        down, added = ancestral(sigma, following)
        x = _midpoint(denoise, x, sigma, down)
        x = x + noise() * added if down else x
    return x


def dpmpp_2s_ancestral(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """DPM-Solver++(2S) (Lu et al. 2022) that falls further, then adds noise."""
    for sigma, following in pairwise(sigmas):
        down, added = ancestral(sigma, following)
        clean = denoise(x, sigma)
        if down:
            middle = math.sqrt(sigma * down)
            clean = denoise(middle / sigma * x + (1 - middle / sigma) * clean, middle)
        x = down / sigma * x + (1 - down / sigma) * clean
        x = x + noise() * added if following else x
    return x


def dpmpp_2m(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """DPM-Solver++(2M): D of the middle of a step, continued from the step before (Lu et al. 2022, algorithm 2)."""
    before: tuple[Tensor, float] | None = None  # the last D and its step in log sigma
    for sigma, following in pairwise(sigmas):
        clean = middle = denoise(x, sigma)
        if following:
            length = math.log(sigma / following)
            if before is not None:
                middle = clean + (clean - before[0]) * length / (2 * before[1])
            before = clean, length
        x = following / sigma * x + (1 - following / sigma) * middle
    return x


def _multistep(weights: Callable[[Sequence[float], int, int], Sequence[float]]) -> Solver:
    """Build a sampler that continues a polynomial through the last slopes."""

    def sample(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
        slopes: list[Tensor] = []  # the newest first
        for step, (sigma, following) in enumerate(pairwise(sigmas)):
            slopes = [_slope(x, denoise(x, sigma), sigma), *slopes[: PAST - 1]]
            shares = weights(sigmas, step, len(slopes)) if following else [-sigma]
            x = x + sum((share * slope for share, slope in zip(shares, slopes, strict=False)), 0 * x)
        return x

    return sample


def _as_if_even(sigmas: Sequence[float], step: int, order: int) -> Sequence[float]:
    """Weigh slopes as if all steps were of one length."""
    return [share * (sigmas[step + 1] - sigmas[step]) for share in ADAMS[order - 1]]


def _as_they_lie(sigmas: Sequence[float], step: int, order: int) -> Sequence[float]:
    """Weigh slopes by the integral of Lagrange's polynomials through their levels."""
    at = [sigmas[step - back] for back in range(order)]
    shares = []
    for own in at:
        basis = Polynomial([1.0])
        for other in at:
            if other != own:
                basis *= Polynomial([-other, 1.0]) / (own - other)
        whole = basis.integ()
        shares.append(float(whole(sigmas[step + 1]) - whole(sigmas[step])))
    return shares


def lcm(denoise: Denoise, x: Tensor, sigmas: Sequence[float], noise: Noise) -> Tensor:
    """Take D for the picture, and noise it to the next level (Luo et al. 2023, algorithm 3)."""
    for sigma, following in pairwise(sigmas):
        x = denoise(x, sigma)
        x = x + following * noise() if following else x
    return x


SAMPLERS: dict[str, Solver] = {
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "heun": heun,
    "dpm_2": dpm_2,
    "dpm_2_ancestral": dpm_2_ancestral,
    "lms": _multistep(_as_they_lie),
    "dpmpp_2s_ancestral": dpmpp_2s_ancestral,
    "dpmpp_2m": dpmpp_2m,
    "lcm": lcm,
    "ipndm": _multistep(_as_if_even),
    "ddim": euler,  # without noise of its own it is Euler's (Song et al. 2021, section 4.3)
}
# These leave out the last level but one, as ComfyUI does: a step between the two smallest would gain nothing.
SHORTENED = ("dpm_2", "dpm_2_ancestral")
SCHEDULERS = ("normal", "karras", "exponential", "sgm_uniform", "simple", "ddim_uniform")


class Levels:
    """The noise levels of a model as samplers see them."""

    def __init__(self, path: AffinePath) -> None:
        least = LEAST_ALPHA / (1 - LEAST_ALPHA)
        self._logs = path.snr.double().clamp(min=least).rsqrt().log()  # of sigma, rising

    def nearest(self, sigma: float) -> int:
        """Find the model's level nearest to a noise level, in the logarithm."""
        return int((self._logs - math.log(sigma)).abs().argmin())

    def noised(self, noise: Tensor, sigma: float) -> Tensor:
        """Scale the first noise, of variance 1: at the model's highest level as if it hid a picture of variance 1."""
        highest = math.isclose(float(self._logs[-1].exp()), sigma, rel_tol=1e-5)
        return noise * (math.hypot(1, sigma) if highest else sigma)

    def spaced(self, scheduler: str, steps: int) -> list[float]:
        """Give the falling noise levels of `steps` steps, and 0, as ComfyUI's scheduler of this name spaces them."""
        logs, last = self._logs, len(self._logs) - 1
        low, high = float(logs[0].exp()), float(logs[-1].exp())
        if scheduler in ("normal", "sgm_uniform"):
            times = torch.linspace(last, 0, steps + (scheduler == "sgm_uniform"), dtype=torch.float64)[:steps]
            chosen = logs[times.floor().long()].lerp(logs[times.ceil().long()], times.frac()).exp()
        elif scheduler == "simple":
            chosen = logs[[last - int(step * len(logs) / steps) for step in range(steps)]].exp()
        elif scheduler == "ddim_uniform":
            chosen = logs[list(range(1, len(logs), max(1, len(logs) // steps)))[::-1]].exp()
        elif scheduler == "exponential":
            chosen = torch.linspace(math.log(high), math.log(low), steps, dtype=torch.float64).exp()
        else:  # karras: equation 5 with rho = 7
            chosen = torch.linspace(high ** (1 / 7), low ** (1 / 7), steps, dtype=torch.float64) ** 7
        return [*chosen.tolist(), 0.0]
