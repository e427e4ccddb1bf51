"""Two processes that ask for the same run at the same moment: one trains it, the other one says so or reuses it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from lora_atelier.trainer_core.config import ExistingConfig
from lora_atelier.trainer_core.runs import Join, Keys, choose_run, find_runs, working_run
from lora_atelier.trainer_core.runs.folder import PROBE, RunFolder

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked: Unix only")

KEYS = Keys(run="a" * 64, course="b" * 64)
ROUNDS, THOROUGH = 12, 40
TRAINED, REUSED, REFUSED, WRONG = 0, 10, 11, 12  # how a process ends


def train(runs: Path, on_existing: Literal["resume", "reuse", "train again"], seconds: float) -> int:
    """Do what training does around its steps: choose, claim, save, finish."""
    existing = ExistingConfig(on_existing=on_existing)
    choose = partial(choose_run, runs, KEYS, 1, existing, lambda run, step: Join())
    if choose().finished:
        return REUSED
    try:
        with working_run(runs, choose, KEYS, "name", 1, [].append, config={}) as (choice, run, _, _):
            if choice.finished:
                return REUSED
            with (runs.parent / "trained").open("a", encoding="utf-8") as file:
                file.write("x")
            time.sleep(seconds)
            run.save(1, lambda folder: (folder / "weights.safetensors").touch(), stays=True)
            run.finish({"step": 1})
    except RuntimeError as error:
        return REFUSED if f"is being trained by process {read_other(runs)} on " in str(error) else WRONG
    return TRAINED


def read_other(runs: Path) -> str:
    """Return the number of the other process of the round."""
    numbers = (runs.parent / "processes").read_text(encoding="utf-8").split()
    return next(number for number in numbers if number != str(os.getpid()))


def both(folder: Path, work: Callable[[], int]) -> Counter[int]:
    """Let two processes pass a barrier and then work; return how they ended."""
    (ready, told), (wait, go) = os.pipe(), os.pipe()
    processes = []
    for _ in range(2):
        processes.append(os.fork())
        if processes[-1] == 0:
            status = WRONG
            try:
                os.write(told, b"!")
                os.read(wait, 1)
                status = work()
            finally:
                os._exit(status)
    (folder / "processes").write_text(" ".join(map(str, processes)), encoding="utf-8")
    for _ in processes:
        os.read(ready, 1)
    os.write(go, b"!!")
    ended = Counter(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)
    for end in (ready, told, wait, go):
        os.close(end)
    return ended


@pytest.mark.parametrize("on_existing", ["resume", "reuse"])
def test_two_processes_that_ask_at_the_same_moment_train_a_run_once(tmp_path, on_existing, pytestconfig):
    for number in range(THOROUGH if pytestconfig.getoption("thorough") else ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended = both(folder, partial(train, folder / "runs", on_existing, 0.8 * (number % 5 == 0)))
        assert ended[TRAINED] == 1 and ended[REUSED] + ended[REFUSED] == 1, ended
        assert (folder / "trained").read_text(encoding="utf-8") == "x"
        (run,) = find_runs(folder / "runs")
        assert run.result() and not run.busy()


def test_a_run_that_ends_while_its_lock_is_waited_for_is_reused(tmp_path):
    """The second process sees the run at work, waits a moment for its lock, and gets it: there is nothing to train."""

    def work() -> int:
        first = (tmp_path / "processes").read_text(encoding="utf-8").split()[0] == str(os.getpid())
        while not first and not (tmp_path / "trained").exists():
            time.sleep(0.001)  # the first one is at work from then on
        return train(tmp_path / "runs", "resume", PROBE / 2)

    ended = both(tmp_path, work)
    assert ended[TRAINED] == 1 and ended[REUSED] + ended[REFUSED] == 1, ended  # refused where the first one is slow


@pytest.mark.parametrize("on_existing", ["resume", "reuse"])
def test_a_run_that_ends_while_it_is_looked_at_is_not_trained_twice(tmp_path, on_existing, monkeypatch):
    """It has no result when it is looked at, and its process has ended a moment later."""
    first = ExitStack()
    choose = partial(choose_run, tmp_path, KEYS, 1, ExistingConfig(on_existing=on_existing), lambda run, step: Join())
    _, run, _, _ = first.enter_context(working_run(tmp_path, choose, KEYS, "name", 1, [].append, config={}))
    run.save(1, lambda folder: (folder / "weights.safetensors").touch(), stays=True)
    read = RunFolder.result

    def ends_after(looked_at: RunFolder) -> dict | None:
        monkeypatch.undo()
        seen = read(looked_at)
        run.finish({"step": 1})
        first.close()
        return seen

    monkeypatch.setattr(RunFolder, "result", ends_after)
    with working_run(tmp_path, choose, KEYS, "name", 1, [].append, config={}) as (choice, second, _, _):
        assert second.path == run.path
        assert choice.finished
    assert len(find_runs(tmp_path)) == 1


def test_train_again_makes_a_run_for_each(tmp_path):
    assert both(tmp_path, partial(train, tmp_path / "runs", "train again", 0.0)) == {TRAINED: 2}
    assert len(find_runs(tmp_path / "runs")) == 2
