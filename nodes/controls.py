"""Control Pictures: train an edit model, or a slider, on pairs of pictures."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import is_column
from ..trainer_core.workflow.settings import read_controls
from .comfyui import folders
from .node import Node
from .schema import schema
from .sockets import DatasetSocket, complaint, io

NODE = "Control Pictures"


class AtelierControlPictures(Node):
    """Set the control pictures of a dataset's concepts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierControlPictures",
            "Trains an edit model on pairs: it sees one to three control pictures and the caption, and "
            "learns to make the picture. Applies to every concept linked in that has no control pictures yet. For "
            "FLUX.1 Kontext, Canny and Depth, FLUX.2, Qwen-Image-Edit, OmniGen2, InstructPix2Pix and Wan I2V by Use "
            "Connected Model. With use slider it trains a slider of any model: more of the pictures at strength 1, "
            "more of the control pictures at -1.",
            [
                *("edit model", "kontext", "qwen edit", "reference", "pairs", "before after"),
                *("slider", "concept slider", "image slider", "atelier"),
            ],
            [
                DatasetSocket.Output(
                    display_name="DATASET",
                    tooltip="The concepts with control pictures, for Train LoRA and Dataset Preview.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        """Refuse a folder that does not exist before anything runs."""
        # ComfyUI repeats the sentence for every input that is named here; the other folders are checked when it runs.
        return complaint(folder, lambda text: is_column(text) or folders.find_folder(text, NODE))

    @classmethod
    def fingerprint_inputs(cls, folder: str = "", folder_2: str = "", folder_3: str = "", **_: object) -> str:
        """Hash the control pictures."""
        named = [
            folders.find_folder(each, NODE) for each in (folder, folder_2, folder_3) if each and not is_column(each)
        ]
        return " ".join(map(folders.fingerprint, named))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Set these control pictures on every concept that has none yet."""
        return io.NodeOutput(read_controls(folders, **inputs))
