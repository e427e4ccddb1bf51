"""A run as a folder: what it is, its saves, its log, its result; all that is written is whole or not there.

run.json                 what the run is: keys, name, configuration
log.jsonl                one line for each step, measurement and event
summary.txt              the same in short, for people
checkpoints/step-…/      each save: weights, optimizer, the LoRA in its final form, checkpoint.json with all digests
samples/                 pictures drawn on the way and at the end
result.json              what came of it, once it is finished
lock, owner.json         who works on it
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

from ..files import (
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
COURSE = "course.safetensors"  # in a save: losses and measurements
FILES = "files.json"  # in a save: what its LoRA files are
PUBLISHED = "published.json"  # in a run's folder: which files outside it are copies of its own
PROBE = 0.5  # seconds to wait for a lock that somebody who asks `busy` may hold for a moment
_STEP = re.compile(r"step-(\d{8,})")
_STEP_LINE = b'{"event": "step"'  # how `log` begins the line of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One save of a run."""

    path: Path
    step: int  # steps finished
    stays: bool  # it is not removed when newer ones are there
    written: float  # seconds since the epoch
    files: Mapping[str, Mapping[str, Any]]  # size and sha256 of each file, by its place in the folder

    @property
    def size(self) -> int:
        """Return how many bytes its files have."""
        return sum(known["size"] for known in self.files.values())

    def problem(self, *names: str) -> str:
        """Return what is wrong with its files, or with those named; empty when they are as they were written."""
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
    about: Mapping[str, Any]  # what run.json holds

    @property
    def keys(self) -> Keys:
        """Return the keys of the run."""
        return Keys(run=self.about["key"], course=self.about["course"])

    @property
    def steps(self) -> int:
        """Return how many steps the run is to take."""
        return self.about["steps"]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let nobody else work on the run for the length of a `with` block; RuntimeError names who does.

        The lock is the system's: it goes with the process that holds it, however that ends.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / LOCK, timeout=PROBE)
        try:
            lock.acquire()
        except Timeout as error:
            raise RuntimeError(
                f"The run {self.path.name} is being trained by {self.owner() or 'another process'}; wait for it, or "
                "set on_existing to train again for one of its own."
            ) from error
        try:
            self._name_what_is_whole()
            remove_leftovers(self.path)
            remove_leftovers(self.path / CHECKPOINTS)
            write_json(self.path / OWNER, {"pid": os.getpid(), "host": platform.node(), "since": time.time()})
            yield
        finally:
            with suppress(OSError):  # a disk that is full or away must not hide why the work ends, nor keep the lock
                (self.path / OWNER).unlink(missing_ok=True)
            lock.release()

    def _name_what_is_whole(self) -> None:
        """Give a save its name that was taking the place of another one when its process was killed."""
        for entry in (self.path / CHECKPOINTS).glob(f".*{TEMPORARY}"):
            checkpoint = _read_checkpoint(entry)
            if checkpoint is not None and not checkpoint.problem():
                path = self.path / CHECKPOINTS / f"step-{checkpoint.step:08}"
                if not path.exists():
                    os.replace(entry, path)

    def busy(self) -> bool:
        """Tell whether somebody works on the run now."""
        if not (self.path / OWNER).exists():  # nobody, who was cut off or works still
            return False
        lock = FileLock(self.path / LOCK, timeout=0)
        try:
            with lock:
                return False
        except Timeout:
            return True

    def owner(self) -> str:
        """Return who works on the run, or did until he was cut off; empty when nobody says so."""
        owner = read_json(self.path / OWNER)
        if not owner:
            return ""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.get("since", 0)))
        return f"process {owner.get('pid')} on {owner.get('host')} since {since}"

    def log(self, event: str, **values: Any) -> None:
        """Add a line to the log. Whoever reads takes the last line of a step that is there twice.

        A folder that was deleted meanwhile is made again.
        """
        if not (self.path / RUN).exists():
            write_json(self.path / RUN, self.about)
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, ensure_ascii=False)
        with (self.path / LOG).open("ab") as file:
            cut = file.tell() and _last_byte(self.path / LOG) != b"\n"  # a process was killed in the middle of a line
            file.write((b"\n" if cut else b"") + line.encode("utf-8", "backslashreplace") + b"\n")

    def events(self, newest: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the lines of the log that are whole; newest: of those of steps only so many, which saves time."""
        path = self.path / LOG
        if path.is_file():
            lines = path.read_bytes().splitlines()
            steps = [number for number, line in enumerate(lines) if line.startswith(_STEP_LINE)]
            left_out = set(steps[:-newest]) if newest else set()
            for number, line in enumerate(lines):
                if number not in left_out and (values := _parse(line.decode(errors="replace"))) is not None:
                    yield values

    def save(self, step: int, write: Callable[[Path], None], *, stays: bool) -> Checkpoint:
        """Add a save that `write` fills a folder with; one of that step takes the place of another.

        Raises what `write` raises, OSError for a disk that is full; then all is as it was.
        """
        path = self.path / CHECKPOINTS / f"step-{step:08}"
        if not (self.path / RUN).exists():  # deleted while the run went on
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
        """Return the saves whose checkpoint.json can be read, the one of the most steps first."""
        found = ((path, _read_checkpoint(path)) for path in self.saves())
        return [c for path, c in found if c is not None and path.name == f"step-{c.step:08}"]

    def saves(self) -> list[Path]:
        """Return the folders of all saves, also of those that cannot be read, the one of the most steps first."""
        folder = self.path / CHECKPOINTS
        paths = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
        return sorted(paths, key=lambda path: -int(path.name.removeprefix("step-")))

    def set_aside(self, path: Path) -> Path:
        """Take a save out of the row, because it cannot be used; return where its files are now."""
        aside = unused_path(path.with_name(f"damaged-{path.name}"))
        os.replace(path, aside)
        return aside

    def prune(self, keep_last: int) -> None:
        """Remove the saves that do not stay, but for the newest; what the disk does not remove now goes later."""
        for checkpoint in self.checkpoints()[keep_last:]:
            if not checkpoint.stays:
                with suppress(OSError):
                    remove_folder(checkpoint.path)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write down what came of the run."""
        write_json(self.path / RESULT, {"format": FORMAT, "finished": time.time(), **result})

    def result(self) -> dict[str, Any] | None:
        """Return what came of the run, None as long as it is not finished."""
        return read_json(self.path / RESULT)

    def write_summary(self, text: str) -> None:
        """Write what a person reads."""
        with written_whole(self.path / SUMMARY) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def size(self) -> int:
        """Return how many bytes the run takes."""
        return folder_size(self.path)


def new_run(runs: Path, keys: Keys, name: str, steps: int, **about: Any) -> RunFolder:
    """Make the folder of a new run; OSError where that cannot be written."""
    runs.mkdir(parents=True, exist_ok=True)
    path = unused_path(runs / f"{name}-{keys.run[:SHOWN]}")
    values: dict[str, Any] = {"format": FORMAT, "key": keys.run, "course": keys.course, "name": name, "steps": steps}
    values |= {"created": time.time(), **about}
    with written_folder(path) as folder:
        write_json(folder / RUN, values)
    return RunFolder(path=path, about=values)


def open_run(path: Path) -> RunFolder:
    """Return the run in a folder; ValueError when its run.json is missing, damaged, older or newer than can be read."""
    about = read_json(path / RUN)
    if about is None or not isinstance(about.get("format"), int):
        raise ValueError(f"{path.name} holds no {RUN} that can be read, so it is no run; put the file back.")
    if about["format"] != FORMAT:
        age, remedy = ("a newer", "update the pack") if about["format"] > FORMAT else ("an older", "train it again")
        raise ValueError(
            f"The run {path.name} is of {age} format ({about['format']}, and this LoRA Atelier reads {FORMAT}): "
            f"{remedy}."
        )
    kinds = {"key": str, "course": str, "name": str, "steps": int, "created": (int, float), "config": dict}
    if lacking := [name for name, kind in kinds.items() if not isinstance(about.get(name), kind)]:
        raise ValueError(f"{RUN} of {path.name} lacks {lacking[0]}; put back the file as it was.")
    return RunFolder(path=path, about=about)


def find_runs(runs: Path) -> list[RunFolder]:
    """Return the runs in a folder, the newest first; folders that are none, or of other formats, are left out."""
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        if path.is_dir() and (path / RUN).is_file():
            try:
                found.append(open_run(path))
            except ValueError:  # its sentence is for whoever asks for that very run
                continue
    return sorted(found, key=lambda run: (-run.about["created"], run.path.name))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what a JSON file holds, None when it is missing or damaged."""
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
