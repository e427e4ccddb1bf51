"""Where tensors live and in which precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations; "auto" is float32 on CPU, bfloat16 or float16 on GPUs."""
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


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a run can take: on a GPU also what torch holds without using it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def give_back(device: torch.device) -> None:
    """Return to the system what torch holds on a GPU without using it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
