"""Pictures: how the pictures of a concept are read and weighted."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_pictures
from .node import Node
from .schema import outputs_of, schema
from .sockets import io


class AtelierPictures(Node):
    """Build settings of pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierPictures",
            "How the pictures of a concept are read and weighted: mirrored copies, sizes of their own, sub-folders, "
            "pictures that cannot be used. Link it into one or more Concept Datasets.",
            ["flip", "mirror", "loss weight", "resolution", "background", "train lora", "atelier"],
            outputs_of("AtelierPictures", "For Concept Dataset and Concept from Images."),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Return the settings."""
        return io.NodeOutput(read_pictures(**inputs))
