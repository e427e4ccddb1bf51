"""The layer of a network that the configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..config import LoraConfig
from .choose import Target
from .layer import NetworkLayer
from .lora import LoraLayer


def build_layer(target: Target, config: LoraConfig, seed: int) -> NetworkLayer:
    """Build what stands beside one frozen layer; a new one changes nothing."""
    return LoraLayer(target.module, target.rank, target.alpha, name=target.name, seed=seed)


def algorithm_of(parts: Mapping[str, Tensor]) -> str:
    """Return the algorithm that trains a layer whose file has these parts; "" for one that none does."""
    if "oft_blocks" in parts:
        return "oft" if parts["oft_blocks"].ndim == 3 else "boft"
    signs = {"down": "lora", "hada_w1_a": "loha", "a1": "glora", "diff": "full", "diff_b": "full"}
    signs |= {"lokr_w1": "lokr", "lokr_w1_a": "lokr"}
    return next((algorithm for part, algorithm in signs.items() if part in parts), "")
