"""Runs whose process is killed, at whatever moment, come to what they would have come to: the same to the last byte."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import sessions

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that are killed here are forked: Unix only")

KILLS, THOROUGH = 13, 46  # at moments that are counted
UNCOUNTED = 1  # at times that nobody counts
HOURS = 3600.0


class Server:
    """A process with everything imported, from which each session is forked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = sessions.make_scene(folder / "scene")
        context = multiprocessing.get_context("spawn")  # other tests may have started autograd's threads in this one
        self.asked, theirs = context.Pipe()
        self.process = context.Process(target=sessions.serve, args=(theirs, config), daemon=True)
        self.process.start()
        theirs.close()

    def session(self, name: str, **job: object) -> int:
        """Run a session in a folder; return how its process has ended, below 0 by which signal."""
        self.asked.send({"folder": str(self.folder / name), "clock": sessions.CLOCK, **job})
        return self.asked.recv()

    def answer(self, name: str) -> dict:
        """Return what the last session in a folder has come to."""
        return json.loads((self.folder / name / "answer.json").read_text(encoding="utf-8"))

    def created(self, name: str) -> bool:
        """Tell whether the run in a folder has its run.json, under its final name."""
        return any(self.folder.glob(f"{name}/loras/runs/[!.]*/run.json"))

    def saved(self, name: str) -> bool:
        """Tell whether the run in a folder has a save and is not finished, so that the next session resumes it."""
        runs = self.folder.glob(f"{name}/loras/runs/[!.]*")
        return any(
            any(run.glob("checkpoints/step-*/checkpoint.json")) and not (run / "result.json").exists() for run in runs
        )

    def files(self, name: str) -> list[str]:
        """Return the names of all LoRA files that there are now."""
        return sorted(path.name for path in (self.folder / name / "loras").glob("*.safetensors"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("kills"))
    yield server
    server.asked.send(None)
    server.process.join()


@pytest.fixture(scope="module")
def whole(server):
    """Give what a run comes to that nobody disturbs, and its moments."""
    assert server.session("whole") == 0
    return server.answer("whole") | {"names": server.files("whole")}


def chosen_moments(moments: list[list[str]], count: int, dice: random.Random) -> list[tuple[int, str]]:
    """Draw moments so that every part of a session has its turn, and in it every operation; (number, when)."""
    parts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, (operation, part, _) in enumerate(moments):
        parts[part][operation].append(number)
    drawn: list[tuple[int, str]] = []
    turns = {part: dice.sample(sorted(operations), len(operations)) for part, operations in sorted(parts.items())}
    while len(drawn) < count:
        for part, operations in turns.items():
            operation = operations[0]
            operations.append(operations.pop(0))
            number = dice.choice(parts[part][operation])
            drawn.append((number, dice.choice(["before", moments[number][2]])))
    return drawn[:count]


@pytest.mark.parametrize("place", [("publishing", "save_file", "half"), ("encoding", "open", "half")])
def test_a_process_that_is_killed_while_it_writes_leaves_nothing_for_good(server, whole, place):
    part, operation, when = place
    moments = [number for number, moment in enumerate(whole["moments"]) if moment[:2] == [operation, part]]
    name = f"left-{part}-{operation}"
    assert server.session(name, kill=(moments[-1], when, signal.SIGKILL)) == -signal.SIGKILL
    folder = server.folder / name
    shared = folder / ("cache" if part == "encoding" else "loras")
    assert unfinished(shared)
    others = [shared / f".{'0' * 8}-1-{'0' * 16}.tmp", shared / ".mine.tmp"]
    for other in others:
        other.write_bytes(b"of another machine, and of another program")
    assert server.session(name) == 0
    assert sorted(unfinished(folder)) == sorted(others)


def unfinished(folder: Path) -> list[Path]:
    """List the unfinished files in a folder and those below."""
    return list(folder.rglob(".*.tmp"))


@pytest.mark.parametrize("half", [0, 1])  # of the moments, so that two processes share them
def test_runs_that_are_killed_at_any_moment_end_with_the_same_bytes(server, whole, half, pytestconfig):
    dice = random.Random(6)
    moments, wrong, resumed = whole["moments"], [], 0
    count = THOROUGH if pytestconfig.getoption("thorough") else KILLS
    kills = [{"kill": (*moment, signal.SIGKILL)} for moment in chosen_moments(moments, count, dice)]
    kills += [{"after": dice.uniform(0.05, 0.9) * whole["seconds"]} for _ in range(UNCOUNTED)]
    parts = {moments[job["kill"][0]][1] for job in kills if "kill" in job}
    needed = {"a periodic save", "an asked save", "the final save", "samples", "the last samples", "publishing"}
    assert needed | {"result.json", "pruning", "the log", "encoding", "the folder"} <= parts
    dice = random.Random(f"half {half}")
    for number, job in list(enumerate(kills))[half::2]:
        name = f"run-{number}"
        ended = [server.session(name, **job)]
        assert ended == [-signal.SIGKILL] or "after" in job
        if number % 5 == 0:  # killed once more, with the clock set back where that is not when the run began
            back = dice.uniform(1, 10) * HOURS if server.created(name) else 0
            again = (dice.randrange(len(moments) // 2), "before", signal.SIGKILL)
            server.session(name, kill=again, clock=sessions.CLOCK - back)
        # On another day where the run is there already: nothing of a file is taken from the moment of its writing.
        later, saved = 30 * HOURS if server.created(name) else 0, server.saved(name)
        ended.append(server.session(name, clock=sessions.CLOCK + later))
        found = server.answer(name) if ended[-1] == 0 else {}
        left = unfinished(server.folder / name)
        resumed += saved
        anew = saved and "was interrupted" not in found.get("how", "")
        if not found or anew or found["left"] != whole["left"] or server.files(name) != whole["names"] or left:
            wrong.append((number, job, moments[job["kill"][0]] if "kill" in job else "", ended, server.files(name)))
        else:
            shutil.rmtree(server.folder / name)
    assert not wrong, f"{len(wrong)} of {len(kills)}: {wrong}"
    assert resumed  # of the kills that nobody counts it is chance how many come after the first save


def test_a_process_that_is_terminated_leaves_what_a_killed_one_does(server, whole):
    at = [number for number, (operation, *_) in enumerate(whole["moments"]) if operation == "step"][2]
    assert server.session("terminated", kill=(at, "before", signal.SIGTERM)) == -signal.SIGTERM
    assert server.session("terminated") == 0
    answer = server.answer("terminated")
    assert answer["left"] == whole["left"] and answer["steps"] == [3, 4]
    assert "(process " in answer["how"]


@pytest.mark.thorough
@pytest.mark.parametrize("megabytes", [1, 15, 16, 48, 96, 160, 256])
def test_a_process_that_gets_no_more_memory_spoils_nothing(server, whole, megabytes):
    name = f"room-{megabytes}"
    assert server.session(name, room=megabytes << 20) in (0, 1)
    assert server.session(name) == 0 and server.answer(name)["left"] == whole["left"]
    assert not unfinished(server.folder / name)
