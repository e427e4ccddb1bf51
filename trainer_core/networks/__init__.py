"""What is attached to a base model and trained, and what files hold of it."""

from .attach import Network, Start
from .choose import named_layers
from .embeddings import Embeddings

__all__ = ["Embeddings", "Network", "Start", "named_layers"]
