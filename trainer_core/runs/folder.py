"""The folder of one run: read and write its configuration, saves, log and result, all of them atomically.

run.json                 keys, name and configuration
log.jsonl                one line for each step, validation and event
summary.txt              a short summary for people
checkpoints/step-…/      each save: weights, optimizer, the LoRA in its final form, checkpoint.json with all digests
samples/                 pictures drawn during and after training
result.json              the step of the last save and the samples, once the run is finished
lock, owner.json         the process that trains the run
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..common.files import (
    TEMPORARY,
    file_digest,
    folder_size,
    reason,
    remove_folder,
    remove_leftovers,
    unused_path,
    write_json,
    written_folder,
    written_whole,
)
from .key import FORMAT, SHOWN, Keys

RUN, RESULT, LOG, SUMMARY = "run.json", "result.json", "log.jsonl", "summary.txt"
CHECKPOINTS, SAMPLES, CHECKPOINT = "checkpoints", "samples", "checkpoint.json"
LOCK, OWNER = "lock", "owner.json"
WEIGHTS, OPTIMIZER, LORA = "weights.safetensors", "optimizer.safetensors", "lora"
HISTORY = "history.safetensors"  # in a save: losses and validation losses
FILES = "files.json"  # in a save: the list of its LoRA files
PUBLISHED = "published.json"  # in a run's folder: copies of its files in other folders
PROBE = 0.5  # seconds to wait for the lock, which `busy` may hold for a moment
_STEP = re.compile(r"step-(\d{8,})")
_STEP_LINE = b'{"event": "step"'  # start of a step's line in the log


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One save of a run, as its checkpoint.json describes it."""

    path: Path
    step: int  # steps finished
    stays: bool  # kept when newer saves are written
    written: float  # seconds since 1970
    files: Mapping[str, Mapping[str, Any]]  # size and sha256 of each file, by its path in the folder

    @property
    def size(self) -> int:
        """Count the bytes of its files."""
        return sum(known["size"] for known in self.files.values())

    def problem(self, *names: str) -> str:
        """Check its files, or those named; return the first problem, "" if all are sound."""
        for name in names or self.files:
            path, known = self.path / name, self.files.get(name)
            if known is None or not path.is_file():
                return f"{name} is missing"
            try:
                if path.stat().st_size != known["size"] or file_digest(path) != known["sha256"]:
                    return f"{name} is damaged"
            except OSError as error:
                return f"{name} cannot be read ({reason(error)})"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """One run on the disk."""

    path: Path
    about: Mapping[str, Any]  # content of run.json

    @property
    def keys(self) -> Keys:
        """The keys of the run."""
        return Keys(run=self.about["key"], course=self.about["course"])

    @property
    def steps(self) -> int:
        """The planned number of steps."""
        return self.about["steps"]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for the length of a `with` block; raises RuntimeError that names the process with the lock.

        The operating system releases the lock when the process ends, however that happens.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / LOCK, timeout=PROBE)
        try:
            lock.acquire()
        except Timeout as error:
            raise RuntimeError(
                f"The run {self.path.name} is being trained by {self.owner() or 'another process'}. Wait for it, or "
                "set on_existing of Train LoRA to train again."
            ) from error
        try:
            self._restore_names()
            remove_leftovers(self.path)
            remove_leftovers(self.path / CHECKPOINTS)
            write_json(self.path / OWNER, {"pid": os.getpid(), "host": platform.node(), "since": time.time()})
            yield
        finally:
            with suppress(OSError):  # a full or missing disk must not hide the first error, nor keep the lock
                (self.path / OWNER).unlink(missing_ok=True)
            lock.release()

    def _restore_names(self) -> None:
        """Rename complete saves that have a temporary name because a process was killed between two renames."""
        for entry in (self.path / CHECKPOINTS).glob(f".*{TEMPORARY}"):
            checkpoint = _read_checkpoint(entry)
            if checkpoint is not None and not checkpoint.problem():
                path = self.path / CHECKPOINTS / f"step-{checkpoint.step:08}"
                if not path.exists():
                    os.replace(entry, path)

    def busy(self) -> bool:
        """Tell whether a process trains the run now."""
        if not (self.path / OWNER).exists():  # no process trains it, and none was killed
            return False
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            with lock:
                return False
        except Timeout:
            return True

    def owner(self) -> str:
        """Name the process that trains the run, or that was killed while it did; "" without one."""
        owner = read_json(self.path / OWNER)
        if not owner:
            return ""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.get("since", 0)))
        return f"process {owner.get('pid')} on {owner.get('host')} since {since}"

    def log(self, event: str, **values: Any) -> None:
        """Append a line to the log; of two lines for a step, readers take the last.

        A run.json that was deleted meanwhile is written again.
        """
        if not (self.path / RUN).exists():
            write_json(self.path / RUN, self.about)
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, ensure_ascii=False)
        with (self.path / LOG).open("ab") as file:
            cut = file.tell() and _last_byte(self.path / LOG) != b"\n"  # a killed process left a partial line
            file.write((b"\n" if cut else b"") + line.encode("utf-8", "backslashreplace") + b"\n")

    def events(self, newest: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the complete lines of the log; newest: limit the lines of steps to this many of the newest."""
        path = self.path / LOG
        if path.is_file():
            lines = path.read_bytes().splitlines()
            steps = [number for number, line in enumerate(lines) if line.startswith(_STEP_LINE)]
            left_out = set(steps[:-newest]) if newest else set()
            for number, line in enumerate(lines):
                if number not in left_out and (values := _parse(line.decode(errors="replace"))) is not None:
                    yield values

    def save(self, step: int, write: Callable[[Path], None], *, stays: bool) -> Checkpoint:
        """Write a save atomically; `write` fills its folder. It replaces an earlier save of the same step.

        Raises any error of `write`, and OSError of the disk; then the run's folder is unchanged.
        """
        path = self.path / CHECKPOINTS / f"step-{step:08}"
        if not (self.path / RUN).exists():  # deleted during the run
            write_json(self.path / RUN, self.about)
        with written_folder(path) as folder:
            write(folder)
            files = {
                file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": file_digest(file)}
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            }
            about = {"format": FORMAT, "step": step, "stays": stays, "written": time.time(), "files": files}
            (folder / CHECKPOINT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        return Checkpoint(path=path, step=step, stays=stays, written=about["written"], files=files)

    def checkpoints(self) -> list[Checkpoint]:
        """List the saves whose checkpoint.json is readable, the newest first."""
        found = ((path, _read_checkpoint(path)) for path in self.saves())
        return [c for path, c in found if c is not None and path.name == f"step-{c.step:08}"]

    def saves(self) -> list[Path]:
        """List the folders of all saves, also of unreadable ones, the newest first."""
        folder = self.path / CHECKPOINTS
        paths = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
        return sorted(paths, key=lambda path: -int(path.name.removeprefix("step-")))

    def set_aside(self, path: Path) -> Path:
        """Rename an unusable save, so that it is no save any more; return its new path."""
        aside = unused_path(path.with_name(f"damaged-{path.name}"))
        os.replace(path, aside)
        return aside

    def prune(self, keep_last: int) -> None:
        """Delete all saves but the newest `keep_last` and those that stay; after a disk error the next call retries."""
        for checkpoint in self.checkpoints()[keep_last:]:
            if not checkpoint.stays:
                with suppress(OSError):
                    remove_folder(checkpoint.path)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Mark the run as finished, with its result."""
        write_json(self.path / RESULT, {"format": FORMAT, "finished": time.time(), **result})

    def result(self) -> dict[str, Any] | None:
        """Read the result of the run, None until it is finished."""
        return read_json(self.path / RESULT)

    def write_summary(self, text: str) -> None:
        """Write the summary for people."""
        with written_whole(self.path / SUMMARY) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def size(self) -> int:
        """Count the bytes of the run's folder."""
        return folder_size(self.path)


def new_run(runs: Path, keys: Keys, name: str, steps: int, **about: Any) -> RunFolder:
    """Create the folder of a new run; raises OSError if it cannot be written."""
    runs.mkdir(parents=True, exist_ok=True)
    path = unused_path(runs / f"{name}-{keys.run[:SHOWN]}")
    values: dict[str, Any] = {"format": FORMAT, "key": keys.run, "course": keys.course, "name": name, "steps": steps}
    values |= {"created": time.time(), **about}
    with written_folder(path) as folder:
        write_json(folder / RUN, values)
    return RunFolder(path=path, about=values)


def open_run(path: Path) -> RunFolder:
    """Open the run in a folder; raises ValueError if its run.json is missing, damaged or of another format."""
    about = read_json(path / RUN)
    if about is None or not isinstance(about.get("format"), int):
        raise ValueError(f"{RUN} of {path.name} is missing or damaged; restore the file, or delete the folder.")
    if about["format"] != FORMAT:
        age, remedy = ("a newer", "update the pack") if about["format"] > FORMAT else ("an older", "train it again")
        raise ValueError(
            f"The run {path.name} has {age} format ({about['format']}; this LoRA Atelier reads {FORMAT}): {remedy}."
        )
    kinds = {"key": str, "course": str, "name": str, "steps": int, "created": (int, float), "config": dict}
    if lacking := [name for name, kind in kinds.items() if not isinstance(about.get(name), kind)]:
        raise ValueError(f"{RUN} of {path.name} lacks {lacking[0]}; restore the file, or delete the folder.")
    return RunFolder(path=path, about=about)


def find_runs(runs: Path) -> list[RunFolder]:
    """List the runs in a folder, the newest first; other folders and other formats are skipped."""
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        if path.is_dir() and (path / RUN).is_file():
            try:
                found.append(open_run(path))
            except ValueError:  # reported when this run itself is opened
                continue
    return sorted(found, key=lambda run: (-run.about["created"], run.path.name))


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file, None if it is missing or damaged."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _parse(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _read_checkpoint(path: Path) -> Checkpoint | None:
    about = read_json(path / CHECKPOINT)
    if about is None or about.get("format") != FORMAT:
        return None
    kinds = {"step": int, "stays": bool, "written": (int, float), "files": dict}
    if not all(isinstance(about.get(name), kind) for name, kind in kinds.items()):
        return None
    files = about["files"]
    for name, known in files.items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not (inside and isinstance(known, dict) and {"size", "sha256"} <= known.keys()):
            return None
    return Checkpoint(path=path, step=about["step"], stays=about["stays"], written=about["written"], files=files)
