"""Optimizers by name, and the safeguard around their step."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

from .config import OptimizerConfig

SINCE_ON_CPU = (0, 50)  # the bitsandbytes whose 8-bit optimizers need no CUDA


def build_optimizer(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups {"params", "lr"}.

    Raises ValueError when AdamW 8-bit is asked for without a bitsandbytes that can do it here.
    """
    options: dict[str, Any] = {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **options)
    check_optimizer(config, next(iter(groups[0]["params"])).device)
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(groups, **options)


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
