"""Decode pictures of any format as upright sRGB, and cut out the pixels that are trained."""

from __future__ import annotations

import functools
import io
import math
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageCms, ImageColor, ImageFile, ImageOps, UnidentifiedImageError

from ..common.axes import Size
from ..common.cancel import look
from ..common.files import open_file
from ..common.windows import too_long
from .buckets import NEUTRAL, Color
from .crops import Crop
from .looks import Look, look_at

PictureSource = Path | bytes | IO[bytes]

LARGEST = 178_956_970  # maximum pixels of a picture, checked before decoding (twice Pillow's warning level)
MOST_FRAMES = 20_000  # of a film or a picture that moves: a quarter of an hour
MOST_PAGES = 1000  # of a TIFF that are counted
MOST_BLOCKS = 2**23  # of all frames of a GIF: 2 GB in those of 255 bytes, as programs write them
MOST_ASIDE = 2**20  # of its comments and settings, and bytes between blocks
LOOK_AFTER = 1000  # blocks
DECODER_ERRORS = (  # raised by Pillow's decoders on broken files
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,  # where the process turns warnings into errors
)
SMALL = 256  # pixels: the longest side of a small copy
_NO_PICTURES = frozenset(  # formats that Pillow opens, but that hold documents, drawings, films or data
    ("BUFR", "EPS", "FITS", "GRIB", "HDF5", "IPTC", "MPEG", "PDF", "WMF")
)
PACKAGES = {  # extensions that not every Pillow reads -> the package that adds them
    ".heic": "pillow-heif",
    ".heif": "pillow-heif",
    ".hif": "pillow-heif",
    ".jxl": "pillow-jxl-plugin",
    ".avif": "pillow 11.3",
}
_UPRIGHT = {  # EXIF orientation -> the transposition that turns the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112  # the EXIF tag
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow turns colours grey


# --- reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFile:
    """Properties of a picture's file."""

    width: int  # pixels, upright
    height: int
    frames: int  # pictures in the file; only the first is used
    has_alpha: bool  # an alpha channel, or a colour that stands for transparent
    format: str  # as Pillow names it: PNG, JPEG ...
    mode: str  # as it is stored: RGB, P, CMYK, I;16 ...
    look: Look = field(default_factory=Look)


@functools.cache
def picture_extensions() -> frozenset[str]:
    """List the lower-case extensions (.png ...) of all raster formats that the installed Pillow opens."""
    names = {*_formats(), "MPO"}  # MPO is opened as the JPEG that it begins with
    return frozenset(ext.lower() for ext, name in Image.registered_extensions().items() if name in names)


def _add_plugins() -> None:
    """Let Pillow read HEIC and JPEG XL where their packages are installed."""
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    with suppress(ImportError):
        import pillow_jxl  # noqa: F401  # registers itself


@functools.cache
def _formats() -> tuple[str, ...]:
    """List the names of all raster formats that the installed Pillow opens.

    Pillow goes by a file's content, not its name, and would pass PostScript called a.png to Ghostscript.
    """
    Image.init()
    _add_plugins()
    return tuple(name for name in Image.OPEN if name not in _NO_PICTURES)


_strict = threading.Lock()
_strict_depth = 0
_strict_before: tuple[bool, int | None] = (False, None)


@contextmanager
def strict_decoding() -> Iterator[None]:
    """Make Pillow refuse truncated and far too large pictures, whatever other code in the process has set.

    The settings are global; nested and concurrent uses share one change, and the last one restores them.
    """
    global _strict_depth, _strict_before
    with _strict:
        if _strict_depth == 0:
            _strict_before = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
        _strict_depth += 1
        # Pillow warns above this number; pictures that large are refused below.
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, LARGEST
    try:
        yield
    finally:
        with _strict:
            _strict_depth -= 1
            if _strict_depth == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = _strict_before


@contextmanager
def opened_picture(source: PictureSource, formats: tuple[str, ...] = ()) -> Iterator[ImageFile.ImageFile]:
    """Open a picture strictly, of any format that is read or of some; raises DECODER_ERRORS.

    A GIF is counted first, as Pillow goes through all that stands before a frame while nobody can stop it.
    """
    with ExitStack() as stack:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        if isinstance(file, Path):
            file = stack.enter_context(open_file(file))
        if file.read(4) == b"GIF8":
            _frames_of_gif(file)
        file.seek(0)
        stack.enter_context(strict_decoding())
        yield stack.enter_context(Image.open(file, formats=formats or _formats()))


class ManyBlocks(ValueError):
    """A GIF has more blocks than are read."""


def decoder_error(error: BaseException) -> str:
    """Describe in a few words of our own why a picture cannot be decoded: a decoder's words may quote the file."""
    if isinstance(error, UnidentifiedImageError):
        return "not a picture"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return "too many pixels"
    if isinstance(error, ManyBlocks):
        return "more blocks than are read of a GIF; save it anew, with fewer frames or comments"
    if isinstance(error, PermissionError):
        return "no permission"
    if isinstance(error, FileNotFoundError):
        return "its path is too long" if too_long(error) else "the file, or what it links to, is missing"
    if isinstance(error, MemoryError):
        return "too little memory to decode it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "damaged or truncated"


def open_upright(source: PictureSource, *, srgb: bool = True) -> Image.Image:
    """Open and fully decode a picture's first frame: upright, 8 bits per channel, in sRGB by its ICC profile.

    Alpha, palettes and other modes stay as they are where no profile asks for a conversion; srgb=False leaves
    profiles aside (masks are numbers, not colours). Raises DECODER_ERRORS on a broken file.
    """
    return _decode(source, srgb)[0]


def load_picture(source: PictureSource, background: str = "white") -> Image.Image:
    """Load a picture as upright RGB in sRGB, transparency laid on a colour; raises DECODER_ERRORS."""
    return flatten(open_upright(source), background)


def upright_size(source: PictureSource) -> Size:
    """Read the size of a picture without decoding it; raises DECODER_ERRORS."""
    with opened_picture(source) as image:
        _refuse_bomb(image.size)
        width, height = image.size
        return (width, height) if _orientation(image) < 5 else (height, width)


def draw_small(source: Path, to: Path) -> None:
    """Write a picture at SMALL x SMALL pixels at most as PNG; raises DECODER_ERRORS."""
    image = load_picture(source)
    image.thumbnail((SMALL, SMALL))
    image.save(to, format="PNG")


def examine(source: PictureSource, background: str = "white") -> PictureFile:
    """Decode a picture as completely as training does, and return its properties; raises DECODER_ERRORS."""
    image, file = _decode(source, True)
    return replace(file, look=look_at(flatten(image, background)))


def flatten(image: Image.Image, background: str = "white") -> Image.Image:
    """Convert any mode to RGB, transparency laid on a background (a colour's name or #rrggbb)."""
    if image.mode == "La":  # premultiplied grey, which Pillow converts to nothing else
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    ground = Image.new("RGBA", layered.size, ImageColor.getrgb(background)[:3])
    return Image.alpha_composite(ground, layered).convert("RGB")


def count_frames(image: ImageFile.ImageFile) -> int:
    """Count the frames of an open picture, up to one more than MOST_FRAMES: Pillow would go through all of a file."""
    if image.format == "PSD":  # layers are parts of one picture
        return 1
    if image.format == "GIF" and image.fp is not None:
        start = image.fp.tell()
        found = _frames_of_gif(image.fp)
        image.fp.seek(start)
        return max(1, found)
    if image.format == "TIFF":
        with suppress(EOFError):
            for number in range(1, MOST_PAGES + 1):
                image.seek(number)
        found = image.tell() + 1
        image.seek(0)
        return found
    return getattr(image, "n_frames", 1)  # in the file's head


def _frames_of_gif(file: IO[bytes]) -> int:
    """Count the frames of a GIF by its blocks; a damaged one ends where it is damaged (GIF89a, 15 to 23).

    Raises ManyBlocks for more blocks than are read: Pillow goes through each, and hears no Cancel.
    """
    file.seek(10)
    file.seek(13 + _colours(file.read(1)))
    found, aside, blocks = 0, MOST_ASIDE, MOST_BLOCKS  # frames; what may still come
    while found <= MOST_FRAMES and (kind := file.read(1)) not in (b"", b";"):
        look()
        if kind == b",":
            found += 1
            file.seek(_colours(file.read(9)[8:]) + 1, 1)  # also the size of codes
            blocks -= _pass_blocks(file, blocks)
        elif kind == b"!":
            file.seek(1, 1)  # the kind of extension
            aside -= _pass_blocks(file, aside) + 1
        else:  # between two blocks, as some programs write it
            aside -= 1
        if aside < 0:
            raise ManyBlocks()
    return found


def _pass_blocks(file: IO[bytes], most: int) -> int:
    """Go to the end of a chain of blocks, and count them; raises ManyBlocks for more than most."""
    for found in range(most + 1):
        size = file.read(1)
        if size in (b"", b"\0"):
            return found
        file.seek(size[0], 1)
        if found % LOOK_AFTER == 0:
            look()
    raise ManyBlocks()


def _colours(flags: bytes) -> int:
    """Compute the bytes of a GIF's table of colours, by the flags before it."""
    return 3 * 2 ** ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _decode(source: PictureSource, srgb: bool) -> tuple[Image.Image, PictureFile]:
    """Decode a picture as open_upright does, and read its properties."""
    with opened_picture(source) as opened:
        _refuse_bomb(opened.size)
        name, mode = opened.format or "", opened.mode
        frames = count_frames(opened)
        opened.load()
        _refuse_bomb(opened.size)
        turn = _UPRIGHT.get(_orientation(opened))
        image = opened.copy() if turn is None else opened.transpose(turn)
    has_alpha = image.has_transparency_data
    profile = image.info.get("icc_profile")
    if image.mode.startswith(("I", "F")):
        image = _eight_bits(image, name)
    if srgb and profile:
        image = _to_srgb(image, profile)
    return image, PictureFile(
        width=image.width, height=image.height, frames=frames, has_alpha=has_alpha, format=name, mode=mode
    )


def _refuse_bomb(size: Size) -> None:
    """Raise Image.DecompressionBombError if a picture has too many pixels."""
    if size[0] * size[1] > LARGEST:
        raise Image.DecompressionBombError(f"{size[0]}x{size[1]} pixels are more than {LARGEST}")


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation, 1..8; 1 if the EXIF data is broken, which says nothing about the pixels."""
    try:
        value = image.getexif().get(_ORIENTATION)
    except DECODER_ERRORS:
        return 1
    return value if isinstance(value, int) else 1


def _eight_bits(image: Image.Image, name: str) -> Image.Image:
    """Turn a grey picture of 16 or 32 bits or of floats into mode "L", or "LA" with its transparent value.

    16 bits are 0..65535. TIFF does not state the range of 32 bits and of floats: take the smallest of the usual
    ranges that holds the brightest pixel. Floats may be overexposed up to twice their range.
    """
    values = np.asarray(image).astype(np.float64)
    finite = values[np.isfinite(values)]
    high = finite.max() if finite.size else 0.0
    ranges: tuple[float, ...] = (65535,)
    if image.mode == "F":
        ranges, high = (1, 255, 65535), high / 2
    elif image.mode == "I" and name == "TIFF":
        ranges = (255, 65535, 2**31 - 1)
    top = next((top for top in ranges if high <= top), ranges[-1])
    grey = np.nan_to_num(values, nan=0.0, posinf=top, neginf=0.0).clip(0, top) * 255 / top
    result = Image.fromarray((grey + 0.5).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        result.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return result


# --- colour profiles ------------------------------------------------------------------------------------------


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert from an ICC profile to sRGB, with alpha; a broken or unsuitable profile is ignored."""
    mode = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}.get(profile[16:20])  # the colour space of the profile
    grey = image.mode in ("1", "L", "LA", "La")
    if mode is None or (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and not grey):
        return image
    transform = _transform(profile, mode)
    if transform is None:
        return image
    alpha = None
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image.convert("RGBA")
        alpha = image.getchannel("A")
    result = transform.apply(image.convert(mode))
    if alpha is not None:
        result.putalpha(alpha)
    return result


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Build the conversion from a profile to sRGB; None if it is impossible or changes nothing.

    The rendering intent is perceptual, made for pictures; between monitor profiles it equals the colorimetric ones.
    """
    try:
        transform = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            renderingIntent=ImageCms.Intent.PERCEPTUAL,
        )
    except (OSError, ImageCms.PyCMSError):
        return None
    if mode == "CMYK":
        return transform
    # Whatever its name: a profile that changes no colour of this sample by more than one level is sRGB.
    levels = np.array([0, 4, 16, 32, 64, 96, 128, 160, 192, 224, 255], np.uint8)
    sample = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, len(levels), 3)
    before = Image.fromarray(sample).convert(mode)
    after = np.asarray(transform.apply(before), np.int16)
    return None if np.abs(after - np.asarray(before.convert("RGB"), np.int16)).max() <= 1 else transform


# --- cutting --------------------------------------------------------------------------------------------------


def cut(image: Image.Image, crop: Crop) -> Image.Image:
    """Rotate, resize, cut, mirror and recolour a picture to the pixels that are trained, of size crop.bucket.

    Shrinking averages the covered area, growing uses Lanczos. Only the rectangle that is kept is computed.
    """
    if crop.angle:
        image, crop = turned(image, crop, Image.Resampling.BICUBIC)
    if crop.resized == image.size:
        left, top = crop.offset
        result = image.crop((left, top, left + crop.bucket[0], top + crop.bucket[1]))
    elif crop.resized[0] <= image.width and crop.resized[1] <= image.height:
        result = _shrink(image, crop)
    else:
        result = image.resize(crop.bucket, Image.Resampling.LANCZOS, box=crop.source_box(image.size))
    result = ImageOps.mirror(result) if crop.flip else result
    return result if crop.color == NEUTRAL else _recolour(result, crop.color)


def turned(image: Image.Image, crop: Crop, resample: Image.Resampling) -> tuple[Image.Image, Crop]:
    """Rotate the kept part of a picture upright; return it with the rest of the crop, of angle 0.

    The result has at least the pixels of the original, so that shrinking can average them, and at least those
    of the bucket, so that a picture that grows is resampled only once.
    """
    first, second, _, fourth = crop.corners(image.size)
    width = max(crop.bucket[0], math.ceil(math.dist(first, second)))
    height = max(crop.bucket[1], math.ceil(math.dist(first, fourth)))
    across = ((second[0] - first[0]) / width, (second[1] - first[1]) / width)  # per new pixel to the right
    down = ((fourth[0] - first[0]) / height, (fourth[1] - first[1]) / height)
    matrix = (across[0], down[0], first[0], across[1], down[1], first[1])
    upright = image.transform((width, height), Image.Transform.AFFINE, matrix, resample)
    return upright, replace(crop, angle=0.0, resized=crop.bucket, offset=(0, 0))


def _shrink(image: Image.Image, crop: Crop) -> Image.Image:
    """Average the exact area below each new pixel (Pillow's BOX counts whole pixels only, which is visible)."""
    pixels = np.asarray(image)
    for side in (1, 0):  # rows first, so that the columns are already few
        edges = (crop.offset[side] + np.arange(crop.bucket[side] + 1)) * (image.size[side] / crop.resized[side])
        pixels = np.moveaxis(_area_mean(np.moveaxis(pixels, 1 - side, 0), edges), 0, 1 - side)
    return Image.fromarray((pixels + 0.5).clip(0, 255).astype(np.uint8))


def _area_mean(pixels: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Average the pixels between neighbouring edges along the first axis, as float32.

    A pixel that an edge divides counts on each side by its share.
    """
    rows = np.ascontiguousarray(pixels).reshape(len(pixels), -1)
    means = np.empty((len(edges) - 1, rows.shape[1]), np.float32)
    for i, (start, stop) in enumerate(pairwise(edges)):
        first, last = int(start), min(math.ceil(stop), len(rows))
        at = np.arange(first, last)
        share = (np.minimum(at + 1, stop) - np.maximum(at, start)) / (stop - start)
        means[i] = share.astype(np.float32) @ rows[first:last].astype(np.float32, copy=False)
    return means.reshape(-1, *pixels.shape[1:])


def _recolour(image: Image.Image, color: Color) -> Image.Image:
    """Change brightness, then contrast about the mean grey, then saturation, then hue; rounded once, at the end."""
    brightness, contrast, saturation, hue = color
    values = np.asarray(image.convert("RGB"), np.float32) * np.float32(brightness)
    values = _away(values, _grey(values).mean(), contrast)
    values = _away(values, _grey(values)[..., None], saturation)
    if hue:
        values = _turn_hue(values.clip(0, 255), hue)
    return Image.fromarray((values + 0.5).clip(0, 255).astype(np.uint8))


def _away(values: np.ndarray, middle: np.ndarray, factor: float) -> np.ndarray:
    """Multiply the distance from the middle; a factor of 1 changes nothing, bit by bit."""
    return values if factor == 1 else middle + (values - middle) * np.float32(factor)


def _grey(values: np.ndarray) -> np.ndarray:
    """Compute the brightness of (..., 3) colours."""
    return values[..., 0] * _LUMA[0] + values[..., 1] * _LUMA[1] + values[..., 2] * _LUMA[2]


def _turn_hue(values: np.ndarray, turns: float) -> np.ndarray:
    """Shift the hue of (H, W, 3) colours on the circle of HSV; red + 1/3 turn = green."""
    red, green, blue = np.moveaxis(values, -1, 0)
    high = values.max(axis=-1)
    chroma = high - values.min(axis=-1)
    divisor = np.maximum(chroma, 1e-6)  # a grey has no hue, and its chroma of 0 hides this value
    sector = np.where(
        high == red,
        (green - blue) / divisor,
        np.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    positions = [(offset + sector + 6 * turns) % 6 for offset in (5, 3, 1)]
    return np.stack([high - chroma * np.minimum(p, 4 - p).clip(0, 1) for p in positions], axis=-1)
