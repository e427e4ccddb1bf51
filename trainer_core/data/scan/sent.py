"""Name files of another computer as they may stand in a folder of pictures, whatever system wrote their names."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections.abc import Container, Iterator, Sequence

from ...config.saves import MOST_BYTES, RESERVED
from ..films import trainable_extensions
from .caption_sources import TEXT_EXTENSIONS
from .caption_tables import TABLES
from .folder import is_hidden

LONGEST_PATH, DEEPEST = 2000, 6  # letters; parts of a path, the file among them
# What no system, or not Windows, has in names, and marks that turn the direction of text.
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]')


def usable_names(paths: Sequence[str]) -> list[str]:
    """Name each file as it may stand in a folder, "" for what no dataset reads; files of one stem keep one.

    Names differ by more than case, as Windows and Macs want it.
    """
    endings = frozenset((*trainable_extensions(), *TEXT_EXTENSIONS, *TABLES))
    wanted = [_parted(path, endings) for path in paths]
    kinds: dict[str, set[str]] = {}  # by stem: the endings of its files
    for stem, ending in filter(None, wanted):
        kinds.setdefault(stem, set()).add(ending)
    given: set[str] = set()  # names in one case
    stems: dict[str, str] = {}  # as they were -> as they may stand
    numbers: dict[str, Iterator[int]] = {}  # that stems of one name have left, without regard to case
    for stem, own in kinds.items():
        plain = "/".join(map(_clean, stem.split("/")))
        left = numbers.setdefault(plain.casefold(), itertools.count(2))
        names = itertools.chain([plain], (f"{plain} {number}" for number in left))
        stems[stem] = next(each for each in names if given.isdisjoint({_folded(each, e) for e in own}))
        given |= {_folded(stems[stem], ending) for ending in own}
    found = [stems[each[0]] + each[1] if each else "" for each in wanted]
    first = {name: number for number, name in reversed([*enumerate(found)])}
    return [name if first[name] == number else "" for number, name in enumerate(found)]


def _parted(path: str, endings: Container[str]) -> tuple[str, str] | None:
    """Split a file's path into stem and lower-case ending; None for a hidden one, and one that no dataset reads."""
    stem, ending = os.path.splitext(unicodedata.normalize("NFC", path[:LONGEST_PATH]).replace("\\", "/"))
    parts = [part for part in stem.split("/") if part not in ("", ".")]
    hidden = any(part == ".." or is_hidden(part) for part in parts)
    if ending.lower() not in endings or hidden or not 0 < len(parts) <= DEEPEST:
        return None
    return "/".join(parts), ending.lower()


def _folded(stem: str, ending: str) -> str:
    return (stem + ending).casefold()


def _clean(part: str) -> str:
    """Replace what a name cannot have; it neither ends with a dot or blank, nor is it a device of Windows."""
    short = _FORBIDDEN.sub("_", part).encode()[:MOST_BYTES].decode(errors="ignore")
    plain = short.rstrip(" .") or "_"
    return f"_{plain}" if RESERVED.fullmatch(plain) else plain
