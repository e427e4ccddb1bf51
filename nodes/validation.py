"""Validation: measure the loss of pictures that are not trained, and stop by it."""

from __future__ import annotations

from typing import Any

from .node import Node
from .schema import outputs_of, schema
from .sockets import TrainPart, io


class AtelierValidation(Node):
    """Measure the validation loss during a run, and keep the best LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierValidation",
            "Optional: how often the validation loss is measured, and whether the run stops by it or keeps the best "
            "LoRA. Needs validation_share, or a Concept Dataset whose role is validation.",
            ["early stopping", "validation loss", "best checkpoint", "overfitting", "atelier"],
            outputs=outputs_of("AtelierValidation", "For Train LoRA's input validation."),
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(TrainPart(values))
