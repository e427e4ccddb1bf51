"""Numbers in float64, on every device: Apple's GPUs have none, nor have most of Intel's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Tell whether a device computes in float64."""
    try:
        return bool(torch.ones(1, device=device).double().add(1).cpu() == 2)
    except (TypeError, RuntimeError):  # MPS raises the first, XPU the second
        return False


def exact(tensor: Tensor) -> Tensor:
    """Give a tensor in float64: on its device, or on the CPU where the device has no such numbers."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()
