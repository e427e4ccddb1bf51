"""Concept Dataset: a folder of pictures, what it is for, and how it is captioned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..trainer_core.config import CaptionConfig
from ..trainer_core.workflow.settings import plain_path, read_concept, slashed
from .comfyui import folders
from .node import Node
from .schema import schema
from .sockets import DatasetSocket, complaint, io

# Inputs that say which files to watch have no socket: fingerprint_inputs sees no linked values.

NODE = "Concept Dataset"


class AtelierConceptDataset(Node):
    """One folder of pictures; several of these are chained by their DATASET sockets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierConceptDataset",
            "A folder of pictures of one character, style or thing, each with a caption. Link another "
            "Concept Dataset into dataset to train several together.",
            ["training images", "captions", "folder", "trigger word", "train lora", "atelier"],
            [
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="All concepts so far, for Train LoRA and Dataset Preview."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None, *, captions_from: object = None) -> bool | str:
        """Refuse a folder that does not exist before anything runs; a linked value is not known yet."""
        # ComfyUI repeats the sentence for every positional input, and passes the dynamic combo in any case.
        del captions_from
        return complaint(folder, lambda text: folders.find_folder(text, NODE))

    @classmethod
    def fingerprint_inputs(
        cls,
        folder: str = "",
        captions_from: Mapping[str, str] | None = None,
        **_: object,
    ) -> str:
        """Hash what lies in the folder, so that a changed file runs the node again."""
        given = captions_from or {}
        captions = CaptionConfig(
            source="table" if given.get("caption_file", "").strip() else "text_file",
            file=slashed(plain_path(given.get("caption_file", ""), CaptionConfig.named("file"))),
        )
        return folders.fingerprint(folders.find_folder(folder, NODE), captions=captions)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Return the concepts so far and this one."""
        return io.NodeOutput(read_concept(folders, **inputs))
