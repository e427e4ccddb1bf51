"""What is attached to a base model and trained, and what files hold of it."""

from .blocks import parse_numbers, remarks_on_blocks
from .choose import Target, choose_targets
from .embeddings import Embeddings
from .network import Network, Start
from .remarks import remarks_on_algorithm

__all__ = [
    "Embeddings",
    "Network",
    "Start",
    "Target",
    "choose_targets",
    "parse_numbers",
    "remarks_on_algorithm",
    "remarks_on_blocks",
]
