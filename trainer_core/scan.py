"""Read the concept folders: every picture verified, with its caption and mask; every problem named."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageFile, UnidentifiedImageError

from .buckets import Size, open_upright
from .captions import read_text
from .config import ConceptConfig, DatasetConfig, MaskConfig
from .masks import find_mask, is_mask_name, mask_folder, read_mask

PICTURE_EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".tga")
)
UNREADABLE_EXTENSIONS = frozenset((".heic", ".heif", ".jxl", ".psd", ".svg", ".cr2", ".nef", ".arw", ".dng"))
TEXT_EXTENSIONS = (".txt", ".caption", ".captions", ".tags", ".text", ".md", ".json")
_SYSTEM_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"))
DECODER_ERRORS = (  # what Pillow's decoders raise on broken files
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One picture with its caption and mask."""

    path: Path
    name: str  # relative to the concept's folder, posix
    concept: int  # index in DatasetConfig.concepts
    width: int  # pixels, upright
    height: int
    digest: str  # sha256 of the file's bytes
    caption: str  # raw text, the first line that is not empty
    mask: Path | None = None  # the picture itself if the mask is its alpha channel
    mask_digest: str = ""  # "" without a mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All pictures of a dataset in a stable order, and remarks a person should read."""

    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()


def scan(dataset: DatasetConfig) -> Manifest:
    """Read and verify a whole dataset; raises one ValueError that names every problem and its remedy."""
    pictures: list[Picture] = []
    report = _Report()
    with _strict_decoding():
        for index, concept in enumerate(dataset.concepts):
            pictures += _read_concept(index, concept, report)
    if report.errors:
        raise ValueError(" ".join(report.errors))
    first: dict[str, Picture] = {}
    copies = [p.name for p in pictures if first.setdefault(p.digest, p) is not p]
    if copies:
        report.notes.append(
            f"{count(copies, 'picture repeats', 'pictures repeat')} another one byte for byte: {names(copies)}."
        )
    return Manifest(pictures=tuple(pictures), notes=tuple(report.notes))


def manifest_digest(manifest: Manifest) -> str:
    """Return the sha256 of what is trained: contents, captions, masks and concepts, no paths and no times."""
    parts = [(p.concept, p.digest, p.caption, p.mask_digest) for p in manifest.pictures]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


def fingerprint(dataset: DatasetConfig) -> str:
    """Return a cheap hash of the configuration and of each file's relative path, size and time.

    Decodes nothing and never raises for what lies on disk: it changes whenever the result of a scan could.
    """
    total = hashlib.sha256(dataset.digest().encode())
    for concept in dataset.concepts:
        endings = (*PICTURE_EXTENSIONS, *UNREADABLE_EXTENSIONS, concept.caption_extension.lower())
        if concept.folder.strip():
            folder = resolve_folder(concept.folder)
            total.update(_listing(folder, concept.recursive, endings))
            if concept.masks is not None:
                suffix = concept.masks.suffix.lower()
                total.update(_listing(mask_folder(folder, concept.masks), True, (suffix,)))
    return total.hexdigest()


def _listing(folder: Path, recursive: bool, endings: tuple[str, ...]) -> bytes:
    """Return names, sizes and times of the files in a folder that end in one of `endings`."""
    lines = []
    try:
        for name, path in list_files(folder, recursive):
            if name.lower().endswith(endings):
                status = path.stat() if path.exists() else path.lstat()
                lines.append(f"{name}\0{status.st_size}\0{status.st_mtime_ns}")
    except OSError as error:  # a folder without permission, a file that vanishes just now
        lines.append(str(error))
    return "\n".join([str(folder.is_dir()), *lines]).encode("utf-8", "surrogatepass")


def load_picture(path: Path) -> Image.Image:
    """Return a picture as upright RGB, transparency laid on white; raises Pillow's errors on broken files."""
    return _on_white(open_upright(path))


def _on_white(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB, transparency laid on white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layered).convert("RGB")


def resolve_folder(folder: str) -> Path:
    """Return the absolute folder of what a person typed or pasted: quotes, blanks and ~ are understood."""
    return Path(folder.strip().strip('"').strip("'")).expanduser().resolve()


def natural_order(name: str) -> tuple[tuple[object, ...], str]:
    """Return a sort key that puts 2.png before 10.png, whatever the case of the letters."""
    parts = re.split(r"(\d+)", name.casefold())
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name


def names(items: Iterable[str]) -> str:
    """Join up to five names and count the others."""
    items = list(items)
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def count(items: Sequence[object], one: str, many: str) -> str:
    """Return "1 picture has" or "2 pictures have", say."""
    return f"{len(items)} {one if len(items) == 1 else many}"


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder belongs to the system: .DS_Store, ._x, .git, Thumbs.db ..."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def list_files(folder: Path, recursive: bool) -> list[tuple[str, Path]]:
    """Return (posix name within folder, path) of all visible files in natural order; [] without the folder."""
    return sorted(_walk(folder, "", recursive, set()), key=lambda item: natural_order(item[0]))


def _walk(folder: Path, prefix: str, recursive: bool, visited: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield visible files; each real folder is entered once, so links cannot loop."""
    real = os.path.realpath(folder)
    if real in visited or not folder.is_dir():
        return
    visited.add(real)
    for entry in sorted(os.scandir(folder), key=lambda entry: natural_order(entry.name)):
        if is_hidden(entry.name):
            continue
        if os.path.isdir(entry.path):
            if recursive:
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", recursive, visited)
        elif os.path.isfile(entry.path) or entry.is_symlink():  # links to nowhere are named when they are read
            yield prefix + entry.name, Path(entry.path)


@functools.lru_cache(maxsize=65_536)
def _examine(path: Path, size: int, mtime_ns: int) -> tuple[str, Size]:
    """Decode a picture completely; return (sha256 of its bytes, upright size). The rest names the version."""
    data = path.read_bytes()
    image = _on_white(open_upright(io.BytesIO(data)))
    return hashlib.sha256(data).hexdigest(), image.size


@functools.lru_cache(maxsize=65_536)
def _examine_mask(path: Path, size: int, mtime_ns: int, config: MaskConfig) -> tuple[str, Size, int] | None:
    """Decode a mask; return (sha256 of its bytes, upright size, brightest value); None if it has no alpha."""
    data = path.read_bytes()
    mask = read_mask(io.BytesIO(data), config)
    if mask is None:
        return None
    high = mask.getextrema()[1]
    return hashlib.sha256(data).hexdigest(), mask.size, int(high) if isinstance(high, (int, float)) else 255


@dataclass(slots=True)
class _Report:
    """What a scan found: errors stop the run, notes are shown."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def _strict_decoding() -> Iterator[None]:
    """Let truncated pictures be errors, even where other code of the process asked Pillow to pad them."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _read_concept(index: int, concept: ConceptConfig, report: _Report) -> list[Picture]:
    """Read one concept's folder; problems go to the report, and pictures that have one are left out."""
    if not concept.folder.strip():
        report.errors.append(f"Concept {index + 1} has no folder; give the folder that holds its pictures.")
        return []
    folder = resolve_folder(concept.folder)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        report.errors.append(f"The folder {folder} {kind}; check its spelling and where it lies.")
        return []
    try:
        files = list_files(folder, concept.recursive)
    except OSError as error:
        report.errors.append(f"The folder {error.filename} cannot be listed ({error.strerror}); check its permissions.")
        return []
    found = _pictures_among(folder, files, concept, report)
    if not found:
        report.errors.append(_nothing_found(folder, files, concept))
        return []
    examined = _examine_all(folder, found, report)
    captions = _captions(folder, found, files, concept, report)
    masks = _masks(folder, found, examined, concept.masks, report)
    return [
        Picture(
            path=path,
            name=name,
            concept=index,
            width=examined[name][1][0],
            height=examined[name][1][1],
            digest=examined[name][0],
            caption=captions[name],
            mask=masks[name][0],
            mask_digest=masks[name][1],
        )
        for name, path in found
        if name in examined and name in captions and name in masks
    ]


def _pictures_among(
    folder: Path, files: list[tuple[str, Path]], concept: ConceptConfig, report: _Report
) -> list[tuple[str, Path]]:
    """Return the pictures among the files; masks are none, formats that cannot be read are noted."""
    masks = concept.masks
    apart = mask_folder(folder, masks) if masks is not None and masks.source == "file" else folder
    found, unused, strange = [], [], []
    for name, path in files:
        extension = os.path.splitext(name)[1].lower()
        if apart != folder and path.is_relative_to(apart):
            continue
        if extension in UNREADABLE_EXTENSIONS:
            strange.append(name)
        elif extension in PICTURE_EXTENSIONS:
            if not is_mask_name(path.name, masks):
                found.append((name, path))
            elif masks is None:
                unused.append(name)
    if strange:
        some = count(strange, "file", "files")
        remedy = "convert them to PNG or JPEG"
        report.notes.append(f"{some} in {folder} cannot be read and do not train: {names(strange)}; {remedy}.")
    if unused:
        some = count(unused, "mask is", "masks are")
        report.notes.append(f"{some} not used in {folder}, as no Mask Loader is connected.")
    return found


def _nothing_found(folder: Path, files: list[tuple[str, Path]], concept: ConceptConfig) -> str:
    """Say what a folder without pictures holds instead."""
    masks = sum(is_mask_name(path.name, concept.masks) for _, path in files)
    kinds = Counter(os.path.splitext(path.name)[1].lower() or "nameless" for _, path in files)
    parts = [f"{number} {kind} file{'' if number == 1 else 's'}" for kind, number in kinds.most_common()]
    parts += [f"{masks} of them masks by the suffix of their names"] if masks else []
    folders = [e.name for e in os.scandir(folder) if os.path.isdir(e.path) and not is_hidden(e.name)]
    parts += [count(folders, "folder", "folders")] if folders else []
    remedy = "put pictures (PNG, JPEG, WebP ...) there or choose another folder"
    if folders and not concept.recursive:
        remedy = "turn on recursive to read its folders, or choose another folder"
    return f"The folder {folder} holds no picture, it holds {', '.join(parts) or 'nothing'}; {remedy}."


def _examine_all(folder: Path, found: list[tuple[str, Path]], report: _Report) -> dict[str, tuple[str, Size]]:
    """Decode all pictures, some at a time; return (digest, size) by name, broken ones go to the report."""

    def examine(item: tuple[str, Path]) -> tuple[str, Size] | str:
        path = item[1]
        try:
            status = path.stat()
            return _examine(path, status.st_size, status.st_mtime_ns) if status.st_size else "an empty file"
        except DECODER_ERRORS as error:
            return _reason(error)

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        results = list(pool.map(examine, found))
    examined: dict[str, tuple[str, Size]] = {}
    broken: list[str] = []
    for (name, _), result in zip(found, results, strict=True):
        if isinstance(result, str):
            broken.append(f"{name} ({result})")
        else:
            examined[name] = result
    if broken:
        some = count(broken, "picture", "pictures")
        report.errors.append(f"{some} in {folder} cannot be read: {names(broken)}; replace or remove them.")
    return examined


def _reason(error: BaseException) -> str:
    """Return why a picture cannot be decoded, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return "not a picture"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    if isinstance(error, PermissionError):
        return "no permission"
    if isinstance(error, FileNotFoundError):
        return "the file it links to is missing"
    return str(error).split("\n")[0][:80] or type(error).__name__


def _captions(
    folder: Path,
    found: list[tuple[str, Path]],
    files: list[tuple[str, Path]],
    concept: ConceptConfig,
    report: _Report,
) -> dict[str, str]:
    """Return the raw caption of each picture by name; undecodable and missing ones go to the report."""
    if concept.caption_source == "none":
        return {name: "" for name, _ in found}
    if concept.caption_source == "file_name":
        return {name: path.stem for name, path in found}
    if concept.caption_source == "folder_name":
        return {name: path.parent.name for name, path in found}
    texts = {name.lower(): path for name, path in files}
    captions: dict[str, str] = {}
    missing, empty, several, broken = [], [], [], []
    for name, _ in found:
        path = texts.get(os.path.splitext(name)[0].lower() + concept.caption_extension.lower())
        captions[name] = ""
        if path is None:
            missing.append(name)
            continue
        try:
            lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
        except (ValueError, OSError) as error:
            broken.append(str(error))
            continue
        captions[name] = lines[0] if lines else ""
        (empty if not lines else several if len(lines) > 1 else []).append(name)
    report.errors += broken[:5] + ([f"{len(broken) - 5} more captions cannot be read."] if len(broken) > 5 else [])
    _report_missing(folder, missing, files, concept, report)
    if empty:
        report.notes.append(f"{count(empty, 'picture has', 'pictures have')} an empty caption file: {names(empty)}.")
    if several:
        report.notes.append(
            f"Of {count(several, 'caption', 'captions')} only the first line is used: {names(several)}."
        )
    return captions


def _report_missing(
    folder: Path, missing: list[str], files: list[tuple[str, Path]], concept: ConceptConfig, report: _Report
) -> None:
    """Note or refuse pictures without a caption file, and name other text files that lie there."""
    if not missing:
        return
    some = count(missing, "picture has", "pictures have")
    if concept.missing_caption == "empty":
        train = "trains" if len(missing) == 1 else "train"
        report.notes.append(f"{some} no caption and {train} with an empty one: {names(missing)}.")
        return
    kinds = Counter(os.path.splitext(name)[1].lower() for name, _ in files)
    others = [kind for kind in TEXT_EXTENSIONS if kinds[kind] and kind != concept.caption_extension.lower()]
    hint = ""
    if others:
        hint = f" (it holds {kinds[others[0]]} {others[0]} files: set the caption extension to {others[0]})"
    report.errors.append(
        f"{some} no {concept.caption_extension} caption in {folder}{hint}: {names(missing)}; "
        "write captions, or set missing captions to empty."
    )


def _masks(
    folder: Path,
    found: list[tuple[str, Path]],
    examined: dict[str, tuple[str, Size]],
    config: MaskConfig | None,
    report: _Report,
) -> dict[str, tuple[Path | None, str]]:
    """Return (mask, mask digest) of each readable picture by name; every problem goes to the report."""
    if config is None:
        return {name: (None, "") for name in examined}
    apart = mask_folder(folder, config) if config.source == "file" else folder
    if not apart.is_dir():
        report.errors.append(f"The mask folder {apart} does not exist; check its spelling and where it lies.")
        return {}
    listed = {name.lower(): path for name, path in list_files(apart, True)} if config.source == "file" else {}
    masks: dict[str, tuple[Path | None, str]] = {}
    missing, wrong, broken, black = [], [], [], []
    for name, path in found:
        if name not in examined:
            continue
        source = path if config.source == "alpha" else find_mask(name, listed, config)
        try:
            status = source.stat() if source else None
            result = _examine_mask(source, status.st_size, status.st_mtime_ns, config) if source and status else None
        except DECODER_ERRORS as error:
            broken.append(f"{source.name if source else name} ({_reason(error)})")
            continue
        masks[name] = (source, result[0]) if result else (None, "")
        if result is None:
            missing.append(name)
            continue
        _, size, high = result
        if size != examined[name][1]:
            wrong.append(f"{name} ({_times(examined[name][1])}, mask {_times(size)})")
        if high == 0:
            black.append(name)
    _report_masks(folder, config, missing, wrong, broken, black, report)
    return masks


def _times(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _report_masks(
    folder: Path,
    config: MaskConfig,
    missing: list[str],
    wrong: list[str],
    broken: list[str],
    black: list[str],
    report: _Report,
) -> None:
    """Put the mask problems of one concept into sentences."""
    lacking = "alpha channel" if config.source == "alpha" else f"mask (<name>{config.suffix})"
    some = count(missing, "picture has", "pictures have")
    if missing and config.missing == "error":
        remedy = "add them, or set missing masks to ones"
        report.errors.append(f"{some} no {lacking} in {folder}: {names(missing)}; {remedy}.")
    elif missing:
        report.notes.append(f"{some} no {lacking} and the whole area trains: {names(missing)}.")
    if broken:
        some = count(broken, "mask", "masks")
        report.errors.append(f"{some} of {folder} cannot be read: {names(broken)}; replace or remove them.")
    if wrong:
        some = count(wrong, "mask differs", "masks differ")
        remedy = "save them at the same size"
        report.errors.append(f"{some} in size from the picture in {folder}: {names(wrong)}; {remedy}.")
    if black:
        report.notes.append(f"{count(black, 'mask is', 'masks are')} completely black: {names(black)}.")
