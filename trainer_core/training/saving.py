"""Save a run to the disk so that it resumes to the last bit, and decide when a save or a sample is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..common.disk_errors import describe_disk_error, reason
from ..common.smooth import say_loss
from ..common.tensor_tree import DISK_ERRORS, pack, save_state, unpack
from ..common.wording import count
from ..config import MemoryConfig, run_again
from ..data.plan import Plan
from ..runs import Checkpoint
from ..runs.asked import Paused
from ..runs.news import FAILURES
from ..runs.publish import Saved
from .checkpoint import restore, state_of
from .sample_files import draw_samples
from .state import Run
from .weights import read_versions, write_versions

SHARE = 0.01  # of a run's time that saves by minutes may take
LONGEST_WAIT = 10  # times save_every: the longest wait for the next save, whatever SHARE says


class Saving:
    """Saves a run and draws samples when they are due, and keeps a backup of the state in RAM."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._sampled = self._saved = clock()
        self._wait = 60.0 * run.config.saves.save_every  # seconds, for saves by minutes
        self._backup: dict[str, Any] = {}  # packed state by the file of a save

    def after_step(self, asked: Collection[str]) -> None:
        """Save and draw if due or asked for; a full disk or a failed sample is reported and does not stop the run."""
        run, saves = self._run, self._run.config.saves
        every, unit = saves.save_every, saves.save_unit
        due = every and self._clock() - self._saved >= self._wait if unit == "minutes" else self._passed(every, unit)
        if (due and run.at < run.plan.steps) or "save" in asked:  # the end is saved anyway
            self._save(asked="save" in asked)
        if "sample" in asked or (run.at < run.plan.steps and self._sample_is_due()):
            draw_samples(run, _keep_lora)  # a page that shows a picture offers its LoRA
            self._sampled = self._clock()

    def before_first_step(self) -> None:
        """Draw samples of the model as it is, if they are wanted; a run that resumes has them."""
        if self._run.config.saves.sample_at_start:
            draw_samples(self._run)
            self._sampled = self._clock()

    def back_up(self) -> None:
        """Back up the state before an update that may have to be undone; an earlier backup stays."""
        self._backup = self._backup or {file: pack(each, copy=True) for file, each in state_of(self._run).items()}

    def drop_backup(self) -> None:
        """Drop the backup."""
        self._backup = {}

    def roll_back(self) -> bool:
        """Restore the run from the backup; tell whether there is one."""
        run = self._run
        if not self._backup:
            return False
        run.scaler = torch.amp.GradScaler(run.device.type, enabled=run.scaler.is_enabled())  # the old may be mid-step
        run.updating = False
        restore(self._run, {file: unpack(*state) for file, state in self._backup.items()})
        return True

    def _sample_is_due(self) -> bool:
        every, unit = self._run.config.saves.sample_every, self._run.config.saves.sample_unit
        if unit == "minutes":
            return bool(every) and self._clock() - self._sampled >= 60 * every
        return self._passed(every, unit)

    def _passed(self, every: int, unit: str) -> bool:
        """Tell whether the last step completed another `every` steps or epochs."""
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
                f"After step {run.at} the run could not be saved; training continues, and the last save is as it was. "
                + describe_disk_error(error, run.folder.path, size_of_save(run))
            )
        else:
            if asked:
                run.callbacks.note(f"Saved after step {run.at} in {checkpoint.path}.")
        self._saved = self._clock()
        # On a slow disk saves get rarer, so that they take at most SHARE of the run's time. The wait has a limit,
        # as a save during which the machine slept took hours by the clock.
        wait = 60.0 * saves.save_every
        self._wait = min(max(wait, (self._saved - began) / SHARE), LONGEST_WAIT * wait)


@contextmanager
def disk_errors_explained(folder: Path | None = None, needed: Callable[[], int] = int) -> Iterator[None]:
    """Turn disk errors in a `with` block into a RuntimeError with one plain message.

    folder: where files are written, by default that of the error's file. needed: computes how many bytes.
    """
    try:
        yield
    except DISK_ERRORS as error:
        then = f", then {run_again()}; the run resumes from its last save"
        raise RuntimeError(describe_disk_error(error, folder, needed(), then)) from error


def size_of_save(run: Run) -> int:
    """Estimate the bytes of a run's next save: those of the last one, else of the state that it would hold."""
    with suppress(OSError):  # asked after an error of the disk: it may not answer at all
        for checkpoint in run.folder.checkpoints()[:1]:
            return checkpoint.size
    return sum(tensor.nbytes for state in state_of(run).values() for tensor in pack(state)[0].values())


def save(run: Run, *, stays: bool = False, at_end: bool = False, lora: bool = True) -> Checkpoint:
    """Save a run: its state, and its LoRA files, which are read back and verified.

    stays: newer saves do not replace it. at_end: as in `write_versions`. lora: False saves the state only. Raises
    ValueError for a LoRA that fails verification and DISK_ERRORS from the disk; the last save then stays.
    """
    run.saves += 1

    def write(folder: Path) -> None:
        for name, state in state_of(run).items():
            save_state(folder / name, state)
        if lora:
            write_versions(run, folder, at_end=at_end)

    try:
        run.folder.write_summary(summary(run))
        run.folder.write_pictures(run.at, watched(run))
        checkpoint = run.folder.save(run.at, write, stays=stays)
    except DISK_ERRORS:
        run.folder.prune(1)  # may free enough room
        checkpoint = run.folder.save(run.at, write, stays=stays)
    run.record("saved", step=run.at)
    if not at_end:
        run.callbacks.saved(run.at)
    run.folder.prune(run.config.saves.keep_last)
    return checkpoint


def _keep_lora(run: Run) -> None:
    """Keep the LoRA that drew samples, so that people can take it; a failure is reported once and stops nothing."""
    if any(checkpoint.step == run.at and checkpoint.stays for checkpoint in run.folder.checkpoints()):
        return
    try:
        run.folder.save_lora(run.at, lambda folder: write_versions(run, folder, at_end=False))
    except (*DISK_ERRORS, ValueError) as error:
        why = describe_disk_error(error, run.folder.path) if isinstance(error, DISK_ERRORS) else str(error)
        run.note_once("loras", f"The LoRA of the samples of step {run.at} could not be kept: {why}")


def publish(run: Run, checkpoint: Checkpoint, kind: str = "") -> list[Saved]:
    """Copy a save's LoRA files to the destination; kind: as for `Destination.publish`."""
    saved, epoch = read_versions(checkpoint), run.plan.epochs_after(checkpoint.step)
    return run.destination.publish(run.folder, saved, checkpoint.step, epoch, kind, run.callbacks.note)


def save_interrupted(run: Run, cause: BaseException) -> None:
    """Save an interrupted run and report where; a save that fails is reported, never raised.

    Does not save weights in the middle of an update, or that are not finite. cause: what interrupted the run; the
    run's log keeps a failure, and a pause.
    """
    paused = isinstance(cause, Paused)
    if paused:
        run.record("paused")
    elif isinstance(cause, FAILURES) and str(cause):
        run.record("failed", text=str(cause))
    before = next(iter(run.folder.checkpoints()), None)
    problem = ""
    if run.at and (before is None or before.step < run.at):
        try:
            if run.updating:
                problem = "the last update was cut off in its middle."
            elif not all(bool(tensor.isfinite().all()) for tensor in run.network.state_dict().values()):
                problem = "the weights are not finite."
            else:
                before = _save_at_least_state(run)
        except DISK_ERRORS as error:
            problem = describe_disk_error(error, run.folder.path, size_of_save(run))
        except (RuntimeError, TypeError) as error:  # a lost GPU, or one that lacks an operation
            problem = f"{reason(error)}."
    note = run.callbacks.note
    lost = f"Step {run.at} could not be saved: {problem} " if problem else ""
    if before is None:
        note(f"{lost}Nothing of this run is saved yet." if run.at else describe_stop(None, run.plan, run.config.memory))
        return
    try:
        saved = publish(run, before, f"-stopped-at-{before.step}")
    except DISK_ERRORS as error:
        saved = []
        lost += f"The LoRA could not be copied. {describe_disk_error(error, run.destination.output.parent)} "
    files = ", ".join(dict.fromkeys(str(path) for each in saved for path in each.files))
    so_far = f"The LoRA so far is saved as {files}. " if files else ""
    note(
        f"{lost}{'Paused' if paused else 'Stopped'} after step {before.step} of {run.plan.steps}. {so_far}The run is "
        f"saved in {before.path}; {run_again()} to resume."
    )


def describe_stop(checkpoint: Checkpoint | None, plan: Plan, memory: MemoryConfig) -> str:
    """Describe a run that was stopped before its first step; checkpoint: the one to resume from."""
    where = "the first step"
    if checkpoint is not None:
        where = f"step {checkpoint.step + 1} of {plan.steps}; the step before is saved in {checkpoint.path}"
    kept = "; encoded pictures and captions are kept" if memory.encodings == "disk" else ""
    return f"Stopped before {where}{kept}; {run_again()} to resume."


def _save_at_least_state(run: Run) -> Checkpoint:
    try:
        return save(run)
    except (ValueError, TypeError, RuntimeError) as error:  # of the LoRA; the run can be resumed from its state
        run.callbacks.note(f"The LoRA of step {run.at} could not be written: {error}")
        return save(run, lora=False)


def watched(run: Run) -> list[dict[str, Any]]:
    """Describe the pictures that have losses, the worst first: their files, captions, and how their losses compare."""
    pictures = run.plan.manifest.pictures
    folders = [Path(concept.folder).name for concept in run.plan.dataset.concepts]
    return [
        {
            "name": pictures[i].name,
            "folder": folders[pictures[i].concept],
            "sha256": pictures[i].digest,
            "caption": "\n".join(pictures[i].lines),  # as it was trained
            **asdict(fit),
        }
        for i, fit in run.fits.fits().items()
    ]


def summary(run: Run) -> str:
    """Describe the run and its progress in a few lines, for people who find its folder."""
    config, plan = run.config, run.plan
    measured = (
        [f"Validation loss after step {run.validation[-1][0]}: {run.validation[-1][1]:.4f}"] if run.validation else []
    )
    return "\n".join(
        [
            f"{run.folder.about['name']}: {run.at} of {count(plan.steps, 'step')}, {say_loss(run.losses)}",
            *measured,
            f"Base model {run.base.name}, {count(plan.manifest.pictures, 'picture')}",
            f"{config.lora.algorithm} of rank {config.lora.rank}, {config.optimizer.name} at "
            f"{config.optimizer.learning_rate:g}, {config.scheduler.name}",
            f"Started {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.folder.about['created']))}",
            "run.json holds the whole configuration, log.jsonl every step, the folder checkpoints each save.",
            "",
        ]
    )
