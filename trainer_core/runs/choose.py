"""Decide whether training reuses a finished run, resumes a stopped one, starts from another run, or is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common.computed import Computed
from ..common.files import remove_folder
from ..config import setting
from .folder import CHECKPOINT, WEIGHTS, Checkpoint, RunFolder, claiming, find_runs, new_run, open_run
from .key import Keys

if TYPE_CHECKING:
    from ..config import ExistingConfig


UNKNOWN = Computed()


class Join(NamedTuple):
    """What happens where the wanted run goes on from a save of another one; all empty: the steps are the same."""

    at_end: bool = False  # the steps up to the save differ, so that only the end of the other run will do
    sentence: str = ""  # for the user: what differs
    refusal: str = ""  # why this makes no sense; "" if it does
    about: Mapping[str, Any] = {}  # for the new run's run.json


# Compares the wanted run with another one up to a save; None if it cannot go on from there.
Joins = Callable[[RunFolder, int], Join | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The run to reuse, to resume, or to start from."""

    run: RunFolder | None = None  # an existing run of the same key; None: a new one is made
    finished: Checkpoint | None = None  # the last save of `run`, if it is finished and sound
    begin_with: tuple[RunFolder, Checkpoint] | None = None  # run and save that a new run starts from
    about: Mapping[str, Any] = field(default_factory=dict)  # for the run.json of that new run
    message: str = ""  # for the user; "" if there is nothing to say yet


def choose_run(
    runs: Path,
    keys: Keys,
    steps: int,
    existing: ExistingConfig,
    joins: Joins,
    note: Callable[[str], None] | None = None,
    computed: Computed = UNKNOWN,
) -> Choice:
    """Look for a run to reuse, to resume or to start from, for a run of `steps` steps; nothing is written.

    computed: what the model computes; runs of one that computes something else are no such runs.
    note: called with one sentence that names the runs that cannot be read. Raises ValueError for a fork whose run or
    save is missing or damaged, and for a join that is refused.
    """
    if existing.on_existing == "train again":
        return Choice()
    found = [run for run in find_runs(runs, note) if not computed.differs(run.about)]
    own = [run for run in found if run.keys.run == keys.run]
    at_work = next((run for run in own if run.busy()), None)  # asked first: one that ends now is then seen as finished
    for run in own:
        if (checkpoint := finished_checkpoint(run)) is not None:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime((run.result() or {}).get("finished", 0)))
            message = f"Already trained in {run.path.name}, finished {day}; its result is reused."
            return Choice(run=run, finished=checkpoint, message=message)
    if at_work is not None:
        return Choice(run=at_work)  # whose lock names the process
    if existing.on_existing != "reuse" and own:
        return Choice(run=max(own, key=lambda run: max((c.step for c in run.checkpoints()), default=0)))
    if existing.on_existing == "fork":
        run, checkpoint = find_fork(runs, existing)
        message = f"Forked from step {checkpoint.step} of the run {run.path.name}."
        return Choice(begin_with=(run, checkpoint), message=message)
    if existing.on_existing == "resume":
        course = [run for run in found if run.keys.course == keys.course]
        found = sorted(_shorter(course, steps, joins), key=lambda c: (-c[0].step, c[1].sentence))
        for checkpoint, join, run in found:
            if not checkpoint.problem():
                if join.refusal:
                    raise ValueError(join.refusal)
                message = f"Resumed after step {checkpoint.step} of the run {run.path.name}, to step {steps}."
                message = f"{message} {join.sentence}".rstrip()
                return Choice(begin_with=(run, checkpoint), about=join.about, message=message)
    return Choice()


def find_fork(runs: Path, existing: ExistingConfig) -> tuple[RunFolder, Checkpoint]:
    """Find the run and the save that a fork names; raises ValueError if one is missing or damaged."""
    path = runs / existing.fork_run
    if not path.is_dir():
        names = ", ".join(run.path.name for run in find_runs(runs)[:5]) or "none yet"
        raise ValueError(
            f"There is no run {existing.fork_run}; set {setting('existing.fork_run')} to one of the newest: {names}."
        )
    run = open_run(path)
    found = run.checkpoints()
    wanted = [c for c in found if not existing.fork_step or c.step == existing.fork_step][:1]
    if not found:
        raise ValueError(
            f"The run {run.path.name} has no save to fork; set {setting('existing.fork_run')} to another one."
        )
    if not wanted:
        steps = ", ".join(str(c.step) for c in reversed(found))
        which = f"of step {existing.fork_step}"
        raise ValueError(
            f"The run {run.path.name} has no save {which}; set {setting('existing.fork_step')} to one of: {steps}."
        )
    if problem := wanted[0].problem():
        raise ValueError(f"The save of step {wanted[0].step} of {run.path.name} cannot be used: {problem}.")
    return run, wanted[0]


def finished_checkpoint(run: RunFolder) -> Checkpoint | None:
    """Find the last save of a finished run; None if the run is not finished or the save is damaged."""
    result = run.result()
    if result is None:
        return None
    for checkpoint in run.checkpoints():
        if checkpoint.step == result.get("step"):
            return checkpoint if not checkpoint.problem() else None
    return None


def _shorter(runs: Sequence[RunFolder], steps: int, joins: Joins) -> Iterator[tuple[Checkpoint, Join, RunFolder]]:
    """Yield the saves that a run of `steps` steps can start from, and how it goes on from there."""
    for run in runs:
        found = [checkpoint for checkpoint in run.checkpoints() if checkpoint.step <= steps]
        end = (run.result() or {}).get("step") if run.steps <= steps else None
        for checkpoint in found:
            join = joins(run, checkpoint.step)
            if join is not None and (not join.at_end or checkpoint.step == end):
                yield checkpoint, join, run


@contextmanager
def working_run(
    runs: Path,
    choose: Callable[[], Choice],
    keys: Keys,
    name: str,
    steps: int,
    note: Callable[[str], None],
    **about: Any,
) -> Iterator[tuple[Choice, RunFolder, Checkpoint | None, str]]:
    """Choose and lock the folder of a run; yield the choice, the run, the save to resume from, a sentence on both.

    Of two processes that want the same run at the same moment the second one finds the first one's. note: called with a
    sentence on each unusable save. Raises RuntimeError if another process trains the run.
    """
    with ExitStack() as until_the_end:
        with claiming(runs):
            choice = choose()
            run, source = choice.run, choice.begin_with
            if run is None:
                begun = {} if source is None else {"begun_with": {"run": source[0].path.name, "step": source[1].step}}
                run = new_run(runs, keys, name, steps, **begun, **choice.about, **about)
                until_the_end.callback(_remove_without_saves, runs, run)
            cut_off = run.owner()
            until_the_end.enter_context(run.locked())
            if choice.run is not None and choice.finished is None:  # it may have ended while its lock was waited for
                again = choose()
                choice = again if again.finished and again.run == run else choice
        checkpoint, message = (source[1] if source else None), choice.message
        if checkpoint is None:
            checkpoint = sound_checkpoint(run, note)
        if checkpoint is not None and not message:
            why = f" ({cut_off} was interrupted)" if cut_off else ""
            message = f"Resumed after step {checkpoint.step} of {steps} of the run {run.path.name}{why}."
        yield choice, run, checkpoint, message or f"New run: {run.path.name}"


def _remove_without_saves(runs: Path, run: RunFolder) -> None:
    """Delete a new run that ended before its first save, unless another process has taken it up."""
    with suppress(OSError, RuntimeError):  # of a full or missing disk: it must not hide the first error
        if not run.checkpoints() and not run.sampled():
            with claiming(runs):
                if not run.busy():
                    remove_folder(run.path)


def sound_checkpoint(run: RunFolder, note: Callable[[str], None]) -> Checkpoint | None:
    """Find the newest save whose files are all sound; else the newest one with sound weights.

    Newer, damaged saves are renamed, so that the run can write its saves of these steps again.
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
            break  # older saves can stay
        aside = run.set_aside(path)
        note(f"The save {path.name} of {run.path.name} cannot be resumed: {problem}. It is renamed to {aside.name}.")
    return chosen
