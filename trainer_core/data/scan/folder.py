"""List the files of a folder with size and times, in natural order (2.png before 10.png)."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...common.access import ANYWHERE, Access, real_path
from ...common.cancel import look
from ...common.disk_errors import reason

ELSEWHERE = "a link to a place that may not be read"  # why a file is ignored
UNOPENED = "a folder that cannot be opened"
MOST_FOLDER_REPEATS = 1000  # 2023_summer is a year, not a number of repeats
_SYSTEM_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin"))


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One listed file; size and times identify the version of its content."""

    path: Path
    name: str  # relative to the folder that was listed, posix
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int
    ignored: str = ""  # the reason why a scan skips it; "" for all others

    @property
    def extension(self) -> str:
        """The lower-case extension with its dot, or ""."""
        return os.path.splitext(self.name)[1].lower()

    @property
    def stem(self) -> str:
        """The relative name without its extension."""
        return os.path.splitext(self.name)[0]


def file_at(path: Path) -> File:
    """Describe one file, whose name is its path; raises OSError for one that is missing."""
    status = path.stat()
    return File(
        path=path, name=str(path), size=status.st_size, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns
    )


def resolve_folder(folder: str) -> Path:
    """Resolve a folder as users write it to an absolute path; quotes and blanks around it are ignored."""
    return real_path(os.path.expanduser(folder.strip().strip('"').strip("'")))


def list_files(folder: Path, recursive: bool, access: Access = ANYWHERE) -> list[File]:
    """List all files in natural order, [] if the folder is missing; raises OSError if it cannot be listed.

    Hidden and system folders are skipped; each real folder is listed once, so that links cannot loop. A link to a place
    outside `access` is listed as ignored, and nothing there is touched.
    """
    return sorted(_walk(folder, "", recursive, set(), access), key=lambda file: natural_order(file.name))


def list_apart(place: Path, what: str, setting: str, access: Access) -> list[File]:
    """List the files of a folder beside the pictures', with its sub-folders; ValueError for one that cannot be read.

    what, setting: name the folder, and the input and node that name it, in the message.
    """
    if not access.allows(place):
        raise ValueError(refused(place, setting))
    if not os.path.isdir(place):  # Path.is_dir raises OSError for a name that is too long
        raise ValueError(f"The {what} {place} does not exist; check {setting}.")
    try:
        return [file for file in list_files(place, True, access) if not file.ignored]
    except OSError as error:
        raise ValueError(unlisted(error)) from error


def _walk(folder: Path, prefix: str, recursive: bool, visited: set[str], access: Access) -> Iterator[File]:
    real = os.path.realpath(folder)
    if real in visited or not os.path.isdir(folder):  # Path.is_dir raises OSError for a name that is too long
        return
    visited.add(real)
    with os.scandir(folder) as entries:  # in order, as of two links to a folder the first one is listed
        ordered = sorted(entries, key=lambda entry: natural_order(entry.name)) if recursive else list(entries)
    for entry in ordered:
        look()
        ignored = "hidden or a system file" if is_hidden(entry.name) else ""
        elsewhere = _is_link(entry) and not access.allows(entry.path)
        if not elsewhere and _is_folder(entry):
            if not recursive or ignored:
                continue
            if os.path.isdir(entry.path):
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", recursive, visited, access)
                continue
            ignored = UNOPENED
        try:
            status = entry.stat(follow_symlinks=not elsewhere)
        except FileNotFoundError:  # it vanished, or it is a broken link, which is reported when it is read
            if not entry.is_symlink():
                continue
            status = entry.stat(follow_symlinks=False)
        except OSError:  # a link to itself
            status = entry.stat(follow_symlinks=False)
        if not ignored and not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            ignored = "a broken link, pipe, socket or device"  # reading it might never end
        if elsewhere and not ignored:
            ignored = ELSEWHERE
        yield File(
            path=Path(entry.path),
            name=prefix + entry.name,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            ignored=ignored,
        )


def _is_link(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a link, or on Windows a junction."""
    if entry.is_symlink():
        return True
    return os.name == "nt" and bool(entry.stat(follow_symlinks=False).st_reparse_tag)  # type: ignore[attr-defined]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_hidden(name: str) -> bool:
    """Tell by its name whether a file or folder is hidden or of the system."""
    return name.startswith(".") or name.lower() in _SYSTEM_NAMES


def natural_order(name: str) -> tuple[tuple[object, ...], str]:
    """Compute a sort key that puts 2.png before 10.png, in any case."""
    parts = re.split(r"(\d+)", name.casefold())
    return (*parts[:1], *(each for i in range(1, len(parts), 2) for each in (_value(parts[i]), parts[i + 1]))), name


def _value(digits: str) -> tuple[int, str]:
    """Compute a key that sorts decimal digits of any script by value; an int of very many digits is an error."""
    plain = digits if digits.isascii() else "".join(str(unicodedata.decimal(digit)) for digit in digits)
    plain = plain.lstrip("0")
    return len(plain), plain


def folder_repeats(name: str) -> int:
    """Read the repeats from the first folder of a relative name: 10 for 10_cat/a.png, else 1."""
    folder, slash, _ = name.partition("/")
    return numbered(folder)[0] if slash else 1


def numbered(folder: str) -> tuple[int, str]:
    """Split a folder's name into repeats and the rest: (10, "cat") for 10_cat, (1, "cat") for cat."""
    number, bar, rest = folder.partition("_")
    repeats = int(number) if bar and number.isdecimal() and len(number) < 100 else 0
    return (repeats, rest) if 1 <= repeats <= MOST_FOLDER_REPEATS else (1, folder)


def same_name(name: str) -> str:
    """Normalize a name for comparison: lower case, composed accents (macOS decomposes them)."""
    return unicodedata.normalize("NFC", name).lower()


def unlisted(error: OSError) -> str:
    """Say in a sentence which folder cannot be listed, and why."""
    return f"The folder {error.filename} cannot be listed ({reason(error)}); check its path and permissions."


def refused(place: Path, setting: str) -> str:
    """Say in a sentence that a file or folder may not be read; setting: the input and node that name it."""
    return f"{place} lies outside the folders that may be read; set {setting} to a place inside them."
