"""Clips: which frames of the clips of a concept are trained."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_clips
from .node import Node
from .schema import outputs_of, schema
from .sockets import io


class AtelierClips(Node):
    """Build settings of clips."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierClips",
            "Which frames of clips are trained, for models of clips such as Wan: how many, at which rate, from where. "
            "Link it into one or more Concept Datasets. A picture is a clip of one frame.",
            ["video", "frames", "wan", "hunyuan video", "ltx video", "train lora", "atelier"],
            outputs_of("AtelierClips", "For Concept Dataset."),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Return the settings."""
        return io.NodeOutput(read_clips(**inputs))
