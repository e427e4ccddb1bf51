"""Files as Windows treats them, pretended on Linux.

What any process has open is neither deleted nor replaced nor moved, and what it has mapped is neither deleted nor
replaced nor cut, nor is what is read-only. A folder with such a file stays where it is. Names that differ in case
alone are one file; a name loses dots and spaces at its end, and some names are refused. A path of more than 259
characters is not found. What opens files by itself, as safetensors does, knows of none of this.
"""

import builtins
import io
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

LONGEST_PATH = 259
OTHERS = ("/proc", "/sys", "/dev")  # which are no disks
REFUSED = re.compile(r'.*[<>:"|?*\x00-\x1f].*|(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?', re.IGNORECASE | re.DOTALL)
OF_THE_PACK = ".trainer_core.common.windows"  # which asks what system it is
# Tests whose own files Windows does not take, or that take away what Windows does not give; each with the reason.
NAME, LONG, SAME = "Windows takes no such name", "Windows takes no such path", "Windows takes two such names for one"
MAPPED = "Windows keeps a shard that is mapped, and the test holds it"
CACHE = "unit/data/test_cache.py::test"
OPEN = "Windows changes no file that is open"
CHANGES = "faults/test_wrong_files.py::test_a_file_that_changes_while_it_is_read_is_named"
ODD = "faults/test_odd_files.py::test_an_odd_file_has_the_outcome_it_must_have"
LEFT_OUT = {
    "faults/test_faults.py::test_a_folder_that_is_deleted_during_the_run_is_there_at_its_end": "its lock is open",
    "faults/test_faults.py::test_names_work_to_the_end_or_are_refused_before_anything_heavy": LONG,
    f"{CACHE}_an_opened_entry_survives_the_deletion_of_its_file": MAPPED,
    f"{CACHE}_a_wrong_entry_drops_its_shard_and_what_was_read_before_stays": MAPPED,
    f"{CACHE}_a_flipped_bit_anywhere_gives_no_wrong_tensor_and_is_noticed": MAPPED,
    f"{CACHE}_a_shard_that_another_pruned_is_a_miss_unless_it_was_read": MAPPED,
    f"{CACHE}_reading_makes_a_shard_the_last_to_go": MAPPED,
    f"{CACHE}_pruning_deletes_the_oldest_as_far_as_needed_and_nothing_in_use": MAPPED,
    f"{CACHE}_what_is_used_of_a_mostly_unused_shard_is_written_anew_and_the_space_comes_back": MAPPED,
    "unit/data/scan/test_scan.py::test_what_windows_cannot_open_is_named_with_the_reason": LONG,
    "unit/runs/test_export.py::test_every_file_of_a_zip_has_a_name_that_file_systems_take": LONG,
    **{f"{CHANGES}[{how}]": OPEN for how in ("replace", "unlink")},
    **{f"{ODD}[name: {name}]": NAME for name in ("quotes", "stars", "line feed", "tab and bell")},
    **{f"{ODD}[name: {name} after the ending]": NAME for name in ("blank", "dot")},
    f"{ODD}[name: reserved on other systems]": NAME,
    f"{ODD}[name: a very long number]": LONG,
    f"{ODD}[caption: two names of one spelling]": SAME,
}
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Windows' rules are pretended on Linux")
_listdir, _stat, _lstat, _open = os.listdir, os.stat, os.lstat, open


def refusal(number: int, path: Any, other: Any = None) -> PermissionError:
    """Build the error that Windows raises under a number."""
    error = PermissionError(13, "Access is denied", os.fspath(path), None, other)
    error.winerror = number  # type: ignore[attr-defined]
    return error


def invalid(path: Any) -> OSError:
    """Build the error of a name that Windows does not take."""
    error = OSError(22, "The filename, directory name, or volume label syntax is incorrect", os.fspath(path))
    error.winerror = 123  # type: ignore[attr-defined]
    return error


def is_open(path: Any) -> bool:
    """Tell whether this process or one that it started has a file open; or one in a folder."""
    wanted = os.path.abspath(os.fsdecode(path))
    for folder in processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            files = (_target(f"{folder}/fd/{each}") for each in _listdir(f"{folder}/fd"))
            if any(each == wanted or each.startswith(f"{wanted}/") for each in files):
                return True
    return False


def is_mapped(path: Any) -> bool:
    """Tell the same of mapped files; with torch imported the system writes thousands of lines for that."""
    wanted = os.path.abspath(os.fsdecode(path))
    within = re.compile(rf" {re.escape(wanted)}(/.*)?$", re.MULTILINE)
    for folder in processes():
        with suppress(FileNotFoundError, ProcessLookupError):
            with _open(f"{folder}/maps", encoding="utf-8", errors="replace") as maps:
                text = maps.read()
            if wanted in text and within.search(text):
                return True
    return False


def processes() -> list[str]:
    """List the folders in which the system tells of this process and of those that it started."""
    return ["/proc/self", *(f"/proc/{number}" for number in children("self"))]


def children(number: str) -> Iterator[str]:
    """Yield the numbers of the processes that a process has started, and of those that they have."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in _listdir(f"/proc/{number}/task"):
            with _open(f"/proc/{number}/task/{thread}/children", encoding="ascii") as file:
                for child in file.read().split():
                    yield child
                    yield from children(child)


def _target(link: str) -> str:
    with suppress(OSError):  # closed meanwhile
        return os.readlink(link)
    return ""


def check_free(path: Any, *, moves: bool = False) -> None:
    """Refuse to delete or replace what is open, mapped or read-only; moves: to rename, which a mapped file allows."""
    if is_open(path):
        raise refusal(32, path)
    if (not moves or kind_of(path) == stat.S_IFDIR) and is_mapped(path):
        raise refusal(5, path)
    if not moves and not _lstat(path).st_mode & 0o200:
        raise refusal(5, path)


def there(path: str) -> bool:
    """Tell whether a path is there in just these capitals."""
    with suppress(OSError):
        return bool(_lstat(path))
    return False


def kind_of(path: str) -> int:
    """Find what is at a path or behind a link, as `stat` calls it; 0 for nothing."""
    with suppress(OSError):
        return stat.S_IFMT(_stat(path).st_mode)
    return 0


def spelled(path: Any) -> Any:
    """Give the path that Windows would open, as it is spelled on the disk; raises OSError where it would open none."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return path
    whole = os.fsdecode(path)
    if whole.startswith(OTHERS) or "\0" in whole:
        return path
    if len(os.path.abspath(whole)) > LONGEST_PATH:
        raise FileNotFoundError(2, "The system cannot find the path specified", os.fspath(path))
    parts = Path(whole).parts
    names = [part if part in ("/", ".", "..") else part.rstrip(". ") for part in parts]
    if any(map(REFUSED.fullmatch, names)):
        raise invalid(path)
    if tuple(names) == parts and there(whole):
        return path
    found = ""
    for name in names:
        place = os.path.join(found, name)
        if not there(place) and kind_of(found or ".") == stat.S_IFDIR:
            alike = (each for each in _listdir(found or ".") if each.casefold() == name.casefold())
            place = os.path.join(found, next(alike, name))
        found = place
    return os.fsencode(found) if isinstance(path, bytes) else found


def moved(real: Callable[..., None]) -> Callable[..., None]:
    """Refuse to rename as Windows does."""

    def move(source: Any, target: Any) -> None:
        begin, end = spelled(source), spelled(target)
        if there(begin):
            check_free(begin, moves=True)
        if there(begin) and os.fspath(begin) == os.fspath(end):  # other capitals
            end = os.path.join(os.path.dirname(end), os.path.basename(target))
        elif there(end):
            try:
                check_free(end)
            except PermissionError:
                raise refusal(5, source, target) from None
            if stat.S_IFDIR in (kind_of(begin), kind_of(end)):
                raise refusal(5, source, target)
        real(begin, end)

    return move


def renamed(real: Callable[..., None]) -> Callable[..., None]:
    """Refuse to put a file in the place of another, which only `replace` does."""

    def rename(source: Any, target: Any) -> None:
        if there(spelled(target)) and os.fspath(spelled(source)) != os.fspath(spelled(target)):
            raise FileExistsError(17, "Cannot create a file when that file already exists", os.fspath(target))
        moved(real)(source, target)

    return rename


def deleted(real: Callable[..., None]) -> Callable[..., None]:
    """Refuse to delete as Windows does."""

    def delete(path: Any, *, dir_fd: int | None = None) -> None:
        assert dir_fd is None
        place = spelled(path)
        if there(place):
            check_free(place)
        real(place)

    return delete


def opened(real: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to write what is read-only, and to empty what is mapped; Python's `open` tells no number of Windows."""

    def open_it(file: Any, mode: Any = "r", *more: Any, **options: Any) -> Any:
        place = spelled(file)
        if isinstance(mode, int):
            writes, empties = bool(mode & (os.O_WRONLY | os.O_RDWR)), bool(mode & os.O_TRUNC)
        else:
            writes, empties = bool(set(mode) & set("wa+x")), "w" in mode
        if writes and not isinstance(place, int) and kind_of(place) == stat.S_IFREG:
            if not _lstat(place).st_mode & 0o200:
                raise PermissionError(13, "Permission denied", os.fspath(file))
            if empties and is_mapped(place):
                raise OSError(22, "Invalid argument", os.fspath(file))
        return real(place, mode, *more, **options)

    return open_it


def found(real: Callable[..., Any]) -> Callable[..., Any]:
    """Find a path as Windows does."""

    def call(path: Any = ".", *more: Any, **options: Any) -> Any:
        return real(path if options.get("dir_fd") is not None else spelled(path), *more, **options)

    return call


@contextmanager
def rules() -> Iterator[None]:
    """Pretend its rules for the length of a `with` block; on Linux, as other systems have rules of their own."""
    if sys.platform != "linux":
        yield
        return
    patches = [(os, "replace", moved), (os, "rename", renamed)]
    patches += [(os, name, deleted) for name in ("unlink", "remove", "rmdir")]
    patches += [(os, name, found) for name in ("stat", "lstat", "mkdir", "scandir", "listdir", "chmod", "utime")]
    patches += [(place, "open", opened) for place in (os, io, builtins)]
    made = [mock.patch.object(place, name, rule(getattr(place, name))) for place, name, rule in patches]
    ours = [module for name, module in [*sys.modules.items()] if name.endswith(OF_THE_PACK)]
    made += [mock.patch.object(module, "WINDOWS", True) for module in ours]
    made.append(mock.patch.object(shutil, "_use_fd_functions", False))
    with ExitStack() as until_the_end:
        for each in made:
            until_the_end.enter_context(each)
        yield
