"""What Windows refuses where other systems do not: files that are open or read-only, and long paths."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil  # elsewhere where it is used, so that doctor can list it where it is missing

WINDOWS = os.name == "nt"
IN_USE = (5, 32, 33, 1224)  # its numbers: access denied (also to what is open or read-only), in use, locked, mapped
DENIED = 5
LONGEST_PATH = 259  # characters, unless its registry allows more
PATIENCE, PAUSE = 2.0, 0.05  # seconds
SEARCH = 3.0  # seconds in which the program that has a file open is found, or not


def patiently(do: Callable[[], object], path: Path) -> None:
    """Delete or replace what is at a path by `do`; while Windows refuses it, make that writable and try again.

    A virus scanner or an indexer may have it open for a moment: it is tried for PATIENCE seconds.
    """
    last = time.monotonic() + PATIENCE
    while True:
        try:
            do()
            return
        except PermissionError as error:
            if getattr(error, "winerror", None) not in IN_USE or time.monotonic() > last:
                raise
        _make_writable(path)
        time.sleep(PAUSE)


def _make_writable(path: Path) -> None:
    """Take the read-only attribute from a file or folder and all in it: Windows neither deletes nor replaces those."""
    inside = (Path(folder, name) for folder, *names in os.walk(path) for name in (*names[0], *names[1]))
    for each in (path, *inside):
        with suppress(OSError):  # gone, or of somebody else
            mode = each.lstat().st_mode
            if not stat.S_ISLNK(mode) and not mode & stat.S_IWRITE:
                each.chmod(stat.S_IMODE(mode) | stat.S_IWRITE)


def who_holds(error: BaseException) -> str:
    """Say which program has a file of an error open, as far as the system tells, and what to do; "" if none may."""
    number = getattr(error, "winerror", None)
    if number not in IN_USE:
        return ""
    import psutil

    program = _holder([each for name in ("filename", "filename2") if (each := getattr(error, name, None))])
    if program is not None and program.pid == os.getpid():
        return "This program itself has a file there open; end it and start it again"
    if program is not None:
        with suppress(psutil.Error):
            return f"{program.name()} (process {program.pid}) has a file there open; close it"
    if number == DENIED:
        return "Close the program that has a file there open, or give yourself access to the folder"
    return "Another program has a file there open; close it"


def _holder(names: Iterable[str | bytes | os.PathLike[str]]) -> psutil.Process | None:
    """Find a process that has one of some files, or one in some folders, open or mapped; this one is asked first."""
    import psutil

    paths = tuple(os.path.normcase(os.path.abspath(os.fsdecode(name))) for name in names)
    last = time.monotonic() + SEARCH
    for process in (psutil.Process(), *psutil.process_iter()):
        if time.monotonic() > last:
            break
        with suppress(psutil.Error, OSError):  # ended, or of somebody else
            for each in (*process.open_files(), *process.memory_maps()):
                used = os.path.normcase(each.path)
                if any(used == path or used.startswith(path + os.sep) for path in paths):
                    return process
    return None


def too_long(error: BaseException) -> int:
    """Count the characters of the path of an error, if Windows may not take it for its length; else 0."""
    path = getattr(error, "filename", None)
    if not WINDOWS or not isinstance(error, FileNotFoundError) or not isinstance(path, (str, bytes, os.PathLike)):
        return 0
    length = len(os.path.abspath(os.fsdecode(path)))
    return length if length > LONGEST_PATH else 0
