"""The layer of a network that the configuration asks for."""

from __future__ import annotations

import math

from ..config import LoraConfig
from .choose import Target
from .dropout import Dropouts
from .layer import NetworkLayer
from .lora import LoraLayer


def build_layer(target: Target, config: LoraConfig, seed: int) -> NetworkLayer:
    """Build what stands beside one frozen layer; a new one changes nothing."""
    # rank-stabilised (Kalajdzievski 2023): alpha / sqrt(rank) = (alpha * sqrt(rank)) / rank, which every loader knows
    alpha = target.alpha * math.sqrt(target.rank) if config.rs_lora else target.alpha
    layer = LoraLayer(
        target.module,
        target.rank,
        alpha,
        name=target.name,
        seed=seed,
        tucker=config.tucker,
        use_scalar=config.use_scalar,
        init=config.init,
    )
    if config.dora:
        layer.decompose(target.module)
    if config.dropout or config.rank_dropout or config.module_dropout:
        layer.dropouts = Dropouts(
            elements=config.dropout,
            ranks=config.rank_dropout,
            layers=config.module_dropout,
            scaled=config.rank_dropout_scale,
            seed=seed,
            name=target.name,
        )
    return layer
