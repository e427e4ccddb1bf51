"""Delete runs and parts of them: never while a process trains the run, never anything outside its folder."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..common.files import folder_size, move, remove_folder, write_json
from ..common.leftovers import leftovers, remove, unfinished
from ..common.values import read_object
from .choose import finished_checkpoint
from .folder import CHECKPOINT, CHECKPOINTS, OPTIMIZER, Checkpoint, RunFolder, claiming, is_elsewhere

KINDS = ("step-*", "damaged-step-*")  # of folders of saves: sound ones, and damaged ones that were renamed
OLD = 3600.0  # seconds after which a deletion has certainly ended


class Clearable(NamedTuple):
    """Something that can be deleted."""

    path: Path
    size: int  # bytes
    what: str  # description for users


def end_of(run: RunFolder, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Find the last save of a finished run among its saves, None without one; its files are not read."""
    step = (run.result() or {}).get("step")
    return next((checkpoint for checkpoint in checkpoints if checkpoint.step == step), None)


def clearable(
    run: RunFolder, end: Checkpoint | None, checkpoints: Sequence[Checkpoint], *, states: bool = False
) -> list[Clearable]:
    """List what is not needed of a run: leftovers of killed processes, and of a finished run its earlier saves.

    Saves that were marked to stay are needed. end: the last save; None for a run that is not finished, which needs all
    its saves. checkpoints: all readable saves. states: include the optimizer state of `end`.
    """
    found = [(path, "left by a process that was killed") for folder in run.folders() for path in leftovers(folder)]
    if end is not None:
        needed = {end.path, *(checkpoint.path for checkpoint in checkpoints if checkpoint.stays)}
        saves = [path for kind in KINDS for path in (run.path / CHECKPOINTS).glob(kind) if path.is_dir()]
        found += [(path, f"save {path.name}") for path in sorted(saves) if path not in needed]
        if states and (end.path / OPTIMIZER).exists():
            found.append((end.path / OPTIMIZER, f"optimizer state of step {end.step}"))
    return [Clearable(path, size_of(path), what) for path, what in found if not is_elsewhere(path, run.path.parent)]


def clear(run: RunFolder, *, states: bool = False) -> None:
    """Delete what `clearable` lists; raises RuntimeError if a process trains the run, ValueError for a link."""
    with _for_deleting(run.path):
        for each in clearable(run, finished_checkpoint(run), run.checkpoints(), states=states):
            if (
                each.path.name == OPTIMIZER
            ):  # first remove it from the save's list of files, so that the save is never damaged
                about = read_object(each.path.with_name(CHECKPOINT)) or {}
                about["files"].pop(OPTIMIZER, None)
                write_json(each.path.with_name(CHECKPOINT), about)
            if each.path.is_dir():
                remove_folder(each.path)
            else:
                remove(each.path)


def saves_of(run: RunFolder, steps: Collection[int]) -> list[Clearable]:
    """List the saves and LoRAs of some steps, also unreadable saves; raises ValueError for a step that has neither."""
    paths = [*run.saves(), *(each.path for each in run.sampled())]
    found = [(int(path.name.rpartition("-")[2]), path) for path in paths]
    if missing := sorted(set(steps) - {step for step, _ in found}):
        raise ValueError(f"{run.path.name} has no save of step {missing[0]}; it may have been deleted.")
    doomed = sorted((step, path) for step, path in found if step in steps)
    return [Clearable(path, size_of(path), f"the save of step {step}") for step, path in doomed]


def delete_saves(run: RunFolder, steps: Collection[int]) -> None:
    """Delete the saves of some steps; raises as `clear` and `saves_of` do."""
    with _for_deleting(run.path):
        for each in saves_of(run, steps):
            remove_folder(each.path)


def delete_run(path: Path) -> None:
    """Delete the whole folder of a run, readable or not; raises as `clear` and `claiming` do, and OSError.

    It is moved first: where that is refused, the run is whole, and what a killed process leaves of it is no run.
    """
    with unfinished(path) as doomed:
        with claiming(path.parent):  # so that nobody takes the run up meanwhile
            with _for_deleting(path):
                pass  # nobody trains it; Windows moves no folder with an open lock in it
            move(path, doomed)
        remove(doomed)


def old_leftovers(runs: Path) -> list[Clearable]:
    """List the folders of runs that a killed process was deleting."""
    found = [path for path in leftovers(runs) if path.is_dir() and not is_elsewhere(path, runs)]
    old = [path for path in found if time.time() - max(path.stat().st_mtime, path.stat().st_ctime) > OLD]
    return [Clearable(path, folder_size(path), "left by a process that was killed") for path in old]


def size_of(path: Path) -> int:
    """Count the bytes of a file, or of a folder's files."""
    return folder_size(path) if path.is_dir() else path.lstat().st_size


@contextmanager
def _for_deleting(path: Path) -> Iterator[None]:
    if is_elsewhere(path, path.parent):
        raise ValueError(f"{path.name} is a link to another folder; delete the run there.")
    with RunFolder(path=path, about={}).locked():
        yield
