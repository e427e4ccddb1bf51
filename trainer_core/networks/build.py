"""Build the layer that LoRA Config asks for."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..config import LoraConfig
from .choose import Target
from .layers import LAYERS
from .layers.dropout import Dropouts
from .layers.full import NormLayer
from .layers.layer import NetworkLayer
from .layers.shape import is_norm


def _plain_layer(target: Target, config: LoraConfig, seed: int) -> NetworkLayer:
    """Build the layer of the algorithm, without DoRA and dropout."""
    kind = LAYERS[config.algorithm]
    own = {"rank": target.rank, "alpha": target.alpha, "name": target.name, "seed": seed}
    given = {name: own[name] if name in own else getattr(config, name) for name in kind.takes}
    build: Callable[..., NetworkLayer] = kind
    return build(target.module, **given)


def build_layer(target: Target, config: LoraConfig, seed: int, *, by_output: bool = False) -> NetworkLayer:
    """Build the layer for one frozen layer; a new one changes nothing. Norms get a `NormLayer`, whatever the algorithm.

    by_output: a DoRA has a magnitude per output, as some files of other programs have.
    """
    if is_norm(target.module):
        layer: NetworkLayer = NormLayer(target.module)
    else:
        if config.rs_lora:
            # rank-stabilised (Kalajdzievski 2023): alpha / sqrt(rank) = (alpha * sqrt(rank)) / rank, as loaders scale
            target = target._replace(alpha=target.alpha * math.sqrt(target.rank))
        layer = _plain_layer(target, config, seed)
        if config.dora:
            layer.decompose(target.module, by_output=by_output)
    if config.dropout or config.rank_dropout or config.module_dropout or config.timestep_rank:
        layer.dropouts = Dropouts(
            elements=config.dropout,
            ranks=config.rank_dropout,
            layers=config.module_dropout,
            scaled=config.rank_dropout_scale,
            seed=seed,
            name=target.name,
            least_rank=config.timestep_rank,
        )
    return layer
