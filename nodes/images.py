"""Concept from Images: train on pictures and captions that other nodes of the graph made."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..trainer_core.common.files import move
from ..trainer_core.common.wording import count as counted
from ..trainer_core.config import MASK_SUFFIX, ConceptConfig, DatasetConfig, MaskConfig
from ..trainer_core.config.forms import FORMS
from ..trainer_core.config.rows import rows_of
from ..trainer_core.workflow.settings import OPEN_CAPTIONS, PicturePart
from .comfyui import folders, kept
from .node import Node
from .schema import inputs_of
from .sockets import CATEGORY, DatasetSocket, io, titled

OF_CONCEPT = {each.input: each for each in FORMS["AtelierConceptDataset"].inputs}
SHARED = [OF_CONCEPT[name] for name in ("trigger_word", "repeats", "role")]
LINKED = [OF_CONCEPT[name] for name in ("dataset", "caption_settings", "picture_settings")]
WEIGHTS = [replace(rows_of(MaskConfig)[name], advanced=True) for name in ("unmasked_weight", "unmasked_probability")]


class AtelierImageConcept(Node):
    """Make a concept of IMAGE batches, MASK batches and caption strings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierImageConcept",
            display_name=titled("Concept from Images"),
            category=CATEGORY,
            description="Trains on pictures that other nodes load, make or edit, with captions from any node that "
            "outputs text. Takes batches and lists; the pictures are kept as PNG in ComfyUI's user folder.",
            search_aliases=["image batch", "training images", "captions", "in-graph dataset", "train lora", "atelier"],
            is_input_list=True,
            inputs=[
                io.Image.Input("images", tooltip="The pictures: a batch, or a list of batches of any sizes."),
                io.String.Input(
                    "captions",
                    multiline=True,
                    default="",
                    tooltip="One line for all pictures, or one line for each, in their order; or a list of texts "
                    "from another node, one for each picture.",
                ),
                *inputs_of((*SHARED, *WEIGHTS), {}),
                io.Mask.Input(
                    "masks",
                    optional=True,
                    tooltip="Optional: a mask for each picture in their order, or one for all; white is trained.",
                ),
                *inputs_of(LINKED, {}),
            ],
            outputs=[
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="All concepts so far, for Train LoRA and Dataset Preview."
                )
            ],
        )

    @classmethod
    def execute(
        cls,
        images: list[torch.Tensor],
        captions: list[str],
        masks: list[torch.Tensor] | None = None,
        dataset: list[DatasetConfig] | None = None,
        **values: list[Any],
    ) -> io.NodeOutput:
        """Write the pictures to files named by their content; output them as a concept."""
        pictures = [picture for batch in images for picture in batch]
        covers = [mask for batch in masks or [] for mask in batch]
        texts = captions_of(captions, len(pictures))
        folder = save_pictures(pictures, texts, masks_of(covers, pictures))
        one = {name: value[0] for name, value in values.items()}
        own = one.get("picture_settings", PicturePart({})).values
        concept = ConceptConfig(
            folder=str(folder),
            captions=one.get("caption_settings", OPEN_CAPTIONS).replace(prefix=one["trigger_word"]),
            masks=MaskConfig(**{each.name: one[each.name] for each in WEIGHTS}) if covers else None,
            **{name: one[name] for name in ("repeats", "role")},
            **own,
        )
        return io.NodeOutput(DatasetConfig(concepts=(*(dataset[0].concepts if dataset else ()), concept)))


def captions_of(captions: list[str], count: int) -> list[str]:
    """Match captions to `count` pictures: a list of texts, the lines of one text, or one for all.

    The lines of a text become one: they are one caption, where a file of several lines is a choice of captions.
    """
    texts = [" ".join(text.split()) for text in captions]
    if len(captions) == 1 and count > 1:
        texts = [line.strip() for line in captions[0].splitlines() if line.strip()] or [""]
    if len(texts) == 1:
        return texts * count
    if len(texts) != count:
        raise ValueError(
            f"Concept from Images has {counted(count, 'picture')} and {counted(texts, 'caption')}; set captions to one "
            "line for each picture, or to a single line."
        )
    return texts


def masks_of(masks: list[torch.Tensor], pictures: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Match masks to pictures, one for each or one for all; raises ValueError where sizes differ."""
    if not masks:
        return [None] * len(pictures)
    if len(masks) == 1:
        masks = masks * len(pictures)
    if len(masks) != len(pictures):
        raise ValueError(
            f"Concept from Images has {counted(pictures, 'picture')} and {counted(masks, 'mask')}; link one mask for "
            "each picture, or a single one."
        )
    for number, (mask, picture) in enumerate(zip(masks, pictures, strict=True)):
        if mask.shape != picture.shape[:2]:
            (height, width), (rows, columns) = mask.shape, picture.shape[:2]
            raise ValueError(
                f"Mask {number + 1} of Concept from Images is {width}x{height} and its picture {columns}x{rows}; "
                "resize the mask to the picture."
            )
    return list(masks)


def save_pictures(
    pictures: Sequence[torch.Tensor], captions: Sequence[str], masks: Sequence[torch.Tensor | None]
) -> Path:
    """Write pictures (H, W, C) in 0..1, captions and masks (H, W) to a folder named by their content; return it.

    What the limit of LoRA Atelier leaves no room for is deleted, the least recently used first.
    """
    root = folders.pictures_folder()
    root.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=root, prefix=".new-", ignore_cleanup_errors=True) as temporary:
        new = Path(temporary) / "pictures"
        new.mkdir()
        digits = len(str(len(pictures)))
        for i, (picture, caption, mask) in enumerate(zip(pictures, captions, masks, strict=True)):
            name = str(i + 1).zfill(digits)
            files = {f"{name}.png": _png(picture), f"{name}.txt": caption.encode()}
            if mask is not None:
                files[f"{name}{MASK_SUFFIX}"] = _png(mask[..., None])
            for file, data in files.items():
                (new / file).write_bytes(data)
                digest.update(f"{file} {len(data)} ".encode() + data)
        folder = root / digest.hexdigest()[:32]
        if not folder.is_dir():
            move(new, folder)
    kept.mark_used([folder])
    kept.make_room()
    return folder


def _png(pixels: torch.Tensor) -> bytes:
    """Encode (H, W, C) values in 0..1 as PNG, rounded as ComfyUI's SaveImage does."""
    values = np.clip(255.0 * pixels.detach().cpu().float().numpy(), 0, 255).astype(np.uint8)
    buffer = BytesIO()
    Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values).save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()
