"""The layer of a network that the configuration asks for."""

from __future__ import annotations

from ..config import LoraConfig
from .choose import Target
from .layer import NetworkLayer
from .lora import LoraLayer


def build_layer(target: Target, config: LoraConfig, seed: int) -> NetworkLayer:
    """Build what stands beside one frozen layer; a new one changes nothing."""
    return LoraLayer(target.module, target.rank, target.alpha, name=target.name, seed=seed)
