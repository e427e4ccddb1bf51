"""The formulas of low-rank deltas, from parts named as in lora_files/formats.py: for layers in training and in files.

A part that a form does not have is missing, or None. Everything is computed in the dtype of the parts. kernel: the
sizes of a convolution's, along any number of axes; k: their product. Linear layers have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Parts = Mapping[str, Any]  # of Tensor, or None
LOHA_SIDES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def with_core(core: Tensor, side: Tensor) -> Tensor:
    """Multiply Tucker's core (m, n, *kernel) by a side (n, in): (m, in, *kernel)."""
    return torch.einsum("m n ..., n i -> m i ...", core, side)


def lora_sides(down: Tensor, up: Tensor, mid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Write a LoRA as down (rank, in * k) and up (out, rank), with Tucker's core in down."""
    return (down if mid is None else with_core(mid, down.flatten(1))).flatten(1), up.flatten(1)


def loha_sides(parts: Parts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write a LoHa as (a1 b1) * (a2 b2), (out, rank) and (rank, in * k) each, with Tucker's cores in b."""
    sides = []
    for number in (1, 2):
        a, b, core = parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"], parts.get(f"hada_t{number}")
        sides += [a, b] if core is None else [a.t(), with_core(core, b).flatten(1)]
    return sides[0], sides[1], sides[2], sides[3]


def pairs_of_ranks(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """Build up (out, rank^2), down (rank^2, n) with up @ down = (a1 b1) * (a2 b2), from all pairs of ranks."""
    return (a1[:, :, None] * a2[:, None, :]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)


def lokr_left(parts: Parts) -> Tensor:
    """Compute W1 of a LoKr, (out_l, in_m)."""
    whole = parts.get("lokr_w1")
    return parts["lokr_w1_a"] @ parts["lokr_w1_b"] if whole is None else whole


def lokr_right(parts: Parts) -> Tensor:
    """Compute W2 of a LoKr, (out_k, in_n, *kernel), or of two factors without a core (out_k, in_n * k)."""
    if (whole := parts.get("lokr_w2")) is not None:
        return whole
    a, b, core = parts["lokr_w2_a"], parts["lokr_w2_b"], parts.get("lokr_t2")
    return a @ b if core is None else torch.einsum("i j ..., j n, i k -> k n ...", core, b, a)


def kronecker(left: Tensor, right: Tensor) -> Tensor:
    """Compute the Kronecker product of W1 (out_l, in_m) and W2 (out_k, in_n, *kernel)."""
    return torch.kron(left.view(*left.shape, *(1,) * (right.ndim - 2)), right.contiguous())


def glora_delta(weight: Tensor, a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    """Compute W a1 a2 + b1 b2 of a weight (out, in, *kernel) in its shape; the matrices are flat."""
    return torch.einsum("o i ..., i j -> o j ...", weight, a1 @ a2) + (b1 @ b2).view(weight.shape)


def comfy_parts(parts: Parts) -> dict[str, Any]:
    """Rewrite parts to those that ComfyUI computes the same delta from: it reads cores and W2 of two axes alone.

    Other cores are multiplied in. Another W2 of a LoKr becomes a matrix (out_k, in_n * k). The core of a LoKr stays.
    """
    found = {part: tensor for part, tensor in parts.items() if tensor is not None}
    if "mid" in found and found["mid"].ndim != 4:
        found["down"] = with_core(found.pop("mid"), found["down"].flatten(1))
    if "hada_t1" in found and found["hada_t1"].ndim != 4:
        sides = dict(zip(LOHA_SIDES, (side.contiguous() for side in loha_sides(found)), strict=True))
        found = {part: tensor for part, tensor in found.items() if part not in ("hada_t1", "hada_t2")} | sides
    if "lokr_w2" in found and found["lokr_w2"].ndim != 4:
        found["lokr_w2"] = found["lokr_w2"].flatten(1)
    return found
