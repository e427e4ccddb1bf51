"""Make a LoRA smaller: the best approximation of every layer's delta at a lower rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS = ((".lora_up.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_A.weight"))  # up and down in LoRA files


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRanks:
    """The ranks of one layer before and after, and the share of its delta that is kept."""

    name: str
    old_rank: int
    new_rank: int
    kept: float  # share of the Frobenius norm, 0..1


def lower_rank(tensors: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], list[LayerRanks]]:
    """Reduce every LoRA layer to at most `rank` by SVD; other tensors are copied as they are.

    Raises ValueError when no layer pair is found. Eckart-Young: the truncated SVD is the nearest matrix.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be at least 1.")
    pairs = {
        key.removesuffix(up): (key, key.removesuffix(up) + down)
        for up, down in PAIRS
        for key in tensors
        if key.endswith(up) and key.removesuffix(up) + down in tensors
    }
    if not pairs:
        raise ValueError("There is no lora_up/lora_down pair in this LoRA; only plain LoRA files can be resized.")
    result = dict(tensors)
    reports = []
    for name, (above, below) in pairs.items():
        up, down = tensors[above], tensors[below]
        if f"{name}.lora_mid.weight" in tensors or f"{name}.dora_scale" in tensors:
            raise ValueError(f"{name} is a Tucker or DoRA layer; only plain LoRA layers can be resized.")
        stored = tensors.get(f"{name}.alpha", torch.zeros(()))
        if min(up.ndim, down.ndim) < 2 or up.shape[1] != len(down) or not up.numel() * down.numel() * stored.numel():
            raise ValueError(f"{name} has impossible shapes, so it cannot be resized; get the LoRA again.")
        if stored.numel() > 1 or not all(tensor.isfinite().all() for tensor in (up, down, stored)):
            raise ValueError(f"{name} holds values that are not finite or several alphas; use another LoRA.")
        old_rank = down.shape[0]
        alpha = float(tensors.get(f"{name}.alpha", torch.tensor(float(old_rank))))
        new_up, new_down, kept = truncate_rank(up, down, min(rank, old_rank))
        result[above], result[below] = new_up, new_down
        new_rank = new_down.shape[0]
        result[f"{name}.alpha"] = torch.tensor(alpha / old_rank * new_rank)
        reports.append(LayerRanks(name=name, old_rank=old_rank, new_rank=new_rank, kept=kept))
    return result, reports


def truncate_rank(up: Tensor, down: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Approximate up @ down at a lower rank; return (up, down, share of the Frobenius norm kept).

    The SVD is of the small core R_up R_down^T of two QR decompositions, never of the full matrix. up and down share
    the singular values evenly, which keeps both far from the limits of float16.
    """
    q_up, r_up = torch.linalg.qr(up.double().flatten(1))
    q_down, r_down = torch.linalg.qr(down.double().flatten(1).t())
    u, sigma, vt = torch.linalg.svd(r_up @ r_down.t(), full_matrices=False)
    rank = min(rank, sigma.numel())
    total = sigma.square().sum()
    kept = 1.0 if total == 0 else float((sigma[:rank].square().sum() / total).sqrt())
    root = sigma[:rank].sqrt()
    new_up = (q_up @ u[:, :rank]) * root
    new_down = root[:, None] * (vt[:rank] @ q_down.t())
    return (
        new_up.reshape(up.shape[0], rank, *up.shape[2:]).to(up.dtype).contiguous(),
        new_down.reshape(rank, *down.shape[1:]).to(down.dtype).contiguous(),
        kept,
    )
