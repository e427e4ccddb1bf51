"""The path from clean latents to noise, and the model's prediction on it: one affine form for every kind.

At level t the noised latents are alpha_t x0 + sigma_t noise, and the target is p_t x0 + q_t noise:
epsilon (0, 1) · v_prediction (-sigma_t, alpha_t) / sqrt(alpha_t^2 + sigma_t^2) · flow (-1, 1) · x0 (1, 0) · affine, as
EDM's preconditioned networks: p_t and q_t of the model (Karras et al. 2022, table 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.axes import like
from ..models.base import NoiseModel

LEAST_ALPHA = 4.8973451890853435e-08  # alpha_t^2 used for pure noise where its ratio must not be 0, as in ComfyUI
PURE_NOISE = 1e-6  # signal-to-noise ratio below which nothing of the picture is left; ComfyUI's pure noise has 5e-8


class Mix(NamedTuple):
    """The coefficients of some levels, each (B,), and the kind of prediction."""

    kind: str
    alpha: Tensor
    sigma: Tensor
    p: Tensor | None
    q: Tensor | None

    @property
    def length(self) -> Tensor:
        """Compute sqrt(alpha_t^2 + sigma_t^2); exactly 1 where that is meant."""
        return path_length(self.alpha, self.sigma)

    def noised(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Mix clean latents and noise: alpha_t x0 + sigma_t noise."""
        return like(self.alpha, latents) * latents + like(self.sigma, noise) * noise

    def noisier(self, shares: Tensor) -> Mix:
        """Move levels, (B,), these shares of the way to pure noise; for flow, where the target is the same everywhere.

        MixFlow's slowed interpolation, which at time t shows the model what its own errors leave it with there.
        """
        return self._replace(alpha=(1 - shares) * self.alpha, sigma=self.sigma + shares * self.alpha)

    def target(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Compute the model's target: p_t x0 + q_t noise (v: Salimans and Ho 2022, appendix D)."""
        if self.kind == "epsilon":
            return noise
        if self.kind == "x0":
            return latents
        if self.kind == "v_prediction":
            return like(self.alpha / self.length, noise) * noise - like(self.sigma / self.length, latents) * latents
        if self.kind == "flow":
            return noise - latents
        assert self.p is not None and self.q is not None
        return like(self.p, latents) * latents + like(self.q, noise) * noise

    def clean(self, predicted: Tensor, noised: Tensor) -> Tensor:
        """Compute the clean latents that a prediction implies, float32; alpha_t > 0 for epsilon."""
        predicted = predicted.float()
        alpha, sigma = like(self.alpha, noised), like(self.sigma, noised)
        # Each case solves the two equations, of `noised` and of `target`, for x0.
        if self.kind == "epsilon":
            return (noised - sigma * predicted) / alpha
        if self.kind == "x0":
            return predicted
        if self.kind == "v_prediction":
            length = like(self.length, noised)
            return alpha / length.square() * noised - sigma / length * predicted
        if self.kind == "flow":
            return (noised - sigma * predicted) / (alpha + sigma)
        assert self.p is not None and self.q is not None
        p, q = like(self.p, noised), like(self.q, noised)
        return (q * noised - sigma * predicted) / (alpha * q - sigma * p)


def path_length(alpha: Tensor, sigma: Tensor) -> Tensor:
    """Compute sqrt(alpha^2 + sigma^2); exactly 1 for a path that keeps the variance, whatever its rounding."""
    length = (alpha.square() + sigma.square()).sqrt()
    return length.where((length - 1).abs() > 1e-6, 1.0)


@dataclass(frozen=True, slots=True)
class AffinePath:
    """A model's noise, level by level; tables are (N,) float32, level 0 the cleanest."""

    noise: NoiseModel

    @property
    def kind(self) -> str:
        """The kind of prediction."""
        return self.noise.kind

    @property
    def snr(self) -> Tensor:
        """Signal-to-noise ratio (alpha_t / sigma_t)^2 of every level."""
        return self.noise.snr

    @property
    def positive_snr(self) -> Tensor:
        """Signal-to-noise ratio of every level; pure noise gets the smallest ratio above 0."""
        least = torch.tensor(LEAST_ALPHA)
        return self.snr.clamp(min=float(least / (1 - least)))

    @property
    def ends_in_noise(self) -> bool:
        """Tell whether the last level is pure noise, up to rounding."""
        return float(self.snr[-1]) < PURE_NOISE

    @property
    def clean_factor(self) -> Tensor:
        """Squared error of a prediction per squared error of the clean latents that it implies, (N,)."""
        # `clean` divides an error of the prediction by (alpha q - sigma p) / sigma; here is its square.
        noise, snr = self.noise, self.snr
        if noise.kind == "affine":
            assert noise.p is not None and noise.q is not None
            return (noise.q * snr.sqrt() - noise.p).square()
        if noise.kind == "flow":
            return (1 + snr.sqrt()).square()
        return {"epsilon": snr, "x0": torch.ones_like(snr)}.get(noise.kind, snr + 1)

    def __len__(self) -> int:
        return len(self.noise.alpha)

    def at(self, levels: Tensor, device: torch.device | str = "cpu", kind: str = "") -> Mix:
        """Look up the coefficients of (B,) levels. kind: another kind of prediction on the same path."""
        # The tables stay on the CPU: only the few numbers of a batch go to the device.
        noise, levels = self.noise, levels.cpu()

        def look_up(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[levels].to(device)

        alpha, sigma = noise.alpha[levels].to(device), noise.sigma[levels].to(device)
        return Mix(kind or self.kind, alpha, sigma, look_up(noise.p), look_up(noise.q))


def flow_noise(levels: int = 1000) -> NoiseModel:
    """Build rectified flow: (1 - t) x0 + t noise, target noise - x0, t from 1/N to 1 (Liu et al. 2022)."""
    t = torch.arange(1, levels + 1, dtype=torch.float64) / levels
    snr, ratio = ((1 - t) / t).square().float(), (t / (1 - t)).float()
    return NoiseModel(kind="flow", alpha=(1 - t).float(), sigma=t.float(), snr=snr, ratio=ratio)
