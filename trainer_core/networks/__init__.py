"""The network that a run trains: small layers attached to a frozen base model, and trained embeddings.

A new adapter kind is a row of `config/algorithms.py` and a module of `layers/`.
"""

from .blocks import parse_numbers, remarks_on_blocks
from .choose import TrainedLayer, choose_layers
from .embeddings import Embeddings
from .network import LayerWeights, Network
from .remarks import remarks_on_algorithm

__all__ = [
    "Embeddings",
    "LayerWeights",
    "Network",
    "TrainedLayer",
    "choose_layers",
    "parse_numbers",
    "remarks_on_algorithm",
    "remarks_on_blocks",
]
