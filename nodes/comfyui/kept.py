"""What the pack keeps in ComfyUI's user folder: what is encoded, pictures and LoRAs of the graph, what undo needs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...trainer_core.common.files import folder_size
from ...trainer_core.common.leftovers import leftovers, sweep, unfinished
from . import folders

UNUSED = 30 * 86400  # seconds after which all but the cache is deleted
IN_USE = 86400  # seconds for which they stay, whatever the limit: a workflow that is open may need them


def sizes() -> dict[str, int]:
    """Measure what is kept, in bytes, by its kind."""
    return {
        "encoded": folder_size(folders.cache_folder()),
        "pictures": folder_size(folders.pictures_folder()) + folder_size(folders.drawn_folder()),
        "loras": folder_size(folders.loras_folder()),
        "undo": sum(map(folder_size, (folders.journal_folder(), folders.earlier_folder(), folders.written_folder()))),
    }


def room_for_cache() -> int:
    """Compute the bytes that the limit leaves for encoded pictures and captions; 0 for any number."""
    limit, known = folders.kept_limit(), sizes()
    return max(limit - sum(known.values()) + known["encoded"], 1) if limit else 0


def mark_used(paths: Iterable[Path]) -> None:
    """Mark pictures and LoRAs of the graph as used now; raises ValueError for one that is no longer kept."""
    makers = _makers()
    for path in paths:
        if node := makers.get(path.parent):
            try:
                os.utime(path)
            except FileNotFoundError as error:
                raise ValueError(
                    f"The files of {node} were not used for long and are deleted; change an input of {node} to write "
                    "them again."
                ) from error


def make_room() -> None:
    """Delete what the graph made and undo needs: what was not used for a month, then the oldest above the limit."""
    sweep([folders.loras_folder()])
    limit, now = folders.kept_limit(), time.time()
    ages = sorted(((now - _used(path), path) for path in _entries()), key=lambda each: each[0])
    total = 0
    for age, path in ages:  # the last used first
        size = _size(path)
        total += size
        if age > UNUSED or (age > IN_USE and (path.name.startswith(".") or (limit and total > limit))):
            _delete(path)
            total -= size


@contextmanager
def in_use() -> Iterator[None]:
    """Let no ComfyUI of this user folder clear it for the length of a `with` block, wherever its runs are."""
    with unfinished(_signs() / "run") as sign:
        with suppress(OSError):  # where nothing can be written, nothing can be cleared
            sign.parent.mkdir(parents=True, exist_ok=True)
            sign.touch()
        try:
            yield
        finally:
            with suppress(OSError):
                sign.unlink()


def is_in_use() -> bool:
    """Tell whether a process uses what is kept; signs of killed ones are deleted."""
    sweep([_signs()])
    return bool(leftovers(_signs()))


def clear() -> None:
    """Delete all that is kept; what another ComfyUI has open stays."""
    from ...trainer_core.data.cache import Cache  # here, so that ComfyUI starts fast

    for path in [*_entries(), *folders.journal_folder().glob("*.jsonl")]:
        _delete(path)
    with Cache(folders.cache_folder(), limit=1) as cache:
        cache.prune()
    shutil.rmtree(folders.index_file().parent, ignore_errors=True)


def _signs() -> Path:
    return folders.cache_folder().with_name("in use")


def _makers() -> dict[Path, str]:
    """Map the folders of what the graph made to the node that writes there."""
    return {
        folders.pictures_folder(): "Concept from Images",
        folders.drawn_folder(): "Drawn Pictures",
        folders.loras_folder(): "Existing LoRA",
    }


def _entries() -> list[Path]:
    earlier = folders.earlier_folder()
    places = [*_makers(), earlier / "masks", earlier / "settings", folders.written_folder()]
    return [path for place in places if place.is_dir() for path in place.iterdir()]


def _used(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0


def _size(path: Path) -> int:
    try:
        return folder_size(path) if path.is_dir() else path.lstat().st_size
    except FileNotFoundError:
        return 0


def _delete(path: Path) -> None:
    """Delete a file or a folder; what a process holds open on Windows stays until next time."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError, PermissionError):
            path.unlink()
