"""A learned uncertainty of each noise level, which weighs the losses by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...common.rng import generator
from ...config import RunConfig
from ..path import AffinePath
from .term import Term

CHANNELS = 128  # Fourier features of a level
FARTHEST = 12.0  # largest logarithm of a level's noise over signal; that of pure noise is infinite
BETAS = (0.9, 0.99)  # of Adam, as EDM2's


class Uncertainty(Term):
    """The logarithmic variance u of the losses at each level, trained along; losses become loss / exp(u) + u.

    Where u is best, exp(u) is the mean loss of the level, so that all levels weigh the same, however large their
    losses (Karras et al. 2024, arXiv 2312.02696, equation 21). u is one linear layer on Fourier features of
    ln(sigma_t / alpha_t) / 4, as there. It begins at 0, so that the first step weighs as without it. It is no part of
    the network, nor of its norm and file.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def begin(self, path: AffinePath, seed: int, device: torch.device) -> None:
        """Build the features of each level, their weights, and an Adam of their own."""
        draws = generator(seed, "uncertainty")
        frequencies = 2 * math.pi * torch.randn(CHANNELS, generator=draws)
        phases = 2 * math.pi * torch.rand(CHANNELS, generator=draws)
        times = path.noise.ratio.log().clamp(-FARTHEST, FARTHEST) / 4
        features = math.sqrt(2) * (times[:, None] * frequencies + phases).cos()
        self._features = (features / math.sqrt(CHANNELS)).to(device)  # (N, CHANNELS)
        self.weight = nn.Parameter(torch.zeros(CHANNELS, device=device))
        self._optimizer = torch.optim.Adam([self.weight], lr=self.rate, betas=BETAS)

    def at(self, levels: Tensor) -> Tensor:
        """Compute u of (B,) levels, (B,)."""
        return self._features[levels] @ self.weight

    def weigh(self, losses: Tensor, levels: Tensor) -> Tensor:
        """Weigh (B,) losses at (B,) levels by their uncertainty: loss / exp(u) + u."""
        uncertain = self.at(levels)
        return losses / uncertain.exp() + uncertain

    @property
    def parameters(self) -> Sequence[Tensor]:
        """List the weights of the features."""
        return (self.weight,)

    def forget_gradients(self) -> None:
        """Drop the gradient, also one of passes that failed."""
        self._optimizer.zero_grad(set_to_none=True)

    def update(self, loss_scale: float) -> None:
        """Take a step with the gradient of a loss that was multiplied by loss_scale."""
        if self.weight.grad is not None:
            # Adam hardly notices a scale that stays, but this one doubles and halves during a run.
            self.weight.grad /= loss_scale
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Collect everything needed to resume."""
        return {"weight": self.weight.detach(), "optimizer": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        with torch.no_grad():
            self.weight.copy_(state["weight"])
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})


def terms_of(config: RunConfig) -> list[Term]:
    """List the term of a run's settings, if any."""
    return [Uncertainty(config.objective.uncertainty_rate)] if config.objective.uncertainty_rate else []
