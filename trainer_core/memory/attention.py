"""Choose the kernel of scaled dot product attention on a GPU: one of torch's, or that of the package xformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH, EFFICIENT, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
ATTENTION = {
    # flash takes no mask, which text encoders have, and no float32; then the next kernel is used
    "flash": [FLASH, EFFICIENT],
    "efficient": [EFFICIENT],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, EFFICIENT, MATH],
    "math": [MATH],
    # Flash is fastest where it runs (16-bit numbers on newer cards), efficient runs everywhere else on CUDA, and math
    # always does. cuDNN is left out: it plans anew for every shape, and pictures have many shapes.
    "auto": [FLASH, EFFICIENT, MATH],
}
DEFAULT = [FLASH, EFFICIENT, MATH, SDPBackend.CUDNN_ATTENTION]  # torch's own order


@contextmanager
def attention_kernel(name: str, device: torch.device) -> Iterator[None]:
    """Select the kernel of scaled dot product attention on a GPU for the length of a `with` block."""
    if device.type != "cuda":
        yield
        return
    with _in_order(ATTENTION[name]):
        yield


@contextmanager
def plain_attention(device: torch.device) -> Iterator[None]:
    """Leave the kernel to torch for a `with` block, also inside `attention_kernel`."""
    if device.type != "cuda":
        yield
        return
    with _in_order(DEFAULT):
        yield


@contextmanager
def _in_order(backends: Sequence[SDPBackend]) -> Iterator[None]:
    """Let torch use the first of some kernels that can run."""
    in_order = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}
    with sdpa_kernel(list(backends), **in_order):
        yield
