"""What is attached to a base model and trained, and what files hold of it."""

from .attach import Network, Start
from .choose import named_layers
from .remarks import remarks_on_algorithm

__all__ = ["Network", "Start", "named_layers", "remarks_on_algorithm"]
