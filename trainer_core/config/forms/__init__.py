"""What each node of a run shows: its rows in their order, and what it gives. Nodes and readers of workflows share it.

The order is a public format: people share workflows, and values stand in them by order alone.
"""

from . import network, pictures, run
from .form import Form

FORMS: dict[str, Form] = {**pictures.FORMS, **network.FORMS, **run.FORMS}

__all__ = ["FORMS", "Form"]
