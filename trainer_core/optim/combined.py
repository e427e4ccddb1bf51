"""Several optimizers that step as one, for optimizers that estimate a step size each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Combined(torch.optim.Optimizer):
    """Optimizers over different parameters with the interface of one; each estimates its own step size."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Store the parts; they hold all state, so torch's own constructor is not called."""
        self.parts = list(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with every part; a closure is not called."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Collect the state of all parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
