"""Saves & Samples: when a run is saved and draws samples, and where the LoRA goes."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import SavesConfig, parse_prompts, setting
from ..trainer_core.workflow.settings import read_saves, split_name
from .node import Node
from .schema import schema
from .sockets import SavesSocket, complaint, io


class AtelierSaves(Node):
    """Set when a run is saved and draws samples, which saves are kept, and the LoRA's file name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierSaves",
            "Optional: the sample pictures of a run, how often it draws them and is saved, which saves are kept, and "
            "the LoRA's file. Nothing here changes the trained weights.",
            ["checkpoint", "save every", "preview", "output name", "train lora", "atelier"],
            outputs=[SavesSocket.Output(display_name="SAVES", tooltip="For Train LoRA's input saves.")],
        )

    @classmethod
    def validate_inputs(cls, sample_prompts: str | None = None, file_name: str | None = None) -> bool | str:
        """Refuse wrong prompts, and a file name that leads out of the LoRA folder; linked ones are not known yet."""
        # ComfyUI repeats what is returned for both inputs, so each sentence names its own.
        found = (
            complaint(sample_prompts, lambda text: parse_prompts(text, setting("sample.prompts"))),
            complaint(file_name, lambda text: SavesConfig(**split_name(text))),
        )
        return " ".join(each for each in found if isinstance(each, str)) or True

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_saves(**inputs))
