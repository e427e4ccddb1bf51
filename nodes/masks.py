"""Mask Loader: train only a part of each picture."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_masks
from .comfyui import folders
from .node import Node
from .schema import schema
from .sockets import DatasetSocket, complaint, io

NODE = "Mask Loader"


class AtelierMaskLoader(Node):
    """Set the masks of a dataset's concepts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierMaskLoader",
            "Train only a part of each picture: white is trained, black is not. Applies to every concept "
            "linked in that has no masks yet.",
            ["masked training", "masked loss", "alpha mask", "train lora", "atelier"],
            [
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="The concepts with masks, for Train LoRA and Dataset Preview."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        """Refuse a folder that does not exist before anything runs."""
        return complaint(folder, lambda text: text and folders.find_folder(text, NODE))

    @classmethod
    def fingerprint_inputs(cls, folder: str = "", **_: object) -> str:
        """Hash the masks of a separate folder; Concept Dataset watches the others."""
        return folders.fingerprint(folders.find_folder(folder, NODE)) if folder else ""

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Set these masks on every concept that has none yet."""
        return io.NodeOutput(read_masks(folders, **inputs))
