"""Read the captions of many pictures from one table (JSON, CSV), and match its entries with pictures."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...config import is_column, setting
from .caption_files import (
    LONGEST_LINE,
    NO_TEXT,
    TEXT_LIMIT,
    LineChoice,
    caption_lines,
    choose_lines,
    decode,
    read_bytes,
    read_text,
)

TABLE_LIMIT = 2**27  # maximum bytes of a table, and characters of all its captions
JSON_LIMIT = 2**26  # bytes; JSON has to be parsed as a whole
MOST_ENTRIES = 2**20  # lines of a table, and lines of all its captions
MOST_VALUES = 2**21  # texts, numbers, lists and objects in a JSON text
MOST_DEPTH = 32  # of lists and objects within each other
LONGEST_ROW = 2**20  # characters
LONGEST_NAME = 2**10  # characters: the longest path of macOS; composing accents takes time by the square of the length
TABLE_NAMES = (  # in order of preference: Hugging Face, plain, then sd-scripts' from its last step to its first
    *("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.json"),
    *("captions.jsonl", "captions.json", "captions.csv", "captions.tsv"),
    *("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"),
)
TABLES = (".json", ".jsonl", ".csv", ".tsv")
FILE_COLUMNS = ("file_name", "file", "image", "filename", "path", "image_path")  # the first present one counts
CONTROL_COLUMNS = ("control_path", *(f"control_path_{number}" for number in range(8)))  # of musubi-tuner
TEXT_COLUMNS = ("text", "caption", "prompt")  # the first present one counts; `tags` are appended to it


@dataclass(frozen=True, slots=True)
class TableMatch:
    """The entries of a caption table, matched with pictures."""

    entries: dict[str, str]  # picture name -> name in the table
    captions: dict[str, tuple[str, ...]]  # picture name -> lines
    missing: tuple[str, ...]  # pictures without an entry
    unmatched: tuple[int, ...]  # numbers of the entries without a picture, from 1; names from a file are not repeated
    by_file_name: tuple[str, ...]  # pictures matched by the bare file name, whose entry names another folder


def find_table(files: Iterable[str]) -> str | None:
    """Find the caption table among names relative to a folder: the first of TABLE_NAMES, in any case."""
    found = {name.lower(): name for name in sorted(files, reverse=True)}
    return next((found[name] for name in TABLE_NAMES if name in found), None)


def read_caption(path: Path, encoding: str, mode: LineChoice) -> tuple[str, ...]:
    """Read the caption file of one picture: lines of text, or in .json a row of a table; raises ValueError, OSError."""
    text = read_text(path, encoding)
    if path.suffix.lower() != ".json":
        return caption_lines(text, mode, path)
    content = _parse_json(str(path), text)
    lines = _row_lines(str(path), _lower_keys(content)) if isinstance(content, dict) else _texts(str(path), content)
    return choose_lines(lines, mode, path)


def read_table(
    path: Path, encoding: str = "auto", controls: dict[str, dict[str, Any]] | None = None
) -> dict[str, tuple[str, ...]]:
    """Read picture name -> caption lines from .jsonl, .json, .csv or .tsv; raises ValueError that names file and line.

    Names are lower-case posix paths, relative to the table's folder if they are inside it. A text is split into lines
    as a caption file is; in a list of texts each is one line. `tags` are appended to the caption, as sd-scripts does;
    a list of tags is one line. controls: takes the columns of control pictures of each picture that has some.
    """
    readers = {".jsonl": _json_lines, ".json": _json_entries, ".csv": _csv_rows, ".tsv": _csv_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is no caption table; its name must end in one of {', '.join(readers)}.")
    limit, kind = (JSON_LIMIT, "JSON table") if reader is _json_entries else (TABLE_LIMIT, "caption table")
    folder = table_key(path.parent.absolute().as_posix()).rstrip("/") + "/"
    table: dict[str, tuple[str, ...]] = {}
    entries = size = 0
    for position, name, columns in reader(path, decode(path, read_bytes(path, limit, kind), encoding)):
        where = f"{path}, {position}"
        key = _picture_key(where, name).removeprefix(folder)
        lines = _row_lines(where, columns)
        if controls is not None and (own := {each: columns[each] for each in columns if is_column(each)}):
            controls[key] = own
        if table.setdefault(key, lines) != lines:
            raise ValueError(f"{where}: this picture has another caption above; remove one of them.")
        entries, size = entries + max(len(lines), 1), size + sum(map(len, lines))
        if entries > MOST_ENTRIES or size > TABLE_LIMIT:
            raise ValueError(f"{where}: the table has too many captions; use several concepts with a table each.")
    if not table:
        raise ValueError(f"{path} has no captions; write some, or set {setting('captions.file')} to another file.")
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
        entries=entries,
        captions={name: table[entry] for name, entry in entries.items()},
        missing=tuple(name for name in names if name not in entries),
        unmatched=tuple(number for number, entry in enumerate(table, 1) if entry not in used),
        by_file_name=tuple(by_file_name),
    )


def table_key(name: str) -> str:
    """Normalize a picture's name for comparison: posix, lower-case, composed characters, no leading ./ ."""
    return unicodedata.normalize("NFC", name).strip().replace("\\", "/").lower().removeprefix("./")


def _picture_key(where: str, name: Any) -> str:
    """Check a picture's name in a table, and normalize it; raises ValueError."""
    if len(_checked(where, name)) > LONGEST_NAME:
        raise ValueError(f"{where}: the picture's name has more than {LONGEST_NAME:,} characters; shorten it.")
    if not (key := table_key(name)):
        raise ValueError(f"{where}: the picture's name is empty; write one.")
    return key


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
        lines = _texts(where, columns[column])
    tags = ", ".join(_texts(where, columns.get("tags", []), "join"))
    if not tags:
        return lines
    if len(lines) * len(tags) > TEXT_LIMIT:
        raise ValueError(f"{where}: too many tags for so many lines; shorten them, or remove lines.")
    return tuple(f"{line}, {tags}" for line in lines) or (tags,)


def _texts(where: str, value: Any, mode: LineChoice = "draw") -> tuple[str, ...]:
    """Read the lines of a text, or of a list of texts with one line each; raises ValueError."""
    if not isinstance(value, list):
        return caption_lines(_checked(where, value), mode, where)
    lines = (line for text in value for line in caption_lines(_checked(where, text), "join", where))
    return choose_lines(tuple(lines), "draw", where)


def _checked(where: str, value: Any) -> str:
    """Check that a value is valid text, and return it; raises ValueError otherwise."""
    if not isinstance(value, str):
        kind = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}.get(
            type(value), "a number"
        )
        raise ValueError(f"{where}: expected text, found {kind}.")
    if NO_TEXT.search(value):
        raise ValueError(f"{where}: the text contains NUL or half characters (\\u0000, \\ud800); remove them.")
    return value


TableRow = tuple[str, Any, dict[str, Any]]  # position in the file, the picture's name, its columns


def _lines(path: Path, text: TextIO) -> Iterator[str]:
    """Yield the lines of a table with their ends; raises ValueError for too many or too long ones."""
    for number, line in enumerate(iter(lambda: text.readline(LONGEST_ROW + 1), ""), 1):
        if len(line) > LONGEST_ROW:
            raise ValueError(f"{path}, line {number} has more than {LONGEST_ROW:,} characters; shorten it.")
        if number > MOST_ENTRIES:
            raise ValueError(f"{path} has more than {MOST_ENTRIES:,} lines; use several concepts with a table each.")
        yield line


def _json_lines(path: Path, text: TextIO) -> Iterator[TableRow]:
    for number, line in enumerate(_lines(path, text), 1):
        if line.strip():
            position = f"line {number}"
            yield _named_row(f"{path}, {position}", position, _parse_json(f"{path}, {position}", line))


def _json_entries(path: Path, text: TextIO) -> Iterator[TableRow]:
    content = _parse_json(str(path), text.read())
    if isinstance(content, list):
        for number, row in enumerate(content, 1):
            yield _named_row(f"{path}, entry {number}", f"entry {number}", row)
    elif isinstance(content, dict):
        for number, (name, value) in enumerate(content.items(), 1):
            yield f"entry {number}", name, _lower_keys(value) if isinstance(value, dict) else {"text": value}
    else:
        raise ValueError(f"{path} must hold an object of picture names and captions, or a list of rows.")


def _named_row(where: str, position: str, row: Any) -> TableRow:
    if not isinstance(row, dict):
        raise ValueError(f'{where}: expected an object, as {{"file_name": "a.png", "text": "a cat"}}.')
    columns = _lower_keys(row)
    column = next((name for name in FILE_COLUMNS if name in columns), None)
    if column is None:
        raise ValueError(f"{where}: no picture name; add one of {', '.join(FILE_COLUMNS)}.")
    return position, columns[column], columns


def _lower_keys(row: dict[str, Any]) -> dict[str, Any]:
    return {key.strip().lower(): value for key, value in row.items()}


def _parse_json(where: str, text: str) -> Any:
    _check_structure(where, text)
    try:
        # Numbers become floats: an integer of a million digits would take minutes to read.
        return json.loads(text, object_pairs_hook=functools.partial(_unique_keys, where), parse_int=float)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(
            f"{where} is not JSON from {at}column {error.colno} on; look there for a missing quote, comma or bracket."
        ) from error


def _check_structure(where: str, text: str) -> None:
    """Raise ValueError for JSON that is nested too deeply, or has more values than memory should be spent on."""
    if text.count("[") + text.count("{") <= MOST_DEPTH and len(text) <= MOST_VALUES:
        return
    plain = text.encode("ascii", "replace").replace(b"\\\\", b"").replace(b'\\"', b"")
    depth, values, quoted = 0, 1, False
    for at in range(0, len(plain), LONGEST_ROW):
        marks = np.frombuffer(plain[at : at + LONGEST_ROW], np.uint8)
        inside = np.logical_xor.accumulate(marks == ord('"')) ^ quoted
        opening = ((marks == ord("[")) | (marks == ord("{"))) & ~inside
        closing = ((marks == ord("]")) | (marks == ord("}"))) & ~inside
        depths = depth + np.cumsum(opening.astype(np.int64) - closing)
        values += int(np.count_nonzero(opening | ((marks == ord(",")) & ~inside)))
        if depths.max() > MOST_DEPTH:
            raise ValueError(f"{where} is nested too deeply for a caption table; write names and captions only.")
        if values > MOST_VALUES:
            raise ValueError(f"{where} has more than {MOST_VALUES:,} values; write the table as .jsonl.")
        depth, quoted = int(depths[-1]), bool(inside[-1])


def _unique_keys(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, (key, value) in enumerate(pairs, 1):
        if key in row and row[key] != value:
            raise ValueError(
                f"{where}: key {number} of an object repeats an earlier one with another value; remove one of them."
            )
        row[key] = value
    return row


def _csv_rows(path: Path, text: TextIO) -> Iterator[TableRow]:
    """Yield the rows of a table with a header, or with two columns: picture, caption."""
    lines = _lines(path, text)
    head: list[str] = []  # to the first line that is not empty
    while not (head and head[-1].strip()) and (line := next(lines, "")):
        head.append(line)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter("".join(head[-1:]))
    header: list[str] | None = None
    for begin, cells in _csv_cells(path, itertools.chain(head, lines), delimiter):
        position = f"line {begin}"
        if not any(cell.strip() for cell in cells) or (header is None and cells[0].lower() == "sep="):
            continue  # an empty row, or Excel's line for the delimiter
        if header is None:
            header, is_header = _header(f"{path}, {position}", cells)
            if is_header:
                continue
        if len(cells) != len(header):
            raise ValueError(
                f"{path}, {position}: {len(cells)} columns instead of {len(header)}; put captions with "
                f"{delimiter!r} in double quotes."
            )
        yield _named_row(f"{path}, {position}", position, dict(zip(header, cells, strict=True)))


def _csv_cells(path: Path, lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line where each row begins, and its cells; raises ValueError for a row that does not end in time."""
    size = 0  # characters of the row so far; within quotes it may have many lines

    def counted() -> Iterator[str]:
        nonlocal size
        for line in lines:
            size += len(line)
            if size > LONGEST_ROW:  # other code in the process may have lifted the module's own limit
                raise csv.Error
            yield line

    begin = 1
    rows = csv.reader(counted(), delimiter=delimiter, strict=True, skipinitialspace=True)
    try:
        for cells in rows:
            yield begin, cells
            begin, size = rows.line_num + 1, 0
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {begin}: the row does not end; look for an unclosed quote, or for a cell of more than "
            f"{LONGEST_LINE:,} characters."
        ) from error


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
            f"{where}: no known column names; write a header with {FILE_COLUMNS[0]} and {TEXT_COLUMNS[0]}, or just "
            "these two columns without a header."
        )
    return [FILE_COLUMNS[0], TEXT_COLUMNS[0]], False


def _delimiter(line: str) -> str:
    """Find the delimiter: the first comma, semicolon or tab after the first cell, which may be quoted."""
    line = line.lstrip()
    if line.startswith('"'):
        _, closed, rest = line[1:].replace('""', "").partition('"')
        line = rest if closed else line
    return next((char for char in line if char in ",;\t"), ",")
