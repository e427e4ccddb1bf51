"""Devices and precision: choose dtypes, move modules, measure free memory, detect out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn

from ..common.devices import computes, emulates, kind_of, module_of

# in out-of-memory errors of CUDA, its libraries, Intel's driver, and torch on the CPU
SIGNS = ("out of memory", "ALLOC_FAILED", "OUT_OF_DEVICE_MEMORY", "can't allocate memory", "not enough memory")

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose the dtype of activations; "auto" is the first of its kind's that the device computes in."""
    if precision != "auto":
        return DTYPES[precision]
    *wished, last = kind_of(device).dtypes
    return next((dtype for dtype in wished if not emulates(device, dtype) and computes(device, dtype)), last)


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
    module, ram = module_of(device), psutil.virtual_memory().available
    if kind_of(device).shares_ram:
        if not hasattr(module, "recommended_max_memory"):
            return ram
        return min(ram, max(0, module.recommended_max_memory() - module.current_allocated_memory()))
    if not hasattr(module, "memory_reserved"):
        return ram  # nothing tells
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    try:
        free, _ = module.mem_get_info(device)
    except (AttributeError, RuntimeError):  # drivers of Intel's that do not count what others use; older torch
        free = module.get_device_properties(device).total_memory - module.memory_reserved(device)
    return free + unused


def total_bytes(device: torch.device) -> int:
    """Find all the memory that a GPU can use, in bytes; 0 without one, or where nothing tells."""
    module = module_of(device)
    if hasattr(module, "recommended_max_memory"):
        return module.recommended_max_memory()
    return module.get_device_properties(device).total_memory if hasattr(module, "get_device_properties") else 0


def begin_peak(device: torch.device) -> None:
    """Begin to measure the peak of memory, where the device measures it."""
    module = module_of(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Read the peak of memory since `begin_peak`, in bytes; None where the device measures none."""
    module = module_of(device)
    return module.max_memory_allocated(device) if hasattr(module, "max_memory_allocated") else None


def give_back(device: torch.device) -> None:
    """Give the memory of a failed step back to the system; takes as long as the process has objects."""
    gc.collect()  # its graphs hold each other in reference cycles
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Give unused memory that torch holds back to the system: on a GPU, and pinned RAM."""
    module = module_of(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # not in older versions


def out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error is out of memory, on a GPU or in RAM."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def with_room(work: Callable[..., T], module: nn.Module, device: torch.device, *tensors: Tensor) -> tuple[T, bool]:
    """Run `work(module, *tensors)` on `device`, or on the CPU when the device is out of memory.

    The second value is True if the CPU did it. The module is on `device` before and after. One without weights of its
    own is not ours to move: its error is raised.
    """
    try:
        return work(module, *(tensor.to(device) for tensor in tensors)), False
    except RuntimeError as error:
        if device.type == "cpu" or not out_of_memory(error) or next(module.parameters(), None) is None:
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
