"""Devices and precision: choose dtypes, move modules, measure free memory, detect out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn

# in out-of-memory errors of CUDA, its libraries, and torch on the CPU
SIGNS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose the dtype of activations; "auto" is float32 on the CPU, bfloat16 or float16 on a GPU."""
    if precision != "auto":
        return DTYPES[precision]
    if device.type == "cuda":
        # torch calls bfloat16 supported where it is emulated, which is very slow
        native = torch.version.hip or torch.cuda.get_device_properties(device).major >= 8
        return torch.bfloat16 if native else torch.float16
    return torch.float32


@contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Move a module to `device` for the length of a `with` block, and to the CPU afterwards, also after an error."""
    try:
        yield module.to(device)
    finally:
        module.to("cpu")


@contextmanager
def staying(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Move a module to `device` for a `with` block, and leave it there."""
    yield module.to(device)


def free_bytes(device: torch.device) -> int:
    """Measure the bytes that a run can use: on a GPU including memory that torch has reserved but does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def give_back(device: torch.device) -> None:
    """Give the memory of a failed step back to the system; takes as long as the process has objects."""
    gc.collect()  # its graphs hold each other in reference cycles
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Give unused memory that torch holds back to the system: on a GPU, and pinned RAM."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # not in older versions


def out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error is out of memory, on a GPU or in RAM."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def with_room(work: Callable[..., T], module: nn.Module, device: torch.device, *tensors: Tensor) -> tuple[T, bool]:
    """Run `work(module, *tensors)` on `device`, or on the CPU when the device is out of memory.

    The second value is True if the CPU did it. The module is on `device` before and after.
    """
    try:
        return work(module, *(tensor.to(device) for tensor in tensors)), False
    except RuntimeError as error:
        if device.type == "cpu" or not out_of_memory(error):
            raise
    give_back(device)
    module.to("cpu")
    try:
        return work(module, *(tensor.cpu() for tensor in tensors)), True
    finally:
        module.to(device)


def in_parts(work: Callable[[slice], Tensor], count: int, device: torch.device) -> Tensor:
    """Run `work` on all of `count` samples at once, or on one after another when memory runs out.

    work: maps a slice of the samples to a tensor (samples in the slice, …).
    """
    try:
        return work(slice(0, count))
    except RuntimeError as error:
        if count == 1 or not out_of_memory(error):
            raise
    give_back(device)
    return torch.cat([work(slice(i, i + 1)) for i in range(count)])
