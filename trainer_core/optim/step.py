"""One update: gradients limited, the step taken only when all is finite, and the learning rate it had."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..config import OptimizerConfig


def move(optimizer: Any, scaler: torch.amp.GradScaler, loss: float, config: OptimizerConfig) -> tuple[float, bool]:
    """Limit the gradients and step, unless loss or gradient is not finite; forget the gradients.

    Returns the norm of the gradient before it was limited, and whether the step was taken. Weights and state are as
    before where it was not.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.unscale_(optimizer)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf))
    finite = math.isfinite(norm) and math.isfinite(loss)
    if finite:
        if config.max_grad_value:
            torch.nn.utils.clip_grad_value_(parameters, config.max_grad_value)
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm, finite


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate of the first parameter group, times the step size where the optimizer estimates one."""
    group = optimizer.param_groups[0]
    if group.get("relative_step"):  # Adafactor's own (Shazeer & Stern 2018, algorithm 5)
        steps = max((state["step"] for state in optimizer.state.values()), default=1)
        return min(1e-6 * steps if group["warmup_init"] else 1e-2, steps**-0.5)
    return float(group["lr"]) * float(group.get("d", 1.0))
