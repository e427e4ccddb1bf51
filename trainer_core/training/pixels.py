"""Read pictures, clips and masks for the encoders, as the scan has found them; threads decode some in advance."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..common.files import file_digest, open_file, read_file
from ..data.controls import Control
from ..data.crops import Crop
from ..data.films import FilmError, read_frames
from ..data.images import DECODER_ERRORS, cut, decoder_error, load_picture, strict_decoding
from ..data.masks import read_mask
from ..data.plan import Plan
from ..data.scan import Picture

AHEAD = 4  # pictures that are decoded and cut in advance, while the autoencoder works
File = TypeVar("File")


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
    times = Counter(numbers)
    try:
        _same(file_digest(clip.path), clip.digest, clip.name)
        with open_file(clip.path) as file:  # not read as a whole, which would take its size in memory
            for number, frame in read_frames(file, times.keys(), background):
                yield from [frame] * times[number]
    except OSError as error:
        raise _vanished(clip.path, clip.name, error) from error
    except FilmError as error:  # the scan could decode it
        raise ValueError(f"{clip.name} cannot be decoded any more ({error}); start again.") from error


def decoded(picture: Picture | Control, background: str) -> Image.Image:
    """Read a picture or control picture as RGB; ValueError if it changed since the scan."""
    data = _bytes(picture.path, picture.digest, picture.name)
    try:
        return load_picture(data, background)
    except DECODER_ERRORS as error:  # the scan could decode it: out of memory, or a decoder was unloaded
        raise ValueError(f"{picture.name} cannot be decoded any more ({decoder_error(error)}); start again.") from error


def mask_of(plan: Plan, i: int) -> Image.Image:
    """Read a picture's mask; ValueError if it changed since the scan."""
    picture, config = plan.manifest.pictures[i], plan.concepts[i].masks
    assert picture.mask is not None
    assert config is not None
    mask = read_mask(_bytes(picture.mask, picture.mask_digest, picture.mask.name), config)
    assert mask is not None, "the scan has found it"
    return mask


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
