"""Read pictures, clips and masks for the encoders, as the scan has found them; threads decode some in advance."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..common.files import file_digest, open_file, read_file
from ..data.controls import Control
from ..data.crops import Crop
from ..data.films import FilmError, is_film, read_frames
from ..data.images import DECODER_ERRORS, cut, decoder_error, load_picture, strict_decoding
from ..data.masks import cut_mask, latent_mask, latent_masks, read_mask, read_mask_frames
from ..data.plan import Plan, View
from ..data.scan import Picture
from ..models import LatentFormat

AHEAD = 4  # pictures that are decoded and cut in advance, while the autoencoder works
File = TypeVar("File")
Frame = TypeVar("Frame")


def prepared_pixels(
    items: Sequence[tuple[File, Crop]],
    read: Callable[[File], Image.Image],
    read_clip: Callable[[File, Sequence[int]], Iterator[Image.Image]] | None = None,
) -> Iterator[tuple[tuple[File, Crop], Tensor]]:
    """Yield each (file, crop) with its pixels, (1, 3, H, W) in -1..1; threads read the next files meanwhile.

    Of a clip's crop the pixels are (1, 3, frames, H, W). read_clip: yields so many frames of a file.
    """

    def prepared(file: File, crops: Sequence[Crop]) -> Iterator[Tensor] | list[Tensor]:
        """Read a file and cut it; what is cut more than once from a picture waits until it is asked for."""
        taken = crops[0].frames
        if taken and read_clip:
            # All crops of a group have the same frames, so that the film is decoded once, and no frame is kept whole.
            cuts = [[np.asarray(cut(frame, crop)) for crop in crops] for frame in read_clip(file, taken)]
            return [clip_pixels(each) for each in zip(*cuts, strict=True)]
        image = read(file)
        if len(crops) == 1:
            return [pixels(cut(image, crops[0]))]
        return (pixels(cut(image, crop)) for crop in crops)

    parts = groupby(items, key=lambda item: (item[0], item[1].frames))
    groups = ((file, [crop for _, crop in group]) for (file, _), group in parts)
    with ThreadPoolExecutor(max_workers=2) as pool, strict_decoding():
        waiting: deque[tuple[File, list[Crop], Future[Iterator[Tensor] | list[Tensor]]]] = deque()
        try:
            while True:
                for file, crops in islice(groups, AHEAD - len(waiting)):
                    waiting.append((file, crops, pool.submit(prepared, file, crops)))
                if not waiting:
                    return
                file, crops, future = waiting.popleft()
                for crop, found in zip(crops, future.result(), strict=True):
                    yield (file, crop), found[None]
        finally:
            for _, _, future in waiting:
                future.cancel()


def frames(clip: Picture | Control, background: str, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """Read frames of a clip as RGB, in their order, one that comes twice twice; ValueError if it changed."""
    yield from _frames_of(
        clip.path, clip.digest, clip.name, numbers, lambda film, wanted: read_frames(film, wanted, background)
    )


def _frames_of(
    path: Path,
    digest: str,
    name: str,
    numbers: Sequence[int],
    read: Callable[[IO[bytes], Collection[int]], Iterator[tuple[int, Frame]]],
) -> Iterator[Frame]:
    """Read frames of a file with the bytes of this digest, one that comes twice twice."""
    times = Counter(numbers)
    try:
        _same(file_digest(path), digest, name)
        with open_file(path) as file:  # not read as a whole, which would take its size in memory
            for number, frame in read(file, times.keys()):
                yield from [frame] * times[number]
    except OSError as error:
        raise _vanished(path, name, error) from error
    except FilmError as error:  # the scan could decode it
        raise ValueError(f"{name} cannot be decoded any more ({error}); start again.") from error


def decoded(picture: Picture | Control, background: str) -> Image.Image:
    """Read a picture or control picture as RGB; ValueError if it changed since the scan."""
    data = _bytes(picture.path, picture.digest, picture.name)
    try:
        return load_picture(data, background)
    except DECODER_ERRORS as error:  # the scan could decode it: out of memory, or a decoder was unloaded
        raise ValueError(f"{picture.name} cannot be decoded any more ({decoder_error(error)}); start again.") from error


def mask_in_latents(plan: Plan, view: View, form: LatentFormat) -> Tensor:
    """Read the mask of a view at the size of its latents: (1, h, w), (1, t, h, w) of a clip; ValueError if changed."""
    if not plan.manifest.pictures[view.picture].mask_moves:
        return latent_mask(cut_mask(mask_of(plan, view.picture), view.crop), form.pixels)
    cuts = (cut_mask(mask, view.crop) for mask in _mask_frames(plan, view.picture, view.crop.frames))
    return latent_masks((latent_mask(mask, form.pixels) for mask in cuts), form.frames)


def mask_of(plan: Plan, i: int) -> Image.Image:
    """Read a picture's mask, the first of a clip of masks; ValueError if it changed since the scan."""
    picture, config = plan.manifest.pictures[i], plan.concepts[i].masks
    assert picture.mask is not None
    assert config is not None
    if is_film(picture.mask):
        return next(_mask_frames(plan, i, (0,)))
    mask = read_mask(_bytes(picture.mask, picture.mask_digest, picture.mask.name), config)
    assert mask is not None, "the scan has found it"
    return mask


def _mask_frames(plan: Plan, i: int, numbers: Sequence[int]) -> Iterator[Image.Image]:
    """Read the masks of a clip's frames, in their order, one that comes twice twice; ValueError if they changed."""
    picture, config = plan.manifest.pictures[i], plan.concepts[i].masks
    assert picture.mask is not None
    assert config is not None

    def read(film: IO[bytes], wanted: Collection[int]) -> Iterator[tuple[int, Image.Image | None]]:
        return read_mask_frames(film, wanted, config)

    for mask in _frames_of(picture.mask, picture.mask_digest, picture.mask.name, numbers, read):
        assert mask is not None, "the scan has found it"
        yield mask


def _bytes(path: Path, digest: str, name: str) -> bytes:
    try:
        data = read_file(path)
    except OSError as error:
        raise _vanished(path, name, error) from error
    _same(hashlib.sha256(data).hexdigest(), digest, name)
    return data


def _vanished(path: Path, name: str, error: OSError) -> ValueError:
    return ValueError(
        f"{name} has vanished since the scan ({error.strerror}: {path}); put it back, or start again without it."
    )


def _same(found: str, digest: str, name: str) -> None:
    if found != digest:
        raise ValueError(f"{name} has changed since the scan; start again to train it as it is now.")


def pixels(image: Image.Image) -> Tensor:
    """Convert an RGB picture to (3, H, W) float32 values in -1..1."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 127.5 - 1


def clip_pixels(images: Sequence[np.ndarray]) -> Tensor:
    """Convert (H, W, 3) bytes of frames to (3, T, H, W) float32 values in -1..1; those of a single one to (3, H, W)."""
    found = torch.from_numpy(np.stack(images)).movedim(-1, 0).float() / 127.5 - 1
    return found[:, 0] if len(images) == 1 else found
