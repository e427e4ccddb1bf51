"""Averages of the trained weights: EMA beside any optimizer, and the average inside schedule-free optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..common.devices import by_device


def ema_decay(updates: int, decay: float, every: int = 1) -> float:
    """Compute the decay of the average at its next update, after `updates` earlier ones that were `every` steps apart.

    The decay rises from 0.1 ** every, so that the initial weights soon lose their influence. The window in steps is the
    same for any `every`.
    """
    return min(decay, (1 + updates) / (10 + updates)) ** every


class Ema:
    """The exponential moving average of parameters, float32: θ̄ <- θ̄ + (1 - δ)(θ - θ̄) every `every` steps."""

    def __init__(self, parameters: Sequence[Tensor], decay: float, every: int = 1, device: str = "same") -> None:
        """Start from the current parameters; device: "cpu" keeps the average in RAM, "same" beside the parameters."""
        self.parameters, self.decay, self.every = list(parameters), decay, every
        self.averages = [
            p.detach().to("cpu" if device == "cpu" else p.device, torch.float32, copy=True) for p in self.parameters
        ]

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Add the parameters to the average; steps: the number of finished steps, from 1, which implies the updates."""
        if steps % self.every:
            return
        weight = 1 - ema_decay(steps // self.every - 1, self.decay, self.every)
        near = [p.detach().to(average) for average, p in zip(self.averages, self.parameters, strict=True)]
        for averages, new in zip(by_device(self.averages), by_device(near), strict=True):
            torch._foreach_lerp_(averages, new, weight)  # one operator for all

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the parameters as they are."""
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.copy_(parameter)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap in the average for the length of a `with` block, and restore the parameters exactly afterwards."""
        kept = [p.data for p in self.parameters]
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            parameter.data = average.to(parameter.device)
        try:
            yield
        finally:
            for data, parameter in zip(kept, self.parameters, strict=True):
                parameter.data = data


@contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """Swap in a schedule-free optimizer's average for a `with` block, and restore the parameters exactly afterwards.

    The optimizer's own way back would round; a copy does not.
    """
    averaging = [part for part in getattr(optimizer, "parts", [optimizer]) if hasattr(part, "eval")]
    if not averaging:
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.float32, copy=True)
    for part in averaging:
        part.eval()  # the libraries' name for it
    try:
        yield
    finally:
        for part in averaging:
            part.train()
        for data, parameter in zip(kept, parameters, strict=True):
            parameter.data = data
