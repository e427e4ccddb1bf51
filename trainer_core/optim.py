"""Optimizers by name, and the safeguard around their step."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config import OptimizerConfig
from .rng import generator

SINCE_ON_CPU = (0, 50)  # the bitsandbytes whose 8-bit optimizers need no CUDA


def build_optimizer(config: OptimizerConfig, groups: Sequence[dict[str, Any]], seed: int = 0) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups {"params", "lr"}.

    bfloat16 parameters are rounded stochastically after each step, by `seed`.
    Raises ValueError when AdamW 8-bit is asked for without a bitsandbytes that can do it here.
    """
    options: dict[str, Any] = {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    first = next(iter(groups[0]["params"]))
    if config.name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True, **options)
    else:
        check_optimizer(config, first.device)
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(groups, **options)
    if first.dtype == torch.bfloat16:
        _step_in_float32(optimizer, seed)
    return optimizer


def check_optimizer(config: OptimizerConfig, device: torch.device) -> None:
    """Raise ValueError when the optimizer cannot run on this device."""
    if config.name != "adamw8bit":
        return
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "adamw8bit needs the package bitsandbytes: pip install bitsandbytes; or choose adamw."
        ) from error
    if device.type != "cuda" and tuple(map(int, version.split(".")[:2])) < SINCE_ON_CPU:
        wanted = ".".join(map(str, SINCE_ON_CPU))
        raise ValueError(
            f"adamw8bit on {device.type} needs bitsandbytes {wanted} or newer, and {version} is installed; upgrade it, "
            "or choose adamw."
        )


def round_stochastically(values: Tensor, draws: torch.Generator) -> Tensor:
    """Return float32 values as bfloat16, up or down with the chances that keep their mean.

    bfloat16 is the upper half of a float32: a random number below one unit of it is added, the lower half cut off.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=draws)
    return ((bits + noise) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _step_in_float32(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Have bfloat16 parameters be float32 for the length of each step: state and arithmetic lose nothing.

    Only there, when activations are gone: between steps parameters and gradients take half the memory.
    """
    steps = 0

    def widen(*_: object) -> None:
        for parameter in _with_gradients(optimizer):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = gradient.float() if gradient is not None else None

    def narrow(*_: object) -> None:
        nonlocal steps
        for i, parameter in enumerate(_with_gradients(optimizer)):
            draws = generator(seed, "rounding", steps, i, device=parameter.device)
            parameter.grad = None
            parameter.data = round_stochastically(parameter.data, draws)
        steps += 1

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
