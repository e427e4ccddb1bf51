"""Broken and odd pictures, captions and masks, made in code, each with what a scan has to make of it."""

import io
import os
import random
import stat
import struct
import sys
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageCms, features

from lora_atelier.trainer_core.config import CaptionConfig, MaskConfig

Colour = tuple[int, int, int]
GREEN: Colour = (10, 200, 30)
SIZE = (32, 24)
TEXTS = CaptionConfig()  # a text file beside each picture
MASKS = MaskConfig()  # a -masklabel.png beside each picture
COMPANION = "zz fine.png"
NO_WORD = CaptionConfig(source="none")


@dataclass(frozen=True, kw_only=True)
class Odd:
    """One file `name`, written by `write` together with what belongs to it, and what happens to it."""

    label: str
    write: Callable[[Path], object]  # is given the path of the file
    name: str = "a.png"
    outcome: str = "picture"  # picture | left out | not used; of the file `name`
    why: str = ""  # a regular expression for the reason; it finds the sentence too where the file is left out
    size: tuple[int, int] | None = None  # of a picture, upright
    colour: Colour | None = None  # in the middle of a picture as it is trained
    lines: tuple[str, ...] | None = None  # of its caption
    mask: int | None = None  # level in the middle of its mask
    note: str = ""  # a regular expression for a remark
    others: dict[str, str] = field(default_factory=dict)  # name -> outcome of further files
    where: str = ""  # "posix": not on Windows; "linux": neither on macOS
    captions: CaptionConfig = NO_WORD
    masks: MaskConfig | None = None
    min_side: int = 16
    background: str = "white"

    @property
    def possible(self) -> bool:
        """Tell whether this system can have such a file."""
        return {"": True, "posix": os.name == "posix", "linux": sys.platform == "linux"}[self.where]


# --- contents -------------------------------------------------------------------------------------------------


def flat(mode: str = "RGB", colour: Any = GREEN, size: tuple[int, int] = SIZE) -> Image.Image:
    """Return a picture of one colour."""
    return Image.new(mode, size, colour)


def noise(size: tuple[int, int] = SIZE) -> Image.Image:
    """Return a picture that compresses badly, so that every byte of its file counts."""
    return Image.frombytes("RGB", size, random.Random(0).randbytes(3 * size[0] * size[1]))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def moving(kind: str, **options: Any) -> bytes:
    """Return a file of three frames, the first green."""
    frames = [flat(), flat(colour=(200, 0, 0)), flat(colour=(0, 0, 200))]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def turned(orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    """Return a picture that its EXIF asks to turn."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(flat(), kind, exif=exif, **options)


def palette() -> Image.Image:
    """Return a palette picture, green by its index 1."""
    image = flat("P", 1)
    image.putpalette([0, 0, 0, *GREEN])
    return image


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes, depth: int = 8, kind: int = 2, before: bytes = b"") -> bytes:
    """Return a PNG from its own numbers: colour type `kind`, uncompressed rows each with a filter byte."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + before + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_16_bit() -> bytes:
    """Return a PNG of 16 bits per colour, which Pillow cannot write."""
    row = b"\0" + struct.pack(">3H", *[level * 257 for level in GREEN]) * SIZE[0]
    return png(*SIZE, row * SIZE[1], depth=16)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """Return the data with some bytes replaced."""
    return data[:at] + new + data[at + len(new) :]


def bad_checksum(data: bytes) -> bytes:
    """Return a PNG whose pixel chunk has a wrong checksum."""
    start = data.index(b"IDAT")
    length = int.from_bytes(data[start - 4 : start], "big")
    return patched(data, start + 4 + length, b"\0\0\0\0")


def claiming_jpeg(width: int, height: int) -> bytes:
    """Return a JPEG whose frame header claims a size."""
    data = saved(noise(), "JPEG")
    return patched(data, data.index(b"\xff\xc0") + 5, struct.pack(">HH", height, width))


def wide_gamut() -> bytes:
    """Return a profile with sRGB's white and curve and with primaries of another order: red is called green.

    Its colours come out with the first two channels exchanged, which no rounding can hide.
    """
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = int.from_bytes(profile[128:132], "big")
    for i in range(count):
        at = 132 + 12 * i
        swap = {b"rXYZ": b"gXYZ", b"gXYZ": b"rXYZ"}
        profile[at : at + 4] = swap.get(bytes(profile[at : at + 4]), profile[at : at + 4])
    return bytes(profile)


# --- writers --------------------------------------------------------------------------------------------------


def content(data: bytes) -> Callable[[Path], object]:
    """Return a writer of these bytes."""
    return lambda path: path.write_bytes(data)


def fine(path: Path) -> None:
    """Write a sound PNG, whatever the path is called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(saved(flat()))


def with_caption(text: bytes, ending: str = ".txt") -> Callable[[Path], None]:
    """Return a writer of a picture and a text of these bytes."""

    def write(path: Path) -> None:
        fine(path)
        path.with_suffix(ending).write_bytes(text)

    return write


def with_mask(data: bytes, suffix: str = "-masklabel.png") -> Callable[[Path], None]:
    """Return a writer of a picture and a mask of these bytes."""

    def write(path: Path) -> None:
        fine(path)
        path.with_name(path.stem + suffix).write_bytes(data)

    return write


def also(*others: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a writer of a sound picture and whatever the others write."""

    def write(path: Path) -> None:
        fine(path)
        for other in others:
            other(path)

    return write


def outside(path: Path) -> Path:
    """Return a place that is not in the dataset, which is the folder above that of the file."""
    return path.parent.parent.parent / f"outside {path.parent.name}"


def link_outside(path: Path) -> None:
    """Link to a picture that lies elsewhere."""
    fine(outside(path) / "real.png")
    path.symlink_to(outside(path) / "real.png")


def link_to_folder(path: Path) -> None:
    """Link to a folder with a picture that lies elsewhere."""
    fine(outside(path) / "real.png")
    path.symlink_to(outside(path), target_is_directory=True)


def link_upwards(path: Path) -> None:
    """Write a picture in a folder that also links to the folder above."""
    fine(path)
    (path.parent / "up").symlink_to(path.parent.parent, target_is_directory=True)


def hard_link(path: Path) -> None:
    """Give one file two names."""
    fine(path)
    os.link(path, path.with_name("b.png"))


def sparse(size: int) -> Callable[[Path], object]:
    """Return a writer of a file that is far larger than the place it takes on the disk."""

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return write


def pipe(path: Path) -> None:
    """Make a pipe; whoever reads it waits for ever."""
    os.mkfifo(path)


def beside(ending: str, write: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a writer that writes <stem><ending> instead."""
    return lambda path: write(path.with_name(path.stem + ending))


def folder(*names: str) -> Callable[[Path], None]:
    """Return a writer of a folder that holds sound pictures."""

    def write(path: Path) -> None:
        path.mkdir(parents=True)
        for name in names:
            fine(path / name)

    return write


# --- the rows -------------------------------------------------------------------------------------------------


def trained(label: str, data: bytes | Callable[[Path], object], name: str = "a.png", **more: Any) -> Odd:
    """Return a file that is trained, of the usual size and colour unless more says otherwise."""
    write = content(data) if isinstance(data, bytes) else data
    return Odd(label=label, write=write, name=name, **{"size": SIZE, "colour": GREEN, **more})


def left_out(
    label: str, data: bytes | Callable[[Path], object], sentence: str, name: str = "a.png", **more: Any
) -> Odd:
    """Return a file that stops the run, or is left out: `sentence` says why, in words of the person."""
    write = content(data) if isinstance(data, bytes) else data
    return Odd(label=label, write=write, name=name, outcome="left out", why=sentence, **more)


def unused(
    label: str, data: bytes | Callable[[Path], object], name: str, why: str = "not a picture", **more: Any
) -> Odd:
    """Return a file that is no picture and no reason to stop."""
    write = content(data) if isinstance(data, bytes) else data
    return Odd(label=label, write=write, name=name, outcome="not used", why=why, **more)


NOISE = {
    "png": saved(noise()),
    "jpg": saved(noise(), "JPEG"),
    "webp": saved(noise(), "WEBP"),
    "gif": saved(noise(), "GIF"),
    "bmp": saved(noise(), "BMP"),
    "tif": saved(noise(), "TIFF"),
}
SEVERAL = r"1 picture has several frames, of which only the first is used: a\."


def _formats() -> list[Odd]:
    lossless = saved(flat("RGBA", (*GREEN, 0)), "WEBP", lossless=True)
    rows = [
        trained("png", saved(flat())),
        trained("jpeg", saved(flat(), "JPEG", quality=95), "a.jpeg"),
        trained("jpeg, progressive", saved(flat(), "JPEG", quality=95, progressive=True), "a.jfif"),
        trained("webp, lossy", saved(flat(), "WEBP", quality=95), "a.webp", colour=None),
        trained("webp, transparent", lossless, "a.webp", background="#0000ff", colour=(0, 0, 255)),
        trained("bmp", saved(flat(), "BMP"), "a.bmp"),
        trained("bmp of 1 bit", saved(flat("1", 1), "BMP"), "a.bmp", colour=(255, 255, 255)),
        trained("tiff", saved(flat(), "TIFF"), "a.tif"),
        trained("tiff, lzw", saved(flat(), "TIFF", compression="tiff_lzw"), "a.tiff"),
        trained("tiff, deflate", saved(flat(), "TIFF", compression="tiff_adobe_deflate"), "a.tif"),
        trained("tiff of several pages", moving("TIFF"), "a.tif", note=SEVERAL),
        trained("gif", saved(flat(), "GIF"), "a.gif"),
        trained("gif, animated", moving("GIF"), "a.gif", note=SEVERAL),
        trained("webp, animated", moving("WEBP", lossless=True), "a.webp", note=SEVERAL),
        trained("png, animated", moving("PNG"), note=SEVERAL),
        trained("jpeg of several cameras", moving("MPO", quality=95), "a.jpg", note=SEVERAL),
        trained("tga", saved(flat(), "TGA"), "a.tga"),
        trained("ppm", saved(flat(), "PPM"), "a.ppm"),
        trained("pcx", saved(flat(), "PCX"), "a.pcx"),
        trained("sgi", saved(flat(), "SGI"), "a.sgi"),
        trained("dds", saved(flat(), "DDS"), "a.dds"),
        trained("ico", saved(flat(size=(32, 32)), "ICO"), "a.ico", size=(32, 32)),
    ]
    if features.check("avif"):
        rows += [
            trained("avif", saved(flat(), "AVIF", quality=100), "a.avif"),
            trained("avif, animated", moving("AVIF", quality=100), "a.avif", note=SEVERAL),
            left_out("avif, last byte missing", saved(noise(), "AVIF")[:-1], r"a\.avif \(.*[Tt]runcated", "a.avif"),
        ]
    if features.check("jpg_2000"):
        rows.append(trained("jpeg 2000", saved(flat(), "JPEG2000"), "a.jp2"))
    return rows


def _modes() -> list[Odd]:
    half = saved(flat("RGBA", (200, 100, 0, 51)))
    return [
        trained("palette", saved(palette())),
        trained("palette, transparent index", saved(palette(), transparency=1), colour=(255, 255, 255)),
        trained("palette gif, transparent", saved(palette(), "GIF", transparency=1), "a.gif", colour=(255, 255, 255)),
        trained("alpha on white", half, colour=(244, 224, 204)),
        trained("alpha on black", half, background="black", colour=(40, 20, 0)),
        trained("alpha, all transparent", saved(flat("RGBA", (*GREEN, 0))), colour=(255, 255, 255)),
        trained("transparent colour", saved(flat(), transparency=GREEN), colour=(255, 255, 255)),
        trained("grey", saved(flat("L", 77)), colour=(77, 77, 77)),
        trained("grey and alpha", saved(flat("LA", (100, 51))), colour=(224, 224, 224)),
        trained("1 bit", saved(flat("1", 1)), colour=(255, 255, 255)),
        trained("16 bits of grey", saved(flat("I;16", 77 * 257)), colour=(77, 77, 77)),
        trained("16 bits of colour", png_16_bit()),
        trained("16-bit tiff", saved(flat("I;16", 77 * 257), "TIFF"), "a.tif", colour=(77, 77, 77)),
        trained("float tiff", saved(flat("F", 0.5), "TIFF"), "a.tif", colour=(128, 128, 128)),
        trained("cmyk jpeg", saved(flat("CMYK", (0, 255, 255, 0)), "JPEG", quality=95), "a.jpg", colour=(255, 0, 0)),
        trained("cmyk tiff", saved(flat("CMYK", (0, 255, 255, 0)), "TIFF"), "a.tif", colour=(255, 0, 0)),
        trained("ycbcr tiff", saved(flat("YCbCr", (81, 90, 240)), "TIFF"), "a.tif", colour=(238, 14, 14)),
        trained("lab tiff", saved(flat("LAB", (255, 128, 128)), "TIFF"), "a.tif", colour=(255, 255, 255)),
        trained("turned by exif, a quarter", turned(6, quality=95), "a.jpg", size=SIZE[::-1]),
        trained("turned by exif, upside down", turned(3, quality=95), "a.jpg"),
        trained("mirrored and turned by exif", turned(5, "PNG"), size=SIZE[::-1]),
        trained("turned webp", turned(8, "WEBP", lossless=True), "a.webp", size=SIZE[::-1]),
        trained("exif of no known turn", turned(99, "PNG")),
        trained(
            "exif that is broken", saved(flat(), "JPEG", quality=95, exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff"), "a.jpg"
        ),
        trained("wide gamut", saved(flat(), icc_profile=wide_gamut()), colour=(200, 10, 30)),
        trained("colour profile that is broken", saved(flat(), icc_profile=b"no profile at all")),
        trained("colour profile cut short", saved(flat(), icc_profile=wide_gamut()[:200])),
        trained("profile of colours on grey", saved(flat("L", 77), icc_profile=wide_gamut()), colour=(77, 77, 77)),
    ]


def _broken() -> list[Odd]:
    gif_bomb = patched(NOISE["gif"], 6, b"\xff\xff\xff\xff")
    gif_bomb = patched(gif_bomb, gif_bomb.index(b",\0\0\0\0") + 5, b"\xff\xff\xff\xff")
    webp_bomb = b"RIFF\x16\0\0\0WEBPVP8L\x0a\0\0\0\x2f" + struct.pack("<I", 16383 | 16383 << 14) + b"\0" * 5
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * (2**26 + 1)))
    rows = [
        left_out("no byte", b"", r"a\.png \(an empty file\)"),
        left_out("one byte", b"\x89", r"a\.png \(not a picture\)"),
        left_out("zeros", b"\0" * 500, r"a\.png \(not a picture\)"),
        left_out("text called png", b"a cat sitting on a mat", r"a\.png \(not a picture\)"),
        left_out("web page called jpg", b"<!DOCTYPE html><html></html>", r"a\.jpg \(not a picture\)", "a.jpg"),
        left_out("json called webp", b'{"error": "rate limited"}', r"a\.webp \(not a picture\)", "a.webp"),
        left_out("drawing called png", b'<svg xmlns="http://www.w3.org/2000/svg"/>', r"a\.png \(not a picture\)"),
        left_out("document called jpg", b"%PDF-1.7\n%%EOF", r"a\.jpg \(not a picture\)", "a.jpg"),
        left_out("archive called png", b"PK\3\4" + b"\0" * 60, r"a\.png \(not a picture\)"),
        left_out("film called gif", b"\0\0\0\x18ftypmp42" + b"\0" * 60, r"a\.gif \(not a picture\)", "a.gif"),
        left_out("heic called jpg", b"\0\0\0\x18ftypheic" + b"\0" * 60, r"a\.jpg \(.+\)", "a.jpg"),
        left_out("signature alone", NOISE["png"][:8], r"a\.png \(.+\)"),
        left_out("header alone", NOISE["png"][:33], r"a\.png \(.+\)"),
        left_out("png without its header", NOISE["png"][40:], r"a\.png \(not a picture\)"),
        left_out("png with a wrong byte", patched(NOISE["png"], 900, b"\xaa\x55\xaa\x55"), r"a\.png \(.+\)"),
        left_out("png of no width", png(0, 24, b""), r"a\.png \(.+\)"),
        left_out("png of no known kind", png(*SIZE, (b"\0" + b"\1" * 96) * 24, kind=1), r"a\.png \(.+\)"),
        left_out("png with a bomb of text", png(*SIZE, (b"\0" + b"\1" * 96) * 24, before=text), r"a\.png \(.+\)"),
        left_out("jpeg with bytes before it", b"\n" + NOISE["jpg"], r"a\.jpg \(not a picture\)", "a.jpg"),
        left_out("jpeg of no height", claiming_jpeg(32, 0), r"a\.jpg \(.+\)", "a.jpg"),
        left_out("tiff that points to itself", b"II*\0\x08\0\0\0\0\0\x08\0\0\0", r"a\.tif \(.+\)", "a.tif"),
        left_out("bmp of a negative size", patched(NOISE["bmp"], 18, b"\xff" * 8), r"a\.bmp \(.+\)", "a.bmp"),
        left_out("png claiming 100000 x 100000", png(100_000, 100_000, b""), r"a\.png \(too many pixels\)"),
        left_out("png claiming a line of 2^31", png(2**31 - 1, 1, b""), r"a\.png \(too many pixels\)"),
        left_out("jpeg claiming 65500 x 65500", claiming_jpeg(65500, 65500), r"a\.jpg \(too many pixels\)", "a.jpg"),
        left_out("gif claiming 65535 x 65535", gif_bomb, r"a\.gif \(too many pixels\)", "a.gif"),
        left_out("webp claiming 16384 x 16384", webp_bomb, r"a\.webp \(.+\)", "a.webp"),
        left_out(
            "bmp claiming 30000 x 30000",
            patched(NOISE["bmp"], 18, struct.pack("<ii", 30000, 30000)),
            r"a\.bmp \(too many pixels\)",
            "a.bmp",
        ),
        left_out("3 GiB of nothing", sparse(3 * 2**30), r"a\.png \(.*3.* GiB.*\)"),
        trained("png called jpg", saved(flat()), "a.jpg"),
        trained("jpeg called png", saved(flat(), "JPEG", quality=95)),
        trained("webp called png", saved(flat(), "WEBP", lossless=True)),
        trained("png with bytes after it", saved(flat()) + b"a film follows" * 99),
        trained("jpeg with a film after it", saved(flat(), "JPEG", quality=95) + b"\0\0\0\x18ftypmp42" * 99, "a.jpg"),
        trained("png with a wrong checksum", bad_checksum(saved(flat()))),
        trained("png, last byte missing", saved(flat())[:-1]),  # of the end mark; every pixel is there
        trained("gif, last byte missing", saved(flat(), "GIF")[:-1], "a.gif"),
    ]
    for ending, data in NOISE.items():
        cuts = {"header": 12, "body": len(data) // 2}
        cuts |= {"last byte": len(data) - 1} if ending not in ("png", "gif") else {}
        rows += [
            left_out(f"{ending} cut in its {place}", data[:end], rf"a\.{ending} \(.+\)", f"a.{ending}")
            for place, end in cuts.items()
        ]
    return rows


def _sizes() -> list[Odd]:
    def small(width: int, height: int) -> str:
        return rf"1 picture has a side shorter than 16 pixels .*a\.png \({width}x{height}\)"

    return [
        left_out("1 x 1", saved(flat(size=(1, 1))), small(1, 1)),
        left_out("15 x 400", saved(flat(size=(15, 400))), small(15, 400)),
        left_out("strip of 1 x 10000", saved(flat(size=(1, 10_000))), small(1, 10_000)),
        left_out("strip of 10000 x 1", saved(flat(size=(10_000, 1))), small(10_000, 1)),
        trained("16 x 16", saved(flat(size=(16, 16))), size=(16, 16)),
        trained("1 x 1 that is allowed", saved(flat(size=(1, 1))), size=(1, 1), min_side=1),
        trained("strip that is allowed", saved(flat(size=(1, 10_000))), size=(1, 10_000), min_side=1),
        trained("a million pixels in a strip", saved(flat(size=(100, 10_000))), size=(100, 10_000)),
    ]


def _names() -> list[Odd]:
    composed, taken_apart = (unicodedata.normalize(form, "é ü.png") for form in ("NFC", "NFD"))
    named = [
        ("upper-case ending", "A.PNG", ""),
        ("mixed-case ending", "a.JpEg", ""),
        ("two endings", "a.png.jpg", ""),
        ("an ending of another kind before it", "a.txt.png", ""),
        ("many dots", "a...png", ""),
        ("blanks", " a  b .png", "posix"),
        ("brackets and hash", "a (1) [x] #2.png", ""),
        ("percent", "a%20b%s.png", ""),
        ("leading dash", "-rf.png", ""),
        ("braces and dollar", "{0} $HOME.png", ""),
        ("semicolon and comma", "a;b,c.png", ""),
        ("quotes", "a\"b'c.png", "posix"),
        ("stars", "*?.png", "posix"),
        ("backslash", "a\\b.png", "posix"),
        ("line feed", "a\nb.png", "posix"),
        ("tab and bell", "a\tb\a.png", "posix"),
        ("255 bytes", "ä" * 125 + "x.png", "posix"),
        ("accents composed", composed, ""),
        ("accents taken apart", taken_apart, ""),
        ("emoji of several characters", "👩\u200d🚀🏳️\u200d🌈.png", ""),
        ("right to left", "חתול قط.png", ""),
        ("far east", "猫とねこ.png", ""),
        ("no character before the mark", "\ufeffa.png", ""),
        ("bytes that are no text", "\udcff\udcfe caf\udce9.png", "linux"),
        ("reserved on other systems", "CON.png", "posix"),
        ("only digits of another script", "٣٢١.png", ""),
        ("a very long number", "9" * 200 + ".png", ""),
    ]
    rows = [trained(f"name: {label}", fine, name, where=where) for label, name, where in named]
    return [
        *rows,
        unused("name: no ending", saved(flat()), "picture"),
        unused("name: blank after the ending", saved(flat()), "a.png ", where="posix"),
        unused("name: dot after the ending", saved(flat()), "a.png.", where="posix"),
        unused("name: backup", saved(flat()), "a.png~"),
        unused("name: half a download", saved(flat())[:100], "a.png.part"),
        unused("name: nothing but an ending", saved(flat()), ".png", "hidden"),
        unused("name: leading dot", saved(flat()), ".a.png", "hidden"),
        unused("name: of macOS", b"\0\5\x16\7" + b"\0" * 80, "._a.png", "hidden"),
        unused("name: store of macOS", b"\0\0\0\1Bud1", ".DS_Store", "hidden"),
        unused("name: thumbnails of Windows", b"\xd0\xcf\x11\xe0", "Thumbs.db", "hidden"),
        unused("name: icon of Windows", b"[.ShellClassInfo]", "desktop.ini", "hidden"),
        left_out(
            "heic", b"\0\0\0\x18ftypheic", r"1 picture needs the Python package pillow-heif .*: a\.HEIC", "a.HEIC"
        ),
        left_out("jpeg xl", b"\xff\x0a", r"1 picture needs the Python package pillow-jxl-plugin .*: a\.jxl", "a.jxl"),
        unused("raw", b"II*\0", "a.cr2", "cannot be read", note=r"1 file .*a\.cr2; convert"),
        unused("film", b"\0\0\0\x18ftypmp42", "a.mp4", "a clip, for a base model of clips"),
        unused("document", b"%PDF-1.7", "a.pdf"),
        unused("script of PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n", "a.eps"),
        unused("latents of another trainer", b"PK\3\4", "a.npz"),
    ]


def _places() -> list[Odd]:
    return [
        trained("folder called a.png", folder("b.png"), "a.png", outcome="", others={"a.png/b.png": "picture"}),
        trained("empty folder called a.png", folder(), "a.png", outcome=""),
        trained("folders of many levels", fine, "/".join("abcdefghijklmnop") + "/x.png"),
        trained("link to a file elsewhere", link_outside, where="posix"),
        trained(
            "folder called a.png elsewhere",
            link_to_folder,
            outcome="",
            others={"a.png/real.png": "picture"},
            where="posix",
        ),
        trained("folder that links upwards", link_upwards, "sub/a.png", where="posix"),
        trained(
            "one file of two names",
            hard_link,
            others={"b.png": "picture"},
            note="repeats? another one exactly",
            where="posix",
        ),
        left_out("link to nowhere", lambda p: p.symlink_to("gone.png"), r"a\.png \(.*link.* missing\)", where="posix"),
        left_out("link to itself", lambda p: p.symlink_to(p.name), r"a\.png \(.+\)", where="posix"),
        unused("pipe", pipe, "a.png", "socket or device", where="posix"),
        unused("link to zeros", lambda p: p.symlink_to("/dev/zero"), "a.png", "socket or device", where="posix"),
        unused("link to nothing", lambda p: p.symlink_to(os.devnull), "a.png", "socket or device", where="posix"),
        unused("socket", lambda p: os.mknod(p, stat.S_IFSOCK | 0o600), "a.png", "socket or device", where="linux"),
    ]


def _captions() -> list[Odd]:
    def text(label: str, data: bytes, *lines: str, note: str = "", name: str = "a.png", ending: str = ".txt") -> Odd:
        other = str(Path(name).with_suffix(ending))
        write = with_caption(data, ending)
        return trained(
            f"caption: {label}", write, name, lines=lines, note=note, captions=TEXTS, others={other: "caption"}
        )

    def unread(label: str, data: bytes, sentence: str) -> Odd:
        why = rf"1 caption in .* cannot be read: .*a\.txt {sentence}"
        return left_out(f"caption: {label}", with_caption(data), why, captions=TEXTS, others={"a.txt": "not used"})

    def lacking(label: str, write: Callable[[Path], object], where: str = "", **others: str) -> Odd:
        why = r"1 picture has no \.txt caption"
        return left_out(f"caption: {label}", write, why, captions=TEXTS, where=where, others=others)

    def shared(path: Path) -> None:
        with_caption(b"a cat")(path)
        path.with_suffix(".jpg").write_bytes(saved(flat(), "JPEG"))

    def apart(path: Path) -> None:
        """Write a picture and a caption whose names are composed in different ways, as copies from macOS are."""
        fine(path)
        (path.parent / unicodedata.normalize("NFD", path.with_suffix(".txt").name)).write_bytes(b"found")

    def by_case(path: Path) -> None:
        """Write two pictures whose names differ in case alone, each with its caption."""
        with_caption(b"lower")(path)
        with_caption(b"upper")(path.with_name("A.png"))

    long = "a cat, " * 7200
    one = r"1 caption file belongs to several pictures of the same name: a\.txt \("
    both = {"a.jpg": "picture", "a.txt": "caption"}
    named = {"captions": CaptionConfig(source="file_name"), "where": "linux"}
    return [
        text("50 kB", long.encode(), long.strip()),
        text("a thousand lines", b"\n".join(b"line %d" % i for i in range(1000)), *(f"line {i}" for i in range(1000))),
        text("empty", b"", note=r"1 picture has an empty caption file: a\.png"),
        text("blanks alone", b" \r\n\t\n ", note=r"1 picture has an empty caption file: a\.png"),
        text("byte order mark", b"\xef\xbb\xbfa cat", "a cat"),
        text("utf-16 with a mark", "größe 猫".encode("utf-16"), "größe 猫"),
        text("utf-16 without a mark", "a big cat".encode("utf-16-le"), "a big cat"),
        text("utf-32", "größe".encode("utf-32"), "größe"),
        text("line ends of three systems", b"a\r\nb\rc\n", "a", "b", "c", note="several lines"),
        text("braces while wildcards are off", b"a {red|blue} cat", "a {red|blue} cat", note=r"\{a\|b\}, which is not"),
        text("line separators of Unicode", "a\u2028b".encode(), "a\u2028b"),
        text("upper-case ending", b"a cat", "a cat", ending=".TXT"),
        unread("latin-1", "größe".encode("latin-1"), "is not UTF-8"),
        unread("picture called txt", NOISE["jpg"], "is not UTF-8"),
        unread("zero bytes in it", b"a\0cat", ".*NUL|is not UTF-8"),
        unread("above 1 MiB", b"a" * (2**20 + 1), "has 1.0 MiB"),
        lacking("none", fine),
        lacking("folder called a.txt", also(beside(".txt", lambda p: p.mkdir()))),
        lacking("pipe called a.txt", also(beside(".txt", pipe)), "posix", **{"a.txt": "not used"}),
        lacking("of another ending", with_caption(b"a cat", ".caption"), **{"a.caption": "not used"}),
        lacking("hidden", also(lambda p: p.with_name("._a.txt").write_bytes(b"x")), **{"._a.txt": "not used"}),
        left_out(
            "caption: link to nowhere",
            also(beside(".txt", lambda p: p.symlink_to("gone.txt"))),
            r"1 caption in .* cannot be read",
            captions=TEXTS,
            where="posix",
        ),
        trained("caption: shared by two", shared, captions=TEXTS, lines=("a cat",), note=one, others=both),
        trained("caption: accents of another form", apart, "é.png", captions=TEXTS, lines=("found",)),
        trained(
            "caption: two names of one spelling",
            by_case,
            captions=TEXTS,
            lines=("lower",),
            others={"A.txt": "caption", "a.txt": "caption"},
            where="linux",
        ),
        left_out("caption: a name that is no text", fine, "name", "caf\udce9.png", **named),
    ]


def _masks() -> list[Odd]:
    def mask(label: str, image: Image.Image | bytes, level: int, note: str = "", **more: Any) -> Odd:
        data = image if isinstance(image, bytes) else saved(image)
        others = {"a-masklabel.png": "mask"}
        options = {"masks": MASKS, "mask": level, "note": note, "others": others, **more}
        return trained(f"mask: {label}", with_mask(data), **options)

    def bad(label: str, data: bytes | Callable[[Path], object], sentence: str, **more: Any) -> Odd:
        write = with_mask(data) if isinstance(data, bytes) else also(beside("-masklabel.png", data))
        return left_out(f"mask: {label}", write, sentence, masks=MASKS, **more)

    unread = r"1 mask of .* cannot be read: a-masklabel\.png \("
    alpha = MaskConfig(source="alpha")
    exif = Image.Exif()
    exif[0x0112] = 6
    on_its_side = saved(Image.new("L", SIZE[::-1], 99), exif=exif)
    return [
        mask("grey", flat("L", 77), 77),
        mask("white", flat("L", 255), 255),
        mask("black", flat("L", 0), 0, note=r"1 mask is completely black: a\.png"),
        mask("of 1 bit", flat("1", 1), 255),
        mask("of 16 bits", flat("I;16", 77 * 257), 77),
        mask("of colours, red counts", flat("RGB", (77, 200, 0)), 77),
        mask("of a palette", palette(), GREEN[0]),
        mask("with alpha, red counts", flat("RGBA", (77, 0, 0, 0)), 77),
        mask("with a colour profile", saved(flat("RGB", (77, 200, 9)), icc_profile=wide_gamut()), 77),
        mask("turned by exif", on_its_side, 99),
        mask("animated", moving("PNG"), GREEN[0]),
        mask("jpeg called png", saved(flat("L", 77), "JPEG", quality=100), 77),
        mask("threshold above it", flat("L", 77), 0, masks=MaskConfig(threshold=0.5), note="completely black"),
        mask("inverted", flat("L", 0), 255, masks=MaskConfig(invert=True)),
        bad("of another size", saved(flat("L", 9, (24, 32))), r"1 mask differs in size .*\(32x24, mask 24x32\)"),
        bad("one pixel too wide", saved(flat("L", 9, (33, 24))), r"1 mask differs in size .*\(32x24, mask 33x24\)"),
        bad("broken", NOISE["png"][:900], unread),
        bad("empty", b"", unread + "an empty file"),
        bad("web page", b"<html></html>", unread + "not a picture"),
        bad("claiming 100000 x 100000", png(100_000, 100_000, b""), unread + "too many pixels"),
        bad("link to nowhere", lambda p: p.symlink_to("gone.png"), unread + ".*link", where="posix"),
        bad("pipe", pipe, r"1 picture has no mask", where="posix"),
        bad("folder", lambda p: p.mkdir(), r"1 picture has no mask"),
        left_out("mask: none", fine, r"1 picture has no mask \(NAME-masklabel\.png\)", masks=MASKS),
        trained("mask: alpha", saved(flat("RGBA", (*GREEN, 77))), mask=77, masks=alpha, colour=None),
        left_out("mask: no alpha", saved(flat()), r"1 picture has no alpha channel", masks=alpha),
        unused("mask: without its picture", saved(flat("L", 9)), "b-masklabel.png", "a mask by its name"),
    ]


def rows() -> list[Odd]:
    """Return all of them; labels are unique."""
    return [*_formats(), *_modes(), *_broken(), *_sizes(), *_names(), *_places(), *_captions(), *_masks()]


def write_row(row: Odd, place: Path) -> None:
    """Write the files of one row into a new folder, which must have a folder above it to itself."""
    (place / row.name).parent.mkdir(parents=True)
    row.write(place / row.name)


def write_companion(place: Path) -> None:
    """Write a sound picture with a caption, an alpha channel and a mask, so that a folder holds at least one."""
    saved_to = place / COMPANION
    flat("RGBA", (1, 2, 3, 255)).save(saved_to)
    saved_to.with_suffix(".txt").write_bytes(b"fine")
    flat("L", 255).save(saved_to.with_name(f"{saved_to.stem}-masklabel.png"))
