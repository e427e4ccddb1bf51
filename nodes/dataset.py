"""The dataset: concepts, their masks, and a look at all of it before the run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from ..trainer_core.config import ConceptConfig, DatasetConfig, MaskConfig, TrainConfig
from ..trainer_core.scan import PICTURE_EXTENSIONS, fingerprint, scan
from . import bridge
from .sockets import CATEGORY, DatasetSocket, complaint, io, ui

# Inputs that say which files to watch have no socket: fingerprint_inputs sees no linked values.

FOLDER_RULE = (
    "An absolute path, or a folder inside ComfyUI's input/ or datasets/ folder. Nothing is ever written there."
)


class AtelierConceptDataset(io.ComfyNode):
    """One folder of pictures; several of these are chained by their DATASET sockets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierConceptDataset",
            display_name="Concept Dataset",
            category=CATEGORY,
            description="A folder of pictures of one character, style or thing, each with a caption. Link another "
            "Concept Dataset into dataset to train several together.",
            search_aliases=["training images", "captions", "folder", "trigger word", "train lora", "atelier"],
            inputs=[
                io.String.Input(
                    "folder",
                    default=bridge.EXAMPLE,
                    socketless=True,
                    placeholder="my_character",
                    tooltip=f"The folder that holds your pictures. {FOLDER_RULE} {bridge.EXAMPLE} is a small example "
                    "that comes with the pack.",
                ),
                io.String.Input(
                    "caption_prefix",
                    default="",
                    placeholder="trigger word",
                    tooltip="The trigger word you will prompt with: put in front of every caption, with a space "
                    "between. Stays in front when tags are shuffled. Empty = nothing.",
                ),
                io.Combo.Input(
                    "caption_source",
                    options=["text_file", "file_name", "folder_name", "none"],
                    default="text_file",
                    tooltip="text_file: a text file of the same name beside each picture. file_name and folder_name: "
                    "the name is the caption. none: captions are empty but for the prefix and suffix.",
                ),
                io.Int.Input(
                    "repeats",
                    default=1,
                    min=1,
                    max=100_000,
                    tooltip="How often each picture is visited in an epoch. Balances concepts of different size.",
                ),
                io.Boolean.Input(
                    "flip",
                    default=False,
                    tooltip="Mirror pictures left to right at half of the visits. Not for faces, text or anything "
                    "whose sides differ.",
                ),
                io.Boolean.Input(
                    "shuffle_tags",
                    default=False,
                    tooltip="Give the comma-separated tags of a caption a new order at each visit.",
                ),
                io.Int.Input(
                    "keep_tags",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="How many tags at the beginning stay where they are, are never shuffled or left out.",
                    advanced=True,
                ),
                io.Float.Input(
                    "tag_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Chance to leave out each other tag at a visit, 0 to 1.",
                    advanced=True,
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Chance that a visit has no caption at all, 0 to 1. 0.05 to 0.1 helps styles.",
                    advanced=True,
                ),
                io.String.Input(
                    "caption_suffix",
                    default="",
                    tooltip="Put behind every caption. Empty = nothing.",
                    advanced=True,
                ),
                io.String.Input(
                    "caption_extension",
                    default=".txt",
                    socketless=True,
                    tooltip="Ending of the caption files, with its dot: .txt, .caption, .tags.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "missing_caption",
                    options=["error", "empty"],
                    default="error",
                    tooltip="A picture without a caption file: error stops before training and names it, empty trains "
                    "it with an empty caption.",
                    advanced=True,
                ),
                io.Float.Input(
                    "loss_weight",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=1e-4,
                    tooltip="Multiplies the loss of these pictures; 1 = as it is, 0 = they teach nothing.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "recursive",
                    default=True,
                    socketless=True,
                    tooltip="Also take the pictures of folders inside the folder.",
                    advanced=True,
                ),
                DatasetSocket.Input(
                    "dataset",
                    optional=True,
                    tooltip="Another Concept Dataset (or Mask Loader) to train together with this one.",
                ),
            ],
            outputs=[
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="All concepts so far, for Train LoRA and Dataset Preview."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None, caption_extension: str | None = None) -> bool | str:
        """Refuse a folder that does not exist before anything runs; a linked value is not known yet."""

        def check() -> None:
            if folder is not None:
                bridge.find_folder(folder)
            ConceptConfig(folder=folder or "", caption_extension=caption_extension or ".txt")

        return complaint(check)

    @classmethod
    def fingerprint_inputs(cls, folder: str, caption_extension: str, recursive: bool = True, **_: object) -> str:
        """Notice every picture, caption and mask that changes in the folder."""
        return _fingerprint(bridge.find_folder(folder), caption_extension, recursive)

    @classmethod
    def execute(cls, folder: str, dataset: DatasetConfig | None = None, **values: object) -> io.NodeOutput:
        """Return the concepts so far and this one."""
        concept = ConceptConfig(folder=str(bridge.find_folder(folder)), **values)
        return io.NodeOutput(DatasetConfig(concepts=(*(dataset.concepts if dataset else ()), concept)))


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
                    tooltip="With source file: the mask of cat.jpg is cat + this, for example cat-masklabel.png. It "
                    "must end with the extension of a picture.",
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
                    options=["error", "ones"],
                    default="error",
                    tooltip="A picture without a mask: error stops before training and names it, ones trains all of "
                    "it.",
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
            ],
            outputs=[
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="The concepts with masks, for Train LoRA and Dataset Preview."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, suffix: str | None = None, folder: str | None = None) -> bool | str:
        """Refuse a suffix that no mask can have and a folder that does not exist."""

        def check() -> None:
            # Only files with these endings are fingerprinted, so that an edited mask trains again.
            if suffix is not None and os.path.splitext("a" + suffix.lower())[1] not in PICTURE_EXTENSIONS:
                raise ValueError(f"The mask suffix is {suffix!r}; it must end as pictures do, as -masklabel.png.")
            if folder:
                bridge.find_folder(folder)

        return complaint(check)

    @classmethod
    def fingerprint_inputs(cls, folder: str, **_: object) -> str:
        """Notice every mask that changes in a folder of its own; Concept Dataset watches the others."""
        return _fingerprint(bridge.find_folder(folder), ".txt", recursive=True) if folder else ""

    @classmethod
    def execute(cls, dataset: DatasetConfig, folder: str, **values: object) -> io.NodeOutput:
        """Return the dataset with masks on every concept that has none yet."""
        masks = MaskConfig(folder=str(bridge.find_folder(folder)) if folder else "", **values)
        concepts = (c if c.masks else c.replace(masks=masks) for c in dataset.concepts)
        return io.NodeOutput(DatasetConfig(concepts=tuple(concepts)))


class AtelierDatasetPreview(io.ComfyNode):
    """Show what will be trained, before training."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierDatasetPreview",
            display_name="Dataset Preview",
            category=CATEGORY,
            description="Shows each picture as it will be trained: cut, mask (red is left out), size and caption; and "
            "counts what an epoch holds. Use the same resolution, bucket_step and batch_size as in Train LoRA.",
            search_aliases=["dataset check", "buckets", "captions", "train lora", "atelier"],
            is_output_node=True,
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The dataset to show."),
                io.Int.Input(
                    "resolution",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="Pixels, as in Train LoRA: pictures are scaled to about resolution x resolution.",
                ),
                io.Int.Input(
                    "bucket_step",
                    default=64,
                    min=8,
                    max=512,
                    step=8,
                    tooltip="Pixels, as in Train LoRA: the sides of all sizes are multiples of it.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Pictures per batch, as in Train LoRA; decides the number of batches in the report.",
                ),
                io.Int.Input("columns", default=4, min=1, max=16, tooltip="Pictures side by side on the sheet."),
                io.Int.Input("limit", default=24, min=1, max=500, tooltip="The most pictures on the sheet."),
            ],
            outputs=[
                io.Image.Output(display_name="SHEET", tooltip="The pictures as they will be trained, on one sheet."),
                io.String.Output(display_name="REPORT", tooltip="Counts, sizes, and what deserves a look."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, resolution: int | None = None, bucket_step: int | None = None) -> bool | str:
        """Refuse sizes that do not go together; a linked one is not known yet."""
        if resolution is None or bucket_step is None:
            return True
        return complaint(lambda: TrainConfig(resolution=resolution, bucket_step=bucket_step))

    @classmethod
    def execute(
        cls, dataset: DatasetConfig, resolution: int, bucket_step: int, batch_size: int, columns: int, limit: int
    ) -> io.NodeOutput:
        """Plan one epoch, draw its pictures and say what it holds."""
        from ..trainer_core.plan import build_plan  # here, so that ComfyUI starts fast
        from ..trainer_core.preview import render_preview

        epoch = TrainConfig(epochs=1, resolution=resolution, bucket_step=bucket_step, batch_size=batch_size)
        plan = build_plan(scan(dataset), dataset, epoch)
        sheet = to_image(render_preview(plan, dataset, columns=columns, limit=limit))
        report = plan.report()
        bridge.NodeProgress(cls.hidden.unique_id).text(report)
        shown = {**ui.PreviewImage(sheet, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        return io.NodeOutput(sheet, report, ui=shown)


def to_image(picture: object) -> torch.Tensor:
    """Return an RGB PIL picture as an IMAGE, (1, H, W, 3) in 0..1."""
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]


def _fingerprint(folder: Path, caption_extension: str, recursive: bool) -> str:
    """Return a hash over the names, sizes and times of pictures, masks and captions in a folder."""
    if not caption_extension.startswith("."):
        return "invalid"  # validate_inputs says what is wrong
    concept = ConceptConfig(folder=str(folder), caption_extension=caption_extension, recursive=recursive)
    return fingerprint(DatasetConfig(concepts=(concept,)))
