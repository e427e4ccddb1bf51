"""Estimate the gradient noise scale: the batch size above which larger batches help little (McCandlish et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.smooth import RunningMean

ELEMENTS = 2**20  # gradient elements to sample, over all parameters: more than enough, and cheap
EVERY = 8  # steps between two comparisons
SMOOTHED = 50  # comparisons
BLOCKS = 10  # parts of the run for the jackknife
FEWEST = 20  # comparisons needed for an estimate
QUANTILE = 2.26  # of Student's t with BLOCKS - 1 degrees of freedom: 95 % lie within
VAGUE = 1.0  # largest standard error of the estimate's logarithm: a factor of e^2 either way


class NoiseScale:
    """Estimates tr(S)/|G|^2 in pictures; G is the true gradient, S the covariance of the gradients of single pictures.

    Two means a, b over n and m pictures have E|a - b|^2 = (1/n + 1/m) tr(S) and E(a·b) = |G|^2. They are the two
    halves of an accumulated step, else a step and the one before it, between which the weights hardly move.
    """

    def __init__(self, parameters: Sequence[Tensor], every: int = EVERY) -> None:
        self._parameters = parameters
        self._every = every
        self._step = 0
        self._halves = False
        self.half: tuple[Tensor, int] | None = None  # gradient of the first half of a step, and its samples
        self._before: tuple[int, Tensor, int] | None = None
        self._pairs: list[tuple[float, float]] = []
        self._means = RunningMean(SMOOTHED), RunningMean(SMOOTHED)

    def state_dict(self) -> dict[str, Any]:
        """Collect everything needed to resume after a step."""
        names = ("_step", "_halves", "_before", "_pairs")
        return {name: getattr(self, name) for name in names} | {"means": [mean.state for mean in self._means]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        self._step, self._halves, self._pairs = state["_step"], state["_halves"], list(state["_pairs"])
        self._before = state["_before"]
        if self._before is not None:
            step, gradient, samples = self._before
            self._before = step, gradient.to(self._parameters[0].device), samples
        for mean, saved in zip(self._means, state["means"], strict=True):
            mean.state = saved

    def halfway(self, samples: int, loss_scale: Callable[[], float]) -> None:
        """Record the gradient accumulated over the first half of a step's micro-batches, with `samples` samples.

        Without a sample, as where a step has one micro-batch, it does nothing.
        """
        if not samples:
            return
        self._halves = True
        if self._step % self._every == 0:
            self.half = self._look() / loss_scale(), samples

    @torch.no_grad()
    def finished(self, samples: int) -> Tensor:
        """Estimate tr(S) and |G|^2, (2,), from a step's gradients before clipping; NaN without a pair to compare."""
        step, half, before = self._step, self.half, self._before
        self._step, self.half, self._before = step + 1, None, None
        if half is not None:
            whole, (first, count) = self._look(), half  # a sum over `count` samples, divided by all of the step
            rest = samples - count
            return compare(first * (samples / count), count, (whole - first) * (samples / rest), rest)
        if not self._halves and step % self._every < 2:
            whole = self._look()
            self._before = step, whole, samples
            if before is not None and before[0] == step - 1:
                return compare(*before[1:], whole, samples)
        return self._parameters[0].new_full((2,), math.nan, dtype=torch.float32)

    def record(self, noise: float, signal: float) -> float | None:
        """Add a pair from `finished`; return the running estimate in pictures, None while there is none."""
        if math.isfinite(noise) and math.isfinite(signal):
            self._pairs.append((noise, signal))
        noise, signal = self._means[0].add(noise), self._means[1].add(signal)
        return noise / signal if signal > 0 and len(self._pairs) >= FEWEST else None

    def estimate(self) -> tuple[float, float, float] | None:
        """Compute (low, estimate, high) in pictures from the second half of the run; None if it is too uncertain.

        The range is a 95 % confidence interval, by a jackknife over tenths of the logarithm.
        """
        pairs = torch.tensor(self._pairs[len(self._pairs) // 2 :], dtype=torch.float64)
        if len(self._pairs) < FEWEST:
            return None
        parts = torch.stack([part.sum(dim=0) for part in pairs.tensor_split(BLOCKS)])
        rest = parts.sum(dim=0) - parts
        if not (rest > 0).all():
            return None
        logs = (rest[:, 0] / rest[:, 1]).log()
        error = float(((BLOCKS - 1) / BLOCKS * (logs - logs.mean()).square().sum()).sqrt())
        noise, signal = pairs.sum(dim=0).tolist()
        spread = math.exp(QUANTILE * error)
        return None if error > VAGUE else (noise / signal / spread, noise / signal, noise / signal * spread)

    def sentence(self, batch: int) -> str:
        """Say in a sentence what the estimate means for steps of `batch` pictures; "" after too short a run."""
        if len(self._pairs) < FEWEST:
            return ""
        if (found := self.estimate()) is None:
            return (
                "The gradient noise scale could not be estimated: nearly all of each gradient is noise. A larger batch "
                "would make the steps steadier."
            )
        low, middle, high = (f"{float(f'{max(value, 1):.2g}'):g}" for value in found)
        advice = "in that range"
        if batch < found[0]:
            advice = "so a larger one would allow a higher learning rate"
        elif batch > found[2]:
            advice = "so a smaller one would reach the same loss with fewer pictures"
        return (
            f"Batches above about {middle} pictures ({low} to {high}) help little here, as a rule of thumb from the "
            f"gradient noise. The batch of this run is {batch}, {advice}."
        )

    def _look(self) -> Tensor:
        """Sample the first elements of each gradient, (n,) float32; zero where a parameter has none."""
        shares, first = looked_at(self._parameters), self._parameters[0].device
        seen = [
            p.new_zeros(share) if p.grad is None else p.grad.reshape(-1)[:share]
            for p, share in zip(self._parameters, shares, strict=True)
        ]
        return torch.cat([each.to(first) for each in seen]).float()


def looked_at(parameters: Sequence[Tensor]) -> list[int]:
    """Count the sampled gradient elements of each parameter; a step holds one float32 copy of them."""
    part = -(-sum(p.numel() for p in parameters) // ELEMENTS)  # one element in `part` is sampled
    return [-(-p.numel() // part) for p in parameters]


def compare(a: Tensor, n: int, b: Tensor, m: int) -> Tensor:
    """Estimate tr(S) and |G|^2 without bias, (2,), from two means over n and m samples."""
    difference = a - b
    return torch.stack([difference @ difference / (1 / n + 1 / m), a @ b])
