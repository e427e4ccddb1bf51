"""What is attached to a base model and trained, and what files hold of it."""

from .attach import Network, Start
from .blocks import block_names, parse_numbers, remarks_on_blocks
from .choose import named_layers
from .embeddings import Embeddings
from .remarks import remarks_on_algorithm

__all__ = [
    "Embeddings",
    "Network",
    "Start",
    "block_names",
    "named_layers",
    "parse_numbers",
    "remarks_on_algorithm",
    "remarks_on_blocks",
]
