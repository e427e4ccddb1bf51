"""Where tensors live and in which precision."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn

# of memory that has run out, as CUDA, its libraries and torch on the CPU say it
SIGNS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")

Result = TypeVar("Result")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations; "auto" is float32 on CPU, bfloat16 or float16 on GPUs."""
    if precision != "auto":
        return DTYPES[precision]
    if device.type == "cuda":
        # torch calls bfloat16 supported where it is emulated, which is very slow
        native = torch.version.hip or torch.cuda.get_device_properties(device).major >= 8
        return torch.bfloat16 if native else torch.float16
    return torch.float32


@contextmanager
def placed(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Have a module on `device` for a while and on the CPU afterwards, whatever happens."""
    try:
        yield module.to(device)
    finally:
        module.to("cpu")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a run can take: on a GPU also what torch holds without using it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def give_back(device: torch.device) -> None:
    """Return to the system what torch holds without using it: on a GPU, and pinned in RAM."""
    gc.collect()  # graphs of a step that failed hang together in circles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # not in older versions


def out_of_memory(error: RuntimeError) -> bool:
    """Tell whether an error says that memory has run out, on a GPU or in RAM."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


def with_room(
    work: Callable[..., Result], module: nn.Module, device: torch.device, *tensors: Tensor
) -> tuple[Result, bool]:
    """Return `work(module, *tensors)` done on `device`, or on the CPU where the device has no room; and which.

    The second value is True when it was the CPU that did it. The module is on `device` before and after.
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
    """Return `work` done on all of `count` samples at once, or on one after the other where memory runs out.

    work: is given which samples, and returns a tensor (that many, …).
    """
    try:
        return work(slice(0, count))
    except RuntimeError as error:
        if count == 1 or not out_of_memory(error):
            raise
    give_back(device)
    return torch.cat([work(slice(i, i + 1)) for i in range(count)])
