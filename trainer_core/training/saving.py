"""A run's state on the disk: all that it needs to go on to the last bit, when it is saved, and how it comes back."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..common.files import reason
from ..common.tensor_tree import DISK_ERRORS, pack, save_state, unpack
from ..data.plan import Plan
from ..runs import HISTORY, OPTIMIZER, WEIGHTS, Checkpoint
from ..runs.publish import Saved
from .checkpoint import restore, state_of
from .sample_files import draw_samples
from .state import Run
from .weights import read_versions, write_versions

SHARE = 0.01  # of a run's time that saving may take, where minutes are what it goes by,
LONGEST_WAIT = 10  # as long as the next save is not that many times save_every away


class Saving:
    """When a run is saved and samples are drawn, beside what somebody asks for; and the state to go back to."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._sampled = self._saved = clock()
        self._wait = 60.0 * run.config.saves.save_every  # seconds, where minutes are what saves go by
        self._good: tuple[Any, ...] = ()

    def after_step(self, asked: Collection[str]) -> None:
        """Save and draw what is due after a step; a full disk or a failed picture is said, and never stops the run."""
        run, saves = self._run, self._run.config.saves
        every, unit = saves.save_every, saves.save_unit
        due = every and self._clock() - self._saved >= self._wait if unit == "minutes" else self._passed(every, unit)
        if (due and run.at < run.plan.steps) or "save" in asked:  # the end is saved anyway
            self._save(asked="save" in asked)
        if "sample" in asked or (run.at < run.plan.steps and self._sample_is_due()):
            draw_samples(run)
            self._sampled = self._clock()

    def remember(self) -> None:
        """Keep the state as it is, before an update that may have to be undone, unless an earlier one is kept."""
        self._good = self._good or tuple(pack(state, copy=True) for state in state_of(self._run))

    def forget(self) -> None:
        """Let go of the state that is kept."""
        self._good = ()

    def go_back(self) -> None:
        """Let the run be as it was when it was remembered."""
        run = self._run
        run.scaler = torch.amp.GradScaler(run.device.type, enabled=run.scaler.is_enabled())  # may be within a step
        run.moving = False
        restore(self._run, *(unpack(*state) for state in self._good))

    def _sample_is_due(self) -> bool:
        every, unit = self._run.config.saves.sample_every, self._run.config.saves.sample_unit
        if unit == "minutes":
            return bool(every) and self._clock() - self._sampled >= 60 * every
        return self._passed(every, unit)

    def _passed(self, every: int, unit: str) -> bool:
        """Tell whether the last step was the first after another `every` steps or epochs."""
        return bool(every) and self._count(self._run.at, unit) // every > self._count(self._run.at - 1, unit) // every

    def _count(self, steps: int, unit: str) -> int:
        return steps if unit == "steps" else int(self._run.plan.epochs_after(steps))

    def _save(self, *, asked: bool) -> None:
        run, saves, began = self._run, self._run.config.saves, self._clock()
        stays = False
        if saves.keep_every and saves.save_every and not asked:
            minutes = saves.save_unit == "minutes"
            number = run.saves + 1 if minutes else self._count(run.at, saves.save_unit) // saves.save_every
            stays = number % saves.keep_every == 0
        try:
            checkpoint = save(run, stays=stays)
            if stays and saves.publish:
                publish(run, checkpoint, f"-step-{run.at:06}")
        except DISK_ERRORS as error:
            run.callbacks.note(
                f"After step {run.at} the run could not be saved ({reason(error)}); training continues, and the last "
                f"save is as it was. Make room in {run.folder.path.parent}."
            )
        else:
            if asked:
                run.callbacks.note(f"Saved after step {run.at} in {checkpoint.path}.")
        self._saved = self._clock()
        # On a slow disk the next save is so much later that saving takes no larger share of the run.
        # No more than so much, as a save in which the machine slept took hours by the clock.
        wait = 60.0 * saves.save_every
        self._wait = min(max(wait, (self._saved - began) / SHARE), LONGEST_WAIT * wait)


@contextmanager
def disk_errors_explained() -> Iterator[None]:
    """Turn what a disk refuses in a `with` block into a RuntimeError that says so in one sentence."""
    try:
        yield
    except DISK_ERRORS as error:
        name = getattr(error, "filename", None)
        where = f"A file in {Path(os.fsdecode(name)).parent}" if name else "A file"
        raise RuntimeError(
            f"{where} could not be read or written ({reason(error)}). Check that the disk answers and has "
            "room, then press Run again; the run resumes from its last save."
        ) from error


def save(run: Run, *, stays: bool = False, at_end: bool = False, lora: bool = True) -> Checkpoint:
    """Save a run as it is: its state, and its LoRA files, which are read back and verified.

    stays: not removed when there are newer ones. at_end: as in `write_versions`. lora: False saves the state alone.
    Raises ValueError for a LoRA that does not pass, DISK_ERRORS when the disk refuses; the last save is there then.
    """
    run.saves += 1

    def write(folder: Path) -> None:
        for name, state in zip((WEIGHTS, OPTIMIZER, HISTORY), state_of(run), strict=True):
            save_state(folder / name, state)
        if lora:
            write_versions(run, folder, at_end=at_end)

    try:
        run.folder.write_summary(summary(run))
        checkpoint = run.folder.save(run.at, write, stays=stays)
    except DISK_ERRORS:
        run.folder.prune(1)  # may make the room that is lacking
        checkpoint = run.folder.save(run.at, write, stays=stays)
    run.record("saved", step=run.at)
    run.folder.prune(run.config.saves.keep_last)
    return checkpoint


def publish(run: Run, checkpoint: Checkpoint, kind: str = "") -> list[Saved]:
    """Copy a save's LoRA files to where they are looked for; kind: as for `Destination.publish`."""
    saved, epoch = read_versions(checkpoint), run.plan.epochs_after(checkpoint.step)
    return run.destination.publish(run.folder, saved, checkpoint.step, epoch, kind)


def keep(run: Run) -> None:
    """Save what there is of a run that ends before its end, and say where; never raises for what cannot be saved.

    Weights in the middle of an update, or that are not finite, are not saved over good ones.
    """
    before = next(iter(run.folder.checkpoints()), None)
    problem = ""
    if run.at and (before is None or before.step < run.at):
        try:
            if run.moving:
                problem = "the last update was cut off in its middle"
            elif not all(bool(tensor.isfinite().all()) for tensor in run.network.state_dict().values()):
                problem = "the weights are not finite"
            else:
                before = _save_what_goes(run)
        except (*DISK_ERRORS, RuntimeError) as error:  # a full disk, a GPU that answers no more
            problem = reason(error)
    note = run.callbacks.note
    lost = f"Step {run.at} could not be saved ({problem}). " if problem else ""
    if before is None:
        note(f"{lost}Nothing of this run is saved yet." if run.at else describe_stop(None, run.plan))
        return
    try:
        saved = publish(run, before, f"-stopped-at-{before.step}")
    except DISK_ERRORS as error:
        saved = []
        lost += f"The LoRA could not be copied ({reason(error)}). "
    files = ", ".join(str(path) for each in saved for path in each.files)
    so_far = f"The LoRA so far is saved as {files}. " if files else ""
    note(
        f"{lost}Stopped after step {before.step} of {run.plan.steps}. {so_far}The run is saved in {before.path}. Press "
        "Run again to continue."
    )


def describe_stop(checkpoint: Checkpoint | None, plan: Plan) -> str:
    """Describe a run that was stopped before it took a step of its own; checkpoint: the one it was to resume from."""
    where = "the first step"
    if checkpoint is not None:
        where = f"step {checkpoint.step + 1} of {plan.steps}; the step before is saved in {checkpoint.path}"
    return f"Stopped before {where}; encoded pictures and captions are kept. Press Run again to continue."


def _save_what_goes(run: Run) -> Checkpoint:
    try:
        return save(run)
    except ValueError as error:  # of the LoRA; the run can still be resumed from its state
        run.callbacks.note(f"The LoRA of step {run.at} could not be written: {error}")
        return save(run, lora=False)


def summary(run: Run) -> str:
    """Say in a few lines what the run is and how far it has come, for whoever finds its folder."""
    config, plan = run.config, run.plan
    finite = [loss for loss in run.losses[-50:] if math.isfinite(loss)]
    loss = f"{sum(finite) / len(finite):.4f}" if finite else "not finite"
    measured = (
        [f"Validation loss after step {run.validation[-1][0]}: {run.validation[-1][1]:.4f}"] if run.validation else []
    )
    return "\n".join(
        [
            f"{run.folder.about['name']}: {run.at} of {plan.steps} steps, mean loss of the last {loss}",
            *measured,
            f"Base model {run.base.name}, {len(plan.manifest.pictures)} pictures",
            f"{config.lora.algorithm} of rank {config.lora.rank}, {config.optimizer.name} at "
            f"{config.optimizer.learning_rate:g}, {config.scheduler.name}",
            f"Begun {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.folder.about['created']))}",
            "The whole configuration is in run.json, every step in log.jsonl, each save in checkpoints.",
            "",
        ]
    )
