"""Read caption files and caption tables; what cannot be read without a guess is an error that names the remedy."""

from __future__ import annotations

import codecs
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
from typing import Any, Literal

TEXT_LIMIT = 2**20  # bytes of a caption file; a larger one is something else
TABLE_LIMIT = 2**28
TABLE_NAMES = (  # looked for in this order: Hugging Face, plain, then sd-scripts' from its last step to its first
    *("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.json"),
    *("captions.jsonl", "captions.json", "captions.csv", "captions.tsv"),
    *("meta_lat.json", "meta_clean.json", "meta_cap_dd.json", "meta_cap.json"),
)
FILE_COLUMNS = ("file_name", "file", "image", "filename", "path")  # the first that is there
TEXT_COLUMNS = ("text", "caption", "prompt")  # the first that is there; `tags` are put after it
_BOMS = (  # the long ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# What a text that is not UTF-8 may be: codec -> the scripts its languages use.
_CODECS = {
    "cp1252": {"LATIN"},
    "cp1250": {"LATIN"},
    "cp1251": {"CYRILLIC"},
    "shift_jis": {"HIRAGANA", "KATAKANA", "CJK", "IDEOGRAPHIC"},
    "euc_kr": {"HANGUL"},
    "gb18030": {"CJK"},
    "big5": {"CJK"},
    "euc_jp": {"HIRAGANA", "KATAKANA", "CJK", "IDEOGRAPHIC"},
}
_FREQUENT = {  # where the frequent characters of each standard lie: the codec that has just these, first bytes
    "shift_jis": ("shift_jis", 0x88, 0x97),
    "gb18030": ("gb2312", 0xB0, 0xD7),
    "big5": ("big5", 0xA4, 0xC6),
    "euc_jp": ("euc_jp", 0xB0, 0xCF),
}
_SIGNS = frozenset("“”‘’„‚‹›«»–—…•·¿¡°€£©®™§½¼¾×、。，．！？：；（）「」『』【】〜～・％")
_LINE_END = re.compile(r"\r\n|\r|\n")  # not U+2028 and form feeds, which stand inside captions


@dataclass(frozen=True, slots=True)
class TableMatch:
    """What a caption table says about some pictures."""

    captions: dict[str, tuple[str, ...]]  # picture name -> lines
    missing: tuple[str, ...]  # pictures without an entry
    unmatched: tuple[str, ...]  # entries without a picture
    by_file_name: tuple[str, ...]  # pictures whose entry names another folder, found by the bare file name


# --- text files ----------------------------------------------------------------------------------------------


def read_text(path: Path, encoding: str = "auto") -> str:
    """Read a caption file; raises ValueError naming the file, OSError if it cannot be opened.

    A byte order mark decides. Without one, "auto" reads UTF-8, and UTF-16 where every other byte shows it; anything
    else is not guessed but refused, with the encoding in which it would read well. Another encoding is followed
    strictly, and UTF-8 text is refused under it, since it would come out garbled without an error.
    """
    return _decode(path, _read_bytes(path, TEXT_LIMIT, "caption file"), encoding)


def caption_lines(text: str, mode: Literal["draw", "first", "join"] = "draw") -> tuple[str, ...]:
    """Return the lines that are not empty, stripped: all of them, the first one, or one joined by blanks."""
    lines = tuple(line for part in _LINE_END.split(text) if (line := part.strip()))
    if mode == "first":
        return lines[:1]
    return (" ".join(lines),) if mode == "join" and lines else lines


def _read_bytes(path: Path, limit: int, kind: str) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        size = path.stat().st_size / 2**20
        raise ValueError(
            f"{path} has {size:.1f} MiB, and a {kind} at most {limit / 2**20:g}; shorten it or take it away."
        )
    return data


def _decode(path: Path, data: bytes, encoding: str) -> str:
    marked = next((name for bom, name in _BOMS if data.startswith(bom)), None)
    if marked:
        text = _decode_marked(path, data, marked)
    elif encoding == "auto":
        text = _decode_unmarked(path, data)
    else:
        text = _decode_as(path, data, encoding)
    if "\0" in text:
        raise ValueError(f"{path} holds NUL characters, as files that are no text do; save it as UTF-8 without them.")
    return text.lstrip("\ufeff")


def _decode_marked(path: Path, data: bytes, codec: str) -> str:
    try:
        return data.decode(codec)
    except UnicodeDecodeError as error:
        name = codec.removesuffix("-sig")
        raise ValueError(
            f"{path} begins with the mark of {name} and goes on otherwise ({error.reason}); save it as UTF-8."
        ) from error


def _decode_as(path: Path, data: bytes, encoding: str) -> str:
    """Decode by the encoding that was asked for, or raise ValueError."""
    try:
        text = data.decode(encoding)
    except (LookupError, ValueError) as error:  # LookupError: a codec that is not of text, as rot13
        raise ValueError(f"{path} cannot be read as {encoding} ({error}); {_remedy(data)}.") from error
    if not data.isascii() and not encoding.lower().startswith("utf") and _is_utf8(data):
        raise ValueError(
            f"{path} is UTF-8 text and caption_encoding is {encoding}; set it to auto, and save captions that are "
            f"{encoding} as UTF-8."
        )
    return text


def _decode_unmarked(path: Path, data: bytes) -> str:
    """Read UTF-8 or UTF-16 without a mark, or raise ValueError with a proposal."""
    # NUL and escape characters are in no UTF-8 caption: they show UTF-16 or 32, and ISO-2022.
    if b"\0" not in data and b"\x1b" not in data and _is_utf8(data):
        return data.decode("utf-8")
    if (text := _decode_utf16(data)) is not None:
        return text
    raise ValueError(f"{path} is not UTF-8 text; {_remedy(data)}.")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode_utf16(data: bytes) -> str | None:
    """Decode UTF-16 without a mark if it can be nothing else: Latin text, so that every other byte is mostly zero."""
    zeros = data[0::2].count(0), data[1::2].count(0)
    if len(data) % 2 or min(zeros) or 4 * max(zeros) < len(data):
        return None
    return _decode_clean(data, "utf-16-le" if zeros[1] else "utf-16-be")


def _decode_clean(data: bytes, codec: str) -> str | None:
    """Decode strictly; None also if control, private or unassigned characters come out."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError:
        return None
    odd = (unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") for char in set(text) - set("\t\n\v\f\r"))
    return None if any(odd) else text


def _remedy(data: bytes) -> str:
    """Say as what a text would read, the two best if none is clearly better, and what to do."""
    codecs_here: tuple[str, ...] = tuple(_CODECS)
    if b"\0" in data:
        little = data[1::2].count(0) > data[0::2].count(0)  # blanks and other ASCII tell the order of bytes
        codecs_here = ("utf-32-le", "utf-32-be", "utf-16-le" if little else "utf-16-be")
    elif b"\x1b" in data:
        codecs_here = ("iso2022_jp", "iso2022_kr")
    elif _is_utf8(data):
        return "it is UTF-8 text: set caption_encoding to auto"
    found: dict[str, tuple[float, str]] = {}  # text -> how well it reads, and by which codec first
    for codec in codecs_here:
        if (text := _decode_clean(data, codec)) is not None:
            found.setdefault(text, (_plausibility(text, codec), codec))
    best = max((score for score, _ in found.values()), default=0.0)
    if best <= 0.5:
        return "in no other encoding does it read well; save it as UTF-8"
    ranked = sorted(found.items(), key=lambda item: -item[1][0])  # of equals the first
    close = [(codec, text) for text, (score, codec) in ranked if score > best - 0.05][:2]
    readings = " and ".join(f'as {codec} it would read "{_excerpt(text)}"' for codec, text in close)
    return f"{readings}; set caption_encoding to {' or '.join(codec for codec, _ in close)}, or save it as UTF-8"


def _excerpt(text: str) -> str:
    """Return a few words around the first character that is not ASCII."""
    first = _beyond_ascii(text)
    start = max(text.rfind(" ", 0, max(first - 12, 0)) + 1, first - 24, 0)
    words = " ".join(text[start : start + 60].split())
    return words + (" ..." if len(text) > start + 60 else "")


def _beyond_ascii(text: str) -> int:
    """Return the place of the first character that is not ASCII, 0 if there is none."""
    found = re.search(r"[^\x00-\x7f]", text)
    return found.start() if found else 0


def _plausibility(text: str, codec: str) -> float:
    """Return which share of the characters beyond ASCII stands as the codec's languages write them, 0..1.

    Looked at is a stretch from the first of them on. Codecs that are not in the table are known by other signs.
    """
    if codec not in _CODECS:
        return 1.0
    start = max(_beyond_ascii(text) - 40, 0)
    scores: list[float] = []
    for part in re.findall(r"[^\W\d_]+|[^\x00-\x7f]", text[start : start + 4000]):
        beyond = [char for char in part if not char.isascii()]
        if not part[0].isalpha():
            scores += [0.8 * (char in _SIGNS) for char in beyond]  # signs are a weaker evidence than words
        elif codec in ("cp1252", "cp1250", "cp1251"):
            scores += [float(_is_word(part, codec))] * len(beyond)
        else:  # an ideograph within a Latin word is more likely an accent misread
            weight = 1.0 if len(beyond) == len(part) else 0.4
            scores += [weight * _is_frequent(char, codec) for char in beyond]
    return sum(scores) / len(scores) if scores else 0.0


def _script(char: str) -> str:
    return re.split("[ -]", unicodedata.name(char, ""))[0]


def _is_frequent(char: str, codec: str) -> bool:
    """Tell whether a character is of the codec's language, and of the frequent half if it is an ideograph."""
    script = _script(char)
    if script != "CJK" or codec not in _FREQUENT:
        return script in _CODECS[codec] and not "\u3131" <= char <= "\u318e"  # single Korean letters write no words
    standard, low, high = _FREQUENT[codec]
    return bytes([low]) <= char.encode(standard, "ignore")[:1] <= bytes([high])


def _is_word(word: str, codec: str) -> bool:
    """Tell whether letters look like a word: one script, sensible capitals, Latin accents among plain letters."""
    beyond = [char for char in word if not char.isascii()]
    latin = codec != "cp1251"
    return (
        all(_script(char) in _CODECS[codec] for char in beyond)
        and word in (word.lower(), word.upper(), word[0] + word[1:].lower())
        and (len(word) == 1 or latin == (len(beyond) < len(word)))
        and (not latin or re.search(r"[^\x00-\x7f]{4}", word) is None)
    )


# --- tables --------------------------------------------------------------------------------------------------


def find_table(files: Iterable[str]) -> str | None:
    """Return the caption table among names relative to a folder: the first of TABLE_NAMES, whatever the case."""
    found = {name.lower(): name for name in sorted(files, reverse=True)}
    return next((found[name] for name in TABLE_NAMES if name in found), None)


def read_table(path: Path, encoding: str = "auto") -> dict[str, tuple[str, ...]]:
    """Read picture name -> caption lines from .jsonl, .json, .csv or .tsv; raises ValueError naming file and place.

    Names are lower-case posix paths relative to the table's folder, as far as they lie in it. A text is split into
    lines as a caption file is; of a list of texts each is one line. `tags` are put after the caption, as sd-scripts
    does; a list of them is one line.
    """
    readers = {".jsonl": _json_lines, ".json": _json_entries, ".csv": _csv_rows, ".tsv": _csv_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} is no caption table; it must end with {', '.join(readers)}.")
    folder = table_key(path.parent.absolute().as_posix()).rstrip("/") + "/"
    table: dict[str, tuple[str, ...]] = {}
    for place, name, columns in reader(path, _decode(path, _read_bytes(path, TABLE_LIMIT, "caption table"), encoding)):
        where = f"{path}, {place}"
        key = table_key(_checked(where, name)).removeprefix(folder)
        if not key:
            raise ValueError(f"{where}: the picture's name is empty.")
        lines = _row_lines(where, columns)
        if table.setdefault(key, lines) != lines:
            raise ValueError(f"{where}: {key} has another caption above; leave one of them.")
    if not table:
        raise ValueError(f"{path} holds no captions.")
    return table


def table_captions(table: dict[str, tuple[str, ...]], names: Sequence[str]) -> TableMatch:
    """Match the entries of a table with picture names (posix, relative to the table's folder).

    The full name counts first, then the name without extension, then the bare file name with or without extension
    where only one picture and one entry have it.
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
    """Return a picture's name as tables are compared: posix, lower-case, composed characters, no leading ./ ."""
    return unicodedata.normalize("NFC", name).strip().replace("\\", "/").lower().removeprefix("./")


def _stem(name: str) -> str:
    """Return a posix name without its extension."""
    folder, slash, bare = name.rpartition("/")
    return folder + slash + (bare.rpartition(".")[0] or bare)


def _unique(values: dict[str, str]) -> dict[str, str]:
    """Return value -> key of the values that only one key has."""
    counts = Counter(values.values())
    return {value: key for key, value in values.items() if counts[value] == 1}


def _row_lines(where: str, columns: dict[str, Any]) -> tuple[str, ...]:
    """Return the caption lines of one row; raises ValueError if it has none or they are no text."""
    column = next((name for name in TEXT_COLUMNS if name in columns), None)
    if column is None and "tags" not in columns:
        raise ValueError(f"{where}: there is no {', '.join(TEXT_COLUMNS)} or tags.")
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
    """Return a value if it is text that can be stored; raises ValueError otherwise."""
    if not isinstance(value, str):
        kind = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}.get(
            type(value), "a number"
        )
        raise ValueError(f"{where}: a text is needed and {kind} stands there.")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{where}: the text holds NUL or half characters (\\u0000, \\ud800).")
    return value


Row = tuple[str, Any, dict[str, Any]]  # where it stands, the picture's name, its columns


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(_LINE_END.split(text), 1):
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
        raise ValueError(f'{where}: an object is needed, as {{"file_name": "a.png", "text": "a cat"}}.')
    columns = _lower_keys(row)
    column = next((name for name in FILE_COLUMNS if name in columns), None)
    if column is None:
        raise ValueError(f"{where}: there is no {', '.join(FILE_COLUMNS)}.")
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
        raise ValueError(f"{where} is nested too deeply to be a caption table.") from error


def _unique_keys(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row and row[key] != value:
            raise ValueError(f"{where}: {key!r} stands there twice with different captions; leave one of them.")
        row[key] = value
    return row


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    """Yield the rows of a table with a header, or of two columns: picture, caption."""
    first = _LINE_END.split(text.lstrip(), maxsplit=1)[0]
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(first)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True)
    header: list[str] | None = None
    begin = 1  # line where the next row begins
    try:
        for cells in rows:
            place, begin = f"line {begin}", rows.line_num + 1
            if not any(cell.strip() for cell in cells) or (header is None and cells[0].lower() == "sep="):
                continue  # an empty row, or Excel's note on its delimiter
            if header is None:
                header, is_header = _header(f"{path}, {place}", cells)
                if is_header:
                    continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, {place}: {len(cells)} columns instead of {len(header)}; put captions that hold "
                    f"{delimiter!r} in double quotes."
                )
            yield _named_row(f"{path}, {place}", place, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(f"{path}, line {begin}: {error}; look for a quote that is not closed.") from error


def _header(where: str, cells: list[str]) -> tuple[list[str], bool]:
    """Return the column names of a table by its first row, and whether that row is a header."""
    names = [cell.strip().lower() for cell in cells]
    has_file, has_text = bool({*names} & {*FILE_COLUMNS}), bool({*names} & {*TEXT_COLUMNS, "tags"})
    if has_file and has_text:
        if twice := [name for name in (*FILE_COLUMNS, *TEXT_COLUMNS, "tags") if names.count(name) > 1]:
            raise ValueError(f"{where}: {len(twice)} columns stand twice ({', '.join(twice)}); leave one of each.")
        return names, True
    if has_file or len(cells) != 2:
        raise ValueError(
            f"{where}: the columns are {names}; name the picture's {FILE_COLUMNS[0]} and the caption's "
            f"{TEXT_COLUMNS[0]} in a header, or give these two columns without one."
        )
    return [FILE_COLUMNS[0], TEXT_COLUMNS[0]], False


def _delimiter(line: str) -> str:
    """Return the comma, semicolon or tab that comes first after a first cell that may stand in quotes."""
    found = re.search(r"[,;\t]", re.sub(r'^\s*"(?:[^"]|"")*"', "", line))
    return found.group() if found else ","
