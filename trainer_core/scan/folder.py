"""List a folder of pictures: every file with its size and times, in the order people expect."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path

MOST_FOLDER_REPEATS = 1000  # 2023_summer is a year, not a number of repeats
_SYSTEM_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"))
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file as the folder lists it. Size and times name the version of its content."""

    path: Path
    name: str  # relative to the folder that was listed, posix
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int
    ignored: str = ""  # why a scan does not look into it; "" for all others

    @property
    def extension(self) -> str:
        """Return the lower-case ending with its dot, or ""."""
        return os.path.splitext(self.name)[1].lower()

    @property
    def stem(self) -> str:
        """Return the relative name without its ending."""
        return os.path.splitext(self.name)[0]


def resolve_folder(folder: str) -> Path:
    """Return the absolute folder that a person means; quotes and blanks around a pasted path are understood."""
    # os.path: Path raises RuntimeError for a link to itself and for the home of nobody
    return Path(os.path.realpath(os.path.expanduser(folder.strip().strip('"').strip("'"))))


def list_files(folder: Path, recursive: bool) -> list[File]:
    """Return all files in natural order; [] without the folder. OSError for a folder that cannot be listed.

    Hidden folders and those of the system are not entered; each real folder is entered once, so links cannot loop.
    """
    return sorted(_walk(folder, "", recursive, set()), key=lambda file: natural_order(file.name))


def _walk(folder: Path, prefix: str, recursive: bool, visited: set[str]) -> Iterator[File]:
    real = os.path.realpath(folder)
    if real in visited or not os.path.isdir(folder):  # Path.is_dir raises OSError for a name that is too long
        return
    visited.add(real)
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: natural_order(entry.name))
    for entry in ordered:
        ignored = "hidden, or of the system" if is_hidden(entry.name) else ""
        if _is_folder(entry):
            if recursive and not ignored:
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", recursive, visited)
            continue
        try:
            status = entry.stat()
        except FileNotFoundError:  # it vanished just now, or it is a link to nowhere, which is named when it is read
            if not entry.is_symlink():
                continue
            status = entry.stat(follow_symlinks=False)
        except OSError:  # a link to itself
            status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            ignored = "no file but a pipe, socket or device"  # reading it could take for ever
        yield File(
            path=Path(entry.path),
            name=prefix + entry.name,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            ignored=ignored,
        )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder belongs to the system by its name."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def natural_order(name: str) -> tuple[tuple[object, ...], str]:
    """Return a sort key that puts 2.png before 10.png, whatever the case of the letters."""
    parts = re.split(r"(\d+)", name.casefold())
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), name


def folder_repeats(name: str) -> int:
    """Return the repeats that the first folder of a relative name states: 10 for 10_cat/a.png, else 1."""
    folder, slash, _ = name.partition("/")
    return numbered(folder)[0] if slash else 1


def numbered(folder: str) -> tuple[int, str]:
    """Return the repeats that a folder's name states and the rest of it: (10, "cat") for 10_cat, (1, "cat") for cat."""
    number, bar, rest = folder.partition("_")
    repeats = int(number) if bar and number.isdecimal() else 0
    return (repeats, rest) if 1 <= repeats <= MOST_FOLDER_REPEATS else (1, folder)


def same_name(name: str) -> str:
    """Return a name as files are matched: any case, accents composed, as macOS takes them apart."""
    return unicodedata.normalize("NFC", name).lower()


def printable(text: str) -> str:
    r"""Write line feeds, control characters and bytes that are no text as \n and \udcff: a line that all can show."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def unlisted(error: OSError) -> str:
    """Say which folder cannot be listed, and why."""
    return f"The folder {error.filename} cannot be listed ({error.strerror}); check where it lies and its permissions."


def names(items: Iterable[str], most: int = 5) -> str:
    """Join up to `most` names, long ones shortened in the middle, and count the others."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return printable(", ".join(n if len(n) <= 80 else f"{n[:50]}...{n[-25:]}" for n in items[:most])) + more


def count(items: Sized, one: str, many: str) -> str:
    """Return "1 picture has" or "2 pictures have", say."""
    return f"{len(items)} {one if len(items) == 1 else many}"
