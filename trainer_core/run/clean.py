"""What of runs can be deleted, and how: never while somebody works on one, never what lies elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..files import folder_size, leftovers, remove_folder, write_json
from .choose import finished_checkpoint
from .folder import CHECKPOINT, CHECKPOINTS, OPTIMIZER, RUN, SAMPLES, Checkpoint, RunFolder, read_json

KINDS = ("step-*", "damaged-step-*")  # of folders of saves; the latter were set aside
OLD = 3600.0  # seconds after which nobody is still deleting a folder


class Clearable(NamedTuple):
    """Something that can be deleted."""

    path: Path
    size: int  # bytes
    what: str  # for people


def end_of(run: RunFolder) -> Checkpoint | None:
    """Return the save that a finished run's result is, None where there is none; its files are not read."""
    step = (run.result() or {}).get("step")
    return next((checkpoint for checkpoint in run.checkpoints() if checkpoint.step == step), None)


def clearable(run: RunFolder, end: Checkpoint | None, *, states: bool = False) -> list[Clearable]:
    """Return what a run can do without: what a killed process left, and once it is finished, all saves but the end's.

    end: the save of its result; None for a run that is not finished, whose saves are all needed. states: the end's
    optimizer state, too.
    """
    found = [
        (path, "left by a process that was killed")
        for folder in (run.path, run.path / CHECKPOINTS, run.path / SAMPLES)
        for path in leftovers(folder)
    ]
    if end is not None:
        saves = [path for kind in KINDS for path in (run.path / CHECKPOINTS).glob(kind) if path.is_dir()]
        found += [(path, f"save {path.name}") for path in sorted(saves) if path != end.path]
        if states and (end.path / OPTIMIZER).exists():
            found.append((end.path / OPTIMIZER, f"optimizer state of step {end.step}"))
    return [Clearable(path, size_of(path), what) for path, what in found if not is_elsewhere(path, run.path.parent)]


def clear(run: RunFolder, *, states: bool = False) -> None:
    """Delete what `clearable` returns; RuntimeError when somebody works on the run, ValueError for a link to a run."""
    with _for_deleting(run.path):
        for each in clearable(run, finished_checkpoint(run), states=states):
            if (
                each.path.name == OPTIMIZER
            ):  # first the save lacks it by its own word, so that it is never a damaged one
                about = read_json(each.path.with_name(CHECKPOINT)) or {}
                about["files"].pop(OPTIMIZER, None)
                write_json(each.path.with_name(CHECKPOINT), about)
            if each.path.is_dir():
                remove_folder(each.path)
            else:
                each.path.unlink(missing_ok=True)


def delete_run(path: Path) -> None:
    """Delete the folder of a run, whether it can be read or not; raises as `clear`."""
    with _for_deleting(path):
        (path / RUN).unlink(missing_ok=True)  # nobody takes it for a run from here on
    remove_folder(path)  # Windows moves no folder with an open lock in it


def old_leftovers(runs: Path) -> list[Clearable]:
    """Return folders of runs that a process was deleting when it was killed."""
    found = [path for path in leftovers(runs) if path.is_dir() and not is_elsewhere(path, runs)]
    old = [path for path in found if time.time() - max(path.stat().st_mtime, path.stat().st_ctime) > OLD]
    return [Clearable(path, folder_size(path), "left by a process that was killed") for path in old]


def size_of(path: Path) -> int:
    """Return how many bytes a file, or a folder's files, hold."""
    return folder_size(path) if path.is_dir() else path.lstat().st_size


def is_elsewhere(path: Path, runs: Path) -> bool:
    """Tell whether a path below the folder of runs leads out of it, over a link."""
    return path.resolve() != runs.resolve() / path.relative_to(runs)


@contextmanager
def _for_deleting(path: Path) -> Iterator[None]:
    if is_elsewhere(path, path.parent):
        raise ValueError(f"{path.name} is a link to a folder that lies elsewhere; delete it there.")
    with RunFolder(path=path, about={}).locked():
        yield
