"""Find masks, bring them through the same geometry as their pictures, and turn them into loss weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from .buckets import Crop, open_upright
from .config import MaskConfig

if TYPE_CHECKING:
    from .scan import Picture

DEFAULT_SUFFIX = "-masklabel.png"


def mask_folder(concept_folder: Path, config: MaskConfig) -> Path:
    """Return where the masks of a concept lie; a relative mask folder starts at the concept's folder."""
    if not config.folder.strip():
        return concept_folder
    return (concept_folder / Path(config.folder.strip().strip('"')).expanduser()).resolve()


def is_mask_name(name: str, config: MaskConfig | None) -> bool:
    """Tell whether a file beside the pictures is a mask by its name; the default suffix always says so.

    With a mask folder of its own, a suffix such as .png says nothing about the files beside the pictures.
    """
    if name.lower().endswith(DEFAULT_SUFFIX):
        return True
    if config is None or config.source != "file":
        return False
    bare_extension = config.suffix.startswith(".") and config.suffix.count(".") == 1
    return not (config.folder.strip() and bare_extension) and name.lower().endswith(config.suffix.lower())


def find_mask(name: str, masks: dict[str, Path], config: MaskConfig) -> Path | None:
    """Return the mask of the picture `name` (posix, relative to the concept's folder), or None.

    `masks` maps lower-case posix names, relative to the mask folder, to files. The mask lies under the same
    sub-folder as the picture or directly in the mask folder.
    """
    stem = name.rsplit(".", 1)[0].lower()
    inside = masks.get(stem + config.suffix.lower())
    if inside is None and config.folder.strip():
        return masks.get(stem.rsplit("/", 1)[-1] + config.suffix.lower())
    return inside


def read_mask(source: Path | BinaryIO, config: MaskConfig) -> Image.Image | None:
    """Decode a mask as mode "L", upright, inverted if asked; None if the alpha channel it needs is missing."""
    image = open_upright(source)
    if config.source == "alpha":
        if not image.has_transparency_data:
            return None
        mask = image.convert("RGBA").getchannel("A")
    else:
        grey = image.mode in ("1", "L", "LA", "La")
        mask = image.convert("L") if image.mode == "1" else (image if grey else image.convert("RGB")).getchannel(0)
    return ImageOps.invert(mask) if config.invert else mask


def load_mask(picture: Picture, config: MaskConfig) -> Image.Image:
    """Return the picture's mask, mode "L" at the picture's size; white where the picture has none."""
    mask = read_mask(picture.mask, config) if picture.mask is not None else None
    return mask if mask is not None else Image.new("L", (picture.width, picture.height), 255)


def cut_mask(mask: Image.Image, crop: Crop) -> Image.Image:
    """Bring a mask through its picture's geometry, bilinear with antialias; the result is crop.bucket big."""
    box = crop.source_box(mask.size)
    result = mask.resize(crop.bucket, Image.Resampling.BILINEAR, box=box)
    return ImageOps.mirror(result) if crop.flip else result


def latent_mask(mask: Image.Image, factor: int = 8) -> Tensor:
    """Return the block mean of a cut mask over factor x factor pixels: (1, h, w) float32 in 0..1."""
    pixels = torch.from_numpy(np.array(mask, dtype=np.float32)) / 255
    height, width = pixels.shape
    blocks = pixels.reshape(height // factor, factor, width // factor, factor)
    return blocks.mean(dim=(1, 3)).clamp(0, 1)[None]


def loss_mask(mask: Tensor, use_mask: Tensor, unmasked_weight: float) -> Tensor:
    """Return m' = max(m, unmasked_weight), with m = 1 for samples that train without their mask.

    mask (B, 1, h, w) in 0..1, use_mask (B,) bool; the result has the shape of mask.
    """
    used = torch.where(use_mask.view(-1, 1, 1, 1), mask, torch.ones_like(mask))
    return used.clamp(min=unmasked_weight)
