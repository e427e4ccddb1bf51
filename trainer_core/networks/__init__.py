"""What is attached to a base model and trained."""

from .attach import Network

__all__ = ["Network"]
