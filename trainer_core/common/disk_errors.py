"""Describe errors of the disk to people: which folder, how much room there is and is needed, what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from .leftovers import TEMPORARY
from .wording import bytes_of

FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Delete files of yours on this disk, or ask for a larger share of it",
    errno.EROFS: "Make this disk writable, or choose another folder",
    errno.EACCES: "Give yourself access to the folder, or choose another one",
    errno.EPERM: "Give yourself access to the folder, or choose another one",
}
IN_USE = (5, 32, 33, 1224)  # Windows' numbers: access denied (also to what is open), in use, locked, mapped
HELD = "Another program has a file there open; close it"
OTHERWISE = "Check that the disk answers and has room"
_NUMBER = re.compile(r"\(os error (\d+)\)")  # as safetensors reports it


def describe_disk_error(error: BaseException, folder: Path | None = None, needed: int = 0, then: str = "") -> str:
    """Describe in two sentences what failed and what to do.

    folder: by default that of the error's file. needed: bytes that had to be written, 0 if unknown. then: what to do
    after the remedy, as the end of a sentence.
    """
    folder = folder or _folder_of(error)
    found = _NUMBER.search(str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    where = f"{folder or 'A file'} cannot be {'written' if number in REMEDIES else 'read or written'}"
    room = _room(folder, needed) if folder and number in FULL else ""
    why = os.strerror(number) if found and number else reason(error)
    held = getattr(error, "winerror", None) in IN_USE
    return f"{where} ({why}){room}. {HELD if held else REMEDIES.get(number or 0, OTHERWISE)}{then}."


def reason(error: BaseException) -> str:
    """Extract the short reason from a disk error, without path and number."""
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0]


def _folder_of(error: BaseException) -> Path | None:
    """Find the folder of the file that an error names; an unfinished folder stands for the one it is in."""
    name = getattr(error, "filename", None)
    if not isinstance(name, (str, bytes, os.PathLike)):
        return None
    return next((p for p in Path(os.fsdecode(name)).parents if not p.name.endswith(TEMPORARY)), None)


def _room(folder: Path, needed: int) -> str:
    wanted = f", about {bytes_of(needed)} are needed" if needed else ""
    try:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    except OSError:  # the disk is away
        return wanted and f": {wanted.removeprefix(', ')}"
    return f": {bytes_of(free)} are free{wanted}"
