"""Averages of the weights: a running one beside any optimizer (EMA), and the one inside schedule-free optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def ema_decay(updates: int, decay: float, every: int = 1) -> float:
    """Return what the average keeps of itself at an update after so many, `every` steps apart.

    Rises from 0.1 ** every, so that the start does not weigh on the average for long; the window in steps is the same
    for any `every`.
    """
    return min(decay, (1 + updates) / (10 + updates)) ** every


class Ema:
    """The exponential moving average of parameters, float32: θ̄ <- θ̄ + (1 - δ)(θ - θ̄) after each `every` steps."""

    def __init__(self, parameters: Sequence[Tensor], decay: float, every: int = 1, device: str = "same") -> None:
        """Begin with the parameters as they are; device: "cpu" keeps the average in RAM, "same" beside them."""
        self.parameters, self.decay, self.every = list(parameters), decay, every
        self.averages = [
            p.detach().to("cpu" if device == "cpu" else p.device, torch.float32, copy=True) for p in self.parameters
        ]

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the parameters after so many steps, 1 and up; how many updates there were follows from that."""
        if steps % self.every:
            return
        weight = 1 - ema_decay(steps // self.every - 1, self.decay, self.every)
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.lerp_(parameter.detach().to(average), weight)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the parameters be their average for the length of a `with` block, and exactly as before afterwards."""
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
    """Let the parameters be a schedule-free optimizer's average in a `with` block, and exactly as before afterwards.

    Going back by the optimizer's own arithmetic would round; a copy does not.
    """
    if not _averages(optimizer):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.data for p in parameters]
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.float32, copy=True)
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        for data, parameter in zip(kept, parameters, strict=True):
            parameter.data = data


def _averages(optimizer: Any) -> bool:
    return any(hasattr(part, "eval") for part in getattr(optimizer, "parts", [optimizer]))
