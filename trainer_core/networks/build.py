"""Build the layer that LoRA Config asks for."""

from __future__ import annotations

import math
from typing import Any

from ..config import LoraConfig
from .choose import TrainedLayer
from .layers import LAYERS
from .layers.dropout import Dropouts
from .layers.full import NormLayer
from .layers.layer import NetworkLayer
from .layers.shape import is_norm


def _plain_layer(trained: TrainedLayer, config: LoraConfig, seed: int) -> NetworkLayer:
    """Build the layer of the algorithm, without DoRA and dropout."""
    kind: Any = LAYERS[config.algorithm]  # each takes arguments of its own
    own = {"rank": trained.rank, "alpha": trained.alpha, "name": trained.name, "seed": seed}
    given = {name: own[name] if name in own else getattr(config, name) for name in kind.takes}
    return kind(trained.module, **given)


def build_layer(trained: TrainedLayer, config: LoraConfig, seed: int, *, by_output: bool = False) -> NetworkLayer:
    """Build the layer for one frozen layer; a new one changes nothing. Norms get a `NormLayer`, whatever the algorithm.

    by_output: a DoRA has a magnitude per output, as some files of other programs have.
    """
    if is_norm(trained.module):
        layer: NetworkLayer = NormLayer(trained.module)
    else:
        if config.rs_lora:
            # rank-stabilised (Kalajdzievski 2023): alpha / sqrt(rank) = (alpha * sqrt(rank)) / rank, as loaders scale
            trained = trained._replace(alpha=trained.alpha * math.sqrt(trained.rank))
        layer = _plain_layer(trained, config, seed)
        if config.dora:
            layer.decompose(trained.module, by_output=by_output)
    if config.dropout or config.rank_dropout or config.module_dropout or config.timestep_rank:
        layer.dropouts = Dropouts(
            elements=config.dropout,
            ranks=config.rank_dropout,
            layers=config.module_dropout,
            scaled=config.rank_dropout_scale,
            seed=seed,
            name=trained.name,
            least_rank=config.timestep_rank,
        )
    return layer
