"""One update of the weights: clip the gradients, step, and report the learning rate."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.devices import by_device
from ..config import OptimizerConfig


def limit_gradients(parameters: Sequence[Tensor], config: OptimizerConfig) -> Tensor:
    """Clip gradients by their common norm, then by value; return the norm before clipping, a float32 scalar."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf)
    norm = norm.to(parameters[0].device, torch.float32)  # that of no gradients is on the CPU
    if config.max_grad_value:
        torch.nn.utils.clip_grad_value_(parameters, config.max_grad_value)
    return norm


def sum_of_norms(parameters: Sequence[Tensor]) -> float:
    """Sum the norms of parameters; not finite if a number is not. One copy waits for each device."""
    return sum(norm for own in by_device(parameters) for norm in torch.stack(torch._foreach_norm(own)).tolist())


def learning_rate(optimizer: Any, group: dict[str, Any] | None = None) -> float:
    """Compute a parameter group's learning rate (default: the first group's), times the estimated step size if any."""
    group = optimizer.param_groups[0] if group is None else group
    assert group is not None
    if group.get("relative_step"):  # Adafactor's own (Shazeer & Stern 2018, algorithm 5)
        steps = max((state["step"] for state in optimizer.state.values()), default=1)
        return min(1e-6 * steps if group["warmup_init"] else 1e-2, steps**-0.5)
    return float(group["lr"]) * (1.0 if _sets_d(type(optimizer)) else float(group.get("d", 1.0)))


@functools.cache
def _sets_d(kind: type) -> bool:
    """Tell whether d is a setting of an optimizer, as of torch's Adafactor, and not its estimate."""
    return "d" in inspect.signature(kind.__init__).parameters
