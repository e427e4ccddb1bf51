"""Optimizers by name, and the safeguard around their step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups {"params", "lr"}.

    Raises ValueError when AdamW 8-bit is asked for without bitsandbytes or without a CUDA device.
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
    if device.type != "cuda":
        raise ValueError(f"adamw8bit runs on CUDA devices only and this run is on {device.type}; choose adamw.")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "adamw8bit needs the package bitsandbytes: pip install bitsandbytes; or choose adamw."
        ) from error
