"""Every kind of picture becomes upright sRGB, and cuts are exact."""

import dataclasses
import io
import itertools
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bounded import bounded
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from odd_files import saved
from PIL import Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError, features

from lora_atelier.trainer_core.config import AugmentConfig
from lora_atelier.trainer_core.data import images
from lora_atelier.trainer_core.data.buckets import bucket_list, choose_bucket
from lora_atelier.trainer_core.data.crops import Crop, fit, variant
from lora_atelier.trainer_core.data.images import (
    DECODER_ERRORS,
    cut,
    decoder_error,
    examine,
    flatten,
    load_picture,
    open_upright,
    picture_extensions,
    strict_decoding,
)


def random_picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def smooth_picture(width: int, height: int) -> Image.Image:
    """Return a picture whose colours change slowly, so that every good filter shows the same."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(2 * np.pi * (x * a / width + y * b / height)) for a, b in ((1, 0.5), (0.3, 1), (-0.7, 0.8))]
    return Image.fromarray((127.5 + 100 * np.stack(waves, axis=-1)).astype(np.uint8))


def flat(mode: str, colour: object) -> Image.Image:
    return Image.new(mode, (4, 4), colour)


# --- every mode becomes RGB -----------------------------------------------------------------------------------


def palette(mode: str = "RGB", *colours: tuple[int, ...]) -> Image.Image:
    image = flat("P", 1)
    image.putpalette([level for colour in colours for level in colour], mode)
    return image


def palette_alpha(colour: tuple[int, ...], alpha: int) -> Image.Image:
    image = flat("PA", (1, alpha))
    image.putpalette([*BLACK, *colour])
    return image


def of_values(values: object, dtype: object) -> Image.Image:
    return Image.fromarray(np.asarray(values, dtype))


BLACK, GREEN = (0, 0, 0), (10, 200, 30)
OPENED: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {  # laid on (0, 0, 255)
    "rgb": (lambda: saved(flat("RGB", GREEN)), GREEN),
    "transparent": (lambda: saved(flat("RGBA", (*GREEN, 0))), (0, 0, 255)),
    "half transparent": (lambda: saved(flat("RGBA", (200, 100, 0, 51))), (40, 20, 204)),
    "opaque alpha": (lambda: saved(flat("RGBA", (*GREEN, 255))), GREEN),
    "transparent colour": (lambda: saved(flat("RGB", GREEN), transparency=GREEN), (0, 0, 255)),
    "other transparent colour": (lambda: saved(flat("RGB", GREEN), transparency=(1, 2, 3)), GREEN),
    "grey": (lambda: saved(flat("L", 77)), (77, 77, 77)),
    "grey, transparent level": (lambda: saved(flat("L", 77), transparency=77), (0, 0, 255)),
    "grey alpha": (lambda: saved(flat("LA", (100, 51))), (20, 20, 224)),
    "1-bit": (lambda: saved(flat("1", 1)), (255, 255, 255)),
    "1-bit, transparent white": (lambda: saved(flat("1", 1), transparency=255), (0, 0, 255)),
    "palette": (lambda: saved(palette("RGB", BLACK, GREEN)), GREEN),
    "palette, transparent index": (lambda: saved(palette("RGB", BLACK, GREEN), transparency=1), (0, 0, 255)),
    "palette, alpha list": (
        lambda: saved(palette("RGB", BLACK, (200, 100, 0)), transparency=b"\xff\x33"),
        (40, 20, 204),
    ),
    "16-bit": (lambda: saved(flat("I;16", 128 * 257)), (128, 128, 128)),
    "16-bit, dark": (lambda: saved(flat("I;16", 257)), (1, 1, 1)),
    "16-bit, transparent level": (lambda: saved(flat("I;16", 5000), transparency=5000), (0, 0, 255)),
    "16-bit tiff": (lambda: saved(flat("I;16", 65535), "TIFF"), (255, 255, 255)),
    "16-bit tiff, big endian": (lambda: saved(flat("I;16B", 77 * 257), "TIFF"), (77, 77, 77)),
    "16-bit pgm": (lambda: b"P5 2 2 65535\n" + struct.pack(">4H", *[77 * 257] * 4), (77, 77, 77)),
    "32-bit tiff of 8 bits": (lambda: saved(of_values([[77, 77]], np.int32), "TIFF"), (77, 77, 77)),
    "32-bit tiff of 16 bits": (lambda: saved(of_values([[77 * 257] * 2], np.int32), "TIFF"), (77, 77, 77)),
    "32-bit tiff": (lambda: saved(of_values([[2**30] * 2], np.int32), "TIFF"), (128, 128, 128)),
    "float tiff": (lambda: saved(flat("F", 0.5), "TIFF"), (128, 128, 128)),
    "float tiff, overexposed": (lambda: saved(flat("F", 1.5), "TIFF"), (255, 255, 255)),
    "float tiff of 8 bits": (lambda: saved(flat("F", 77.0), "TIFF"), (77, 77, 77)),
    "float tiff of 16 bits": (lambda: saved(flat("F", 77 * 257.0), "TIFF"), (77, 77, 77)),
    "float tiff of nothing": (lambda: saved(flat("F", float("nan")), "TIFF"), (0, 0, 0)),
    "float tiff of infinity": (lambda: saved(flat("F", float("inf")), "TIFF"), (255, 255, 255)),
    "cmyk jpeg (Adobe, inverted)": (lambda: saved(flat("CMYK", (0, 255, 255, 0)), "JPEG", quality=95), (255, 0, 0)),
    "cmyk tiff": (lambda: saved(flat("CMYK", (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
    "ycbcr tiff": (lambda: saved(flat("YCbCr", (81, 90, 240)), "TIFF"), (238, 14, 14)),
    "lab tiff": (lambda: saved(flat("LAB", (255, 128, 128)), "TIFF"), (255, 255, 255)),
    "pa tiff": (lambda: saved(palette_alpha((200, 100, 0), 51), "TIFF"), (40, 20, 204)),
    "jpeg": (lambda: saved(flat("RGB", GREEN), "JPEG", quality=95), GREEN),
    "grey jpeg": (lambda: saved(flat("L", 77), "JPEG"), (77, 77, 77)),
    "webp": (lambda: saved(flat("RGBA", (*GREEN, 0)), "WEBP", lossless=True), (0, 0, 255)),
    "bmp": (lambda: saved(flat("RGB", GREEN), "BMP"), GREEN),
    "tga": (lambda: saved(flat("RGBA", (200, 100, 0, 51)), "TGA"), (40, 20, 204)),
    "ppm": (lambda: saved(flat("RGB", GREEN), "PPM"), GREEN),
    "ico": (lambda: saved(Image.new("RGBA", (16, 16), (200, 100, 0, 51)), "ICO"), (40, 20, 204)),
    "gif": (lambda: saved(flat("RGB", GREEN), "GIF"), GREEN),
    "gif, transparent": (lambda: saved(palette("RGB", BLACK, GREEN), "GIF", transparency=1), (0, 0, 255)),
}
if features.check("avif"):
    OPENED["avif"] = (lambda: saved(flat("RGB", GREEN), "AVIF", quality=100), GREEN)
if features.check("jpg_2000"):
    OPENED["jpeg 2000"] = (lambda: saved(Image.new("RGB", (64, 64), GREEN), "JPEG2000"), GREEN)


@pytest.mark.parametrize("kind", OPENED)
def test_every_file_becomes_rgb_on_the_background(kind: str) -> None:
    write, expected = OPENED[kind]
    image = load_picture(write(), "#0000ff")
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image, int) - expected).max() <= 2


FLATTENED: dict[str, tuple[Image.Image, tuple[int, int, int]]] = {  # on (0, 0, 255)
    "premultiplied": (flat("RGBa", (40, 20, 0, 51)), (40, 20, 204)),
    "premultiplied grey": (flat("La", (20, 51)), (20, 20, 224)),
    "palette and alpha": (palette_alpha((200, 100, 0), 51), (40, 20, 204)),
    "palette of four channels": (palette("RGBA", (0, 0, 0, 255), (200, 100, 0, 51)), (40, 20, 204)),
    "unused channel": (flat("RGBX", (*GREEN, 9)), GREEN),
    "hsv": (flat("HSV", (0, 255, 255)), (255, 0, 0)),
}


@pytest.mark.parametrize("kind", FLATTENED)
def test_modes_that_no_file_has_are_flattened_too(kind: str) -> None:
    image, expected = FLATTENED[kind]
    assert np.abs(np.asarray(flatten(image, "blue"), int) - expected).max() <= 1


def test_an_opaque_picture_is_the_same_on_every_background() -> None:
    picture = random_picture(20, 10)
    layered = picture.convert("RGBA")
    for background in ("white", "black", "#12345678"):
        assert flatten(layered, background).tobytes() == picture.tobytes()
        assert load_picture(saved(picture), background).tobytes() == picture.tobytes()


def test_a_path_and_an_open_file_are_read_as_bytes_are(tmp_path: Path) -> None:
    data = saved(random_picture(20, 10))
    (tmp_path / "ä b.PNG").write_bytes(data)
    assert load_picture(tmp_path / "ä b.PNG") == load_picture(io.BytesIO(data)) == load_picture(data)


# --- upright, first frame, facts ------------------------------------------------------------------------------

SIDEWAYS = {  # orientation -> how an upright picture is stored
    1: lambda upright: upright,
    2: ImageOps.mirror,
    3: lambda upright: upright.rotate(180),
    4: ImageOps.flip,
    5: lambda upright: upright.transpose(Image.Transpose.TRANSPOSE),
    6: lambda upright: upright.transpose(Image.Transpose.ROTATE_90),
    7: lambda upright: upright.transpose(Image.Transpose.TRANSVERSE),
    8: lambda upright: upright.transpose(Image.Transpose.ROTATE_270),
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", SIDEWAYS)
def test_pictures_stand_upright(orientation: int, kind: str) -> None:
    upright = random_picture(12, 7)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(SIDEWAYS[orientation](upright), kind, exif=exif, **options)
    assert open_upright(data).tobytes() == upright.tobytes()
    facts = examine(data)
    assert (facts.width, facts.height, facts.format, facts.mode) == (12, 7, kind, "RGB")


def test_the_orientation_of_a_jpeg_and_of_16_bits() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: width and height change places
    assert open_upright(saved(Image.new("RGB", (40, 20)), "JPEG", exif=exif)).size == (20, 40)
    assert open_upright(saved(Image.new("I;16", (40, 20), 7), exif=exif)).size == (20, 40)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0"])
def test_exif_that_cannot_be_read_leaves_a_sound_picture(exif: bytes) -> None:
    assert open_upright(saved(Image.new("RGB", (40, 20)), "JPEG", exif=exif)).size == (40, 20)


COLOURS = [(10, 200, 30), (200, 0, 0), (0, 0, 200)]
ANIMATED = {
    "GIF": {},
    "PNG": {},
    "TIFF": {},
    "WEBP": {"lossless": True},
    "MPO": {"quality": 95},
    **({"AVIF": {"quality": 100}} if features.check("avif") else {}),
}


@pytest.mark.parametrize("kind", ANIMATED)
def test_the_first_frame_counts_and_the_number_is_known(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in COLOURS]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **ANIMATED[kind])
    assert examine(data).frames == 3
    assert np.abs(np.asarray(load_picture(data), int) - COLOURS[0]).max() <= 2
    assert examine(saved(frames[0], kind)).frames == 1


def test_only_the_first_frame_is_decoded() -> None:
    frames = [random_picture(16, 16), random_picture(16, 16).rotate(90)]
    data = bytearray(saved(frames[0], "TIFF", save_all=True, append_images=frames[1:], compression="tiff_lzw"))
    with Image.open(io.BytesIO(data)) as opened:
        opened.seek(1)
        start = opened.tag_v2[273][0]
    data[start : start + 100] = b"\xff" * 100
    with Image.open(io.BytesIO(data)) as opened, pytest.raises(DECODER_ERRORS):
        opened.seek(1)
        opened.load()
    assert open_upright(bytes(data)).tobytes() == frames[0].tobytes()


@pytest.mark.parametrize(
    ("image", "options", "mode", "has_alpha"),
    [
        (flat("RGB", GREEN), {}, "RGB", False),
        (flat("RGBA", (*GREEN, 255)), {}, "RGBA", True),
        (flat("RGB", GREEN), {"transparency": (1, 2, 3)}, "RGB", True),
        (palette("RGB", BLACK, GREEN), {}, "P", False),
        (palette("RGB", BLACK, GREEN), {"transparency": 0}, "P", True),
        (flat("I;16", 9), {}, "I;16", False),
        (flat("I;16", 9), {"transparency": 9}, "I;16", True),
    ],
)
def test_facts_tell_the_mode_and_alpha(image: Image.Image, options: dict, mode: str, has_alpha: bool) -> None:
    facts = examine(saved(image, **options))
    assert (facts.mode, facts.has_alpha, facts.format, facts.frames) == (mode, has_alpha, "PNG", 1)


def test_extensions_are_those_of_raster_pictures() -> None:
    extensions = picture_extensions()
    assert {".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".tga", ".ppm"} <= extensions
    assert (".avif" in extensions) == features.check("avif")
    others = {".pdf", ".eps", ".ps", ".mpg", ".mpeg", ".h5", ".hdf", ".grib", ".bufr", ".wmf", ".emf", ".fits", ".fit"}
    assert not extensions & (others | {".txt", ".svg", ".palm"})
    assert all(extension == extension.lower() and extension.startswith(".") for extension in extensions)


# --- broken and far too large ---------------------------------------------------------------------------------


def test_truncated_pictures_are_errors_even_if_the_process_pads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF"):
        data = saved(random_picture(64, 64), kind)
        with pytest.raises(DECODER_ERRORS):
            load_picture(data[: len(data) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_strictness_ends_with_the_last_of_several_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    first, second = strict_decoding(), strict_decoding()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # in the order of threads, not of blocks
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert Image.MAX_IMAGE_PIXELS == images.LARGEST
    second.__exit__(None, None, None)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    assert Image.MAX_IMAGE_PIXELS is None
    data = saved(random_picture(64, 64))
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert len(set(pool.map(lambda _: load_picture(data).tobytes(), range(40)))) == 1
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    with pytest.raises(KeyError), strict_decoding():
        raise KeyError
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def claims(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size."""
    data = saved(flat("RGB", GREEN))
    head = data[12:16] + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]


@pytest.mark.parametrize("limit", [None, 10, 10**12])
def test_bombs_are_refused_by_their_header_whatever_the_process_allows(limit, monkeypatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    for data in (claims(100_000, 100_000), claims(images.LARGEST + 1, 1), claims(20_000, 10_000)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Image.DecompressionBombError) as error:
                open_upright(data)
        assert decoder_error(error.value) == "too many pixels"
    assert limit == Image.MAX_IMAGE_PIXELS


def test_large_pictures_are_read_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_upright(saved(Image.new("1", (40, 40)))).size == (40, 40)


def damaged(data: bytes, draws: random.Random) -> bytes:
    """Return a file with a few wrong bytes, sometimes cut short."""
    broken = bytearray(data)
    for _ in range(draws.randint(1, 3)):
        broken[draws.randrange(min(len(broken), 200))] = draws.randrange(256)
    return bytes(broken[: draws.randrange(len(broken))] if draws.random() < 0.3 else broken)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TGA", "WEBP", "ICO", "PPM"])
def test_damaged_files_raise_nothing_but_decoder_errors(kind: str) -> None:
    data, refused = saved(random_picture(24, 16), kind), 0
    for seed in range(40):
        try:
            examine(damaged(data, random.Random(seed)))
        except DECODER_ERRORS as error:
            refused += 1
            assert 0 < len(decoder_error(error)) <= 80
    assert refused > 5


def test_reasons_are_words() -> None:
    assert decoder_error(PermissionError(13, "x")) == "no permission"
    assert decoder_error(FileNotFoundError(2, "x")) == "the file, or what it links to, is missing"
    assert decoder_error(OSError(5, "Input/output error")) == "Input/output error"
    assert decoder_error(MemoryError()) == "too little memory to decode it"
    with pytest.raises(DECODER_ERRORS) as error:
        open_upright(b"P1\nsesame\n")
    assert "sesame" in str(error.value)
    assert decoder_error(error.value) == "damaged or truncated"
    with pytest.raises(DECODER_ERRORS) as error:
        open_upright(b"<html>")
    assert decoder_error(error.value) == "not a picture"


# --- colour profiles ------------------------------------------------------------------------------------------

SRGB_D50 = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
ADOBE_D50 = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
D50 = (0.9642, 1.0, 0.8249)


def icc(space: bytes, tags: dict[bytes, bytes], kind: bytes = b"mntr", connection: bytes = b"XYZ ") -> bytes:
    """Build an ICC profile of version 2.4 from its tags."""
    tags = {b"wtpt": b"XYZ \0\0\0\0" + fixed(*D50), **tags}
    place = 132 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += name + struct.pack(">II", place + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    head = struct.pack(">I4xI", place + len(body), 0x02400000) + kind + space + connection
    head += struct.pack(">6H", 2024, 1, 1, 0, 0, 0) + b"acsp" + b"\0" * 28 + fixed(*D50)
    return head.ljust(128, b"\0") + table + body


def fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256)) + b"\0\0"


def rgb_profile(matrix: np.ndarray, exponent: float) -> bytes:
    tags = {name: b"XYZ \0\0\0\0" + fixed(*matrix[:, i]) for i, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))}
    return icc(b"RGB ", tags | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), gamma(exponent)))


def cmyk_profile() -> bytes:
    """Return a profile in which paper is white, everything printed is black, and cyan alone is Lab (50, 60, 40)."""
    colours = dict.fromkeys(itertools.product((0, 1), repeat=4), (0, 128, 128))
    colours |= {(0, 0, 0, 0): (255, 128, 128), (1, 0, 0, 0): (128, 188, 168)}
    ramp = bytes(range(256))
    table = bytes(level for ink in sorted(colours) for level in colours[ink])
    lut = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + ramp * 4 + table + ramp * 3
    return icc(b"CMYK", {b"A2B0": lut}, b"prtr", b"Lab ")


def to_srgb(colour: tuple[int, ...], matrix: np.ndarray, exponent: float) -> np.ndarray:
    """Return the closed form of a conversion from a matrix profile."""
    light = np.linalg.inv(SRGB_D50) @ matrix @ (np.array(colour) / 255) ** exponent
    light = light.clip(0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


ADOBE = rgb_profile(ADOBE_D50, 563 / 256)


@pytest.mark.parametrize("colour", [(200, 100, 50), (128, 128, 128), (255, 255, 255), (0, 0, 0), (60, 120, 90)])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
def test_a_wide_gamut_becomes_srgb(colour: tuple[int, ...], kind: str) -> None:
    data = saved(
        Image.new("RGB", (16, 16), colour), kind, icc_profile=ADOBE, **({"quality": 100} if kind == "JPEG" else {})
    )
    expected = to_srgb(colour, ADOBE_D50, 563 / 256)
    assert np.abs(np.asarray(load_picture(data)) - expected).max() <= (3 if kind == "JPEG" else 1.5)
    if colour == (200, 100, 50):
        assert np.abs(expected - colour).max() > 10
    assert open_upright(data, srgb=False).getpixel((0, 0)) == pytest.approx(colour, abs=1)


def test_profiles_work_on_alpha_palettes_and_grey() -> None:
    colour = (200, 100, 50)
    expected = to_srgb(colour, ADOBE_D50, 563 / 256)
    image = open_upright(saved(flat("RGBA", (*colour, 77)), icc_profile=ADOBE))
    assert image.mode == "RGBA"
    assert np.abs(np.asarray(image)[..., :3] - expected).max() <= 1.5
    assert image.getchannel("A").getextrema() == (77, 77)
    image = open_upright(saved(palette("RGB", BLACK, colour), icc_profile=ADOBE, transparency=b"\xff\x33"))
    assert np.abs(np.asarray(image)[..., :3] - expected).max() <= 1.5
    assert image.getchannel("A").getextrema() == (51, 51)
    dark = rgb_profile(SRGB_D50, 1.0)  # a grey picture may have a profile of colours
    assert load_picture(saved(flat("L", 55), icc_profile=dark)).getpixel((0, 0)) == pytest.approx((128,) * 3, abs=1)


def test_threads_share_a_conversion() -> None:
    files = [saved(random_picture(200, 100 + i), icc_profile=ADOBE) for i in range(8)]
    alone = [open_upright(data).tobytes() for data in files]
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(lambda data: open_upright(data).tobytes(), files * 3)) == alone * 3


@pytest.mark.parametrize("mode", ["L", "LA", "I;16", "1"])
def test_grey_profiles(mode: str) -> None:
    profile = icc(b"GRAY", {b"kTRC": gamma(1.0)})  # linear light
    stored = {"L": 55, "LA": (55, 128), "I;16": 55 * 257, "1": 1}[mode]
    image = open_upright(saved(flat(mode, stored), icc_profile=profile))
    level = 255 if mode == "1" else 128  # 1.055 * (55 / 255) ** (1 / 2.4) - 0.055 = 0.5018
    assert image.getpixel((0, 0))[:3] == pytest.approx((level,) * 3, abs=1)
    assert image.has_transparency_data == (mode == "LA")


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk_profiles(kind: str) -> None:
    cyan, paper, black = (255, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 255)
    for ink, lab in ((cyan, (128, 188, 168)), (paper, (255, 128, 128)), (black, (0, 128, 128))):
        data = saved(Image.new("CMYK", (16, 16), ink), kind, icc_profile=cmyk_profile())
        expected = Image.new("LAB", (1, 1), lab).convert("RGB").getpixel((0, 0))
        assert load_picture(data).getpixel((8, 8)) == pytest.approx(expected, abs=3)


def test_a_profile_that_is_srgb_changes_nothing() -> None:
    picture = random_picture(32, 32)
    plain = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for image in (picture, picture.convert("RGBA"), picture.convert("L")):
        read = open_upright(saved(image, icc_profile=plain))
        assert (read.mode, read.tobytes()) == (image.mode, image.tobytes())


@pytest.mark.parametrize(
    ("profile", "mode"),
    [
        (b"no profile", "RGB"),
        (ADOBE[:200], "RGB"),
        (ADOBE[:128] + b"\xff" * 100, "RGB"),
        (icc(b"GRAY", {b"kTRC": gamma(1.0)}), "RGB"),
        (cmyk_profile(), "RGB"),
        (ADOBE, "CMYK"),
        (icc(b"RGB ", {}), "RGB"),
        (ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes(), "RGB"),
    ],
)
def test_a_profile_that_does_not_fit_leaves_the_picture(profile: bytes, mode: str) -> None:
    image = random_picture(16, 16).convert(mode)
    assert open_upright(saved(image, "TIFF", icc_profile=profile)).tobytes() == image.tobytes()


# --- cuts -----------------------------------------------------------------------------------------------------


def area_weights(old: int, new: int) -> np.ndarray:
    """Return the (new, old) matrix of overlaps, the definition of an area filter."""
    edges = np.arange(new + 1) * old / new
    pixels = np.arange(old)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return overlap.clip(0) * new / old


@pytest.mark.parametrize("size", [(150, 100), (100, 150), (131, 127), (65, 64), (640, 643)])
def test_shrinking_averages_exact_areas(size: tuple[int, int]) -> None:
    picture = random_picture(*size)
    crop = fit(size, (64, 64), shift=(0.4, -0.6))
    whole = np.asarray(picture, np.float64)
    whole = np.einsum("yh,hwc->ywc", area_weights(size[1], crop.resized[1]), whole)
    whole = np.einsum("xw,ywc->yxc", area_weights(size[0], crop.resized[0]), whole)
    left, top = crop.offset
    expected = whole[top : top + 64, left : left + 64]
    assert np.abs(np.asarray(cut(picture, crop), np.float64) - expected).max() <= 0.51


def test_growing_is_lanczos_of_the_whole_picture_then_cropped() -> None:
    picture = random_picture(30, 20)
    crop = fit((30, 20), (64, 64))
    left, top = crop.offset
    whole = picture.resize(crop.resized, Image.Resampling.LANCZOS).crop((left, top, left + 64, top + 64))
    assert np.abs(np.asarray(whole, int) - np.asarray(cut(picture, crop), int)).max() <= 1


def test_a_picture_of_the_right_size_is_left_as_it_is_and_flip_mirrors() -> None:
    picture = random_picture(64, 64)
    crop = fit((64, 64), (64, 64))
    assert np.array_equal(np.asarray(cut(picture, crop)), np.asarray(picture))
    flipped = cut(picture, dataclasses.replace(crop, flip=True))
    assert np.array_equal(np.asarray(flipped), np.asarray(picture)[:, ::-1])


def test_a_picture_at_its_own_size_is_only_cut() -> None:
    picture = random_picture(80, 60)
    crop = fit((80, 60), (64, 48), resized=(80, 60), shift=(1.0, -1.0))
    assert np.array_equal(np.asarray(cut(picture, crop)), np.asarray(picture)[:48, 16:])


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (1, 1), (3, 2000), (2000, 3)])
@pytest.mark.parametrize("angle", [0.0, 7.0])
def test_extreme_pictures_are_cut_without_building_the_resized_one(size: tuple[int, int], angle: float) -> None:
    picture = Image.new("RGB", size, (10, 200, 30))
    crop = fit(size, choose_bucket(size, bucket_list((512, 512), 64)), angle=angle)
    result = cut(picture, crop)
    assert result.size == crop.bucket
    assert result.getextrema() == ((10, 10), (200, 200), (30, 30))


def test_a_flat_picture_stays_flat_through_any_geometry() -> None:
    for width in range(60, 200, 29):
        for height in range(60, 200, 31):
            for bucket in bucket_list((64, 64), 16):
                crop = fit((width, height), bucket)
                assert cut(Image.new("RGB", (width, height), (255, 0, 77)), crop).getextrema() == (
                    (255, 255),
                    (0, 0),
                    (77, 77),
                )


@given(
    st.tuples(st.integers(20, 150), st.integers(20, 150)),
    st.sampled_from(bucket_list((64, 64), 16)),
    st.integers(0, 10_000),
)
@examples(240)
def test_no_turn_shows_what_lies_outside_the_picture(size, bucket, index: int) -> None:
    augment = AugmentConfig(crop_jitter=1, zoom=0.3, rotation=45)
    crop = variant(size, bucket, augment, seed=1, picture=0, index=index)
    result = cut(Image.new("RGB", size, (255, 0, 77)), crop)
    assert result.size == bucket
    assert result.getextrema() == ((255, 255), (0, 0), (77, 77))


@pytest.mark.parametrize("bucket", [(64, 48), (128, 128), (400, 304)])  # much smaller, smaller, larger
@pytest.mark.parametrize("angle", [-33.0, -2.0, 0.5, 10.0, 45.0])
def test_a_turn_is_the_picture_seen_through_the_crop_corners(bucket: tuple[int, int], angle: float) -> None:
    """Compare with the colours read where the corners say each new pixel lies."""
    picture = smooth_picture(300, 220)
    crop = fit(picture.size, bucket, angle=angle, shift=(0.5, -0.3), zoom=1.2)
    first, second, _, fourth = np.array(crop.corners(picture.size))
    x = (np.arange(bucket[0])[None, :, None] + 0.5) / bucket[0]
    y = (np.arange(bucket[1])[:, None, None] + 0.5) / bucket[1]
    at = first + x * (second - first) + y * (fourth - first) - 0.5
    near = np.floor(at).astype(int).clip(0, np.array(picture.size) - 2)
    right, down = np.moveaxis(at - near, -1, 0)[..., None]
    pixels = np.asarray(picture, np.float64)
    rows, columns = near[..., 1], near[..., 0]
    upper = pixels[rows, columns] * (1 - right) + pixels[rows, columns + 1] * right
    lower = pixels[rows + 1, columns] * (1 - right) + pixels[rows + 1, columns + 1] * right
    expected = upper * (1 - down) + lower * down
    assert np.abs(np.asarray(cut(picture, crop)) - expected).max() <= 3


def test_a_positive_angle_turns_the_picture_against_the_clock() -> None:
    picture = smooth_picture(200, 200)
    crop = fit((200, 200), (64, 64), angle=20.0)
    ours = np.asarray(cut(picture, crop), int)
    share = 1 / (np.cos(np.radians(20)) + np.sin(np.radians(20)))
    edge = 100 - 100 * share
    theirs = picture.rotate(20, Image.Resampling.BICUBIC).crop((round(edge),) * 2 + (round(200 - edge),) * 2)
    theirs = np.asarray(theirs.resize((64, 64), Image.Resampling.BOX), int)
    assert np.abs(ours - theirs).max() <= 6
    against = np.asarray(cut(picture, dataclasses.replace(crop, angle=-20.0)), int)
    assert np.abs(ours - against).max() > 30


def test_turning_keeps_fine_detail_from_becoming_false_pattern() -> None:
    """Shrink stripes of two pixels eightfold: they must become grey, not broad stripes."""
    pixels = np.zeros((512, 512), np.uint8)
    pixels[:, ::2] = 255
    result = np.asarray(cut(Image.fromarray(pixels).convert("RGB"), fit((512, 512), (64, 64), angle=3.0)), float)
    assert result.mean() == pytest.approx(127.5, abs=1)
    assert result.std() < 6


# --- colours --------------------------------------------------------------------------------------------------


def recoloured(image: Image.Image, *color: float) -> np.ndarray:
    """Return the pixels of a picture cut at its own size with (brightness, contrast, saturation, hue)."""
    crop = Crop(resized=image.size, offset=(0, 0), bucket=image.size, color=color)
    return np.asarray(cut(image, crop), np.float64)


def test_brightness_multiplies_and_stays_in_range() -> None:
    picture = random_picture(32, 32)
    pixels = np.asarray(picture, np.float64)
    for factor in (0.0, 0.5, 1.3, 2.0):
        expected = (pixels * factor).clip(0, 255)
        assert np.abs(recoloured(picture, factor, 1, 1, 0) - expected).max() <= 0.51


def test_contrast_turns_about_the_mean_grey() -> None:
    picture = random_picture(32, 32)
    pixels = np.asarray(picture, np.float64)
    mean = (pixels @ (0.299, 0.587, 0.114)).mean()
    for factor in (0.0, 0.6, 1.4):
        expected = (mean + (pixels - mean) * factor).clip(0, 255)
        assert np.abs(recoloured(picture, 1, factor, 1, 0) - expected).max() <= 0.51


def test_saturation_moves_between_grey_and_more_colour() -> None:
    picture = random_picture(32, 32)
    grey = np.asarray(picture.convert("L"), np.float64)[..., None]
    assert np.abs(recoloured(picture, 1, 1, 0, 0) - grey).max() <= 1
    pixels = np.asarray(picture, np.float64)
    luma = (pixels @ (0.299, 0.587, 0.114))[..., None]
    assert np.abs(recoloured(picture, 1, 1, 1.5, 0) - (luma + 1.5 * (pixels - luma)).clip(0, 255)).max() <= 0.51


def test_a_third_of_a_turn_moves_red_to_green_to_blue() -> None:
    picture = random_picture(32, 32)
    pixels = np.asarray(picture)
    assert np.abs(recoloured(picture, 1, 1, 1, 1 / 3) - np.roll(pixels, 1, axis=-1)).max() <= 1
    assert np.abs(recoloured(picture, 1, 1, 1, -1 / 3) - np.roll(pixels, -1, axis=-1)).max() <= 1
    assert np.abs(recoloured(picture, 1, 1, 1, 1.0) - pixels).max() <= 1
    grey = picture.convert("L").convert("RGB")
    assert np.array_equal(recoloured(grey, 1, 1, 1, 0.4), np.asarray(grey))


@pytest.mark.parametrize("turns", [-0.5, -0.1, 0.07, 0.25, 0.5])
def test_a_turn_of_hue_is_that_of_colorsys(turns: float) -> None:
    import colorsys

    picture = random_picture(12, 12)
    expected = []
    for red, green, blue in np.asarray(picture).reshape(-1, 3) / 255:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        expected.append(colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value))
    shown = recoloured(picture, 1, 1, 1, turns).reshape(-1, 3)
    assert np.abs(shown - 255 * np.array(expected)).max() <= 0.51


def test_colours_change_after_the_geometry() -> None:
    picture = random_picture(100, 80)
    crop = fit((100, 80), (64, 48), flip=True)
    plain = cut(picture, crop)
    color = (1.1, 0.8, 1.2, 0.05)
    assert np.array_equal(np.asarray(cut(picture, dataclasses.replace(crop, color=color))), recoloured(plain, *color))


def test_postscript_in_the_clothes_of_a_picture_reaches_no_interpreter(monkeypatch) -> None:
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was called"))
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(UnidentifiedImageError):
        open_upright(script)


def test_extensions_of_pictures_and_of_nothing_else() -> None:
    extensions = picture_extensions()
    assert {".png", ".jpg", ".mpo", ".webp", ".tif", ".psd"} <= extensions
    assert not extensions & {".eps", ".pdf", ".mpg", ".txt", ".json", ".svg"}


@given(
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)), max_size=4),
)
@bounded(20)
def test_any_bytes_of_a_picture_are_decoded_or_refused(kind, changes):
    whole = io.BytesIO()
    Image.radial_gradient("L").resize((24, 16)).convert("RGB").save(whole, kind)
    content = bytearray(whole.getvalue())
    for share, length, new in changes:
        start = int(share * len(content))
        content[start : start + length] = new
    try:
        found = images.examine(bytes(content))
    except images.DECODER_ERRORS as error:
        assert images.decoder_error(error)
    else:
        assert found.width > 0 and found.height > 0
