"""Optimizer: the rule and the learning rates of a run."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import OPTIMIZERS
from ..trainer_core.workflow.settings import read_optimizer
from .node import Node
from .schema import schema
from .sockets import OptimizerSocket, io


class AtelierOptimizer(Node):
    """Choose the optimizer and its learning rates."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierOptimizer",
            "Which optimizer trains the LoRA, and at which learning rates.",
            [*OPTIMIZERS, "learning rate", "ema", "train lora", "kohya", "atelier"],
            [OptimizerSocket.Output(display_name="OPTIMIZER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_optimizer(**inputs))
