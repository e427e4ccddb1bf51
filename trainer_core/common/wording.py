"""Format lists, counts and file names for messages, and sentences that a page can say in other languages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sized
from typing import Any

OUT_OF_RAM = (
    "Out of memory: no more RAM is free for this process. Close other programs, or lower the resolution and the batch "
    "size; what is saved is kept."
)
# What torch and Python raise as a RuntimeError where the system gives no more.
_OUT_OF_RAM = ("can't allocate memory", "can't start new thread")
_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:e[+-]?[0-9]+)?")
# Control characters, those that turn the direction of what follows, and halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# An absolute path, of any system. In quotes it goes on to the next one; elsewhere a folder may have three blanks.
_NAME = r"[^\s\\/:*?\"'<>|,;]+"
_PATH = re.compile(
    rf"""(?<=(['"]))(?:[A-Za-z]:)?[\\/](?:(?!\1).)+(?=\1)"""
    rf"""|(?:\\\\[?.]\\)?(?:\b[A-Za-z]:|~|(?<![\w).]))(?:[\\/]+{_NAME}(?:(?:\ {_NAME}){{1,3}}(?=[\\/]))?){{2,}}[\\/]?"""
    r"""|\b[A-Za-z]:[\\/][^\s"']*|\\\\[^\s"']+"""
)
_PROGRAM = re.compile(r"[^\\/]+\.(?:dll|py|pyd|so)\b[\d.]*$")


class Said(str):
    """An English text that knows the template and the values it was made of."""

    key = ""
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        return self  # str() of it, and of an exception that carries it, keeps the template


def is_out_of_ram(error: BaseException) -> bool:
    """Tell whether an error says that the process gets no more RAM."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_RAM)


def say(key: str, *values: object) -> Said:
    """Fill a template, whose values stand at {0}, {1} …; other languages know it by this text."""
    said = Said(key.format(*values))
    said.key, said.values = key, values
    return said


def for_page(value: Any) -> Any:
    """Write plain values for a page: each text of `say` becomes {text, key, values}."""
    if isinstance(value, Said):
        return {"text": f"{value}", "key": value.key, "values": [for_page(each) for each in value.values]}
    if isinstance(value, Mapping):
        return {name: for_page(each) for name, each in value.items()}
    return [for_page(each) for each in value] if isinstance(value, list | tuple) else value


def printable(text: str) -> str:
    r"""Escape line feeds, control characters, turns of direction and undecodable bytes as \n, \udcff.

    What is left is a line that can be shown anywhere.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_said(text: str) -> str:
    """Escape a text as `printable` does; one of `say` keeps its template, and its values are escaped."""
    escaped = Said(printable(text))
    if isinstance(text, Said):
        escaped.key = text.key
        escaped.values = tuple(printable_said(each) if isinstance(each, str) else each for each in text.values)
    return escaped if escaped.key else printable(text)


def without_paths(text: str) -> str:
    """Leave out of a sentence whatever looks like a path of somebody's machine, but for a program's file."""
    return _PATH.sub(lambda match: found[0] if (found := _PROGRAM.search(match[0])) else "(a path)", text)


def table_cell(value: object) -> object:
    """Give a value for a table as CSV; a text that a spreadsheet would compute begins with an apostrophe."""
    if not isinstance(value, str) or not value.startswith(_COMPUTED) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def names(items: Iterable[str], most: int = 5) -> str:
    """Join up to `most` names with commas, long ones shortened in the middle, and count the others."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return printable(", ".join(n if len(n) <= 80 else f"{n[:50]}...{n[-25:]}" for n in items[:most])) + more


def them(what: Sized) -> str:
    """Write the pronoun for so many things."""
    return "it" if len(what) == 1 else "them"


def count(items: Sized | float, one: str, many: str = "") -> str:
    """Write a number with its noun: "1 picture has", "2 pictures have"; many: by default `one` with an s."""
    text = short(items if isinstance(items, int | float) else len(items))
    return f"{text} {one if text == '1' else many or one + 's'}"


def short(number: float) -> str:
    """Write a number with two digits after the point at most."""
    return str(number) if isinstance(number, int) else f"{number:.2f}".rstrip("0").rstrip(".")


def bytes_of(size: float) -> str:
    """Format a size in bytes for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def speed(seconds: float) -> str:
    """Write a step's duration: 11.3 it/s, or 2.50 s/it when it takes longer than a second."""
    return f"{1 / seconds:.1f} it/s" if 0 < seconds < 1 else f"{seconds:.2f} s/it"


def clock(seconds: float) -> str:
    """Write a duration as 0:25, 12:05 or 3:00:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
