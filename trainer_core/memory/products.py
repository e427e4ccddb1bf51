"""Products with frozen weights, of which autograd keeps nothing, by the faster of torch's two libraries for a CPU."""

from __future__ import annotations

import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 64  # below them oneDNN is the slower one in the forward pass


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T + b for x (…, in) and W (out, in); without gradients."""
    if not _by_onednn(x, weight) or x.numel() < LEAST_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return _product(x, weight, bias)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Compute g W, the gradient of the input of `linear`, for g (…, out) and W (out, in)."""
    return _product(gradient, weight.t()) if _by_onednn(gradient, weight) else gradient @ weight


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product.view(*x.shape[:-1], len(weight))


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Tell whether oneDNN takes a product: torch takes MKL in float32, which is slow on processors of AMD."""
    plain = type(weight) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return plain and x.dtype == weight.dtype == torch.float32 and _has_onednn()


@functools.cache
def _has_onednn() -> bool:
    known = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    return known and hasattr(torch.ops.mkldnn, "_linear_pointwise")
