"""Where tensors live and in which precision; what is given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of frozen weights and activations; "auto" is float32 on CPU, bfloat16 or float16 on GPUs."""
    if precision != "auto":
        return DTYPES[precision]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float32


@contextmanager
def placed(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Have a module on `device` for a while and on the CPU afterwards, whatever happens."""
    module.to(device)
    try:
        yield module
    finally:
        module.to("cpu")


def enable_checkpointing(modules: Iterable[Any]) -> None:
    """Recompute activations in the backward pass instead of keeping them."""
    for module in modules:
        if hasattr(module, "gradient_checkpointing_enable"):  # transformers
            module.gradient_checkpointing_enable({"use_reentrant": False})
            module.train()  # transformers checkpoints in training mode only; these models have no dropout
        else:
            module.enable_gradient_checkpointing()
