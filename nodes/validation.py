"""Validation: measure the loss of pictures that are not trained, and stop by it."""

from __future__ import annotations

from typing import Any

from .node import Node
from .sockets import CATEGORY, Validation, ValidationSocket, io, titled

DEFAULTS = Validation()


class AtelierValidation(Node):
    """Measure the validation loss during a run, and keep the best LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierValidation",
            display_name=titled("Validation"),
            category=CATEGORY,
            description="Optional: how often the validation loss is measured, and whether the run stops by it or keeps "
            "the best LoRA. Needs validation_share, or a Concept Dataset whose role is validation.",
            search_aliases=["early stopping", "validation loss", "best checkpoint", "overfitting", "atelier"],
            inputs=[
                io.Int.Input(
                    "validate_every",
                    default=DEFAULTS.validate_every,
                    min=0,
                    max=1_000_000,
                    tooltip="Steps between two measurements of the validation loss, with a concept of the role "
                    "validation. 0 = at the start and the end only.",
                ),
                io.Int.Input(
                    "early_stop_patience",
                    default=DEFAULTS.early_stop_patience,
                    min=0,
                    max=1000,
                    tooltip="Early stopping: ends the run after this many measurements in a row without a lower "
                    "validation loss, and keeps the best LoRA. 3 to 5 suit most. Needs validate_every. 0 = off.",
                ),
                io.Float.Input(
                    "early_stop_min_improvement",
                    default=DEFAULTS.early_stop_min_improvement,
                    min=0.0,
                    max=0.9,
                    step=0.001,
                    round=0.0001,
                    tooltip="For early_stop_patience: the share by which the validation loss must fall, 0 to 0.9: 0.01 "
                    "= one per cent below the lowest so far. 0 = any fall counts.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "keep_best",
                    default=DEFAULTS.keep_best,
                    tooltip="On: the LoRA is the one of the lowest validation loss instead of the last; the last one "
                    "is saved beside it as <name>-last. Needs validate_every. early_stop_patience turns it on.",
                ),
                io.Int.Input(
                    "validation_levels",
                    default=DEFAULTS.validation_levels,
                    min=0,
                    max=20,
                    optional=True,
                    tooltip="Measures the validation loss at so many noise levels one by one, each a curve of the log "
                    "and of the run's graph: little noise shows detail, much noise composition. 8 is usual. 0 "
                    "(default) = only their mean, which stays the same. Takes a pass for each picture and level.",
                    advanced=True,
                ),
                io.Float.Input(
                    "validation_share",
                    default=DEFAULTS.validation_share,
                    min=0.0,
                    max=0.9,
                    step=0.05,
                    round=0.001,
                    optional=True,
                    tooltip="Share of the training pictures that is held out for validation, 0 to 0.9, of every "
                    "concept alike. The seed and the pictures' content choose which; the report names them. 0 = none.",
                ),
            ],
            outputs=[ValidationSocket.Output(display_name="VALIDATION", tooltip="For Train LoRA's input validation.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(Validation(**values))
