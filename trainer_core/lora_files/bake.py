"""Approximate every trained layer by a plain LoRA, which every program loads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..common.rng import generator
from ..config import setting
from ..networks.layers.svd import largest_singular
from ..networks.network import Network


def bake_network(network: Network, seed: int) -> tuple[dict[str, Tensor], str]:
    """Approximate each layer of a network by a plain LoRA of its rank; also return a sentence on the error.

    Norm layers, which are no matrices, stay as they are. The frozen models must be in memory. seed: the run's.
    """
    baked: dict[str, Tensor] = {}
    errors = {}
    for name, change, rank in network.changes():
        lora = bake(change, rank, generator(seed, f"bake/{name}"))
        baked |= {f"{name}.{suffix}": tensor for suffix, tensor in lora.items()}
        missing = change.flatten(1) - lora["lora_up.weight"].flatten(1) @ lora["lora_down.weight"].flatten(1)
        errors[name] = float(missing.norm()), float(change.norm())
    rest = {key: tensor for key, tensor in network.tensors().items() if key.partition(".")[0] not in errors}
    whole = math.hypot(*(norm for _, norm in errors.values()))
    share = math.hypot(*(missing for missing, _ in errors.values())) / whole if whole else 0.0
    return {**baked, **rest}, (
        f"Baked into plain LoRA: the file lacks {share:.1%} of the trained change (Frobenius norm of all changes of "
        f"weights). For a closer match set {setting('lora.rank')} higher; without bake nothing is lost."
    )


def bake(change: Tensor, rank: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Compute the LoRA of a rank nearest to the change (out, in, *kernel) of a weight; tensors by kohya's suffixes.

    Scale 1. Eckart-Young: the truncated SVD is the nearest matrix.
    """
    u, sigma, vt = largest_singular(change.flatten(1), rank, draws)
    root, ones = sigma.sqrt(), (1,) * (change.ndim - 2)
    return {
        "lora_down.weight": (root[:, None] * vt).view(-1, *change.shape[1:]),
        "lora_up.weight": (u * root).view(len(u), -1, *ones),
        "alpha": torch.tensor(float(len(sigma))),
    }
