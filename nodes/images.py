"""Concept from Images: train on pictures and captions that other nodes of the graph made."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..trainer_core.common.files import move
from ..trainer_core.common.wording import count as counted
from ..trainer_core.config import MASK_SUFFIX, ConceptConfig, DatasetConfig, MaskConfig
from ..trainer_core.config.forms import FORMS
from ..trainer_core.config.rows import rows_of
from ..trainer_core.data.films import film_of
from ..trainer_core.workflow.settings import OPEN_CAPTIONS, PicturePart
from .comfyui import folders, kept
from .node import Node
from .schema import inputs_of
from .sockets import CATEGORY, DatasetSocket, io, titled

OF_CONCEPT = {each.input: each for each in FORMS["AtelierConceptDataset"].inputs}
SHARED = [OF_CONCEPT[name] for name in ("trigger_word", "repeats", "role")]
LINKED = [OF_CONCEPT[name] for name in ("dataset", "caption_settings", "picture_settings")]
FILM = ".mkv"  # the ending of clips that are kept
MOST_RATE = 240.0  # frames per second, as of Clips
WEIGHTS = [replace(rows_of(MaskConfig)[name], advanced=True) for name in ("unmasked_weight", "unmasked_probability")]


class Frames(NamedTuple):
    """A picture, or a clip: (T, H, W, C) in 0..1, and its frames per second, 0 for a picture."""

    frames: torch.Tensor
    rate: float = 0.0


class AtelierImageConcept(Node):
    """Make a concept of IMAGE batches, VIDEO, MASK batches and caption strings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierImageConcept",
            display_name=titled("Concept from Images"),
            category=CATEGORY,
            description="Trains on pictures that other nodes load, make or edit, with captions from any node that "
            "outputs text. Takes batches, lists and videos; they are kept without loss in ComfyUI's user folder.",
            search_aliases=[
                "image batch",
                "video",
                "training images",
                "captions",
                "in-graph dataset",
                "train lora",
                "atelier",
            ],
            is_input_list=True,
            inputs=[
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="The pictures: a batch, or a list of batches of any sizes. With as_clips each is a clip.",
                ),
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
                    tooltip="Optional: a mask for each picture in their order, or one for all; white is trained. With "
                    "clips a batch for each picture and clip: of one mask, or of one for each frame.",
                ),
                *inputs_of(LINKED, {}),
                io.Video.Input(
                    "videos",
                    optional=True,
                    tooltip="Optional, for models of clips: a video, or a list of them; each is a clip. Their captions "
                    "and masks follow those of the images.",
                ),
                io.Boolean.Input(
                    "as_clips",
                    default=False,
                    optional=True,
                    tooltip="On: each batch of images has the frames of one clip, for models of clips.",
                ),
                io.Float.Input(
                    "clip_rate",
                    default=16.0,
                    min=1.0,
                    max=MOST_RATE,
                    step=1.0,
                    round=0.001,
                    optional=True,
                    tooltip="With as_clips: frames per second of the batches. A video tells its own.",
                ),
                *inputs_of([OF_CONCEPT["clip_settings"]], {}),
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
        captions: list[str],
        images: list[torch.Tensor] | None = None,
        masks: list[torch.Tensor] | None = None,
        dataset: list[DatasetConfig] | None = None,
        videos: list[Any] | None = None,
        **values: list[Any],
    ) -> io.NodeOutput:
        """Write the pictures and clips to files named by their content; output them as a concept."""
        one = {name: value[0] for name, value in values.items()}
        pictures = shown_of(images or [], videos or [], one["clip_rate"] if one.get("as_clips") else 0.0)
        covers = list(masks or [])
        if not any(each.rate for each in pictures):
            covers = [mask[None] for batch in covers for mask in batch]
        texts = captions_of(captions, len(pictures))
        folder = save_pictures(pictures, texts, masks_of(covers, pictures))
        own = one.get("picture_settings", PicturePart({})).values
        concept = ConceptConfig(
            folder=str(folder),
            captions=one.get("caption_settings", OPEN_CAPTIONS).replace(prefix=one["trigger_word"]),
            masks=MaskConfig(**{each.name: one[each.name] for each in WEIGHTS}) if covers else None,
            clips=one.get("clip_settings"),
            **{name: one[name] for name in ("repeats", "role")},
            **own,
        )
        return io.NodeOutput(DatasetConfig(concepts=(*(dataset[0].concepts if dataset else ()), concept)))


def shown_of(images: Sequence[torch.Tensor], videos: Sequence[Any], rate: float) -> list[Frames]:
    """List the pictures and clips of batches (B, H, W, C) and ComfyUI's videos, in their order.

    rate: of batches that are clips, frames per second; 0: each of their images is a picture. Raises ValueError without
    any.
    """
    clips = [(batch, rate) for batch in images] if rate else []
    found = [Frames(picture[None]) for batch in images for picture in batch] if not rate else []
    for video in videos:
        parts = video.get_components()
        clips.append((parts.images, float(parts.frame_rate)))
    found += [Frames(frames, its_rate if len(frames) > 1 else 0.0) for frames, its_rate in clips if len(frames)]
    if not found:
        raise ValueError("Concept from Images has no picture; link images or videos.")
    return found


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


def masks_of(masks: list[torch.Tensor], pictures: list[Frames]) -> list[torch.Tensor | None]:
    """Match masks (1 or T, H, W) to pictures and clips, one for each or one for all; ValueError where sizes differ."""
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
        if len(mask) not in (1, len(picture.frames)):
            raise ValueError(
                f"Mask {number + 1} of Concept from Images has {counted(mask, 'frame')} and its clip "
                f"{len(picture.frames)}; link a mask for each frame, or a single one."
            )
        if mask.shape[1:] != picture.frames.shape[1:3]:
            (height, width), (rows, columns) = mask.shape[1:], picture.frames.shape[1:3]
            raise ValueError(
                f"Mask {number + 1} of Concept from Images is {width}x{height} and its picture {columns}x{rows}; "
                "resize the mask to the picture."
            )
    return list(masks)


def save_pictures(pictures: Sequence[Frames], captions: Sequence[str], masks: Sequence[torch.Tensor | None]) -> Path:
    """Write pictures and clips, captions and masks (1 or T, H, W) to a folder named by their content; return it.

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
            files = {name + ending: data for ending, data in (_file_of(picture), (".txt", caption.encode()))}
            if mask is not None:
                ending, data = _file_of(Frames(mask[..., None], picture.rate if len(mask) > 1 else 0.0))
                files[Path(name + MASK_SUFFIX).stem + ending] = data
            for file, data in files.items():
                (new / file).write_bytes(data)
                digest.update(f"{file} {len(data)} ".encode() + data)
        folder = root / digest.hexdigest()[:32]
        if not folder.is_dir():
            move(new, folder)
    kept.mark_used([folder])
    kept.make_room()
    return folder


def _file_of(shown: Frames) -> tuple[str, bytes]:
    """Encode a picture as PNG, a clip as a film without loss; return the file's ending, and its content."""
    if not shown.rate:
        return ".png", _png(shown.frames[0])
    frames = (_bytes(frame[..., :3]).repeat(3 // min(frame.shape[-1], 3), -1) for frame in shown.frames)
    return FILM, film_of(frames, shown.rate)


def _bytes(pixels: torch.Tensor) -> np.ndarray[Any, Any]:
    """Round values in 0..1 as ComfyUI's SaveImage does."""
    return np.clip(255.0 * pixels.detach().cpu().float().numpy(), 0, 255).astype(np.uint8)


def _png(pixels: torch.Tensor) -> bytes:
    """Encode (H, W, C) values in 0..1 as PNG."""
    values = _bytes(pixels)
    buffer = BytesIO()
    Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values).save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()
