"""Mask Loader: train only a part of each picture."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import MASK_SUFFIX
from ..trainer_core.workflow.settings import read_masks
from .comfyui import folders
from .dataset import FOLDER_RULE
from .node import Node
from .sockets import CATEGORY, DatasetSocket, complaint, io, titled

NODE = "Mask Loader"


class AtelierMaskLoader(Node):
    """Set the masks of a dataset's concepts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierMaskLoader",
            display_name=titled(NODE),
            category=CATEGORY,
            description="Train only a part of each picture: white is trained, black is not. Applies to every concept "
            "linked in that has no masks yet.",
            search_aliases=["masked training", "masked loss", "alpha mask", "train lora", "atelier"],
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The concepts that get masks."),
                io.Combo.Input(
                    "source",
                    options=["file", "alpha"],
                    default="file",
                    tooltip="file: a mask picture for each picture. alpha: the transparency of the pictures "
                    "themselves; opaque is trained.",
                ),
                io.String.Input(
                    "suffix",
                    default=MASK_SUFFIX,
                    tooltip="With source file: the mask of cat.jpg is cat + this, for example cat-masklabel.png. "
                    "Several, separated by commas, are tried in this order. Each must end like a picture file.",
                ),
                io.String.Input(
                    "folder",
                    default="",
                    placeholder="beside the pictures",
                    socketless=True,
                    tooltip="With source file: the folder that holds the masks. Empty = they lie beside the pictures. "
                    f"{FOLDER_RULE}",
                ),
                io.Boolean.Input("invert", default=False, tooltip="On: black is trained, white is not."),
                io.Combo.Input(
                    "missing",
                    options=["error", "ones", "leave_out"],
                    default="error",
                    tooltip="A picture without a mask. error: stop before training and name it. ones: train all of "
                    "it. leave_out: train without that picture and list it.",
                ),
                io.Float.Input(
                    "unmasked_weight",
                    default=0.1,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="How much the rest of the picture still counts, 0 to 1. A little keeps backgrounds intact.",
                ),
                io.Float.Input(
                    "unmasked_probability",
                    default=0.1,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Share of visits that train the whole picture, 0 to 1.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "normalize_masked_area",
                    default=False,
                    tooltip="On: small and large masks teach equally strongly; the loss is divided by the masked "
                    "share of the picture.",
                    advanced=True,
                ),
                io.Float.Input(
                    "threshold",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=1e-4,
                    optional=True,
                    tooltip="0 = grey levels are weights. Above 0: pixels at least this bright are trained fully, "
                    "the others not at all.",
                    advanced=True,
                ),
                io.Float.Input(
                    "prior_weight",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=1e-4,
                    optional=True,
                    tooltip="Weight of a loss that keeps the unmasked part as the base model draws it (masked "
                    "prior preservation). 0 = off; above 0 each step takes about a third longer.",
                    advanced=True,
                ),
            ],
            outputs=[
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
