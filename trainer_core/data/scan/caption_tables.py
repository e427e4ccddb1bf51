"""Read the captions of many pictures from one table (JSON, CSV), and match its entries with pictures."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .caption_files import LINE_END, caption_lines, decode, read_bytes

TABLE_LIMIT = 2**28
TABLE_NAMES = (  # in order of preference: Hugging Face, plain, then sd-scripts' from its last step to its first
    *("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.json"),
    *("captions.jsonl", "captions.json", "captions.csv", "captions.tsv"),
    *("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"),
)
FILE_COLUMNS = ("file_name", "file", "image", "filename", "path")  # the first present one counts
TEXT_COLUMNS = ("text", "caption", "prompt")  # the first present one counts; `tags` are appended to it


@dataclass(frozen=True, slots=True)
class TableMatch:
    """The entries of a caption table, matched with pictures."""

    captions: dict[str, tuple[str, ...]]  # picture name -> lines
    missing: tuple[str, ...]  # pictures without an entry
    unmatched: tuple[str, ...]  # entries without a picture
    by_file_name: tuple[str, ...]  # pictures matched by the bare file name, whose entry names another folder


def find_table(files: Iterable[str]) -> str | None:
    """Find the caption table among names relative to a folder: the first of TABLE_NAMES, in any case."""
    found = {name.lower(): name for name in sorted(files, reverse=True)}
    return next((found[name] for name in TABLE_NAMES if name in found), None)


def read_table(path: Path, encoding: str = "auto") -> dict[str, tuple[str, ...]]:
    """Read picture name -> caption lines from .jsonl, .json, .csv or .tsv; raises ValueError that names file and place.

    Names are lower-case posix paths, relative to the table's folder if they are inside it. A text is split into lines
    as a caption file is; in a list of texts each is one line. `tags` are appended to the caption, as sd-scripts does;
    a list of tags is one line.
    """
    readers = {".jsonl": _json_lines, ".json": _json_entries, ".csv": _csv_rows, ".tsv": _csv_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is no caption table; its name must end in one of {', '.join(readers)}.")
    folder = table_key(path.parent.absolute().as_posix()).rstrip("/") + "/"
    table: dict[str, tuple[str, ...]] = {}
    for place, name, columns in reader(path, decode(path, read_bytes(path, TABLE_LIMIT, "caption table"), encoding)):
        where = f"{path}, {place}"
        key = table_key(_checked(where, name)).removeprefix(folder)
        if not key:
            raise ValueError(f"{where}: the picture's name is empty.")
        lines = _row_lines(where, columns)
        if table.setdefault(key, lines) != lines:
            raise ValueError(f"{where}: {key} has another caption above; remove one of them.")
    if not table:
        raise ValueError(f"{path} has no captions; write some, or choose another caption_file in Concept Dataset.")
    return table


def table_captions(table: dict[str, tuple[str, ...]], names: Sequence[str]) -> TableMatch:
    """Match the entries of a table with picture names (posix, relative to the table's folder).

    The full name counts first, then the name without extension, then the bare file name with or without extension if
    only one picture and one entry have it.
    """
    bare_entries = _unique({entry: entry.rsplit("/", 1)[-1] for entry in table})
    bare_names = _unique({name: table_key(name).rsplit("/", 1)[-1] for name in names})
    bare_stems = _unique({name: _stem(table_key(name).rsplit("/", 1)[-1]) for name in names})
    entries: dict[str, str] = {}
    by_file_name: list[str] = []
    for name in names:
        key = table_key(name)
        entry = key if key in table else _stem(key)
        if entry not in table:
            bare = key.rsplit("/", 1)[-1]
            entry = bare_entries.get(bare) if bare in bare_names else None
            entry = entry or (bare_entries.get(_stem(bare)) if _stem(bare) in bare_stems else None)
            if entry is None:
                continue
            if "/" in entry:
                by_file_name.append(name)
        entries[name] = entry
    used = set(entries.values())
    return TableMatch(
        captions={name: table[entry] for name, entry in entries.items()},
        missing=tuple(name for name in names if name not in entries),
        unmatched=tuple(entry for entry in table if entry not in used),
        by_file_name=tuple(by_file_name),
    )


def table_key(name: str) -> str:
    """Normalize a picture's name for comparison: posix, lower-case, composed characters, no leading ./ ."""
    return unicodedata.normalize("NFC", name).strip().replace("\\", "/").lower().removeprefix("./")


def _stem(name: str) -> str:
    """Remove the extension of a posix name."""
    folder, slash, bare = name.rpartition("/")
    return folder + slash + (bare.rpartition(".")[0] or bare)


def _unique(values: dict[str, str]) -> dict[str, str]:
    """Invert a dict, keeping only the values that occur once."""
    counts = Counter(values.values())
    return {value: key for key, value in values.items() if counts[value] == 1}


def _row_lines(where: str, columns: dict[str, Any]) -> tuple[str, ...]:
    """Read the caption lines of one row; raises ValueError if it has none, or no text."""
    column = next((name for name in TEXT_COLUMNS if name in columns), None)
    if column is None and "tags" not in columns:
        raise ValueError(f"{where}: no caption; add one of {', '.join(TEXT_COLUMNS)} or tags.")
    lines: tuple[str, ...] = ()
    if column is not None:
        value = columns[column]
        if isinstance(value, list):
            lines = tuple(line for text in value for line in caption_lines(_checked(where, text), "join"))
        else:
            lines = caption_lines(_checked(where, value))
    value = columns.get("tags", [])
    parts = value if isinstance(value, list) else [value]
    tags = ", ".join(line for text in parts for line in caption_lines(_checked(where, text), "join"))
    if not tags:
        return lines
    return tuple(f"{line}, {tags}" for line in lines) or (tags,)


def _checked(where: str, value: Any) -> str:
    """Check that a value is valid text, and return it; raises ValueError otherwise."""
    if not isinstance(value, str):
        kind = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}.get(
            type(value), "a number"
        )
        raise ValueError(f"{where}: expected text, found {kind}.")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{where}: the text contains NUL or half characters (\\u0000, \\ud800); remove them.")
    return value


Row = tuple[str, Any, dict[str, Any]]  # place in the file, the picture's name, its columns


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(LINE_END.split(text), 1):
        if line.strip():
            place = f"line {number}"
            yield _named_row(f"{path}, {place}", place, _parse_json(f"{path}, {place}", line))


def _json_entries(path: Path, text: str) -> Iterator[Row]:
    content = _parse_json(str(path), text)
    if isinstance(content, list):
        for number, row in enumerate(content, 1):
            yield _named_row(f"{path}, entry {number}", f"entry {number}", row)
    elif isinstance(content, dict):
        for name, value in content.items():
            yield f"entry {name!r}", name, _lower_keys(value) if isinstance(value, dict) else {"text": value}
    else:
        raise ValueError(f"{path} must hold an object of picture names and captions, or a list of rows.")


def _named_row(where: str, place: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f'{where}: expected an object, as {{"file_name": "a.png", "text": "a cat"}}.')
    columns = _lower_keys(row)
    column = next((name for name in FILE_COLUMNS if name in columns), None)
    if column is None:
        raise ValueError(f"{where}: no picture name; add one of {', '.join(FILE_COLUMNS)}.")
    return place, columns[column], columns


def _lower_keys(row: dict[str, Any]) -> dict[str, Any]:
    return {key.strip().lower(): value for key, value in row.items()}


def _parse_json(where: str, text: str) -> Any:
    try:
        # Numbers become floats: an integer of a million digits would take minutes to read.
        return json.loads(text, object_pairs_hook=functools.partial(_unique_keys, where), parse_int=float)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{where} is not JSON: {error.msg} at {at}column {error.colno}.") from error
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply for a caption table.") from error


def _unique_keys(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row and row[key] != value:
            raise ValueError(f"{where}: {key!r} has two different captions; remove one of them.")
        row[key] = value
    return row


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    """Yield the rows of a table with a header, or with two columns: picture, caption."""
    first = LINE_END.split(text.lstrip(), maxsplit=1)[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(first)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True)
    header: list[str] | None = None
    begin = 1  # line where the next row begins
    try:
        for cells in rows:
            place, begin = f"line {begin}", rows.line_num + 1
            if not any(cell.strip() for cell in cells) or (header is None and cells[0].lower() == "sep="):
                continue  # an empty row, or Excel's line for the delimiter
            if header is None:
                header, is_header = _header(f"{path}, {place}", cells)
                if is_header:
                    continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, {place}: {len(cells)} columns instead of {len(header)}; put captions with "
                    f"{delimiter!r} in double quotes."
                )
            yield _named_row(f"{path}, {place}", place, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {begin}: {error}; look for an unclosed quote.") from error


def _header(where: str, cells: list[str]) -> tuple[list[str], bool]:
    """Read the column names from the first row of a table, and tell whether that row is a header."""
    names = [cell.strip().lower() for cell in cells]
    has_file, has_text = bool({*names} & {*FILE_COLUMNS}), bool({*names} & {*TEXT_COLUMNS, "tags"})
    if has_file and has_text:
        if twice := [name for name in (*FILE_COLUMNS, *TEXT_COLUMNS, "tags") if names.count(name) > 1]:
            raise ValueError(f"{where}: duplicate columns ({', '.join(twice)}); keep one of each.")
        return names, True
    if has_file or len(cells) != 2:
        raise ValueError(
            f"{where}: the columns are {names}; write a header with {FILE_COLUMNS[0]} and {TEXT_COLUMNS[0]}, or just "
            "these two columns without a header."
        )
    return [FILE_COLUMNS[0], TEXT_COLUMNS[0]], False


def _delimiter(line: str) -> str:
    """Find the delimiter: the first comma, semicolon or tab after the first cell, which may be quoted."""
    found = re.search(r"[,;\t]", re.sub(r'^\s*"(?:[^"]|"")*"', "", line))
    return found.group() if found else ","
