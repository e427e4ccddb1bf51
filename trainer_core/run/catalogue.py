"""What is told of runs, as plain JSON values; one that cannot be read is told of as well, and says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from ..files import folder_size
from .clean import clearable, end_of
from .folder import (
    CHECKPOINT,
    CHECKPOINTS,
    COURSE,
    LOG,
    OWNER,
    PUBLISHED,
    RESULT,
    RUN,
    SAMPLES,
    Checkpoint,
    RunFolder,
    open_run,
    read_json,
)

POINTS = 2000  # most of a curve
RECENT = 50  # steps whose mean is told as the loss


def run_paths(runs: Path) -> list[Path]:
    """Return the folders that are runs, or hold what is left of one, by name; OSError for a folder nobody may read."""
    paths = runs.iterdir() if runs.is_dir() else ()
    return sorted(path for path in paths if not path.name.startswith(".") and _is_run(path))


def list_runs(runs: Path, roots: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Describe all runs, the one that changed last first; roots: as for `describe`."""
    return sorted((describe(path, roots) for path in run_paths(runs)), key=lambda run: (-run["changed"], run["run"]))


def describe(path: Path, roots: Sequence[Path] = (), *, verify: bool = False) -> dict[str, Any]:
    """Describe the run in a folder; times are seconds since the epoch, sizes bytes, and what is not known is None.

    No path of the machine is told: files outside the folder have names relative to the one of `roots` they lie in.
    verify: each save gets its `problem`, empty when all its files are as they were written.
    """
    return _describe(path, roots, verify=verify, curves=False)


def describe_in_detail(path: Path, roots: Sequence[Path] = ()) -> dict[str, Any]:
    """Describe a run as `describe` does, and its curves: [step, value] of loss and validation, each thinned."""
    return _describe(path, roots, verify=False, curves=True)


def published_files(run: RunFolder) -> list[str]:
    """Return the paths of a run's copies in the folders of LoRAs and words, as they were when they were made."""
    known = (read_json(run.path / PUBLISHED) or {}).values()
    entries = (each for files in known if isinstance(files, list) for each in files if isinstance(each, list))
    return list(dict.fromkeys(each[0] for each in entries if each and isinstance(each[0], str)))


def _describe(path: Path, roots: Sequence[Path], *, verify: bool, curves: bool) -> dict[str, Any]:
    unknown = ("name", "key", "created", "base_model", "pictures", "begun_with", "finished", "saved", "loss")
    told: dict[str, Any] = dict.fromkeys((*unknown, "validation", "step", "steps"))
    told |= {"run": path.name, "status": "unreadable", "clearable": 0, "saves": [], "samples": [], "published": []}
    told |= {"changed": _changed(path), "size": folder_size(path)} | ({"curves": None} if curves else {})
    try:
        run = open_run(path)
        told |= _about(run) | _state(run, curves=curves) | _files(run, roots, verify=verify)
    except ValueError as error:  # of another format, or damaged
        told["sentence"] = str(error)
    except OSError as error:
        told["sentence"] = f"{path.name} cannot be read ({error.strerror}); check the permissions and the disk."
    return _plain(told)


def _about(run: RunFolder) -> dict[str, Any]:
    about = run.about
    base_model, begun_with = about["config"].get("base_model"), about.get("begun_with")
    place = base_model.get("path") if isinstance(base_model, dict) else None
    return {
        **{name: about[name] for name in ("name", "key", "created", "steps")},
        "base_model": PureWindowsPath(place).name if isinstance(place, str) else None,  # of either system's paths
        "pictures": about.get("pictures"),
        "begun_with": begun_with if isinstance(begun_with, dict) else None,
    }


def _state(run: RunFolder, *, curves: bool) -> dict[str, Any]:
    """Tell how far a run is, and its losses up to there."""
    checkpoints, result = run.checkpoints(), run.result() or {}
    saved = checkpoints[0].step if checkpoints else 0
    events = list(run.events(None if curves else RECENT))
    if run.busy():
        status, step = "running", _step_now(run, events, saved)
        sentence = f"It is being trained: step {step} of {run.steps}."
    elif result:
        status, step = "finished", result["step"] if isinstance(result.get("step"), int) else 0
        sentence = f"Finished after {step} steps."
        if end_of(run) is None:
            sentence = f"Finished, but the save of step {step}, which is its result, is not there."
        elif step != run.steps:
            sentence = f"Finished early, after step {step} of {run.steps}."
    elif checkpoints:
        status, step = "stopped", saved
        sentence = f"Stopped after step {step} of {run.steps}; queue the same again to go on from there."
    else:
        status, step, sentence = "empty", 0, "Nothing of it is saved yet."
    told = {"status": status, "step": step, "sentence": sentence, "finished": result.get("finished")}
    losses, validation = _read_curves(events, step)
    if curves:
        for checkpoint in checkpoints[:1]:  # what was trained before the log begins, in a run it went on from
            before, measured = _read_course(checkpoint)
            losses, validation = before | losses, measured | validation
        told["curves"] = {"loss": thin(losses), "validation": thin(validation)}
    last = max(validation, default=None)
    return told | {
        "loss": _mean([losses[step] for step in sorted(losses)[-RECENT:]]),
        "validation": None if last is None else {"step": last, "loss": validation[last]},
    }


def _files(run: RunFolder, roots: Sequence[Path], *, verify: bool) -> dict[str, Any]:
    checkpoints, folders = run.checkpoints(), run.saves()
    told = {checkpoint.path: _save(checkpoint, verify=verify) for checkpoint in checkpoints}
    told |= {path: _broken_save(path) for path in folders if path not in told}
    saves = [save for path, save in told.items() if path.is_dir()]  # still: a run that goes on removes saves
    samples = run.path / SAMPLES
    return {
        "saves": sorted(saves, key=lambda save: save["step"]),
        "saved": max((save["written"] for save in saves if save["written"] is not None), default=None),
        "samples": sorted(path.name for path in samples.glob("[!.]*")) if samples.is_dir() else [],
        "published": [_told(PurePath(file), roots) for file in published_files(run)],
        "clearable": sum(each.size for each in clearable(run, end_of(run))),
    }


def _save(checkpoint: Checkpoint, *, verify: bool) -> dict[str, Any]:
    about = {name: getattr(checkpoint, name) for name in ("step", "written", "stays")}
    files = [{"name": name, "size": known["size"]} for name, known in checkpoint.files.items()]
    about |= {"size": folder_size(checkpoint.path), "files": files}
    return about | ({"problem": checkpoint.problem()} if verify else {})


def _broken_save(path: Path) -> dict[str, Any]:
    about = {"step": int(path.name.rpartition("-")[2]), "size": folder_size(path), "written": None, "stays": False}
    return about | {"files": [], "problem": f"{CHECKPOINT} is missing or damaged"}


def _told(path: PurePath, roots: Sequence[Path]) -> str:
    """Return a file's name relative to the folder it is looked for in, else its plain name."""
    for root in roots:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return PureWindowsPath(path).name


def _step_now(run: RunFolder, events: Sequence[Mapping[str, Any]], saved: int) -> int:
    """Return the last step of whoever trains a run now: lines of its log may be of one who was cut off further on."""
    since = (read_json(run.path / OWNER) or {}).get("since", 0)
    steps = [event["step"] for event in events if _is_step(event) and event.get("time", 0) >= since]
    return steps[-1] if steps else saved


def _read_curves(events: Iterable[Mapping[str, Any]], end: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return loss and validation loss by step up to one; steps that were taken again count as the last time."""
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    for event in events:
        step, loss, kind = event.get("step"), event.get("loss"), event.get("event")
        if kind in ("step", "validation") and isinstance(step, int) and step <= end and isinstance(loss, (int, float)):
            (losses if kind == "step" else validation)[step] = loss
    return losses, validation


def _read_course(checkpoint: Checkpoint) -> tuple[dict[int, float], dict[int, float]]:
    """Return loss and validation loss by step up to a save; none when they are damaged, which `verify` tells."""
    from ..state import load_state  # here, so that runs are listed without torch

    with suppress(FileNotFoundError):  # the run that goes on may remove it at any time
        if not checkpoint.problem(COURSE):
            course = load_state(checkpoint.path / COURSE)
            return dict(enumerate(course["losses"].tolist(), 1)), dict(course["validation"])
    return {}, {}


def thin(curve: Mapping[int, float], most: int = POINTS) -> list[list[float | None]]:
    """Return [step, value] of a curve, in order; of more than `most` steps the means of equal parts, at their ends."""
    steps = sorted(curve)
    size = max(1, math.ceil(len(steps) / most))
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [[part[-1], _mean([curve[step] for step in part])] for part in parts]


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of what is finite, None where nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def _changed(path: Path) -> float:
    times = [0.0]
    for name in ("", RUN, LOG, RESULT, CHECKPOINTS):
        with suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and any((path / name).exists() for name in (RUN, RESULT, LOG, CHECKPOINTS))
    except OSError:  # no permission: it is listed, and says so
        return True


def _is_step(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "step" and isinstance(event.get("step"), int)


def _plain(value: Any) -> Any:
    """Return plain values that every reader of JSON takes: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
