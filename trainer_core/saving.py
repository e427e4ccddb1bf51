"""A run's state on the disk: all that it needs to go on to the last bit, when it is saved, and how it comes back."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import reason
from .optim import arguments, describe, load_exactly
from .outcome import Run, Saved, read_versions, write_versions
from .plan import Plan
from .run import COURSE, OPTIMIZER, WEIGHTS, Checkpoint
from .sample_files import draw_samples
from .state import DISK_ERRORS, load_state, pack, save_state, unpack
from .validate import Best

SHARE = 0.01  # of a run's time that saving may take, where minutes are what it goes by,
LONGEST_WAIT = 10  # as long as the next save is not that many times save_every away
OF_GROUPS = ("lr", "base_lr", "weight_decay", "model", "decays")  # in an optimizer's groups: the settings' own


def state_of(run: Run) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what a run goes on with: weights and averages; the optimizer; losses and measurements so far."""
    assert run.noise_scale is not None
    best = run.best and {"steps": run.best.steps, "loss": run.best.loss, "weights": run.best.weights}
    weights = {
        "network": run.network.state_dict(),
        "ema": dict(zip(_names(run, run.ema.parameters), run.ema.averages, strict=True)) if run.ema else None,
        "best": best,
        "at": run.at,
        "saves": run.saves,
    }
    optimizer = {
        "optimizer": run.optimizer.state_dict(),
        "of": _identity(run),
        "scaler": run.scaler.state_dict(),
        "noise_scale": run.noise_scale.state_dict(),
    }
    course = {
        "losses": torch.tensor(run.losses, dtype=torch.float64),
        "concepts": {name: torch.tensor(losses, dtype=torch.float64) for name, losses in run.concepts.items()},
        "validation": run.validation,
        "best": run.best and (run.best.steps, run.best.loss),
    }
    return weights, optimizer, course


def restore(run: Run, weights: dict[str, Any], optimizer: dict[str, Any] | None, course: dict[str, Any] | None) -> None:
    """Let a run be where its state was taken, as `state_of` returns it; without an optimizer's that begins anew.

    Without losses and measurements these are not known.

    Raises ValueError for the state of another network, as a fork may name one.
    """
    own, network = run.network.state_dict(), weights["network"]
    odd = [k for k in {*own, *network} if k not in own or k not in network or own[k].shape != network[k].shape]
    if odd:
        raise ValueError(
            f"The save to go on with is of another network (it differs at {min(odd)}); set LoRA Config as it was then, "
            "or go on with its LoRA file by Existing LoRA."
        )
    run.network.load_state_dict(network)
    if run.ema is not None:  # of a fork that has none yet, it begins with the weights as they are
        saved = weights["ema"] or network
        for name, average in zip(_names(run, run.ema.parameters), run.ema.averages, strict=True):
            average.copy_(saved.get(name, network[name]))
    if weights["best"] is not None and run.config.train.keeps_by:
        run.best = Best(**weights["best"])
    run.at, run.saves = weights["at"], weights["saves"]
    none = torch.full((run.at,), math.nan)
    course = course or {"losses": none, "concepts": {}, "validation": []}
    run.losses, run.validation = course["losses"].tolist(), list(course["validation"])
    run.concepts = {name: course["concepts"].get(name, none).tolist() for name in run.concepts}
    if optimizer is not None:
        _restore_optimizer(run, optimizer)
        if run.scaler.is_enabled() and optimizer["scaler"]:  # the precision may be another one now
            run.scaler.load_state_dict(optimizer["scaler"])
        assert run.noise_scale is not None
        run.noise_scale.load_state_dict(optimizer["noise_scale"])


def go_on(run: Run, checkpoint: Checkpoint) -> None:
    """Let a run be where it was at a save; what is not sound of it beside the weights begins anew, and that is said."""

    def part(name: str, lost: str) -> Any:
        problem = checkpoint.problem(name)
        if problem:
            run.callbacks.note(f"{lost}, for in the save of step {checkpoint.step} {problem}.")
        return None if problem else load_state(checkpoint.path / name)

    optimizer = part(OPTIMIZER, "The optimizer begins anew")
    course = part(COURSE, "Losses and measurements so far are lost")
    restore(run, load_state(checkpoint.path / WEIGHTS), optimizer, course)


def _restore_optimizer(run: Run, state: dict[str, Any]) -> None:
    """Give an optimizer its state back; settings that a fork has changed stay as they are now."""
    if state["of"] != _identity(run):
        run.callbacks.note(f"The optimizer begins anew after step {run.at}: the save is of another one.")
        return
    own = {*OF_GROUPS, *arguments(run.config.optimizer)}
    settings = [{key: group[key] for key in own if key in group} for group in run.optimizer.param_groups]
    load_exactly(run.optimizer, state["optimizer"])
    for group, kept in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(kept)


def _identity(run: Run) -> dict[str, Any]:
    """Return what an optimizer's state belongs to: its class, and the parameters of each group."""
    groups = run.optimizer.param_groups
    return {"class": describe(run.config.optimizer, False), "groups": [_names(run, g["params"]) for g in groups]}


def _names(run: Run, parameters: Sequence[Tensor]) -> list[str]:
    """Return how the network calls parameters."""
    names = {id(parameter): name for name, parameter in run.network.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def read_course(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return losses, measurements and the best step up to a save."""
    return load_state(checkpoint.path / COURSE)


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
                f"After step {run.at} the run could not be saved ({reason(error)}); it goes on, and its last save is "
                f"as it was. Make room in {run.folder.path.parent}."
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
def disk_told() -> Iterator[None]:
    """Turn what a disk refuses in a `with` block into a RuntimeError that says so in one sentence."""
    try:
        yield
    except DISK_ERRORS as error:
        name = getattr(error, "filename", None)
        where = f"A file in {Path(os.fsdecode(name)).parent}" if name else "A file"
        raise RuntimeError(
            f"{where} could not be read or written ({reason(error)}). See that the disk answers and has room, then "
            "queue the same again; a run goes on from its last save."
        ) from error


def save(run: Run, *, stays: bool = False, at_end: bool = False, lora: bool = True) -> Checkpoint:
    """Save a run as it is: its state, and its LoRA files, which are read back and verified.

    stays: not removed when there are newer ones. at_end: as in `write_versions`. lora: False saves the state alone.
    Raises ValueError for a LoRA that does not pass, DISK_ERRORS when the disk refuses; the last save is there then.
    """
    run.saves += 1

    def write(folder: Path) -> None:
        for name, state in zip((WEIGHTS, OPTIMIZER, COURSE), state_of(run), strict=True):
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
    """Copy a save's LoRA files to where they are looked for; kind: as for `Shelf.publish`."""
    saved, epoch = read_versions(checkpoint), run.plan.epochs_after(checkpoint.step)
    return run.shelf.publish(run.folder, saved, checkpoint.step, epoch, kind)


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
    files = "".join(f"{path}, " for each in saved for path in each.files)
    note(
        f"{lost}Stopped after step {before.step} of {run.plan.steps}; what was learned is in {files}and in "
        f"{before.path}. Queue the same again to go on from there."
    )


def describe_stop(checkpoint: Checkpoint | None, plan: Plan) -> str:
    """Say where a run is that was stopped before it took a step of its own; checkpoint: what it was to go on with."""
    where = "the first step"
    if checkpoint is not None:
        where = f"step {checkpoint.step + 1} of {plan.steps}; the step before is saved in {checkpoint.path}"
    return f"Stopped before {where}; what was encoded is kept. Queue the same again to go on from there."


def _save_what_goes(run: Run) -> Checkpoint:
    try:
        return save(run)
    except ValueError as error:  # of the LoRA; the state can still be gone on with
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
