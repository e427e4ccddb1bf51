"""Find the caption lines of every picture of a concept: in files, tables, file names or folder names."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.cancel import look
from ...common.disk_errors import reason
from ...common.wording import count, names
from ...config import CaptionConfig, setting
from ..captions import has_wildcards
from .caption_files import caption_lines, choose_lines, read_text
from .caption_tables import TABLE_NAMES, TABLES, find_table, read_caption, read_table, table_captions
from .folder import File, numbered, refused, same_name
from .report import Report

TEXT_EXTENSIONS = (".txt", ".caption", ".captions", ".tags", ".text", ".md", ".json")
Lines = dict[str, tuple[str, ...]]  # by name of the picture


def read_captions(folder: Path, found: list[File], files: list[File], report: Report) -> Lines:
    """Read the caption lines of each picture; undecodable and missing ones are reported."""
    captions = report.concept.captions
    if captions.source == "none":
        return {file.name: () for file in found}
    if captions.source == "file_name":
        return _names_as_captions(folder, {file.name: file.path.stem for file in found}, report)
    if captions.source == "folder_name":
        folders = {file.name: file.path.parent.name for file in found}
        if report.concept.folder_repeats:
            folders = {name: numbered(each)[1] for name, each in folders.items()}
        return _names_as_captions(folder, folders, report)
    if captions.source == "text_file":
        return _texts_beside(folder, found, files, report)
    return _texts_in_one_file(folder, found, files, report)


def _names_as_captions(folder: Path, texts: dict[str, str], report: Report) -> Lines:
    """Use names as captions; names with undecodable bytes (of old encodings) are reported."""
    odd = dict.fromkeys(name for name, text in texts.items() if re.search("[\ud800-\udfff]", text))
    if odd:
        some = count(odd, "name is", "names are")
        sentence = f"{some} undecodable in {folder} and cannot be captions: {names(odd)}"
        report.problem(odd, "its name is undecodable", sentence, "rename them")
    return {name: (text,) for name, text in texts.items() if name not in odd}


def captions_beside(found: list[File], files: list[File], captions: CaptionConfig) -> dict[File, File | None]:
    """Find the text file beside each picture: the first extension that exists, cat.png.txt or cat.txt."""
    exact = {file.stem + file.extension: file for file in files}
    alike = {same_name(file.name): file for file in files}
    extensions = list(map(str.lower, captions.extensions))

    def beside(file: File) -> Iterator[File | None]:
        for extension in extensions:
            for name in (file.name + extension, file.stem + extension):
                yield exact.get(name) or alike.get(same_name(name))

    return {file: next(filter(None, beside(file)), None) for file in found}


def _texts_beside(folder: Path, found: list[File], files: list[File], report: Report) -> Lines:
    """Read the text file beside each picture."""
    captions = report.concept.captions
    lines: Lines = {}
    missing: list[str] = []
    broken: dict[str, str] = {}
    used: dict[str, list[str]] = {}
    for file, text in captions_beside(found, files, captions).items():
        look()
        if text is None:
            missing.append(file.name)
            continue
        try:
            lines[file.name] = read_caption(text.path, captions.encoding, captions.lines)
        except (ValueError, OSError) as error:
            broken[file.name] = _complaint(text.path, error).rstrip(".")
            continue
        report.outcomes[text.name] = ("caption", f"of {file.name}")
        report.texts[file.name] = text.path
        used.setdefault(text.name, []).append(file.name)
    if broken:
        some = count(broken, "caption", "captions")
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        sentence = f"{some} in {folder} cannot be read: {'; '.join(list(broken.values())[:3])}{more}"
        report.problem(broken, "its caption cannot be read", sentence)
    if len(captions.extensions) > 1 and used:
        kinds = Counter(Path(name).suffix.lower() for name in used)
        report.notes.append(f"Captions come from {', '.join(count(n, f'{kind} file') for kind, n in kinds.items())}.")
    shared = [f"{name} ({', '.join(pictures)})" for name, pictures in used.items() if len(pictures) > 1]
    if shared:
        some = count(shared, "caption file belongs", "caption files belong")
        report.notes.append(f"{some} to several pictures of the same name: {names(shared)}.")
    _remark(lines, captions, report)
    return lines | _missing(folder, missing, len(found), _hint(found, files, captions), report)


def _texts_in_one_file(folder: Path, found: list[File], files: list[File], report: Report) -> Lines:
    """Read the captions of all pictures from one file: the same lines for each, or a table by name."""
    captions = report.concept.captions
    path = table_path(folder, files, captions)
    if path is None:
        report.errors.append(
            f"There is no caption table in {folder} (metadata.jsonl, metadata.csv, captions.json ...); write one, or "
            f"set {setting('captions.file')} to its name."
        )
        return {}
    if not report.access.allows(path):
        report.errors.append(refused(path, setting("captions.file")))
        return {}
    if not os.path.isfile(path):  # Path.is_file raises OSError for a name that is too long
        report.errors.append(f"The caption file {path} does not exist; check {setting('captions.file')}.")
        return {}
    if path.is_relative_to(folder) and (inside := path.relative_to(folder).as_posix()) in report.outcomes:
        report.outcomes[inside] = ("caption", "of all pictures")
    try:
        if captions.source == "one_file":
            return _same_for_all(path, found, report)
        return _by_name(folder, path, found, report)
    except (ValueError, OSError) as error:
        report.errors.append(_complaint(path, error))
        return {}


def table_path(folder: Path, files: list[File], captions: CaptionConfig) -> Path | None:
    """Find the file that holds the captions of all pictures."""
    name = captions.file.strip() or find_table(file.name for file in files)
    return Path(os.path.normpath(folder / name)) if name else None


def _same_for_all(path: Path, found: list[File], report: Report) -> Lines:
    """Read the lines of one file for all pictures; raises ValueError and OSError."""
    captions = report.concept.captions
    if path.suffix.lower() in (".json", ".jsonl"):
        raise ValueError(f"{path} is a table of captions; set {setting('captions.source')} to table.")
    same = caption_lines(read_text(path, captions.encoding), captions.lines, path)
    if not same:
        raise ValueError(f"The caption file {path} is empty; write one caption per line.")
    _remark({path.name: same}, captions, report)
    return {file.name: same for file in found}


def _by_name(folder: Path, path: Path, found: list[File], report: Report) -> Lines:
    """Read the captions of the pictures from a table; raises ValueError and OSError."""
    captions = report.concept.captions
    named: dict[str, dict[str, Any]] = {}
    matched = table_captions(read_table(path, captions.encoding, named), [file.name for file in found])
    lines = {name: choose_lines(each, captions.lines, f"{path}, {name},") for name, each in matched.captions.items()}
    if matched.unmatched:
        some = count(matched.unmatched, "entry names", "entries name")
        report.notes.append(f"{some} no picture in {path.name}: number {names(map(str, matched.unmatched))}.")
    if matched.by_file_name:
        some = count(matched.by_file_name, "picture was", "pictures were")
        report.notes.append(f"{some} matched in {path.name} by the file name alone: {names(matched.by_file_name)}.")
    controls = report.concept.controls
    if named and controls is None:
        report.notes.append(
            f"{path.name} names control pictures, which are not used; set {setting('controls.folders')} to "
            f"{min(column for row in named.values() for column in row)}."
        )
    elif named and controls and not controls.columns:
        report.notes.append(
            f"{path.name} names control pictures, too; those of {', '.join(controls.folders)} count. Set "
            f"{setting('controls.folders')} to control_path to use the table's."
        )
    _remark(lines, captions, report)
    return lines | _missing(folder, list(matched.missing), len(found), f" in {path.name}", report)


def _complaint(path: Path, error: ValueError | OSError) -> str:
    """Say in a sentence why a caption file cannot be read."""
    if isinstance(error, OSError):
        return f"{path} cannot be opened ({reason(error)}); check that it exists, and its permissions."
    return str(error)


def _remark(lines: Lines, captions: CaptionConfig, report: Report) -> None:
    """Note captions that are empty, have several lines, or contain wildcards while these are off."""
    empty = [name for name, each in lines.items() if not each]
    several = [name for name, each in lines.items() if len(each) > 1]
    wild = [name for name, each in lines.items() if not captions.wildcards and any(map(has_wildcards, each))]
    if empty:
        some = count(empty, "picture has", "pictures have")
        report.notes.append(f"{some} an empty caption file: {names(empty)}.")
    if several:
        some = count(several, "caption has", "captions have")
        report.notes.append(f"{some} several lines, and each visit uses the next one: {names(several)}.")
    if wild:
        some = count(wild, "caption contains", "captions contain")
        report.notes.append(f"{some} {{a|b}}, which is not replaced because wildcards is off: {names(wild)}.")


def _hint(found: list[File], files: list[File], captions: CaptionConfig) -> str:
    """Mention captions in the folder that another setting reads: files with another extension, or a table."""
    stems = {same_name(file.stem) for file in found}
    tables = [file.name for file in files if file.extension in TABLES and same_name(file.stem) not in stems]
    kinds = Counter(file.extension for file in files if file.name not in tables)
    others = [kind for kind in TEXT_EXTENSIONS if kinds[kind] and kind not in map(str.lower, captions.extensions)]
    if others:
        there = "is 1 {} file" if kinds[others[0]] == 1 else f"are {kinds[others[0]]} {{}} files"
        return f", but there {there.format(others[0])} (set {setting('captions.extensions')} to {others[0]})"
    if not tables:
        return ""
    name = find_table(tables) or tables[0]
    file = "" if name.lower() in TABLE_NAMES else f" and {setting('captions.file')} to {name}"
    return f", but there is the table {name} (set {setting('captions.source')} to table{file})"


def _missing(folder: Path, missing: list[str], total: int, hint: str, report: Report) -> Lines:
    """Report pictures without a caption; return empty lines for those that train without one."""
    if not missing:
        return {}
    captions = report.concept.captions
    some = count(missing, "picture has", "pictures have")
    if captions.missing == "empty":
        train = "trains" if len(missing) == 1 else "train"
        report.notes.append(f"{some} no caption and {train} with an empty one{hint}: {names(missing)}.")
        return dict.fromkeys(missing, ())
    if captions.missing == "class_prompt":
        train = "trains" if len(missing) == 1 else "train"
        report.notes.append(f"{some} no caption and {train} with the class prompt{hint}: {names(missing)}.")
        return dict.fromkeys(missing, (captions.class_prompt.strip(),))
    if captions.missing == "folder_name":
        train = "trains" if len(missing) == 1 else "train"
        report.notes.append(f"{some} no caption and {train} with the name of the folder{hint}: {names(missing)}.")
        folders = {name: Path(name).parent.name or folder.name for name in missing}
        return _names_as_captions(folder, {name: numbered(each)[1] for name, each in folders.items()}, report)
    if total == len(missing) > 1:
        some = f"None of the {total} pictures has a caption; {some}"
    wanted = "entry" if captions.source == "table" else f"{' or '.join(captions.extensions)} caption"
    where = hint if captions.source == "table" else f" in {folder}{hint}"
    sentence = f"{some} no {wanted}{where}: {names(missing)}"
    elsewhere = f", set {setting('captions.source')} to where they are" if total == len(missing) else ""
    remedy = f"write captions{elsewhere}, set {setting('captions.missing')} to empty"
    report.problem(missing, "without a caption", sentence, remedy)
    return {}
