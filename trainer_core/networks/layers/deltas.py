"""The formulas of low-rank deltas, from parts named as in lora_files/formats.py: for layers in training and in files.

A part that a form does not have is missing, or None. Everything is computed in the dtype of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DeltaTensors = Mapping[str, Any]  # of Tensor, or None


def with_core(core: Tensor, side: Tensor) -> Tensor:
    """Multiply Tucker's core (m, n, k, k) by a side (n, in): (m, in, k, k)."""
    return torch.einsum("m n x y, n i -> m i x y", core, side)


def lora_sides(down: Tensor, up: Tensor, mid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Write a LoRA as down (rank, in * k * k) and up (out, rank), with Tucker's core in down."""
    return (down if mid is None else with_core(mid, down.flatten(1))).flatten(1), up.flatten(1)


def loha_sides(parts: DeltaTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write a LoHa as (a1 b1) * (a2 b2), (out, rank) and (rank, in * k * k) each, with Tucker's cores in b."""
    sides = []
    for number in (1, 2):
        a, b, core = parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"], parts.get(f"hada_t{number}")
        sides += [a, b] if core is None else [a.t(), with_core(core, b).flatten(1)]
    return sides[0], sides[1], sides[2], sides[3]


def pairs_of_ranks(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """Build up (out, rank^2), down (rank^2, n) with up @ down = (a1 b1) * (a2 b2), from all pairs of ranks."""
    return (a1[:, :, None] * a2[:, None, :]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)


def lokr_left(parts: DeltaTensors) -> Tensor:
    """Compute W1 of a LoKr, (out_l, in_m)."""
    whole = parts.get("lokr_w1")
    return parts["lokr_w1_a"] @ parts["lokr_w1_b"] if whole is None else whole


def lokr_right(parts: DeltaTensors) -> Tensor:
    """Compute W2 of a LoKr, (out_k, in_n[, k, k]), or of two factors without a core (out_k, in_n * k * k)."""
    if (whole := parts.get("lokr_w2")) is not None:
        return whole
    a, b, core = parts["lokr_w2_a"], parts["lokr_w2_b"], parts.get("lokr_t2")
    return a @ b if core is None else torch.einsum("i j x y, j n, i k -> k n x y", core, b, a)


def kronecker(left: Tensor, right: Tensor) -> Tensor:
    """Compute the Kronecker product of W1 (out_l, in_m) and W2 (out_k, in_n[, k, k])."""
    return torch.kron(left.view(*left.shape, *(1,) * (right.ndim - 2)), right.contiguous())


def glora_delta(weight: Tensor, a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    """Compute W a1 a2 + b1 b2 of a weight (out, in[, k, k]) in its shape; the matrices are flat."""
    return torch.einsum("o i ..., i j -> o j ...", weight, a1 @ a2) + (b1 @ b2).view(weight.shape)
