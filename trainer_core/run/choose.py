"""Which run a queue means: a finished one, one that was cut off, a shorter one, or a new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import remove_folder
from .folder import CHECKPOINT, WEIGHTS, Checkpoint, RunFolder, find_runs, new_run, open_run
from .key import Keys

if TYPE_CHECKING:
    from ..config import ExistingConfig

# In what a run that differs in length has not taken the same steps as the one that is wanted up to one of them, as
# the end of a sentence; empty where it has.
OtherSteps = Callable[[RunFolder, int], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a queue finds."""

    own: RunFolder | None = None  # the run itself; None: it is made anew
    finished: Checkpoint | None = None  # the end of the run itself, its files sound
    other: tuple[RunFolder, Checkpoint] | None = None  # what a new run begins with
    sentence: str = ""  # says what is done


def choose_run(runs: Path, keys: Keys, steps: int, existing: ExistingConfig, other_steps: OtherSteps) -> Choice:
    """Look for what a run of so many steps can take or go on with; nothing is written.

    Raises ValueError for a fork whose run or save is not there.
    """
    if existing.on_existing == "train again":
        return Choice()
    found = find_runs(runs)
    own = [run for run in found if run.keys.run == keys.run]
    for run in own:
        if (checkpoint := finished_checkpoint(run)) is not None:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime((run.result() or {}).get("finished", 0)))
            sentence = (
                f"Nothing was trained: the run {run.path.name}, finished {day}, has these settings, pictures and "
            )
            return Choice(own=run, finished=checkpoint, sentence=f"{sentence}models, and its result was taken.")
    if existing.on_existing != "reuse" and own:
        return Choice(own=max(own, key=lambda run: max((c.step for c in run.checkpoints()), default=0)))
    if existing.on_existing == "fork":
        run, checkpoint = find_fork(runs, existing)
        sentence = f"Forked from step {checkpoint.step} of the run {run.path.name}."
        return Choice(other=(run, checkpoint), sentence=sentence)
    if existing.on_existing == "resume":
        course = [run for run in found if run.keys.course == keys.course]
        for checkpoint, other, run in sorted(_shorter(course, steps, other_steps), key=lambda c: (-c[0].step, c[1])):
            if not checkpoint.problem():
                sentence = f"Went on after step {checkpoint.step} of the run {run.path.name}, to step {steps}."
                if other:
                    sentence += f" Up to there {other}."
                return Choice(other=(run, checkpoint), sentence=sentence)
    return Choice()


def find_fork(runs: Path, existing: ExistingConfig) -> tuple[RunFolder, Checkpoint]:
    """Return the run and the save that a fork names; ValueError when it is not there or damaged."""
    path = runs / existing.fork_run
    if not path.is_dir():
        names = ", ".join(run.path.name for run in find_runs(runs)[:5]) or "none yet"
        raise ValueError(f"There is no run {existing.fork_run} to fork; the newest runs are: {names}.")
    run = open_run(path)
    found = run.checkpoints()
    wanted = [c for c in found if not existing.fork_step or c.step == existing.fork_step][:1]
    if not wanted:
        steps = ", ".join(str(c.step) for c in reversed(found)) or "none"
        which = f"of step {existing.fork_step}" if existing.fork_step else "at all"
        raise ValueError(f"The run {run.path.name} has no save {which} to fork; it has those of steps: {steps}.")
    if problem := wanted[0].problem():
        raise ValueError(f"The save of step {wanted[0].step} of {run.path.name} cannot be forked: {problem}.")
    return run, wanted[0]


def finished_checkpoint(run: RunFolder) -> Checkpoint | None:
    """Return the save that a finished run's result is, None when the run is not finished or the files are damaged."""
    result = run.result()
    if result is None:
        return None
    for checkpoint in run.checkpoints():
        if checkpoint.step == result.get("step"):
            return checkpoint if not checkpoint.problem() else None
    return None


def _shorter(
    runs: Sequence[RunFolder], steps: int, other_steps: OtherSteps
) -> Iterator[tuple[Checkpoint, str, RunFolder]]:
    """Yield the saves that a run of so many steps can begin with, and in what it would have come there otherwise."""
    for run in runs:
        found = [checkpoint for checkpoint in run.checkpoints() if checkpoint.step <= steps]
        end = (run.result() or {}).get("step") if run.steps <= steps else None
        for checkpoint in found:
            other = other_steps(run, checkpoint.step)
            if not other or checkpoint.step == end:
                yield checkpoint, other, run


@contextmanager
def working_run(
    runs: Path, choice: Choice, keys: Keys, name: str, steps: int, note: Callable[[str], None], **about: Any
) -> Iterator[tuple[RunFolder, Checkpoint | None, str]]:
    """Lend the folder of a run that is trained now, the save to go on with, and a sentence on it.

    note: is told of saves that cannot be used. RuntimeError when somebody else works on the run.
    """
    run, other = choice.own, choice.other
    if run is None:
        begun = {} if other is None else {"begun_with": {"run": other[0].path.name, "step": other[1].step}}
        run = new_run(runs, keys, name, steps, **begun, **about)
    cut_off = run.owner()
    try:
        with run.locked():
            checkpoint, sentence = (other[1] if other else None), choice.sentence
            if checkpoint is None:
                checkpoint = sound_checkpoint(run, note)
            if checkpoint is not None and not sentence:
                why = f", in which {cut_off} was cut off" if cut_off else ""
                sentence = f"Went on after step {checkpoint.step} of {steps} of the run {run.path.name}{why}."
            yield run, checkpoint, sentence or f"Trained from the first step, in the run {run.path.name}."
    finally:
        if choice.own is None and not run.checkpoints():  # it has ended before there was anything to keep
            with suppress(OSError):  # of a disk that is full or away: it must not hide why the work has ended
                remove_folder(run.path)


def sound_checkpoint(run: RunFolder, note: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest save whose files are as they were written; else the newest one with sound weights.

    Newer ones, which cannot be gone on with, are set aside, so that the run can take its way once more.
    """
    readable = {checkpoint.path: checkpoint for checkpoint in run.checkpoints()}
    problems: dict[Path, str] = {}
    chosen = None
    for path in run.saves():
        found = readable.get(path)
        problem = found.problem() if found else f"{CHECKPOINT} is missing, damaged or of another version"
        if not problem:
            chosen = found
            break
        problems[path] = problem
    if chosen is None:
        chosen = next((checkpoint for checkpoint in readable.values() if not checkpoint.problem(WEIGHTS)), None)
    for path, problem in problems.items():
        if chosen is not None and chosen.path == path:
            break  # older ones are in nobody's way
        aside = run.set_aside(path)
        note(f"The save {path.name} of {run.path.name} cannot be gone on with: {problem}; it is kept as {aside.name}.")
    return chosen
