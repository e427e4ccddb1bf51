"""Write files and folders atomically: complete or absent, also after a crash or on a full disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from .cancel import look
from .disk_errors import describe_disk_error
from .leftovers import TEMPORARY, remove, remove_leftovers, unfinished
from .windows import patiently

BLOCK = 1 << 20  # bytes read at once
THREADS = 8  # that write small files
LONGEST_PART = 100  # characters of a folder's name in a long path


@contextmanager
def written_whole(path: Path, *, apart: bool = False) -> Iterator[Path]:
    """Yield a temporary path for a `with` block; the file written there replaces `path` if the block succeeds.

    apart: in a folder of its own, for a library that writes through names of its own, as safetensors does. A killed
    process would leave those beside `path`, where nobody knows them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as place, _naming(path):
        temporary = place / f"whole{TEMPORARY}" if apart else place  # ComfyUI's lists go into hidden folders, too
        try:
            if apart:
                place.mkdir()
            yield temporary
            _to_disk(temporary)
            with suppress(PermissionError):  # of a disk without modes
                # Safetensors makes files for their owner alone. On Windows a folder that is read-only takes files.
                os.chmod(temporary, path.parent.stat().st_mode & 0o666 | stat.S_IWRITE)
            move(temporary, path)
            _to_disk(path.parent)
        finally:
            if apart:
                shutil.rmtree(place, ignore_errors=True)  # what stays is deleted as a leftover
            else:
                with suppress(PermissionError):  # open elsewhere: likewise
                    remove(place)


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder for a `with` block; it replaces `path` if the block succeeds.

    An existing folder is moved away once the new one is on the disk. A process that is killed between the two renames
    leaves both folders complete, under temporary names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as temporary, unfinished(path) as before, _naming(path):
        temporary.mkdir()
        try:
            yield temporary
            for folder in [*temporary.rglob("*"), temporary]:
                remove_leftovers(folder)  # of files in it, which would go with it
            for entry in [*temporary.rglob("*"), temporary]:
                _to_disk(entry)
            if path.exists():
                move(path, before)
            try:
                move(temporary, path)
            except OSError:
                if before.exists():
                    move(before, path)
                raise
            _to_disk(path.parent)
            shutil.rmtree(before, ignore_errors=True)  # leftovers are deleted when the run is locked next
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_together(contents: Mapping[Path, bytes | None]) -> None:
    """Replace many small files, and delete those of None: all are on the disk under other names before one changes."""
    with ExitStack() as stack:
        written: dict[Path, Path] = {}
        for path, content in contents.items():
            if content is not None:
                written[path] = stack.enter_context(unfinished(path))
        try:
            _each(lambda path: _write_beside(path, written[path], contents[path] or b""), list(written))
            _each(lambda path: move(written[path], path), list(written))
            for path in contents.keys() - written.keys():
                remove(path)
            for folder in {path.parent for path in contents}:
                _to_disk(folder)
        finally:
            for temporary in written.values():
                temporary.unlink(missing_ok=True)


def _each(act: Callable[[Path], None], paths: Sequence[Path]) -> None:
    """Do something with many files in threads, which wait for the disk."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda own: [act(path) for path in own], (paths[i::THREADS] for i in range(THREADS))))


def _write_beside(path: Path, temporary: Path, content: bytes) -> None:
    """Write a file that will replace another one, with the permissions of that."""
    with _naming(path):
        temporary.write_bytes(content)
        _to_disk(temporary)
        with suppress(FileNotFoundError, PermissionError):  # a new file; a disk without modes
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode) | stat.S_IWRITE)


def open_file(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a file; raises OSError for what is none: a pipe would keep whoever reads it, and a device never ends."""
    _regular(path)
    return cast("IO[bytes]", path.open(mode))


def read_file(path: Path) -> bytes:
    """Read a whole file; raises OSError as `open_file` does. Whoever calls this has bounded its size."""
    _regular(path)
    return path.read_bytes()


def _regular(path: Path) -> None:
    with suppress(FileNotFoundError):  # as whoever opens it says, or it is made
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))


def move(source: Path, target: Path) -> None:
    """Rename a file or folder; a file in its place is replaced."""
    patiently(lambda: os.replace(source, target), target)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to disk errors that name none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def remove_folder(path: Path) -> None:
    """Delete a folder atomically: it is renamed first, so that no partial folder ever has its name."""
    if path.exists():
        with unfinished(path) as doomed:
            move(path, doomed)
            remove(doomed)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file atomically."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def check_writable(folder: Path, below: int = 0) -> None:
    """Raise ValueError with the reason if a folder cannot be written; create the folder if it is missing.

    below: characters of the longest path that is going to be written in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished(folder / "probe") as probe:
            place = probe
            while (more := below - len(str(place)) + len(str(folder))) > 0:
                place /= "x" * min(more, LONGEST_PART)
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(b" ")
            finally:
                with suppress(PermissionError):  # open elsewhere: it is deleted as a leftover
                    remove(probe)
    except OSError as error:
        raise ValueError(describe_disk_error(error, folder)) from error


def file_digest(path: Path) -> str:
    """Compute the sha256 of a file's content."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(BLOCK):
            look()
            digest.update(block)
    return digest.hexdigest()


def short_hash(path: Path) -> str:
    """Compute the short hash of older web UIs: the first 8 hex digits of the sha256 of 64 KB that begin at 1 MB."""
    with path.open("rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]


def keep_newest(folder: Path, most: int) -> None:
    """Delete the files of a folder but for the newest ones."""
    files = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    for entry in sorted(files, key=lambda entry: entry.stat().st_mtime_ns)[: max(0, len(files) - most)]:
        with suppress(FileNotFoundError, PermissionError):  # by another process; open elsewhere
            os.remove(entry.path)


def folder_size(folder: Path) -> int:
    """Sum the bytes of all files below a folder; links are not followed, files that cannot be seen count 0."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def unused_path(path: Path) -> Path:
    """Find a path that does not exist: the path itself, else name-2, name-3 …"""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def _to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk (fsync)."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders, and orders their changes itself
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)
