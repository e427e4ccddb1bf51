"""List a folder of pictures: every file with its size and times, in the order people expect."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path

_SYSTEM_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"))


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file as the folder lists it. Size and times name the version of its content."""

    path: Path
    name: str  # relative to the folder that was listed, posix
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int
    hidden: bool = False  # .DS_Store, ._x, Thumbs.db ...: belongs to the system

    @property
    def extension(self) -> str:
        """Return the lower-case ending with its dot, or ""."""
        return os.path.splitext(self.name)[1].lower()

    @property
    def stem(self) -> str:
        """Return the relative name without its ending, lower-case: what picture, caption and mask share."""
        return os.path.splitext(self.name)[0].lower()


def resolve_folder(folder: str) -> Path:
    """Return the absolute folder that a person means; quotes and blanks around a pasted path are understood."""
    return Path(folder.strip().strip('"').strip("'")).expanduser().resolve()


def list_files(folder: Path, recursive: bool) -> list[File]:
    """Return all files in natural order; [] without the folder. OSError for a folder that cannot be listed.

    Hidden folders and those of the system are not entered; each real folder is entered once, so links cannot loop.
    """
    return sorted(_walk(folder, "", recursive, set()), key=lambda file: natural_order(file.name))


def _walk(folder: Path, prefix: str, recursive: bool, visited: set[str]) -> Iterator[File]:
    real = os.path.realpath(folder)
    if real in visited or not folder.is_dir():
        return
    visited.add(real)
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: natural_order(entry.name))
    for entry in ordered:
        hidden = is_hidden(entry.name)
        if _is_folder(entry):
            if recursive and not hidden:
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
        yield File(
            path=Path(entry.path),
            name=prefix + entry.name,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            hidden=hidden,
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


def names(items: Iterable[str], most: int = 5) -> str:
    """Join up to `most` names, long ones shortened in the middle, and count the others."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(n if len(n) <= 80 else f"{n[:50]}...{n[-25:]}" for n in items[:most]) + more


def count(items: Sized, one: str, many: str) -> str:
    """Return "1 picture has" or "2 pictures have", say."""
    return f"{len(items)} {one if len(items) == 1 else many}"
