"""Memory: trade speed for memory."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import MemoryConfig
from .node import Node
from .schema import schema
from .sockets import MemorySocket, io


class AtelierMemory(Node):
    """Fix memory settings that are automatic otherwise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierMemory",
            "Optional: trades time for memory. Train LoRA estimates what a run needs and picks the fastest "
            "settings that fit; here you can fix each of them. The trained weights stay the same but for rounding.",
            [
                "vram",
                "gradient checkpointing",
                "offload",
                "torch compile",
                "xformers",
                "low memory",
                "atelier",
            ],
            [MemorySocket.Output(display_name="MEMORY", tooltip="For Train LoRA's input memory.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(MemoryConfig(**values))
