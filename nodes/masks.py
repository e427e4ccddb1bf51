"""Mask Loader: which part of each picture is trained."""

from __future__ import annotations

import os
from typing import Any

from ..trainer_core.config import DatasetConfig, MaskConfig
from ..trainer_core.images import picture_extensions
from . import bridge
from .dataset import FOLDER_RULE, split_list
from .sockets import CATEGORY, DatasetSocket, complaint, io


class AtelierMaskLoader(io.ComfyNode):
    """Say which part of each picture is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierMaskLoader",
            display_name="Mask Loader",
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
                    default="-masklabel.png",
                    tooltip="With source file: the mask of cat.jpg is cat + this, for example cat-masklabel.png. "
                    "Several with commas between are tried in this order. Each must end as a picture does.",
                ),
                io.String.Input(
                    "folder",
                    default="",
                    placeholder="beside the pictures",
                    socketless=True,
                    tooltip="With source file: the folder that holds the masks. Empty = they lie beside the pictures. "
                    f"{FOLDER_RULE}",
                ),
                io.Boolean.Input("invert", default=False, tooltip="Train black and leave out white."),
                io.Combo.Input(
                    "missing",
                    options=["error", "ones", "leave_out"],
                    default="error",
                    tooltip="A picture without a mask: error stops before training and names it, ones trains all of "
                    "it, leave_out trains without that picture and lists it.",
                ),
                io.Float.Input(
                    "unmasked_weight",
                    default=0.1,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="How much the rest of the picture still counts, 0 to 1. A little keeps backgrounds sane.",
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
                    tooltip="Let small and large masks teach equally strongly: the loss is divided by the masked "
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
                    tooltip="0 keeps grey levels as weights between. Above 0, what is at least this bright is trained "
                    "fully and the rest not at all.",
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
                    tooltip="Holds what the mask leaves out to what the base model makes of it (masked prior "
                    "preservation). 0 = off; above 0 each step takes about a third longer.",
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
        return complaint(lambda: folder and bridge.find_folder(folder))

    @classmethod
    def fingerprint_inputs(cls, folder: str, **_: object) -> str:
        """Notice every mask that changes in a folder of its own; Concept Dataset watches the others."""
        return bridge.fingerprint(bridge.find_folder(folder)) if folder else ""

    @classmethod
    def execute(cls, dataset: DatasetConfig, folder: str, suffix: str, **values: Any) -> io.NodeOutput:
        """Return the dataset with masks on every concept that has none yet."""
        suffixes = split_list(suffix)
        # Only files with these endings are fingerprinted, so that an edited mask trains again.
        if wrong := [s for s in suffixes if os.path.splitext("a" + s.lower())[1] not in picture_extensions()]:
            raise ValueError(f"The mask suffix is {wrong[0]!r}; it must end as pictures do, as -masklabel.png.")
        masks = MaskConfig(folder=str(bridge.find_folder(folder)) if folder else "", suffixes=suffixes, **values)
        concepts = (c if c.masks else c.replace(masks=masks) for c in dataset.concepts)
        return io.NodeOutput(DatasetConfig(concepts=tuple(concepts)))
