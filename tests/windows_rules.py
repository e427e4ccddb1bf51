"""Files as Windows treats them, pretended on Linux.

What any process has open or mapped is neither deleted nor replaced nor moved, nor is what is read-only; a path of more
than 259 characters, or a folder whose name ends in a dot or a space, is not found.
"""

import builtins
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from lora_atelier.trainer_core.common import disk_errors, windows

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Windows' rules are pretended on Linux")


def refusal(number: int, path: Any, other: Any = None) -> PermissionError:
    """Build the error that Windows raises under a number."""
    error = PermissionError(13, "Access is denied", os.fspath(path), None, other)
    error.winerror = number  # type: ignore[attr-defined]
    return error


def in_use(path: Any) -> bool:
    """Tell whether this process or one that it started has a file open or mapped, or one in a folder."""
    wanted = os.path.abspath(os.fspath(path))
    if not os.path.lexists(wanted):
        return False
    me = psutil.Process()
    used = set[str]()
    for process in (me, *me.children(recursive=True)):
        with suppress(FileNotFoundError):  # it has ended
            folder = Path("/proc", str(process.pid))
            for each in os.listdir(folder / "fd"):
                with suppress(FileNotFoundError):
                    used.add(os.readlink(folder / "fd" / each))
            used |= {line[line.find("/") :] for line in (folder / "maps").read_text(errors="replace").splitlines()}
    return any(each == wanted or each.startswith(f"{wanted}/") for each in used)


def read_only(path: Any) -> bool:
    """Tell whether a file or folder has the attribute."""
    return os.path.lexists(path) and not os.lstat(path).st_mode & 0o200


def missing(path: Any) -> bool:
    """Tell whether Windows would not find a path, whatever is there."""
    if not isinstance(path, (str, os.PathLike)) or str(path).startswith(("/proc", "/sys", "/dev")):
        return False
    parts = Path(path).parts
    return len(os.path.abspath(path)) > windows.LONGEST_PATH or any(
        p not in (".", "..") and p.endswith((".", " ")) for p in parts
    )


def moved(real: Callable[..., None]) -> Callable[..., None]:
    """Refuse to rename as Windows does."""

    def move(source: Any, target: Any) -> None:
        if os.path.isdir(source) and os.path.lexists(target):
            raise refusal(5, source, target)
        if in_use(source):
            raise refusal(32, source, target)
        if os.path.lexists(target) and (in_use(target) or read_only(target)):
            raise refusal(5, source, target)
        found(real)(source, target)

    return move


def deleted(real: Callable[..., None]) -> Callable[..., None]:
    """Refuse to delete as Windows does."""

    def delete(path: Any, *, dir_fd: int | None = None) -> None:
        if in_use(path):
            raise refusal(32, path)
        if read_only(path):
            raise refusal(5, path)
        real(path, dir_fd=dir_fd)

    return delete


def found(real: Callable[..., Any]) -> Callable[..., Any]:
    """Find no path that Windows does not."""

    def call(path: Any, *more: Any, **options: Any) -> Any:
        for each in (path, *more[:1]):
            if missing(each):
                raise FileNotFoundError(2, "The system cannot find the path specified", os.fspath(each))
        return real(path, *more, **options)

    return call


@contextmanager
def rules() -> Iterator[None]:
    """Pretend its rules for the length of a `with` block."""
    patches = [(os, name, moved) for name in ("replace", "rename")]
    patches += [(os, name, deleted) for name in ("unlink", "remove", "rmdir")]
    patches += [(os, name, found) for name in ("stat", "open", "mkdir", "scandir")]
    patches += [(place, "open", found) for place in (io, builtins)]
    made = [mock.patch.object(place, name, rule(getattr(place, name))) for place, name, rule in patches]
    made += [mock.patch.object(module, "WINDOWS", True) for module in (windows, disk_errors)]
    made.append(mock.patch.object(shutil, "_use_fd_functions", False))
    with ExitStack() as until_the_end:
        for each in made:
            until_the_end.enter_context(each)
        yield


@pytest.fixture
def as_windows() -> Iterator[None]:
    """Pretend its rules for the length of a test."""
    with rules():
        yield
