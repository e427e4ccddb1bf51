"""The layers of a network: one file for each algorithm, all listed here.

The words of each, what it takes and what ComfyUI makes of its file are its row of `config/algorithms.py`. A matrix that
all layers share is built and held by `networks/network.py`, and handed to each by `networks/build.py`.
"""

from __future__ import annotations

from .form import Parts
from .full import FullLayer
from .glora import GloraLayer
from .ia3 import Ia3Layer
from .layer import NetworkLayer
from .loha import LohaLayer
from .lokr import LokrLayer
from .lora import LoraLayer
from .oft import BoftLayer, OftLayer

LAYERS: dict[str, type[NetworkLayer]] = {  # by the names of config/algorithms.py
    "lora": LoraLayer,
    "loha": LohaLayer,
    "lokr": LokrLayer,
    "glora": GloraLayer,
    "ia3": Ia3Layer,
    "oft": OftLayer,
    "boft": BoftLayer,
    "full": FullLayer,  # the last: a difference of the bias may lie beside layers of other kinds
}


def algorithm_of(parts: Parts) -> str:
    """Find the algorithm whose layers have these parts in files; raises ValueError for none."""
    for name, layer in LAYERS.items():
        if layer.holds(parts):
            return name
    raise ValueError(f"No algorithm has layers of {', '.join(sorted(parts))}.")


def layer_of(parts: Parts) -> type[NetworkLayer]:
    """Find the class of layers that have these parts in files; raises ValueError for none."""
    return LAYERS[algorithm_of(parts)]
