"""Automagic: one learning rate for the whole run, found by how steadily the weights move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOST_SIGNS = 8  # of each weight, in one byte
FARTHEST = math.log(1e4)  # from the rate that was set, either way


class Automagic(torch.optim.Optimizer):
    """Adafactor's steps, with a rate that all weights vote on (the rule of ai-toolkit's Automagic v3).

    Each weight keeps the signs of its last updates. It votes for a higher rate where all are the same, for a lower one
    where each differs from the one before. The rate is multiplied by exp(vote), the mean of +1, -1 and 0 over all
    weights, weighed by the sizes of their updates. The product of all votes is `d` of each group; it starts at 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        beta2: float = 0.999,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        history: int = 4,
    ) -> None:
        if not 2 <= history <= MOST_SIGNS:
            raise ValueError(f"history is {history}; set it between 2 and {MOST_SIGNS}.")
        own = {"lr": lr, "beta2": beta2, "eps": eps, "clip_threshold": clip_threshold}
        super().__init__(params, {**own, "weight_decay": weight_decay, "history": history})
        for group in self.param_groups:
            group.setdefault("d", 1.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the weights, then the rate for the next step; a closure is not called."""
        votes: list[Tensor] = []
        for group in self.param_groups:
            rate = group["lr"] * group["d"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                update = _update(parameter.grad.float(), state, group)
                if (vote := _vote(update, state, group["history"])) is not None:
                    votes.append(vote if not votes else vote.to(votes[0].device))
                if group["weight_decay"]:
                    parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-rate)
        if not votes:
            return
        agreed, whole = torch.stack(votes).sum(0).tolist()  # one copy waits for the device
        found = math.log(self.param_groups[0]["d"]) + (agreed / whole if whole > 0 else 0.0)
        for group in self.param_groups:
            group["d"] = math.exp(min(max(found, -FARTHEST), FARTHEST))


def _update(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Divide a gradient by the root of its mean square, and limit the result (Shazeer & Stern 2018).

    Of a matrix the squares are kept as the means of rows and columns, whose outer product stands for them.
    """
    state["step"] = state.get("step", 0) + 1
    squares, weight = gradient.square(), 1 - group["beta2"]
    corrected = 1 - group["beta2"] ** state["step"]
    if gradient.ndim < 2:
        mean = state.setdefault("squares", torch.zeros_like(gradient)).lerp_(squares, weight) / corrected
    else:
        flat = squares.flatten(1)
        rows = state.setdefault("rows", torch.zeros_like(flat[:, 0])).lerp_(flat.mean(1), weight) / corrected
        columns = state.setdefault("columns", torch.zeros_like(flat[0])).lerp_(flat.mean(0), weight) / corrected
        mean = (rows[:, None] * columns / (rows.mean() + group["eps"])).view_as(gradient)
    update = gradient * (mean + group["eps"]).rsqrt()
    most = group["clip_threshold"]
    update /= (update.square().mean().sqrt() / most).clamp(min=1)
    return update.clamp(-most, most)


def _vote(update: Tensor, state: dict[str, Any], history: int) -> Tensor | None:
    """Sum (votes, weights) of a parameter; None until its signs fill the history."""
    before = state.get("signs", torch.zeros_like(update, dtype=torch.uint8))
    signs = state["signs"] = (before.to(torch.uint8) << 1) | (update > 0).to(torch.uint8)
    if state["step"] < history:
        return None
    size, window = update.abs(), 2**history - 1
    latest, changed = signs & window, (signs ^ (signs >> 1)) & (window >> 1)
    steady, turning = (latest == 0) | (latest == window), changed == window >> 1
    return torch.stack(((size * (steady.float() - turning.float())).sum(), size.sum()))
