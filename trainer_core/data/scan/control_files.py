"""Find and check the control pictures of every picture of a concept."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.access import Access
from ...common.callbacks import Callbacks
from ...common.wording import count, names, them
from ...config import ConceptConfig, is_column, setting
from ..controls import Control, same_shape
from ..images import PACKAGES, decoder_error, picture_extensions
from ..masks import folder_beside
from .caption_sources import table_path
from .caption_tables import read_table, table_captions
from .folder import File, file_at, list_apart, refused, same_name
from .index import FileFacts, Index
from .pictures import facts_of, reading
from .report import Report

Controls = dict[str, tuple[Control, ...]]  # by name of the picture


def read_controls(
    folder: Path, found: dict[File, FileFacts], report: Report, index: Index, callbacks: Callbacks
) -> Controls:
    """Find the control pictures of each picture, one in each folder; missing, broken and misfitting ones are reported.

    found: the concept's pictures and their properties. The result has the pictures without a problem.
    """
    controls: Controls = {file.name: () for file in found}
    config = report.concept.controls
    for name in config.folders if config else ():
        if is_column(name):
            pairs, place, words = _pairs_of_table(name, list(found), report), f"{name} of the table", "control picture"
        else:
            place, words = str(folder_beside(folder, name)), "control picture of the same name"
            pairs = _pairs(Path(place), folder, list(found), report)
        own = _read_pairs(pairs, place, words, folder, found, report, index, callbacks)
        controls = {name: (*earlier, own[name]) for name, earlier in controls.items() if name in own}
    return controls


def read_named(
    folder: Path, files: list[File], concept: ConceptConfig, access: Access, columns: tuple[str, ...] = ()
) -> dict[str, dict[str, Path]]:
    """Read which control pictures a caption table names: by its column, and the name of the picture there.

    columns: by default those of the concept's control pictures. Relative names start at the table's folder. A table
    that cannot be read names none: its captions are missed, too.
    """
    columns = columns or (concept.controls.columns if concept.controls else ())
    path = table_path(folder, files, concept.captions) if columns and concept.captions.source == "table" else None
    if path is None or not access.allows(path):
        return {}
    rows: dict[str, dict[str, Any]] = {}
    with suppress(ValueError, OSError):
        read_table(path, concept.captions.encoding, rows)
    return {
        column: {
            entry: Path(os.path.normpath(path.parent / row[column].strip().replace("\\", "/")))
            for entry, row in rows.items()
            if isinstance(row.get(column), str) and row[column].strip() and "\0" not in row[column]
        }
        for column in columns
    }


def _pairs_of_table(column: str, found: list[File], report: Report) -> list[tuple[File, File | None]]:
    """Pair each picture with the one that a column of the caption table names."""
    if report.concept.captions.source != "table":
        report.errors.append(
            f"{column} is a column of a caption table, and captions come from {report.concept.captions.source}; set "
            f"{setting('captions.source')} to table, or {setting('controls.folders')} to a folder."
        )
        return []
    named = report.named.get(column, {})
    entries = table_captions(dict.fromkeys(named, ()), [file.name for file in found]).entries
    pairs: list[tuple[File, File | None]] = []
    for picture in found:
        path, control = named.get(entries.get(picture.name, "")), None
        if path is not None and not report.access.allows(path):
            report.errors.append(refused(path, setting("controls.folders")))
            return []
        with suppress(OSError):
            control = replace(file_at(path), name=path.name) if path else None
        pairs.append((picture, control))
    return pairs


def _read_pairs(
    pairs: list[tuple[File, File | None]],
    place: str,
    words: str,
    folder: Path,
    found: dict[File, FileFacts],
    report: Report,
    index: Index,
    callbacks: Callbacks,
) -> dict[str, Control]:
    """Read the control pictures of one folder or column. place, words: say where one is missing, and what."""
    missing = [picture.name for picture, control in pairs if control is None]
    sources = [control for _, control in pairs if control is not None]
    results = index.examine(sources, reading("picture"), facts_of, decoder_error, callbacks)
    facts = dict(zip((source.path for source in sources), results, strict=True))
    as_picture = report.concept.controls is not None and report.concept.controls.fit == "as_picture"
    controls: dict[str, Control] = {}
    broken: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for file, source in pairs:
        if source is None:
            continue
        digest, fact = facts[source.path]
        if "problem" in fact:
            broken[file.name] = f"{source.name} ({fact['problem']})"
            continue
        size, own = (found[file]["width"], found[file]["height"]), (fact["width"], fact["height"])
        if as_picture and not same_shape(size, own):
            wrong[file.name] = f"{source.name} ({own[0]}x{own[1]}, picture {size[0]}x{size[1]})"
            continue
        controls[file.name] = Control(path=source.path, name=source.name, digest=digest, width=own[0], height=own[1])
        if source.path.is_relative_to(folder):
            report.outcomes[source.path.relative_to(folder).as_posix()] = ("control picture", f"of {file.name}")
    _report_problems(place, words, missing, broken, wrong, report)
    return controls


def _pairs(place: Path, folder: Path, found: list[File], report: Report) -> list[tuple[File, File | None]]:
    """Pair each picture with the picture of its name in a folder, whatever their endings."""
    try:
        files = list_apart(place, "folder of control pictures", setting("controls.folders"), report.access)
    except ValueError as error:
        report.errors.append(str(error))
        return []
    if place == folder:
        report.errors.append(
            f"{place} holds the pictures, so it cannot hold their control pictures; set {setting('controls.folders')} "
            "to another folder."
        )
        return []
    listed: dict[str, list[File]] = {}
    for file in files:
        if file.extension in picture_extensions() or file.extension in PACKAGES:
            listed.setdefault(same_name(file.stem), []).append(file)

    def control_of(picture: File) -> File | None:
        stem = same_name(picture.stem)  # in the same sub-folder, or directly in the folder
        same = listed.get(stem) or listed.get(stem.rpartition("/")[2]) or []
        return max(
            same,
            key=lambda file: (file.path.stem == picture.path.stem, file.extension == picture.extension),
            default=None,
        )

    return [(picture, control_of(picture)) for picture in found]


def _report_problems(
    place: str, words: str, missing: list[str], broken: dict[str, str], wrong: dict[str, str], report: Report
) -> None:
    """Add the problems of one folder of control pictures to the concept's report, as sentences."""
    if missing:
        some = count(missing, "picture has", "pictures have")
        sentence = f"{some} no {words} in {place}: {names(missing)}"
        report.problem(missing, "without a control picture", sentence, f"add {them(missing)}")
    if broken:
        sentence = f"{count(broken, 'control picture')} of {place} cannot be read: {names(broken.values())}"
        report.problem(broken, "its control picture cannot be read", sentence, f"replace or remove {them(broken)}")
    if wrong:
        differ = count(wrong, "control picture has", "control pictures have")
        sentence = f"{differ} another shape than the picture in {place}: {names(wrong.values())}"
        remedy = "cut them alike" + (f", set {setting('controls.fit')} to whole" if report.concept.shown else "")
        report.problem(wrong, "its control picture has another shape", sentence, remedy)
