"""Files and folders that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BLOCK = 1 << 20  # bytes read at once
TEMPORARY = ".tmp"  # how the names of what is being written end; they begin with a dot


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Lend another name for the length of a `with` block; what was written there becomes `path` unless it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
    try:
        yield temporary
        _to_disk(temporary)
        os.chmod(temporary, path.parent.stat().st_mode & 0o666)  # safetensors makes files for their owner alone
        os.replace(temporary, path)
        _to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Lend an empty folder for the length of a `with` block; it becomes `path`, with its files, unless that fails.

    A folder that is there already makes way when the new one is on the disk; a process that is killed between the two
    renames leaves both whole, under names of their own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, before = (path.with_name(f".{uuid.uuid4().hex}{TEMPORARY}") for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        for entry in [*temporary.rglob("*"), temporary]:
            _to_disk(entry)
        if path.exists():
            os.replace(path, before)
        try:
            os.replace(temporary, path)
        except OSError:
            if before.exists():
                os.replace(before, path)
            raise
        _to_disk(path.parent)
        shutil.rmtree(before, ignore_errors=True)  # what is left of it goes when the folder is locked next
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder so that at no time a part of it has its name."""
    if path.exists():
        doomed = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(folder: Path) -> None:
    """Delete what a process that was killed was writing in a folder, or deleting there."""
    for entry in leftovers(folder):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """Return what is being written in a folder, or deleted there, or was when a process was killed."""
    return list(folder.glob(f".*{TEMPORARY}"))


def write_json(path: Path, values: Any) -> None:
    """Write JSON, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raise ValueError that says why nothing can be written into a folder; it is made if it is not there."""
    probe = folder / f".{uuid.uuid4().hex}{TEMPORARY}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("xb") as file:
            file.write(b" ")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"Nothing can be written into {folder} ({reason(error)}); make room or give access there, or choose "
            "another place."
        ) from error


def reason(error: BaseException) -> str:
    """Return why a disk refused, without the rest of an error's text."""
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def short_hash(path: Path) -> str:
    """Return by what web UIs used to call a model file: 8 hex digits, of 64 KB that begin at 1 MB."""
    with path.open("rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]


def folder_size(folder: Path) -> int:
    """Return how many bytes the files below a folder hold; links are not followed, and what vanishes is left out."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def unused_path(path: Path) -> Path:
    """Return the path itself, or the first of name-2, name-3 … that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def _to_disk(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders, and orders their changes itself
        return
    number = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(number)
    finally:
        os.close(number)
