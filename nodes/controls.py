"""Control Pictures: train an edit model, or a slider, on pairs of pictures."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import CONTROL_FOLDERS, read_controls
from .comfyui import folders
from .dataset import FOLDER_RULE
from .node import Node
from .sockets import CATEGORY, DatasetSocket, complaint, io, titled

NODE = "Control Pictures"


class AtelierControlPictures(Node):
    """Set the control pictures of a dataset's concepts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierControlPictures",
            display_name=titled(NODE),
            category=CATEGORY,
            description="Trains an edit model on pairs: it sees one to three control pictures and the caption, and "
            "learns to make the picture. Applies to every concept linked in that has no control pictures yet. For "
            "FLUX.1 Kontext, FLUX.2, Qwen-Image-Edit and OmniGen2 by Use Connected Model. With use slider it trains a "
            "slider of any model: more of the pictures at strength 1, more of the control pictures at -1.",
            search_aliases=[
                *("edit model", "kontext", "qwen edit", "reference", "pairs", "before after"),
                *("slider", "concept slider", "image slider", "atelier"),
            ],
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The concepts that get control pictures."),
                io.String.Input(
                    "folder",
                    default="",
                    placeholder="my_character_before",
                    socketless=True,
                    tooltip="The folder of control pictures. That of cat.jpg is cat with any picture ending, in the "
                    f"same sub-folder or directly in the folder. {FOLDER_RULE}",
                ),
                *(
                    io.String.Input(
                        name,
                        default="",
                        socketless=True,
                        optional=True,
                        tooltip=f"The folder of a {number} control picture of each picture. Empty = none.",
                    )
                    for name, number in zip(CONTROL_FOLDERS[1:], ("second", "third"), strict=True)
                ),
                io.Combo.Input(
                    "fit",
                    options=["as_picture", "whole"],
                    default="as_picture",
                    optional=True,
                    tooltip="as_picture: control pictures are cut exactly as their pictures, so both need the same "
                    "shape. whole: they may have any shape and are not cut; for references that show a subject "
                    "elsewhere. Both are mirrored together with their pictures.",
                ),
                io.Combo.Input(
                    "use",
                    options=["edit", "slider"],
                    default="edit",
                    optional=True,
                    tooltip="edit (default): an edit model sees the control pictures. slider: each shows less of what "
                    "its picture shows more of, as a neutral face beside a smile; the LoRA draws more of it at "
                    "strength 1 and less at -1, with any model. One folder, fit as_picture. Steps take about twice "
                    "as long.",
                ),
            ],
            outputs=[
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
        return complaint(folder, lambda text: folders.find_folder(text, NODE))

    @classmethod
    def fingerprint_inputs(cls, folder: str = "", folder_2: str = "", folder_3: str = "", **_: object) -> str:
        """Hash the control pictures."""
        named = [folders.find_folder(each, NODE) for each in (folder, folder_2, folder_3) if each]
        return " ".join(map(folders.fingerprint, named))

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Set these control pictures on every concept that has none yet."""
        return io.NodeOutput(read_controls(folders, **inputs))
