"""Build the layer that LoRA Config asks for, and find the algorithm of a layer in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from ..config import LoraConfig
from .choose import TrainedLayer
from .layers.dropout import Dropouts
from .layers.full import FullLayer, NormLayer
from .layers.glora import GloraLayer
from .layers.ia3 import Ia3Layer
from .layers.layer import NetworkLayer
from .layers.loha import LohaLayer
from .layers.lokr import LokrLayer
from .layers.lora import LoraLayer
from .layers.oft import BoftLayer, OftLayer
from .layers.shape import is_norm

# Algorithms with a rank and an alpha, and the further settings of their layers.
RANKED: dict[str, tuple[Callable[..., NetworkLayer], tuple[str, ...]]] = {
    "lora": (LoraLayer, ("tucker", "use_scalar", "init")),
    "loha": (LohaLayer, ("tucker", "use_scalar")),
    "lokr": (LokrLayer, ("factor", "decompose_both", "full_matrix", "tucker", "use_scalar")),
    "glora": (GloraLayer, ("use_scalar",)),
}


def _plain_layer(trained: TrainedLayer, config: LoraConfig, seed: int) -> NetworkLayer:
    """Build the layer of the algorithm, without DoRA and dropout."""
    if config.algorithm in RANKED:
        kind, names = RANKED[config.algorithm]
        settings = {name: getattr(config, name) for name in names}
        return kind(trained.module, trained.rank, trained.alpha, name=trained.name, seed=seed, **settings)
    if config.algorithm == "ia3":
        return Ia3Layer(trained.module, name=trained.name)
    if config.algorithm == "full":
        return FullLayer(trained.module)
    kind = {"oft": OftLayer, "boft": BoftLayer}[config.algorithm]
    return kind(trained.module, trained.rank, constraint=config.constraint)


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


def algorithm_of(parts: Mapping[str, Tensor]) -> str:
    """Find the algorithm whose layers have these parts in files; "" for none."""
    if "oft_blocks" in parts:
        return "oft" if parts["oft_blocks"].ndim == 3 else "boft"
    signs = {"down": "lora", "hada_w1_a": "loha", "a1": "glora", "diff": "full", "diff_b": "full"}
    signs |= {"lokr_w1": "lokr", "lokr_w1_a": "lokr"}
    return next((algorithm for part, algorithm in signs.items() if part in parts), "")
