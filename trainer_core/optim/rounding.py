"""Train bfloat16 parameters: each step is computed in float32 and rounded stochastically."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.rng import generator


def round_stochastically(values: Tensor, draws: torch.Generator) -> Tensor:
    """Round float32 values to bfloat16, up or down at random so that the mean is kept.

    bfloat16 is the upper half of a float32: a random number below one unit of it is added, the lower half cut off.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=draws)
    return ((bits + noise) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def step_in_float32(optimizer: torch.optim.Optimizer, seed: int, part: int = 0) -> None:
    """Convert bfloat16 parameters to float32 for the length of each step, so that state and arithmetic stay exact.

    Between steps parameters and gradients take half the memory. The number of steps is stored in the first group, so
    that it is part of the optimizer's state. part: index of the optimizer among several that step as one.
    """
    optimizer.param_groups[0]["rounded"] = 0

    def widen(*_: object) -> None:
        for parameter in _with_gradients(optimizer):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = gradient.float() if gradient is not None else None

    def narrow(*_: object) -> None:
        steps = optimizer.param_groups[0]["rounded"]
        for i, parameter in enumerate(_with_gradients(optimizer)):
            draws = generator(seed, "rounding", part, steps, i, device=parameter.device)
            parameter.grad = None
            parameter.data = round_stochastically(parameter.data, draws)
        optimizer.param_groups[0]["rounded"] = steps + 1

    def all_parameters() -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def widen_all(*_: object) -> None:  # torch gives loaded state the dtype of its parameter
        for parameter in all_parameters():
            parameter.data = parameter.data.float()

    def narrow_all(*_: object) -> None:
        for parameter in all_parameters():
            parameter.data = parameter.data.to(torch.bfloat16)

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)
    optimizer.register_load_state_dict_pre_hook(widen_all)
    optimizer.register_load_state_dict_post_hook(narrow_all)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
