"""Captions: how the captions of a concept are read and change from visit to visit."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_captions
from .node import Node
from .schema import outputs_of, schema
from .sockets import io


class AtelierCaptions(Node):
    """Build settings of captions."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierCaptions",
            "How captions are read, and how they change each time that a picture is trained: shuffled and dropped "
            "tags, empty captions, several lines. Link it into one or more Concept Datasets.",
            ["tags", "shuffle", "caption dropout", "keep tokens", "wildcards", "train lora", "atelier"],
            outputs_of("AtelierCaptions", "For Concept Dataset and Concept from Images."),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Return the settings."""
        return io.NodeOutput(read_captions(**inputs))
