"""Paint the mask of one picture: a copy for the editor, its result beside the picture, the earlier one kept."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from ..common.access import Access
from ..common.axes import Size
from ..common.files import keep_newest, move, written_whole
from ..common.leftovers import remove, unfinished
from ..config import BucketConfig, MaskConfig
from .buckets import Point, parse_resolution
from .crops import fit
from .films import load_shown
from .images import DECODER_ERRORS, decoder_error, load_picture, open_upright, upright_size
from .masks import find_mask, read_mask
from .scan import Changed
from .scan.caption_files import read_bytes
from .shapes import shape_of

STEP = 64  # pixels: the usual bucket_step
LARGEST = 2**28  # bytes of a mask; one of grey levels has fewer at any size
MOST_COPIES, MOST_EARLIER = 20, 1000  # for the editor; masks that were replaced


def mask_place(picture: Path) -> Path:
    """The file in which the mask of a picture is written."""
    return picture.with_name(picture.stem + MaskConfig().suffixes[0])


def mask_beside(picture: Path, access: Access) -> Path | None:
    """Find the mask beside a picture as a run does; a link to a place that may not be read is none."""
    start = picture.stem.lower()
    named = (path for path in picture.parent.iterdir() if path.name.lower().startswith(start))
    files = {path.name.lower(): path for path in named if access.allows(path) and path.is_file()}
    return find_mask(picture.name, files, MaskConfig())


def state_of_mask(picture: Path, access: Access) -> str:
    """Compute the sha256 of the mask beside a picture, "" without one."""
    content = _content(mask_beside(picture, access))
    return hashlib.sha256(content).hexdigest() if content else ""


def draw_for_painting(picture: Path, to: Path, access: Access) -> None:
    """Write a picture, upright, as PNG whose alpha is what its mask leaves out; raises DECODER_ERRORS.

    ComfyUI's mask editor shows what is transparent as painted, so what is trained is painted.
    """
    image = load_picture(picture)
    mask = _mask_of(picture, access)
    shown = mask if mask is not None and mask.size == image.size else Image.new("L", image.size, 0)
    image.putalpha(shown.point([255 - level for level in range(256)]))
    with written_whole(to) as temporary:
        image.save(temporary, format="PNG", compress_level=1)
    keep_newest(to.parent, MOST_COPIES)


def draw_for_page(picture: Path, side: int, masks: Access | None) -> Image.Image:
    """Draw a picture, or a clip's first frame, at `side` pixels at most; raises DECODER_ERRORS, FilmError.

    masks: from where masks may be read; what the picture's mask leaves out is red. None: without its mask.
    """
    (image,) = load_shown(picture, ())
    image.thumbnail((side, side), reducing_gap=2.0)
    mask = _mask_of(picture, masks) if masks else None
    if mask is None:
        return image
    red = Image.blend(image, Image.new("RGB", image.size, (200, 30, 30)), 0.5)
    return Image.composite(image, red, mask.resize(image.size))


def save_painted(picture: Path, content: bytes, was: str, earlier: Path, access: Access) -> None:
    """Write a picture of grey levels as the mask of a picture; one without any white removes it.

    was: the mask's `state_of_mask` when the painting began; earlier: the file that keeps the earlier mask. Raises
    Changed for a mask that is another one by now, and ValueError for one of another size or that cannot be read.
    """
    try:
        found, size = upright_size(content), upright_size(picture)  # before it is decoded, which takes memory
        mask = open_upright(content, srgb=False).convert("RGB").getchannel(0) if found == size else None
    except DECODER_ERRORS as error:
        raise ValueError(
            f"The mask of {picture.name} cannot be read ({decoder_error(error)}); paint it anew."
        ) from error
    if mask is None:
        raise ValueError(
            f"The mask has {found[0]}x{found[1]} pixels and {picture.name} {size[0]}x{size[1]}; do not turn the "
            "picture while you paint."
        )
    data = io.BytesIO()
    mask.save(data, format="PNG")
    _replace(picture, data.getvalue() if np.asarray(mask).any() else b"", was, earlier, access)


def undo_painted(picture: Path, was: str, earlier: Path, access: Access) -> None:
    """Write the earlier mask of a picture back, and keep the one that it replaces; was, earlier: of `save_painted`."""
    if not earlier.is_file():
        raise ValueError(f"No earlier mask of {picture.name} is kept; paint it anew.")
    _replace(picture, _content(earlier), was, earlier, access)


def frame_of(size: Size, resolution: str, focus: Point | None) -> tuple[float, float, float, float]:
    """Compute what a crop about a focus keeps (left, top, right, bottom), as shares of the picture's sides.

    For the usual settings of Buckets, and without augmentation. Raises ValueError for what is no resolution.
    """
    bucket, resized = shape_of(size, parse_resolution(resolution), BucketConfig(), STEP)
    left, top, right, bottom = fit(size, bucket, resized=resized, focus=focus).source_box(size)
    return left / size[0], top / size[1], right / size[0], bottom / size[1]


def _mask_of(picture: Path, access: Access) -> Image.Image | None:
    """Read the mask beside a picture, if there is one; the first of a clip of masks."""
    found = mask_beside(picture, access)
    return read_mask(found, MaskConfig()) if found else None


def _replace(picture: Path, content: bytes, was: str, earlier: Path, access: Access) -> None:
    """Write the mask of a picture, or remove it for b"", and keep the one before; an empty file stands for none."""
    found = mask_beside(picture, access)
    if state_of_mask(picture, access) != was:
        name = (found or mask_place(picture)).name
        raise Changed(f"{name} was changed meanwhile; look at the picture again, and paint anew.")
    before, place = _content(found), found if found and found.suffix.lower() == ".png" else mask_place(picture)
    with _restored_on_error(earlier):
        with written_whole(earlier) as temporary:
            temporary.write_bytes(before)
        if content:
            with written_whole(place) as temporary:
                temporary.write_bytes(content)
        if found and not (content and found == place):
            found.unlink(missing_ok=True)
    keep_newest(earlier.parent, MOST_EARLIER)


@contextmanager
def _restored_on_error(path: Path) -> Iterator[None]:
    """Put a file back that is replaced in a `with` block which a full disk ends."""
    with unfinished(path) as aside:
        if there := path.is_file():
            move(path, aside)
        try:
            yield
        except OSError:
            if there:
                move(aside, path)
            raise
        remove(aside)


def _content(path: Path | None) -> bytes:
    """Read a mask, b"" where there is none; raises ValueError for one that is too large."""
    try:
        return read_bytes(path, LARGEST, "mask") if path else b""
    except FileNotFoundError:
        return b""
