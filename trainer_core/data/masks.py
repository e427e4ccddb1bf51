"""Recognise mask files by their name (suffix), crop them exactly as their pictures, turn them into loss weights.

The default suffix is MASK_SUFFIX in config/dataset.py, as all defaults are in config/.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..common.access import real_path
from ..common.axes import Size, like
from ..common.files import open_file
from ..config import MaskConfig
from .crops import Crop
from .films import FILM_EXTENSIONS, is_film, read_frames, spread_evenly
from .images import PACKAGES, PictureSource, open_upright, picture_extensions, turned

USUAL = MaskConfig().suffixes  # which mean a mask whatever the settings are


def mask_folder(concept_folder: Path, config: MaskConfig) -> Path:
    """Find the folder of a concept's masks; a relative mask folder starts at the concept's folder."""
    return folder_beside(concept_folder, config.folder) if config.folder.strip() else concept_folder


def folder_beside(concept_folder: Path, folder: str) -> Path:
    """Resolve a folder as users write it; a relative one starts at the concept's folder."""
    return real_path(concept_folder / os.path.expanduser(folder.strip().strip('"')))


@functools.cache
def mask_endings(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """List the lower-case endings of mask files in the order they are tried: a suffix, then with other extensions.

    A suffix that is only an extension, as .png, stands for itself. Pictures come before clips.
    """
    found: list[str] = []
    others = (*sorted({*picture_extensions(), *PACKAGES}), *sorted(FILM_EXTENSIONS))
    for suffix in map(str.lower, suffixes):
        stem = os.path.splitext(f"a{suffix}")[0][1:]
        found += [suffix, *(stem + extension for extension in others if stem)]
    return tuple(dict.fromkeys(found))


def is_mask_name(name: str, config: MaskConfig | None) -> bool:
    """Tell whether a file beside the pictures is a mask by its name; names with the default suffix always are.

    With a mask folder of its own, a suffix such as .png says nothing about the files beside the pictures.
    """
    if name.lower().endswith(mask_endings(USUAL)):
        return True
    if config is None or config.source != "file":
        return False
    apart = bool(config.folder.strip())
    telling = tuple(s for s in config.suffixes if not (apart and s.startswith(".") and s.count(".") == 1))
    return name.lower().endswith(mask_endings(telling))


def find_mask(name: str, masks: dict[str, Path], config: MaskConfig) -> Path | None:
    """Find the mask of the picture `name` (posix, relative to the concept's folder), or None.

    `masks` maps lower-case posix names, relative to the mask folder, to files. The mask is in the same
    sub-folder as the picture, or directly in the mask folder. Of several suffixes the first one found counts.
    """
    stem = name.rsplit(".", 1)[0].lower()
    stems = [stem, stem.rsplit("/", 1)[-1]] if config.folder.strip() else [stem]
    for ending in mask_endings(config.suffixes):
        for start in stems:
            if (found := masks.get(start + ending)) is not None:
                return found
    return None


def read_mask(source: PictureSource, config: MaskConfig) -> Image.Image | None:
    """Decode a mask as mode "L", upright; None if the alpha channel it needs is missing.

    It is inverted before the threshold, which thus applies to the trained area. Of a film's file the first frame.
    """
    if isinstance(source, Path) and is_film(source):
        with open_file(source) as film:
            return next(read_mask_frames(film, (0,), config))[1]
    return _levels(open_upright(source, srgb=False), config)  # it holds numbers; no colour profile may bend them


def read_mask_frames(
    film: bytes | IO[bytes], wanted: Collection[int] | None, config: MaskConfig
) -> Iterator[tuple[int, Image.Image | None]]:
    """Yield each wanted frame of a clip of masks with its number, as `read_mask`; None for all. Raises FilmError."""
    for number, frame in read_frames(film, wanted, background=None):
        yield number, _levels(frame, config)


def _levels(image: Image.Image, config: MaskConfig) -> Image.Image | None:
    """Turn a picture into the grey levels of a mask; None if the alpha channel it needs is missing."""
    if image.mode == "La":
        image = image.convert("LA")
    if config.source == "alpha":
        if not image.has_transparency_data:
            return None
        mask = image.convert("RGBA").getchannel("A")
    else:
        grey = image.mode in ("1", "L", "LA")
        mask = image.convert("L") if image.mode == "1" else (image if grey else image.convert("RGB")).getchannel(0)
    mask = ImageOps.invert(mask) if config.invert else mask
    if config.threshold:
        mask = mask.point([255 if level / 255 >= config.threshold else 0 for level in range(256)])
    return mask


def examine_mask(source: PictureSource, config: MaskConfig) -> tuple[Size, int] | None:
    """Read a mask's upright size and brightest value, 0..255; None if the alpha channel it needs is missing."""
    mask = read_mask(source, config)
    return None if mask is None else (mask.size, int(np.asarray(mask).max()))


def examine_mask_clip(film: bytes | IO[bytes], config: MaskConfig) -> tuple[Size, int, int] | None:
    """Read the size of a clip of masks, its brightest value and its frames; None without the alpha that it needs."""
    size, high, frames = (0, 0), 0, 0
    for _, mask in read_mask_frames(film, None, config):
        if mask is None:
            return None
        size, high, frames = mask.size, max(high, int(np.asarray(mask).max())), frames + 1
    return size, high, frames


def load_mask(source: PictureSource | None, size: Size, config: MaskConfig) -> Image.Image:
    """Load a mask in mode "L"; white at the picture's size if the picture has none."""
    mask = None if source is None else read_mask(source, config)
    return Image.new("L", size, 255) if mask is None else mask


def load_shown_masks(path: Path, frames: Sequence[int], most: int, config: MaskConfig) -> list[Image.Image]:
    """Read at most so many masks of a clip of them, of the frames that `load_shown` reads of the clip."""
    wanted = spread_evenly(frames, most)
    with open_file(path) as file:
        found = dict(read_mask_frames(file, wanted, config))
    return [mask for number in wanted if (mask := found[number]) is not None]


def cut_mask(mask: Image.Image, crop: Crop) -> Image.Image:
    """Crop a mask exactly as its picture, bilinear with antialias; the result has the size crop.bucket."""
    if crop.angle:
        mask, crop = turned(mask, crop, Image.Resampling.BILINEAR)
    result = mask.resize(crop.bucket, Image.Resampling.BILINEAR, box=crop.source_box(mask.size))
    return ImageOps.mirror(result) if crop.flip else result


def latent_mask(mask: Image.Image, factor: int | Fraction) -> Tensor:
    """Average a cut mask over blocks of factor x factor pixels: (1, h, w) float32 in 0..1."""
    pixels = torch.from_numpy(np.array(mask, dtype=np.float32)) / 255
    side, parts = factor.numerator, factor.denominator  # a block of side x side parts of pixels
    if parts > 1:
        pixels = pixels.repeat_interleave(parts, 0).repeat_interleave(parts, 1)
    height, width = pixels.shape
    blocks = pixels.reshape(height // side, side, width // side, side)
    return blocks.mean(dim=(1, 3)).clamp(0, 1)[None]


def latent_masks(masks: Iterable[Tensor], step: int) -> Tensor:
    """Average the masks (1, h, w) of a clip's frames over the frames of each latent one: (1, t, h, w).

    The first latent frame is of the first frame, and each other one of the next `step` frames.
    """
    first, *others = masks
    groups = (others[start : start + step] for start in range(0, len(others), step))
    return torch.stack([first, *(torch.stack(group).mean(0) for group in groups)], 1)


def painting_masks(mask: Image.Image, factor: int | Fraction) -> tuple[Tensor, Tensor]:
    """Convert a cut mask as ComfyUI does for inpainting models, 1 = painted: (1, H, W) pixels, (1, h, w) latents.

    The small one is interpolated bilinearly at the middle of each latent pixel, and rounded.
    """
    pixels = torch.from_numpy(np.array(mask, dtype=np.float32))[None] / 255
    small = torch.nn.functional.interpolate(pixels[None], scale_factor=float(1 / factor), mode="bilinear")[0]
    return pixels, small.round()


def loss_mask(mask: Tensor, use_mask: Tensor, unmasked_weight: float) -> Tensor:
    """Compute m' = max(m, unmasked_weight), with m = 1 for samples that train without their mask.

    mask (B, 1, *axes) in 0..1, use_mask (B,) bool; the result has the shape of mask.
    """
    used = torch.where(like(use_mask, mask), mask, torch.ones_like(mask))
    return used.clamp(min=unmasked_weight)
