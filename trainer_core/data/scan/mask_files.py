"""Find and check the mask of every picture of a concept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...common.callbacks import Callbacks
from ...common.wording import count, names, them
from ...config import MaskConfig, setting
from ..films import FILM_EXTENSIONS, FilmError
from ..images import DECODER_ERRORS, decoder_error
from ..masks import examine_mask, examine_mask_clip, find_mask, mask_folder
from .folder import File, list_apart, same_name
from .index import FileFacts, Index
from .pictures import film_reading, reading
from .report import Report

_MOVING = frozenset((".gif", ".webp"))  # endings of pictures that may be clips


class MaskFile(NamedTuple):
    """The mask of a picture or clip."""

    path: Path | None = None  # None: without one
    digest: str = ""
    moves: bool = False  # a clip with a mask for each frame


Masks = dict[str, MaskFile]  # by name of the picture


def read_masks(folder: Path, found: dict[File, FileFacts], report: Report, index: Index, callbacks: Callbacks) -> Masks:
    """Find the mask of each picture; missing, broken, black ones and wrong sizes are reported.

    found: the concept's pictures and their properties.
    """
    config = report.concept.masks
    if config is None or not report.reads_masks:
        return {file.name: MaskFile() for file in found}
    pairs = _pairs(folder, list(found), config, report)
    facts = _examined(pairs, found, config, index, callbacks)
    masks: Masks = {}
    missing: list[str] = []
    wrong: dict[str, str] = {}
    broken: dict[str, str] = {}
    uneven: dict[str, str] = {}
    black: list[str] = []
    for file, source in pairs:
        if source is None or "none" in facts[source.path][1]:
            missing.append(file.name)
            if config.missing == "ones":
                masks[file.name] = MaskFile()
            continue
        digest, fact = facts[source.path]
        if "problem" in fact:
            broken[file.name] = f"{source.path.name} ({fact['problem']})"
            continue
        size, other = (found[file]["width"], found[file]["height"]), (fact["width"], fact["height"])
        if size != other:
            wrong[file.name] = f"{file.name} ({size[0]}x{size[1]}, mask {other[0]}x{other[1]})"
            continue
        frames = found[file]["frames"] if "rate" in found[file] else 1
        moves = fact.get("frames", 1) > 1
        if moves and fact["frames"] != frames:
            uneven[file.name] = f"{file.name} ({frames}, mask {fact['frames']})"
            continue
        masks[file.name] = MaskFile(source.path, digest, moves)
        if source is not file and source.path.is_relative_to(folder):
            report.outcomes[source.path.relative_to(folder).as_posix()] = ("mask", f"of {file.name}")
        if fact["high"] == 0:
            black.append(file.name)
    _report_problems(folder, config, missing, wrong, uneven, broken, black, report)
    return masks


def _examined(
    pairs: list[tuple[File, File | None]],
    found: Mapping[File, FileFacts],
    config: MaskConfig,
    index: Index,
    callbacks: Callbacks,
) -> dict[Path, tuple[str, FileFacts]]:
    """Read the digest and facts of each mask; those of clips have their "frames"."""
    pictures: dict[Path, File] = {}
    films: dict[Path, File] = {}
    for file, mask in pairs:
        if mask is not None:
            moving = FILM_EXTENSIONS | (_MOVING if "rate" in found[file] else frozenset())
            (films if mask.extension in moving else pictures)[mask.path] = mask
    kind = f"{config.source}/{config.invert}/{config.threshold}"
    of_pictures = index.examine(
        list(pictures.values()), reading(f"mask/{kind}"), lambda data: _facts(data, config), decoder_error, callbacks
    )
    facts = dict(zip(pictures, of_pictures, strict=True))
    of_films = index.examine(
        list(films.values()),
        film_reading(f"mask clip/{kind}"),
        lambda data: _film_facts(data, config),
        decoder_error,
        callbacks,
    )
    return facts | dict(zip(films, of_films, strict=True))


def _film_facts(data: bytes, config: MaskConfig) -> FileFacts:
    """Read the size, brightest value and frames of a clip of masks, as `_facts` does of a picture."""
    try:
        found = examine_mask_clip(data, config)
    except FilmError as error:
        return {"problem": str(error)}
    if found is None:
        return {"none": True}
    (width, height), high, frames = found
    return {"width": width, "height": height, "high": high, "frames": frames}


def _facts(data: bytes, config: MaskConfig) -> FileFacts:
    """Read a mask's size and brightest value; {"none": True} without its alpha channel, {"problem": …} if broken."""
    if not data:
        return {"problem": "an empty file"}
    try:
        found = examine_mask(data, config)
    except DECODER_ERRORS as error:
        return {"problem": decoder_error(error)}
    return {"none": True} if found is None else {"width": found[0][0], "height": found[0][1], "high": found[1]}


def _pairs(folder: Path, found: list[File], config: MaskConfig, report: Report) -> list[tuple[File, File | None]]:
    """Pair each picture with the file of its mask."""
    if config.source == "alpha":
        return [(file, file) for file in found]
    apart = mask_folder(folder, config)
    try:
        files = list_apart(apart, "mask folder", setting("masks.folder"), report.access)
    except ValueError as error:
        report.errors.append(str(error))
        return []
    listed: dict[str, list[File]] = {}
    for file in files:
        listed.setdefault(same_name(file.name), []).append(file)
    places = {name: Path(name) for name in listed}
    chosen = ((file, find_mask(same_name(file.name), places, config)) for file in found)
    return [(file, None if place is None else _best_spelling(file, listed[place.as_posix()])) for file, place in chosen]


def _best_spelling(picture: File, masks: list[File]) -> File:
    """Choose among masks whose names differ in case alone: the one spelled like the picture, else the first."""
    return next((mask for mask in masks if mask.path.name.startswith(Path(picture.stem).name)), masks[0])


def _report_problems(
    folder: Path,
    config: MaskConfig,
    missing: list[str],
    wrong: dict[str, str],
    uneven: dict[str, str],
    broken: dict[str, str],
    black: list[str],
    report: Report,
) -> None:
    """Add the mask problems of one concept to its report, as sentences."""
    lacking = "alpha channel" if config.source == "alpha" else f"mask (NAME{' or '.join(config.suffixes)})"
    some = count(missing, "picture has", "pictures have")
    if missing and config.missing == "error":
        sentence = f"{some} no {lacking} in {folder}: {names(missing)}"
        report.problem(
            missing, "without a mask", sentence, f"add {them(missing)}, set {setting('masks.missing')} to ones"
        )
    elif missing and config.missing == "leave_out":
        report.outcomes |= dict.fromkeys(missing, ("left out", "without a mask"))
        report.notes.append(f"Left out: {some} no {lacking} in {folder}: {names(missing)}.")
    elif missing:
        report.notes.append(f"{some} no {lacking} and the whole area is trained: {names(missing)}.")
    if broken:
        sentence = f"{count(broken, 'mask', 'masks')} of {folder} cannot be read: {names(broken.values())}"
        report.problem(broken, "its mask cannot be read", sentence, f"replace or remove {them(broken)}")
    if wrong:
        differ = count(wrong, "mask differs", "masks differ")
        sentence = f"{differ} in size from the picture in {folder}: {names(wrong.values())}"
        report.problem(wrong, "its mask has another size", sentence, "save them at the same size")
    if uneven:
        differ = count(uneven, "mask differs", "masks differ")
        sentence = f"{differ} in frames from what it covers in {folder}: {names(uneven.values())}"
        remedy = "save a mask for each frame, or one picture for all"
        report.problem(uneven, "its mask has another number of frames", sentence, remedy)
    if black:
        report.notes.append(f"{count(black, 'mask is', 'masks are')} completely black: {names(black)}.")
