"""What is asked of a run through its folder, who works on it, and what its folder tells while it trains."""

import json
import math
import os
import platform
import time

import pytest
from run_folders import make_run

from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.runs import describe
from lora_atelier.trainer_core.runs.asked import PAUSE, SAID, Asked, ask
from lora_atelier.trainer_core.runs.folder import SILENT
from lora_atelier.trainer_core.runs.follow import TAIL, follow

pytestmark = pytest.mark.usefixtures("as_windows")  # which refuses more than any other system does


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs", "moss")


def own_from(run, host, age):
    """Let a process of a machine own the run, whose last sign of life was some seconds ago."""
    owner = run.path / "owner.json"
    write_json(owner, {"pid": 7, "host": host, "since": time.time() - age})
    os.utime(owner, (time.time() - age,) * 2)


def test_what_is_asked_is_taken_once_and_nothing_else(run):
    now = [0.0]
    asked = Asked(run.path, lambda: now[0])
    assert not asked.take()
    for word in SAID:
        ask(run.path, word)
        ask(run.path, word)  # pressed twice
    (run.path / "asked-dance").touch()
    assert not asked.take()  # it looked a moment ago
    now[0] += PAUSE
    assert set(asked.take()) == set(SAID)
    now[0] += PAUSE
    assert not asked.take()
    assert (run.path / "asked-dance").exists()


def test_a_link_in_the_place_of_a_wish_leads_nowhere(run, tmp_path):
    other = tmp_path / "other"
    (run.path / "asked-stop").symlink_to(other)
    ask(run.path, "stop")
    assert not other.exists()
    other.write_text("mine")
    assert set(Asked(run.path).take()) == {"stop"} and other.read_text() == "mine"


def test_what_was_asked_before_a_process_took_the_run_up_is_forgotten(run):
    ask(run.path, "stop")
    with run.locked():
        assert not Asked(run.path).take()
        ask(run.path, "save")
        assert set(Asked(run.path).take()) == {"save"}


def test_a_folder_that_is_gone_asks_nothing(tmp_path):
    assert not Asked(tmp_path / "gone").take()


def test_a_process_elsewhere_counts_for_a_while_after_its_last_sign_of_life(run):
    assert not run.at_work()
    with run.locked():
        assert run.at_work()
    assert not run.at_work()
    own_from(run, "another", SILENT / 2)
    assert run.at_work() and not run.busy() and describe(run.path)["status"] == "running"
    own_from(run, "another", 2 * SILENT)
    assert not run.at_work()
    own_from(run, platform.node(), 0)  # killed: here the lock would tell of it
    assert not run.at_work()


def test_signs_of_life_are_given_between_steps(run, monkeypatch):
    monkeypatch.setattr("lora_atelier.trainer_core.runs.folder.BEAT", 0.01)
    with run.locked():
        owner = run.path / "owner.json"
        os.utime(owner, (1, 1))
        while owner.stat().st_mtime == 1:
            time.sleep(0.01)


def test_a_follower_sees_each_step_once(run):
    run.log("step", step=1, loss=9.0, lr={"unet": 1.0})  # of a process before
    with run.locked():
        assert follow(run.path)["text"] == "preparing the run"
        seen = follow(run.path)["seen"]
        for step in (1, 2, 3):
            run.log("step", step=step, loss=1 / step, lr={"unet": 1e-4}, concepts={"cat": math.nan})
        state = follow(run.path, seen)
        assert state["alive"] and (state["step"], state["steps"], state["text"]) == (3, 8, "step 3 of 8")
        assert state["points"][0] == {"step": 1, "loss": 1.0, "rate": {"unet": 1e-4}, "concepts": {"cat": None}}
        assert [point["step"] for point in state["points"]] == [1, 2, 3] and not state["changed"]
        assert "mean loss 0.6111 (last 3 steps)" in state["details"] and any(
            "left" in each for each in state["details"]
        )
        assert state["details"][-1].startswith(f"process {os.getpid()} on ")
        json.dumps(state, allow_nan=False)
        with (run.path / "log.jsonl").open("ab") as log:
            log.write(b'{"event": "step", "st')  # being written now
        assert not follow(run.path, state["seen"])["points"] and follow(run.path, state["seen"])["step"] == 3
        run.log("saved", step=3)
        assert follow(run.path, state["seen"])["changed"]
    assert not follow(run.path)["alive"]


def test_a_follower_reads_only_the_end_of_a_log(run):
    with run.locked():
        for step in range(1, 4):
            run.log("step", step=step, loss=1.0, lr={}, more="x" * (TAIL // 2))
        state = follow(run.path, 1)
        assert [point["step"] for point in state["points"]] == [3] and state["changed"]


@pytest.mark.parametrize("line", [b"5", b"[]", b'{"event": 5, "time": 1}', b'{"event": "step", "time": "x"}', b"\xff"])
def test_a_follower_passes_over_damaged_lines(run, line):
    (run.path / "log.jsonl").write_bytes(line + b"\n")
    with run.locked():
        assert follow(run.path)["step"] == 0
