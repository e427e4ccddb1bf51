"""Find the pictures of a concept among its files, and decode each one to check it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import PIL

from ...common.callbacks import Callbacks
from ...common.wording import count, names, them
from ...config import node, setting
from ..controls import control_folders
from ..films import ANIMATED, FILM_EXTENSIONS, PACKAGE, FilmError, examine_film, has_decoder
from ..images import DECODER_ERRORS, PACKAGES, decoder_error, examine, picture_extensions
from ..masks import is_mask_name, mask_folder
from .caption_tables import table_key
from .folder import File, same_name, unlisted
from .index import FileFacts, Index
from .report import Report

UNREADABLE_EXTENSIONS = frozenset((".svg", ".cr2", ".nef", ".arw", ".dng"))  # no pictures that a package adds
# Files that hold many pictures: tables of Hugging Face, shards of webdataset, archives.
PACKED = frozenset((".parquet", ".arrow", ".tar", ".tfrecord", ".zip", ".7z", ".rar", ".gz", ".tgz"))
ENCODED = (".pkl", ".safetensors")  # of the shards that ComfyUI's Save Training Dataset writes
FORMAT = 4  # increase it whenever pictures or masks are read, or their problems said, differently


def reading(kind: str) -> str:
    """Name a kind of facts for the index; it includes Pillow's version, since another one may read other files."""
    return f"{kind}/{FORMAT}/{PIL.__version__}"


def pictures_among(folder: Path, files: list[File], report: Report) -> list[File]:
    """Select the pictures among the files; masks are skipped, unreadable formats are noted."""
    masks, readable = report.concept.masks, picture_extensions()
    apart = {place: "control pictures" for place in control_folders(folder, report.concept.controls)}
    if masks is not None and masks.source == "file":
        apart[mask_folder(folder, masks)] = "masks"
    apart.pop(folder, None)
    found: list[File] = []
    unused: list[File] = []
    wanted = _not_left_out(folder, files, report)
    strange: list[str] = []
    films: list[File] = []
    lacking: dict[str, str] = {}
    controls = {path for row in report.named.values() for path in row.values()}
    entries = {entry for row in report.named.values() for entry in row}  # a picture may be one and have one
    for file in files:
        if file.path in controls and table_key(file.name) not in entries:
            report.outcomes[file.name] = ("not used", "a control picture by its table")
        elif what := next((what for place, what in apart.items() if file.path.is_relative_to(place)), ""):
            report.outcomes[file.name] = ("not used", f"in the folder of {what}")
        elif file.extension in readable or file.extension in FILM_EXTENSIONS:
            if not is_mask_name(file.path.name, masks):
                if wanted(file):
                    (found if file.extension in readable else films).append(file)
                continue
            report.outcomes[file.name] = ("not used", "a mask by its name")
            if masks is None:
                unused.append(file)
        elif file.extension in PACKAGES and not is_mask_name(file.path.name, masks):
            lacking[file.name] = PACKAGES[file.extension]
        elif file.extension in UNREADABLE_EXTENSIONS:
            strange.append(file.name)
            report.outcomes[file.name] = ("not used", "this format cannot be read")
    used = {*found, *_usable(folder, films, report)}
    found = [file for file in files if file in used]
    if strange:
        some = count(strange, "file", "files")
        remedy = "convert them to PNG or JPEG"
        report.notes.append(f"{some} in {folder} cannot be read and are not trained: {names(strange)}; {remedy}.")
    if lacking:
        some = count(lacking, "picture needs", "pictures need")
        packages = " and ".join(sorted({*lacking.values()}))
        sentence = f"{some} the Python package {packages} to be read in {folder}: {names(lacking)}"
        report.problem(lacking, "its package is not installed", sentence, "install it, convert them to PNG or JPEG")
    if unused:
        some = count(unused, "mask is", "masks are")
        report.notes.append(f"{some} not used in {folder}, because no {node('masks')} is connected.")
    return found


def _usable(folder: Path, films: list[File], report: Report) -> list[File]:
    """Return the films where they can be trained; else they are noted, all in a sentence."""
    listed = [file.name for file in films]
    if not films:
        return []
    if not report.concept.takes_clips:
        some = count(films, "clip is", "clips are")
        report.outcomes |= dict.fromkeys(listed, ("not used", "a clip, for a base model of clips"))
        report.notes.append(
            f"{some} not trained in {folder}, as no base model of clips, such as Wan, is linked: {names(listed)}."
        )
        return []
    if not has_decoder():
        some = count(films, "clip needs", "clips need")
        sentence = f"{some} the Python package {PACKAGE} to be read in {folder}: {names(listed)}"
        report.problem(listed, "its package is not installed", sentence, f"install {PACKAGE}, which ComfyUI requires")
        return []
    return films


def _not_left_out(folder: Path, files: list[File], report: Report) -> Callable[[File], bool]:
    """Build a function that tells whether leave_out lets a file be; a pattern that nothing matches is noted.

    A pattern is a name within the folder, in any case; * stands for any text and ? for any character.
    """
    patterns = {pattern: same_name(pattern) for pattern in report.concept.leave_out}
    escaped = {pattern: text.replace("[", "[[]") for pattern, text in patterns.items()}
    names_of = {file: same_name(file.name) for file in files} if patterns else {}
    unknown = [pattern for pattern, text in escaped.items() if not any(fnmatchcase(n, text) for n in names_of.values())]
    if unknown:
        some = count(unknown, "entry of leave_out names", "entries of leave_out name")
        report.notes.append(f"{some} no file in {folder}: {names(unknown)}.")

    def wanted(file: File) -> bool:
        if not any(fnmatchcase(names_of[file], text) for text in escaped.values()):
            return True
        report.outcomes[file.name] = ("left out", f"by {setting('concepts.leave_out')}")
        return False

    return wanted if patterns else lambda file: True


def examine_pictures(
    folder: Path, found: list[File], report: Report, index: Index, callbacks: Callbacks
) -> tuple[dict[File, FileFacts], dict[str, str]]:
    """Decode all pictures and clips; return the facts of usable ones, and their digests by name. Problems are reported.

    Facts of a clip have its "rate".
    """
    smallest = report.concept.min_side
    facts: dict[File, FileFacts] = {}
    digests: dict[str, str] = {}
    broken: dict[str, str] = {}
    tiny: dict[str, str] = {}
    moving: list[str] = []
    for file, (digest, fact) in zip(found, _examined(found, report, index, callbacks), strict=True):
        if "problem" in fact:
            broken[file.name] = f"{file.name} ({fact['problem']})"
        elif min(fact["width"], fact["height"]) < smallest:
            tiny[file.name] = f"{file.name} ({fact['width']}x{fact['height']})"
        else:
            facts[file], digests[file.name] = fact, digest
            if fact["frames"] > 1 and "rate" not in fact:
                moving.append(file.name)
    if broken:
        clips = [name.lower().endswith(tuple(FILM_EXTENSIONS)) for name in broken]
        what = ("clip", "clips") if all(clips) else ("file", "files") if any(clips) else ("picture", "pictures")
        sentence = f"{count(broken, *what)} in {folder} cannot be read: {names(broken.values())}"
        report.problem(broken, "it cannot be read", sentence, f"replace or remove {them(broken)}")
    if tiny:
        some = count(tiny, "picture has", "pictures have")
        sentence = f"{some} a side shorter than {smallest} pixels in {folder}: {names(tiny.values())}"
        report.problem(tiny, "too small", sentence, f"replace or remove {them(tiny)}, set min_picture_side lower")
    if moving:
        some = count(moving, "picture has", "pictures have")
        report.notes.append(f"{some} several frames, of which only the first is used: {names(moving)}.")
    return facts, digests


def _examined(found: list[File], report: Report, index: Index, callbacks: Callbacks) -> Iterator[tuple[str, FileFacts]]:
    """Yield the digest and facts of each file; of pictures that move those as clips, where clips are taken."""
    pictures = [file for file in found if file.extension not in FILM_EXTENSIONS]
    results = dict(
        zip(pictures, index.examine(pictures, reading("picture"), facts_of, decoder_error, callbacks), strict=True)
    )
    films = [file for file in found if file not in results or _moves(results[file][1], report)]
    results |= zip(
        films, index.examine(films, film_reading("clip"), film_facts_of, decoder_error, callbacks), strict=True
    )
    yield from map(results.__getitem__, found)


def _moves(fact: FileFacts, report: Report) -> bool:
    """Tell whether a picture is trained as a clip."""
    return report.concept.takes_clips and fact.get("frames", 1) > 1 and fact["format"] in ANIMATED


def film_reading(kind: str) -> str:
    """Name a kind of facts of clips for the index, with the version of what decodes them."""
    if not has_decoder():
        return reading(kind)
    import av

    return f"{reading(kind)}/{av.__version__}"


def film_facts_of(data: bytes) -> FileFacts:
    """Decode a clip's content into its properties, {"problem": …} if it is broken."""
    try:
        return dataclasses.asdict(examine_film(data))
    except FilmError as error:
        return {"problem": str(error)}


def facts_of(data: bytes) -> FileFacts:
    """Decode a picture's content into its properties, {"problem": …} if it is broken."""
    if not data:
        return {"problem": "an empty file"}
    try:
        return dataclasses.asdict(examine(data))
    except DECODER_ERRORS as error:
        return {"problem": decoder_error(error)}


def nothing_found(folder: Path, files: list[File], report: Report) -> str:
    """Describe in a sentence the contents of a folder without pictures."""
    concept = report.concept
    masks = sum(is_mask_name(file.path.name, concept.masks) for file in files)
    kinds: dict[str, int] = {}
    for file in files:
        kinds[file.extension or "nameless"] = kinds.get(file.extension or "nameless", 0) + 1
    parts = [count(number, f"{kind} file") for kind, number in kinds.items()]
    parts += [f"{masks} of them masks by their names"] if masks else []
    try:
        folders = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:  # it vanished meanwhile
        return unlisted(error)
    parts += [count(folders, "folder", "folders")] if folders else []
    remedy = "put pictures (PNG, JPEG, WebP ...) there, or choose another folder"
    if not FILM_EXTENSIONS.isdisjoint(kinds) and not concept.takes_clips:
        remedy = "clips are trained with a base model of clips, such as Wan"
    if packed := [kind for kind in kinds if kind in PACKED]:
        remedy = f"unpack the {packed[0]} files, whose pictures are read as single files, or choose another folder"
    if any(file.path.name.startswith("shard_") and file.extension in ENCODED for file in files):
        remedy = "these are latents that another node encoded; choose the folder of their pictures"
    if folders and not concept.recursive:
        remedy = f"set {setting('concepts.recursive')} to on, or choose another folder"
    if not parts:
        return f"The folder {folder} is empty; {remedy}."
    return f"The folder {folder} has no picture, but {', '.join(parts)}; {remedy}."
