"""Describe runs as plain JSON values, for lists in the browser and the shell; unreadable runs come with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from ..common.files import folder_size
from ..common.smooth import MEAN_OF, mean_loss, say_loss
from ..common.values import is_count, is_number, is_object, is_text, is_texts, is_time, read_object, unfit
from ..common.wording import printable, say
from .clean import clearable, end_of
from .detail import LONGEST, files_of, last_part, nodes_of, sample_files, settings_of, thumbnail_of
from .folder import (
    CHECKPOINT,
    CHECKPOINTS,
    FILES,
    HISTORY,
    LOG,
    LORAS,
    OWNER,
    PARTS,
    PUBLISHED,
    RESULT,
    RUN,
    WEIGHTS,
    WORKFLOW,
    Checkpoint,
    RunFolder,
    is_elsewhere,
    open_run,
)

POINTS = 2000  # maximum of the loss's curve
FEWER = 500  # maximum of each other curve
MOST_CURVES = 32  # concepts, and learning rates, that have one
MOST_NOTES, LONGEST_NOTE = 100, 10_000  # notes, characters of one
MOST_PROMPTS, LONGEST_PROMPT = 64, 500  # prompts of the samples, characters of one
MOST_SAVES = 1000  # that are looked at, the newest
MOST_ODD = 20  # pictures that are named
MOST_COPIES = 100  # files of a save, and copies in other folders


def run_paths(runs: Path) -> list[Path]:
    """List the folders of runs, also of damaged ones, by name; raises OSError if `runs` cannot be read."""
    paths = runs.iterdir() if runs.is_dir() else ()
    return sorted(path for path in paths if not path.name.startswith(".") and _is_run(path))


def list_runs(runs: Path, roots: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Describe all runs, the last changed first; roots: as for `describe`."""
    return sorted((describe(path, roots) for path in run_paths(runs)), key=lambda run: (-run["changed"], run["run"]))


def describe(path: Path, roots: Sequence[Path] = (), *, verify: bool = False) -> dict[str, Any]:
    """Describe the run in a folder; times in seconds since 1970, sizes in bytes, unknown values None.

    The description holds no path of the machine: files outside the run's folder are named relative to one of `roots`.
    verify: compute each save's `problem`, "" if all its files are sound.
    """
    return _describe(path, roots, verify=verify, curves=False)


def describe_in_detail(path: Path, roots: Sequence[Path] = ()) -> dict[str, Any]:
    """Describe a run as `describe` does, with best step, notes, prompts, settings, files, and thinned curves.

    curves: loss, validation, rate by group, concepts by name and validation losses by noise level, each a list of
    [step, value]; a part of the loss that stands for several steps is [last step, mean, lowest, highest]. The notes and
    the reason of a failure may name full paths.
    """
    return _describe(path, roots, verify=False, curves=True)


def signature(path: Path) -> tuple[object, ...] | None:
    """Read what changes with every change of a run that `describe` tells of; None while a process may train it."""
    if (path / OWNER).exists():
        return None
    try:
        inner = (each for name in (CHECKPOINTS, LORAS) for each in (path / name).glob("*"))
        paths = [path, *(path / name for name in PARTS), *inner]
        return tuple(_stamp(each) for each in paths)
    except OSError:  # nothing can be said of it: look anew each time
        return None


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def published_files(run: RunFolder) -> list[str]:
    """List the paths of a run's copies in the folders of LoRAs and embeddings, as they were when copied."""
    known = (read_object(run.path / PUBLISHED) or {}).values()
    entries = (each for files in known if isinstance(files, list) for each in files if isinstance(each, list))
    return list(dict.fromkeys(each[0] for each in entries if each and is_text(each[0])))


def _describe(path: Path, roots: Sequence[Path], *, verify: bool, curves: bool) -> dict[str, Any]:
    unknown = ("name", "key", "created", "base_model", "rank", "pictures", "begun_with", "finished", "saved", "seconds")
    described: dict[str, Any] = dict.fromkeys((*unknown, "loss", "validation", "step", "steps", "thumbnail"))
    described |= {"run": path.name, "status": "unreadable", "clearable": 0, "saves": [], "samples": [], "published": []}
    described |= {
        "changed": _changed(path),
        "size": folder_size(path),
        "title": "",
        "workflow": False,
        "loss_words": "",
    }
    described |= (
        {"curves": None, "best": None, "notes": [], "prompts": [], "settings": {}, "nodes": [], "files": [], "odd": []}
        if curves
        else {}
    )
    try:
        if is_elsewhere(path, path.parent):
            raise ValueError(f"{path.name} is a link to another folder; move that folder here, or delete the link.")
        run = open_run(path)
        checkpoints = run.checkpoints(MOST_SAVES)
        described |= _about(run) | _state(run, checkpoints, curves=curves)
        described |= _files(run, checkpoints, roots, verify=verify)
        if curves:
            described |= {"prompts": _prompts(run), "settings": settings_of(run), "files": files_of(run)}
            described["odd"] = [
                {name: text[:LONGEST] for name, text in each.items()} for each in run.odd_pictures()[:MOST_ODD]
            ]
            described["nodes"] = nodes_of(run, described["settings"])
    except ValueError as error:  # of another format, or damaged
        described["sentence"] = str(error)
    except OSError as error:
        described["sentence"] = f"{path.name} cannot be read ({error.strerror}); check its permissions and the disk."
    return _plain(described)


def _about(run: RunFolder) -> dict[str, Any]:
    about = run.about
    base_model, lora = about["config"].get("base_model"), about["config"].get("lora")
    path = base_model.get("path") if isinstance(base_model, dict) else None
    rank = lora.get("rank") if isinstance(lora, dict) else None
    return {
        **{name: about[name] for name in ("created", "steps")},
        **{name: printable(about[name][:LONGEST]) for name in ("name", "key")},
        "base_model": last_part(path) if is_text(path) else None,
        "rank": rank if is_count(rank) else None,
        "seconds": run.seconds(),
        "pictures": about["pictures"] if is_count(about.get("pictures")) else None,
        "begun_with": _origin(about.get("begun_with")),
        "title": run.title(),
        "workflow": (run.path / WORKFLOW).is_file(),
        "thumbnail": (picture := thumbnail_of(run)) and picture.name,
    }


def _origin(begun_with: Any) -> dict[str, Any] | None:
    """Describe the run and the step that a run started from."""
    if not is_object(begun_with) or unfit(begun_with, {"run": is_text, "step": is_count}):
        return None
    return {"run": printable(begun_with["run"][:LONGEST]), "step": begun_with["step"]}


def _state(run: RunFolder, checkpoints: Sequence[Checkpoint], *, curves: bool) -> dict[str, Any]:
    """Describe the status and progress of a run, and its losses up to there."""
    result = run.result() or {}
    saved = checkpoints[0].step if checkpoints else 0
    events = list(run.events(None if curves else MEAN_OF))
    if run.at_work():
        status, step = "running", _step_now(run, events, saved)
        sentence = say("Training: step {0} of {1}.", step, run.steps)
    elif result:
        status, step = "finished", result["step"]
        sentence = say("Finished after {0} step.", step) if step == 1 else say("Finished after {0} steps.", step)
        if end_of(run, checkpoints) is None:
            sentence = say("Finished, but the save of its last step {0} is missing.", step)
        elif step != run.steps:
            sentence = say("Finished early, after step {0} of {1}.", step, run.steps)
    elif checkpoints:
        status, step = "stopped", saved
        sentence = say("Stopped after step {0} of {1}; run the same workflow again to resume it.", step, run.steps)
    else:
        status, step, sentence = "empty", 0, say("Nothing is saved yet.")
    ended, failure = _read_end(events) if status in ("stopped", "empty") else ("", "")
    if status == "stopped" and ended == "paused":
        sentence = say("Paused after step {0} of {1}.", step, run.steps)
    elif ended == "failed" and curves:  # the reason may name a full path, which lists do not
        sentence = failure
    elif status == "stopped" and ended == "failed":
        sentence = say("An error stopped it after step {0} of {1}; the run's page has the reason.", step, run.steps)
    state = {"status": status, "step": step, "sentence": sentence, "finished": result.get("finished")}
    state |= {"failed": bool(failure), "paused": ended == "paused"}
    losses, validation = _read_curves(events, step)
    if not curves and len(losses) < min(MEAN_OF, step):  # the run went back to a save, or it began with one
        losses, validation = _read_curves(run.events(), step)
    if curves or len(losses) < min(MEAN_OF, step):
        for checkpoint in checkpoints[:1]:  # steps before the log begins, of the run it started from
            before, measured = _read_history(checkpoint)
            losses, validation = before | losses, measured | validation
    if curves:
        groups = {"rate": ("step", "lr"), "concepts": ("step", "concepts"), "levels": ("validation", "levels")}
        found = {name: _read_groups(events, step, *keys) for name, keys in groups.items()}
        state["curves"] = {
            "loss": thin(losses, spread=True),
            "validation": thin(validation, FEWER),
            **{name: {key: thin(each, FEWER) for key, each in group.items()} for name, group in found.items()},
        }
        finite = [step for step, loss in validation.items() if math.isfinite(loss)]
        state |= {"best": min(finite, key=lambda step: validation[step], default=None), "notes": _read_notes(events)}
    last, ordered = max(validation, default=None), [losses[step] for step in sorted(losses)]
    return state | {
        "loss": mean_loss(ordered),
        "loss_words": say_loss(ordered),
        "validation": None if last is None else {"step": last, "loss": validation[last]},
    }


def _files(run: RunFolder, checkpoints: Sequence[Checkpoint], roots: Sequence[Path], *, verify: bool) -> dict[str, Any]:
    described = {checkpoint.path: _save(checkpoint, verify=verify) for checkpoint in checkpoints}
    described |= {path: _broken_save(path) for path in run.saves()[:MOST_SAVES] if path not in described}
    saved = {save["step"] for save in described.values()}
    described |= {each.path: _save(each, verify=verify) for each in run.sampled() if each.step not in saved}
    saves = [save for path, save in described.items() if path.is_dir()]  # check again: a run in progress removes saves
    return {
        "saves": sorted(saves, key=lambda save: save["step"])[-MOST_SAVES:],
        "saved": max((save["written"] for save in saves if save["written"] is not None), default=None),
        "samples": [path.name for path in sample_files(run)],
        "published": [relative_name(PurePath(file), roots) for file in published_files(run)[:MOST_COPIES]],
        "clearable": sum(each.size for each in clearable(run, end_of(run, checkpoints), checkpoints)),
    }


def _save(checkpoint: Checkpoint, *, verify: bool) -> dict[str, Any]:
    about = {name: getattr(checkpoint, name) for name in ("step", "written", "stays")}
    files = [{"name": name, "size": known["size"]} for name, known in checkpoint.files.items()][:MOST_COPIES]
    about |= {"size": folder_size(checkpoint.path), "files": files, "lora": FILES in checkpoint.files}
    about["resumes"] = WEIGHTS in checkpoint.files
    return about | ({"problem": checkpoint.problem()} if verify else {})


def _broken_save(path: Path) -> dict[str, Any]:
    about = {"step": int(path.name.rpartition("-")[2]), "size": folder_size(path), "written": None, "stays": False}
    return about | {"files": [], "lora": False, "resumes": False, "problem": f"{CHECKPOINT} is missing or damaged"}


def relative_name(path: PurePath, roots: Sequence[Path]) -> str:
    """Name a file relative to the one of `roots` that holds it, else by its plain name."""
    for root in roots:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return last_part(str(path))


def _step_now(run: RunFolder, events: Sequence[Mapping[str, Any]], saved: int) -> int:
    """Find the step that a running process has reached; older log lines may be of a killed process that was further."""
    since = run.owned_since()
    steps = [event["step"] for event in events if _is_step(event) and event["time"] >= since]
    return steps[-1] if steps else saved


def _read_curves(events: Iterable[Mapping[str, Any]], end: int) -> tuple[dict[int, float], dict[int, float]]:
    """Read losses and validation losses by step, up to step `end`; of a repeated step the last line counts."""
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    for event in events:
        step, loss, kind = event.get("step"), event.get("loss"), event.get("event")
        if kind in ("step", "validation") and is_count(step) and step <= end and is_number(loss):
            (losses if kind == "step" else validation)[step] = float(loss)
    return losses, validation


def _read_groups(events: Iterable[Mapping[str, Any]], end: int, kind: str, field: str) -> dict[str, dict[int, float]]:
    """Read the numbers by step, up to step `end`, that each line of a kind holds by name in a field."""
    curves: dict[str, dict[int, float]] = {}
    for event in events:
        named, step = event.get(field), event.get("step")
        if event.get("event") == kind and is_count(step) and step <= end and isinstance(named, dict):
            for name, value in named.items():
                if is_number(value) and (name in curves or len(curves) < MOST_CURVES):
                    curves.setdefault(name, {})[step] = float(value)
    return curves


def _read_end(events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Find how the last process ended that trained the run: "paused", "failed" with the reason, or "" with ""."""
    for event in reversed(events):
        kind, text = event.get("event"), event.get("text")
        if kind == "failed":
            return ("failed", printable(text[:LONGEST_NOTE])) if is_text(text) and text else ("", "")
        if kind in ("step", "begun", "paused"):
            return ("paused", "") if kind == "paused" else ("", "")
    return "", ""


def _read_notes(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Read the notes since a process last took the run up."""
    notes: list[str] = []
    for event in events:
        if event.get("event") == "begun":
            notes.clear()
        elif event.get("event") == "note" and is_text(event.get("text")):
            notes.append(event["text"][:LONGEST_NOTE])
    return notes[-MOST_NOTES:]


def _prompts(run: RunFolder) -> list[str]:
    sample = run.about["config"].get("sample")
    prompts = sample.get("prompts") if isinstance(sample, dict) else None
    listed = prompts if isinstance(prompts, list) and is_texts(prompts) else []
    return [_without_switches(text)[:LONGEST_PROMPT] for text in listed[:MOST_PROMPTS]]


def _without_switches(text: str) -> str:
    """Read the prompt of a line; a line that this version cannot read is shown as it is."""
    from ..config.prompt_lines import parse_line  # imported here, so that lists of runs need no image library

    try:
        return parse_line(text, "a prompt").prompt
    except ValueError:
        return text


def _read_history(checkpoint: Checkpoint) -> tuple[dict[int, float], dict[int, float]]:
    """Read losses and validation losses by step from a save; empty if its files are damaged or just removed."""
    from ..common.tensor_tree import DISK_ERRORS, load_state  # imported here, so that lists of runs need no torch

    if checkpoint.problem(HISTORY):
        return {}, {}
    try:
        history = load_state(checkpoint.path / HISTORY)
        validation = {int(step): float(loss) for step, loss in history["validation"]}
        return dict(enumerate(map(float, history["losses"].tolist()), 1)), validation
    except (*DISK_ERRORS, ValueError, KeyError, TypeError, AttributeError, OverflowError):  # a history of a stranger
        return {}, {}


def thin(curve: Mapping[int, float], most: int = POINTS, *, spread: bool = False) -> list[list[float | None]]:
    """List a curve as [step, value] in order; above `most` steps average equal parts, each at its last step.

    spread: append the lowest and the highest finite value of each part.
    """
    steps = sorted(curve)
    size = max(1, math.ceil(len(steps) / most))
    points: list[list[float | None]] = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        finite = [curve[step] for step in part if math.isfinite(curve[step])]
        ends = [min(finite), max(finite)] if spread and size > 1 and finite else []
        points.append([part[-1], _mean(finite), *ends])
    return points


def _mean(values: Sequence[float]) -> float | None:
    """Compute the mean of the finite values; None without any."""
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
    except OSError:  # no permission: list it, with this reason
        return True


def _is_step(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "step" and is_count(event.get("step")) and is_time(event.get("time"))


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by None, so that every JSON reader accepts the values."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
