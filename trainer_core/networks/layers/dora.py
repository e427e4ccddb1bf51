"""DoRA without building the changed weight (Liu et al. 2024, section 4.3 for the detached norm).

On the input axis, with V = W + s B A and g = m / (||V|| + EPS) per input, W' x = V (x g), and
||V_j||^2 = ||W_j||^2 + 2 s sum_r A_rj (W^T B)_jr + s^2 (A^T B^T B A)_jj.
On the output axis, found in files of other programs, ComfyUI divides by the norm of W:
g = m / (||W|| + EPS) per output and W' x = g (V x).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

EPS = 2.0**-10  # added to norms: the epsilon of float16, in which GPUs merge DoRA at inference


@functools.singledispatch
def frozen_weight(layer: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Read a frozen layer's weight as the layer computes with it; device: by default the weight's own.

    Owners of other layers, which quantize, patch or move their weights in their own way, register theirs by class.
    """
    kept = layer.__dict__.get("kept")
    if kept is not None:
        return kept.weight(dtype)
    return layer.weight.detach().to(device, dtype)  # type: ignore[union-attr]


def column_norms(weight: Tensor) -> Tensor:
    """Compute the norm of each input's column of a weight (out, in, *kernel): (in,), at least float32."""
    axes = [axis for axis in range(weight.ndim) if axis != 1]
    return torch.linalg.vector_norm(weight, dim=axes, dtype=torch.promote_types(weight.dtype, torch.float32))


def row_norms(weight: Tensor) -> Tensor:
    """Compute the norm of each output's row of a weight (out, in, *kernel): (out,), at least float32."""
    return column_norms(weight.transpose(0, 1))


@torch.no_grad()
def changed_norms(weight: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the column norms of W and of W + up @ down, both (in,); up (out, R), down (R, in * k).

    Both are bitwise equal when up @ down is zero. W is read in its own dtype and never copied.
    """
    squares = column_norms(weight).square()
    crossed = (up.t().to(weight.dtype) @ weight.flatten(1)).to(down.dtype)  # (R, in * k)
    change = ((2 * crossed + (up.t() @ up) @ down) * down).sum(0)
    change = change.view(weight.shape[1], -1).sum(1)
    return squares.sqrt(), (squares + change).clamp(min=0).sqrt()


def magnitude_factor(
    moved: Tensor,
    weight: Tensor,
    low_rank: Callable[[], tuple[Tensor, Tensor] | None],
    delta_weight: Callable[[], Tensor],
) -> Tensor:
    """Compute the factor of each input, (in,), exactly 1 for a new layer; only `moved` gets a gradient.

    moved (in,): the magnitude minus (||W|| + EPS). delta_weight is used where low_rank gives None.
    """
    with torch.no_grad():
        if (pair := low_rank()) is not None:
            own, changed = changed_norms(weight, *pair)
        else:
            own, changed = column_norms(weight), column_norms(weight + delta_weight())
    return (own + EPS + moved) / (changed + EPS)


def per_output(moved: Tensor, output: Tensor, bias: Tensor | None, *, channels: bool) -> Tensor:
    """Multiply outputs by 1 + moved, (out,) or (B, out); the bias is unchanged."""
    moved = per_column(moved, output, channels=channels)
    changed = torch.addcmul(output, output, moved)
    if bias is None:
        return changed
    bias = bias.detach().to(moved.dtype)
    return changed.addcmul_(per_column(bias, output, channels=channels), moved, value=-1)


def per_column(factor: Tensor, x: Tensor, *, channels: bool) -> Tensor:
    """Reshape factors (in,) or (B, in) to multiply x: (B, in, *axes) with channels, else (B, …, in)."""
    if channels:
        return factor.view(*factor.shape, *(1,) * (x.ndim - 2))
    return factor if factor.ndim == 1 else factor.view(len(factor), *(1,) * (x.ndim - 2), -1)
