"""Names of unfinished files and folders that tell their process, so that those of a killed one can be deleted.

Process numbers mean the same within one machine, one boot and one container only; these are part of the names.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .windows import patiently

TEMPORARY = ".tmp"  # ending of the names of unfinished files and folders; they begin with a dot
OLD = 86_400.0  # seconds after which an unfinished file that nobody writes to is left over, whoever began it
CLOCKS = 3.0  # seconds by which a file's time and the start of a process may be wrong
_in_use: set[str] = set()  # names of unfinished files that this process writes now
LONGEST_NAME = 41  # characters
_NAME = re.compile(r"\.([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{16}\.tmp")


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` for an unfinished file or folder, which `sweep` spares for the length of the block.

    It holds the machine, the process and a random number.
    """
    name = f".{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:16]}{TEMPORARY}"
    _in_use.add(name)
    try:
        yield path.with_name(name)
    finally:
        _in_use.discard(name)


def sweep(folders: Iterable[Path]) -> None:
    """Delete what killed processes have left directly in some folders: unfinished files and folders of their names.

    Files of running processes, of other machines and of other programs stay; those of other machines for a day.
    """
    for folder in set(folders):
        with suppress(OSError):  # not to be listed: whoever writes there next says so
            for entry in filter(_is_left_over, leftovers(folder)):
                _try_to_remove(entry)


def remove_leftovers(folder: Path) -> None:
    """Delete all unfinished files and folders in a folder; its lock must be held, so that no process writes there."""
    for entry in leftovers(folder):
        _try_to_remove(entry)


def leftovers(folder: Path) -> list[Path]:
    """List the unfinished files and folders in a folder: in use now, or left by a killed process."""
    return sorted(folder.glob(f".*{TEMPORARY}")) if folder.is_dir() else []


def remove(path: Path) -> None:
    """Delete a file, a folder with its content, or a link itself; on Windows others may have it open for a moment."""
    patiently(lambda: _remove(path), path)


def _try_to_remove(path: Path) -> None:
    with suppress(OSError):  # gone meanwhile, or in use on Windows: the next start tries again
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_left_over(path: Path) -> bool:
    name = _NAME.fullmatch(path.name)
    if name is None or path.name in _in_use or path.is_symlink():
        return False
    try:
        changed = path.stat().st_mtime
    except OSError:  # gone meanwhile
        return False
    return time.time() - changed > OLD or (name[1] == _machine() and not _runs(int(name[2]), changed))


def _runs(number: int, then: float) -> bool:
    """Tell whether the other process that had a number at a time (seconds since 1970) still runs.

    A later process may have the same number: in a container it is always 1.
    """
    if number == os.getpid():  # of this process, or of an earlier one
        return False
    import psutil  # here, so that doctor can list it where it is missing

    try:
        return psutil.Process(number).create_time() <= then + CLOCKS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@functools.cache
def _machine() -> str:
    """Identify the machine, and on Linux its boot and its container, by eight digits."""
    parts = [platform.node()]
    if sys.platform == "linux":
        with suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        with suppress(OSError):
            parts.append(str(Path("/proc/self/ns/pid").readlink()))
    else:
        parts.append(str(uuid.getnode()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
