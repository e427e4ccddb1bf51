"""Describe errors of the disk to people: which folder, how much room there is and is needed, what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from .leftovers import TEMPORARY
from .windows import LONGEST_PATH, WINDOWS, too_long, who_holds
from .wording import bytes_of, say

FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Delete files of yours on this disk, or ask for a larger share of it",
    errno.EROFS: "Make this disk writable, or choose another folder",
    errno.EACCES: "Give yourself access to the folder, or choose another one",
    errno.EPERM: "Give yourself access to the folder, or choose another one",
}
SHORTEN = "Choose a shorter name or folder, or turn on long paths in Windows"
OTHERWISE = "Check that the disk answers and has room"
_NUMBER = re.compile(r"([^:]*?)\.? \(os error (\d+)\)")  # as safetensors reports it


def describe_disk_error(error: BaseException, folder: Path | None = None, needed: int = 0, then: str = "") -> str:
    """Describe in two sentences what failed and what to do.

    folder: by default that of the error's file. needed: bytes that had to be written, 0 if unknown. then: what to do
    after the remedy, as the end of a sentence.
    """
    folder = folder or _folder_of(error)
    error = _of_the_system(error)
    number = getattr(error, "errno", None)
    where = f"{folder or 'A file'} cannot be {'written' if number in REMEDIES else 'read or written'}"
    room = _room(folder, needed) if folder and number in FULL else ""
    remedy = who_holds(error) or (SHORTEN if too_long(error) else REMEDIES.get(number or 0, OTHERWISE))
    return f"{where} ({reason(error)}){room}. {remedy}{then}."


def reason(error: BaseException) -> str:
    """Extract the short reason from a disk error, without path and number."""
    if length := too_long(error):
        return f"a path of {length} characters, where Windows takes {LONGEST_PATH}"
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0]


def describe_refusal(error: BaseException) -> str:
    """Say in a sentence without a path that the disk refused something, why, and which program stands in the way."""
    return say("The disk refused it: {0}.", why(error))


def why(error: BaseException) -> str:
    """Say why the disk refused something, and which program stands in the way, without path and full stop."""
    return ". ".join(filter(None, (reason(error), who_holds(error))))


def _of_the_system(error: BaseException) -> BaseException:
    """Take the system's error out of one of safetensors; others stay as they are."""
    if (found := _NUMBER.search(str(error))) is None:
        return error
    number, text = int(found[2]), found[1].strip()
    return OSError(0, text, None, number) if WINDOWS else OSError(number, text)


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
