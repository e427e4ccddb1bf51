"""Choose the kernel of scaled dot product attention on a GPU: one of torch's, or that of the package xformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..common.devices import kind_of
from ..config import setting

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
XFORMERS = "xformers"
ALIGNED = 8  # rows of a bias begin at multiples of so many numbers, as xformers' kernels read them
BROKEN = (ImportError, OSError, AttributeError, RuntimeError)  # of a package that was built for another torch
torchs_attention = F.scaled_dot_product_attention


def check_attention(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError where xformers is chosen and is not installed, or does not run on the device; dtype: of steps.

    Tries it forward and backward on one small head.
    """
    if name != XFORMERS:
        return
    remedy = f"set {setting('memory.attention')} to auto"
    if not kind_of(device).kernels:
        raise ValueError(f"The package xformers has no attention for {device.type}, on which this run is; {remedy}.")
    try:
        import xformers.ops  # noqa: F401
    except BROKEN as error:
        raise ValueError(
            f"attention is xformers, and the package xformers cannot be imported ({error}); install the version that "
            f"belongs to torch {torch.__version__}, or {remedy}."
        ) from error
    try:
        head = torch.zeros(1, 1, ALIGNED, 64, device=device, dtype=dtype, requires_grad=True)
        xformers_attention(head, head, head).sum().backward()  # pyright: ignore[reportCallIssue]
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        short = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"The package xformers cannot train in {short} on this GPU ({said}); install the version that belongs to "
            f"torch {torch.__version__}, or {remedy}."
        ) from error


@contextmanager
def attention_kernel(name: str, device: torch.device) -> Iterator[None]:
    """Select the kernel of scaled dot product attention on a GPU for the length of a `with` block.

    xformers takes the place of torch's function, which diffusers, transformers and ComfyUI all call.
    """
    if not kind_of(device).kernels:
        yield
        return
    by_xformers = name == XFORMERS
    with (
        _in_order(ATTENTION["auto" if by_xformers else name]),
        _attending(xformers_attention) if by_xformers else nullcontext(),
    ):
        yield


@contextmanager
def plain_attention(device: torch.device) -> Iterator[None]:
    """Leave the kernel to torch for a `with` block, also inside `attention_kernel`."""
    if not kind_of(device).kernels:
        yield
        return
    exchanged = F.scaled_dot_product_attention is xformers_attention
    with _in_order(DEFAULT), _attending(torchs_attention) if exchanged else nullcontext():
        yield


@torch.compiler.disable  # compiled blocks call it as it is
def xformers_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what torch's scaled_dot_product_attention does, by xformers; (B, H, M, K) queries.

    xformers' tensors are (B, M, H, K). What it does not take goes to torch: other devices, numbers of axes and heads.
    """
    if enable_gqa or not kind_of(query.device).kernels or {query.ndim, key.ndim, value.ndim} != {4}:
        groups = {"enable_gqa": True} if enable_gqa else {}
        return torchs_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **groups)
    import xformers.ops

    bias: Any = xformers.ops.LowerTriangularMask() if is_causal else None
    if attn_mask is not None:
        bias = _bias(attn_mask, query, key)
    rows = (each.transpose(1, 2) for each in (query, key, value))
    output = xformers.ops.memory_efficient_attention(*rows, attn_bias=bias, p=dropout_p, scale=scale)
    return output.transpose(1, 2)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Write a mask that may be of booleans, or of one row for all, as a bias (B, H, M, N) whose rows are aligned."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    whole = query.new_zeros(batch, heads, rows, -(-columns // ALIGNED) * ALIGNED)[..., :columns]
    return whole.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else whole.add_(mask)


@contextmanager
def _attending(function: Any) -> Iterator[None]:
    """Put a function in the place of torch's scaled_dot_product_attention for a `with` block."""
    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


@contextmanager
def _in_order(backends: Sequence[SDPBackend]) -> Iterator[None]:
    """Let torch use the first of some kernels that can run."""
    in_order = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}
    with sdpa_kernel(list(backends), **in_order):
        yield
