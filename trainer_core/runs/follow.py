"""Follow a run that any process trains, from its folder alone; cheap enough to be asked every second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.files import open_file
from ..common.json_files import finite
from ..common.remaining import Remaining
from ..common.smooth import say_loss
from ..common.values import is_count, is_number, is_object, is_time
from ..common.wording import printable, say
from .folder import LOG, RunFolder, open_run, parse_line

TAIL = 2**16  # bytes of the log that are read, its end
MOST_POINTS = 200  # steps that are described at once, the newest
MOST_NUMBERS = 64  # learning rates, and concepts, of one step


def follow(path: Path, seen: int = 0) -> dict[str, Any]:
    """Describe a run at work, and the steps that it took after its log had `seen` bytes.

    alive: whether a process trains it. seen: for the next question. changed: whether there is more than steps and
    numbers: a save, samples, a note, or steps that are left out. Raises as `open_run` does, and OSError.
    """
    run = open_run(path)
    alive, since = run.at_work(), run.owned_since()
    lines, end = _tail(path / LOG)
    events = [(position, event) for position, event in lines if event["time"] >= since]
    steps = [event for _, event in events if event["event"] == "step"]
    losses = {event["step"]: float(event["loss"]) for _, event in lines if event["event"] == "step"}
    new = [event for position, event in events if position >= seen]
    points = [_point(event) for event in new if event["event"] == "step"][-MOST_POINTS:]
    at = steps[-1]["step"] if steps else 0
    cut = bool(lines) and lines[0][0] > seen
    return {
        "run": path.name,
        "name": printable(run.about["name"][:100]),
        "alive": alive,
        "followed": True,
        "step": at,
        "steps": run.steps,
        "text": say("step {0} of {1}", at, run.steps) if steps else say("preparing the run"),
        "details": [*_numbers(steps, run, losses), *([run.owner()] if run.owner() else [])],
        "points": points,
        "changed": cut or len(new) > len(points),
        "seen": end,
    }


def _tail(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Read the complete lines at the end of a log, each with its position in bytes, and where the next one begins."""
    try:
        with open_file(path) as file:
            start = max(0, file.seek(0, 2) - TAIL)
            file.seek(start)
            data = file.read(TAIL)
    except OSError:  # not there, or no file
        return [], 0
    return list(_lines(data, start)), start + data.rfind(b"\n") + 1


def _lines(data: bytes, position: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        event = parse_line(line)  # the first one may be cut off
        if event is not None and is_time(event.get("time")) and _is_event(event):
            yield position, event
        position += len(line)


def _is_event(event: Mapping[str, Any]) -> bool:
    if event.get("event") != "step":
        return isinstance(event.get("event"), str)
    return is_count(event.get("step")) and is_number(event.get("loss"))


def _point(event: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": event["step"],
        "loss": finite(event["loss"]),
        "rate": _named(event.get("lr")),
        "concepts": _named(event.get("concepts")),
    }


def _named(values: object) -> dict[str, float | None]:
    known = list(values.items())[:MOST_NUMBERS] if is_object(values) else []
    return {name: finite(value) for name, value in known if is_number(value)}


def _numbers(steps: Sequence[Mapping[str, Any]], run: RunFolder, losses: Mapping[int, float]) -> list[str]:
    """Write the time that is left, the speed and the loss, as events of a run in ComfyUI tell them.

    losses: by step, also of earlier processes, some of which went further.
    """
    remaining = Remaining()
    for step in steps:
        remaining.add(step["step"], step["time"])
    loss = [say_loss([losses[step] for step in sorted(losses) if step <= steps[-1]["step"]])] if steps else []
    return [*remaining.texts(run.steps), *loss]
