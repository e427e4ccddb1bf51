"""Gradient checkpointing in levels: from its level on, a block recomputes its activations in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Unit = tuple[nn.Module, int]  # a repeated block, and the lowest level that recomputes it
LEVELS = ("0", "1", "2", "3", "4", "full")


class Recomputed:
    """A module's forward whose activations are recomputed in the backward pass instead of kept."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; it draws no random numbers, so no generator state is kept."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def recompute(units: Iterable[Unit], level: str) -> None:
    """Switch gradient checkpointing on for the blocks of a level; may be called again with a higher level.

    units: the blocks, each with the lowest level that recomputes it.
    """
    wanted = LEVELS.index(level) if level in LEVELS else 0  # auto, where no estimate has chosen one
    for unit, least in units:
        if wanted >= least and not isinstance(unit.forward, Recomputed):
            unit.forward = Recomputed(unit.forward)
