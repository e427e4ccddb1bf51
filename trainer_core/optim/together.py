"""Several optimizers that step as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Together(torch.optim.Optimizer):
    """Optimizers over different parameters, as one: each estimates a step size of its own."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Take the parts; all that a torch optimizer holds is theirs, so that nothing is set up here."""
        self.parts = list(parts)
        self.param_groups = [group for part in parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with every part; a closure is not called."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def train(self) -> None:
        """Let schedule-free parts go on learning."""
        for part in self.parts:
            if hasattr(part, "train"):
                part.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        """Let the parameters be the averages of schedule-free parts."""
        for part in self.parts:
            if hasattr(part, "eval"):
                part.eval()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of all parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
