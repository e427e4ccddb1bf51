"""Scheduler: the learning rate's curve over the run."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_scheduler
from .node import Node
from .schema import schema
from .sockets import SchedulerSocket, io


class AtelierScheduler(Node):
    """Choose the learning rate's curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierScheduler",
            "How the learning rate changes from the first step to the last; drawn on the node.",
            ["learning rate schedule", "cosine", "rex", "restarts", "warmup", "train lora", "atelier"],
            [SchedulerSocket.Output(display_name="SCHEDULER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_scheduler(**values))
