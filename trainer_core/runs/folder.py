"""The folder of one run: read and write its configuration, saves, log and result, all of them atomically.

run.json                 keys, name and configuration
log.jsonl                one line for each step, validation and event
summary.txt              a short summary for people
checkpoints/step-…/      each save: weights, optimizer, the LoRA in its final form, checkpoint.json with all digests
samples/                 pictures drawn during and after training
loras/step-…/            the LoRA files of each step that drew samples, and checkpoint.json as in a save
picture.png              a small picture that was trained, which stands for the run until it has samples
workflow.json            the workflow that trained it, where ComfyUI keeps workflows in its files
title.json               the title that a person gave it
result.json              the step of the last save and the samples, once the run is finished
lock, owner.json         the process that trains the run; the time of owner.json is its last sign of life
asked-stop, …            what a page asks of that process; see asked.py
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..common.disk_errors import reason
from ..common.files import (
    file_digest,
    folder_size,
    move,
    open_file,
    remove_folder,
    unused_path,
    write_json,
    written_folder,
    written_whole,
)
from ..common.json_files import LARGEST, parse_json, read_json
from ..common.leftovers import leftovers, remove, remove_leftovers
from ..common.values import (
    is_count,
    is_flag,
    is_inside,
    is_object,
    is_plain,
    is_text,
    is_texts,
    is_time,
    is_words,
    read_object,
    unfit,
)
from ..common.windows import WINDOWS
from ..common.wording import names, printable, say
from ..config import MOST_LORAS, run_again, setting
from .asked import take
from .key import FORMAT, SHOWN, Keys

RUN, RESULT, LOG, SUMMARY = "run.json", "result.json", "log.jsonl", "summary.txt"
CHECKPOINTS, SAMPLES, LORAS, CHECKPOINT = "checkpoints", "samples", "loras", "checkpoint.json"
LOCK, OWNER = "lock", "owner.json"
WEIGHTS, OPTIMIZER, LORA = "weights.safetensors", "optimizer.safetensors", "lora"
HISTORY = "history.safetensors"  # in a save: losses and validation losses
FILES = "files.json"  # in a save: the list of its LoRA files
PUBLISHED = "published.json"  # in a run's folder: copies of its files in other folders
WORKFLOW, TITLE, PICTURE = "workflow.json", "title.json", "picture.png"
PICTURES = "pictures.json"  # what the watch over each picture has found, written with each save
# of a run's folder
PARTS = (
    *(RUN, RESULT, LOG, SUMMARY, CHECKPOINTS, SAMPLES, LORAS, PUBLISHED, WORKFLOW, TITLE, PICTURE, PICTURES),
    *(LOCK, OWNER),
)
CLAIMS = ".lock"  # in the folder of runs
CLAIM = 60.0  # seconds to wait for a process that chooses a run: it reads that run's last save
PROBE = 0.5  # seconds to wait for the lock, which `busy` may hold for a moment
BEAT = 20.0  # seconds from one sign of life of the process that trains a run to the next
SILENT = 120.0  # seconds without one after which a process of another machine has ended
LOG_TAIL = 2**24  # bytes of the log that are read, its end
NEWEST_TAIL = 2**18  # the same where only its newest steps are
LONGEST_LINE = 2**16  # bytes of a line of the log
MOST_PICTURES = 20_000  # whose comparisons are kept, the worst
MOST_FILES, LARGEST_LIST = 2000, 2**20  # of a save; bytes of their list, of which each reading parses all
LONGEST_TITLE = 100  # characters
_STEP = re.compile(r"step-([0-9]{8,})")
_STEP_LINE = b'{"event": "step"'  # start of a step's line in the log
_TIME = re.compile(rb'^\{"event": "([a-z]+)", "time": ([0-9.]+)', re.MULTILINE)  # start of every line


def _kinds(kind: type) -> dict[str, Callable[[Any], bool]]:
    """Map the fields of a class that stand in a file to what tells whether a value there can be it."""
    return {each.name: each.metadata["fits"] for each in fields(kind) if each.metadata}


def _is_files(values: Any) -> bool:
    """Tell whether a value gives the size and sha256 of files in a folder."""
    kinds = {"size": is_count, "sha256": is_text}
    return (
        is_object(values)
        and len(values) <= MOST_FILES
        and all(is_inside(name) and is_object(known) and not unfit(known, kinds) for name, known in values.items())
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFiles:
    """The LoRA file of one set of weights in a save, and the files of its embeddings; paths in the save's folder."""

    path: str = field(metadata={"fits": is_text})
    words: dict[str, str] = field(metadata={"fits": is_words})  # by token
    steps: int = field(metadata={"fits": is_count})  # finished when the weights were reached


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One save of a run, as its checkpoint.json describes it."""

    path: Path
    step: int = field(metadata={"fits": is_count})  # steps finished
    stays: bool = field(metadata={"fits": is_flag})  # kept when newer saves are written
    written: float = field(metadata={"fits": is_time})  # seconds since 1970
    files: Mapping[str, Mapping[str, Any]] = field(metadata={"fits": _is_files})  # by path in the folder

    @property
    def size(self) -> int:
        """Count the bytes of its files."""
        return sum(known["size"] for known in self.files.values())

    def problem(self, *names: str) -> str:
        """Check its files, or those named; return the first problem, "" if all are sound."""
        for name in names or self.files:
            path, known = self.path / name, self.files.get(name)
            if is_elsewhere(path, self.path):
                return f"{name} is a link to another place"
            if known is None or not path.is_file():
                return f"{name} is missing"
            try:
                if path.stat().st_size != known["size"] or file_digest(path) != known["sha256"]:
                    return f"{name} is damaged"
            except OSError as error:
                return f"{name} cannot be read ({reason(error)})"
        return self._problem_of_list(names)

    def _problem_of_list(self, names: Collection[str]) -> str:
        if names and FILES not in names:
            return ""
        try:
            self.lora_files()
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"{FILES} cannot be read ({reason(error)})"
        return ""

    def lora_files(self) -> list[LoraFiles]:
        """List its LoRA files, none if they could not be written; ValueError if the list is damaged, or OSError."""
        if FILES not in self.files:
            return []
        try:
            listed = read_json(self.path / FILES)
        except ValueError as error:
            raise ValueError(f"{FILES} is damaged") from error
        found = listed.get("files") if isinstance(listed, dict) else None
        for each in found if isinstance(found, list) else [None]:
            if not isinstance(each, dict) or unfit(each, _kinds(LoraFiles)):
                raise ValueError(f"{FILES} is damaged")
            outside = {each["path"], *each["words"].values()} - self.files.keys()
            if outside or not all(map(is_plain, each["words"])):  # they become parts of file names
                raise ValueError(f"{FILES} names other files than those of the save")
        return [LoraFiles(**{name: each[name] for name in _kinds(LoraFiles)}) for each in found or ()]


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
        lock = FileLock(self._lock_file(), timeout=PROBE)
        try:
            lock.acquire()
        except Timeout as error:
            raise RuntimeError(
                f"The run {self.path.name} is being trained by {self.owner() or 'another process'}. Wait for it, or "
                f"set {setting('existing.on_existing')} to train again."
            ) from error
        try:
            self._restore_names()
            for folder in self.folders():
                remove_leftovers(folder)
            take(self.path)  # asked of an earlier process
            write_json(self.path / OWNER, {"pid": os.getpid(), "host": platform.node(), "since": time.time()})
            with _beating(self.path / OWNER):
                yield
        finally:
            with suppress(OSError):  # a full or missing disk must not hide the first error, nor keep the lock
                (self.path / OWNER).unlink(missing_ok=True)
            lock.release()

    def _restore_names(self) -> None:
        """Rename complete saves that have a temporary name because a process was killed between two renames."""
        for entry in leftovers(self.path / CHECKPOINTS) if self.path / CHECKPOINTS in self.folders() else ():
            checkpoint = _read_checkpoint(entry)
            if checkpoint is not None and not checkpoint.problem():
                path = self.path / CHECKPOINTS / f"step-{checkpoint.step:08}"
                if not path.exists():
                    move(entry, path)

    def busy(self) -> bool:
        """Tell whether a process trains the run now."""
        if not (self.path / OWNER).exists():  # no process trains it, and none was killed
            return False
        lock = FileLock(self._lock_file(), timeout=0)
        try:
            with lock:
                return False
        except Timeout:
            return True

    def at_work(self) -> bool:
        """Tell whether a process trains the run now, here or on another machine, whose lock may not be seen here.

        A process elsewhere counts for SILENT seconds from its last sign of life; the machines' clocks must agree to a
        minute.
        """
        if self.busy():
            return True
        host = (read_object(self.path / OWNER) or {}).get("host")
        try:
            silent = abs(time.time() - (self.path / OWNER).stat().st_mtime)
        except FileNotFoundError:
            return False
        return is_text(host) and host != platform.node() and silent < SILENT

    def _lock_file(self) -> Path:
        """Give the path of the lock; a link in its place is deleted, since to open it would empty another file."""
        path = self.path / LOCK
        if path.is_symlink():
            path.unlink(missing_ok=True)
        return path

    def folders(self) -> list[Path]:
        """List its own folder and those in it that a process writes to; links to other places are left out."""
        inner = (self.path / name for name in (CHECKPOINTS, SAMPLES, LORAS))
        return [self.path, *(folder for folder in inner if not is_elsewhere(folder, self.path))]

    def owner(self) -> str:
        """Name the process that trains the run, or that was killed while it did; "" without one."""
        owner = read_object(self.path / OWNER) or {}
        if unfit(owner, {"pid": is_count, "host": is_text, "since": is_time}):
            return ""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner["since"]))
        return say("process {0} on {1} since {2}", owner["pid"], printable(owner["host"]), since)

    def owned_since(self) -> float:
        """Read when the process that trains the run began to, in seconds since 1970; 0 without one."""
        since = (read_object(self.path / OWNER) or {}).get("since")
        return since if is_time(since) else 0.0

    def log(self, event: str, **values: Any) -> None:
        """Append a line to the log; of two lines for a step, readers take the last.

        A run.json that was deleted meanwhile is written again.
        """
        if not (self.path / RUN).exists():
            write_json(self.path / RUN, self.about)
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, ensure_ascii=False)
        with open_file(self.path / LOG, "ab") as file:
            cut = file.tell() and _last_byte(self.path / LOG) != b"\n"  # a killed process left a partial line
            file.write((b"\n" if cut else b"") + line.encode("utf-8", "backslashreplace") + b"\n")

    def events(self, newest: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the complete lines at the end of the log; newest: limit the lines of steps to this many of the newest.

        Earlier lines than the last LOG_TAIL bytes, or NEWEST_TAIL, are left out: the saves hold their losses.
        """
        path = self.path / LOG
        lines = _tail(path, NEWEST_TAIL if newest else LOG_TAIL) if path.is_file() else b""
        older = sum(line.startswith(_STEP_LINE) for line in io.BytesIO(lines)) - newest if newest else 0
        for line in io.BytesIO(lines):
            if line.startswith(_STEP_LINE) and older > 0:
                older -= 1
            elif len(line) <= LONGEST_LINE and (values := parse_line(line)) is not None:
                yield values

    def seconds(self) -> float | None:
        """Add up how long processes worked on the run, from the log; None where its beginning is out of reach."""
        path = self.path / LOG
        if not path.is_file() or path.stat().st_size > LOG_TAIL:
            return None
        spent, before = 0.0, float(self.about["created"])
        for kind, text in _TIME.findall(path.read_bytes()):
            with suppress(ValueError):  # of a strange log
                now = float(text)
                spent += max(0.0, now - before) if kind != b"begun" or not spent else 0.0
                before = now
        return spent

    def save(self, step: int, write: Callable[[Path], None], *, stays: bool) -> Checkpoint:
        """Write a save atomically; `write` fills its folder. It replaces an earlier save of the same step.

        Raises any error of `write`, and OSError of the disk; then the run's folder is unchanged.
        """
        return self._write(self.path / CHECKPOINTS / f"step-{step:08}", step, write, stays=stays)

    def save_lora(self, step: int, write: Callable[[Path], None]) -> None:
        """Write the LoRA files of a step that drew samples, as `save` does; those of the oldest such steps go."""
        self._write(self.path / LORAS / f"step-{step:08}", step, write, stays=False)
        for old in self._steps_in(LORAS)[MOST_LORAS:]:
            with suppress(OSError):
                remove_folder(old)

    def _write(self, path: Path, step: int, write: Callable[[Path], None], *, stays: bool) -> Checkpoint:
        if not (self.path / RUN).exists():  # deleted during the run
            write_json(self.path / RUN, self.about)
        with written_folder(path) as folder:
            write(folder)
            files = {
                file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": file_digest(file)}
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            }
            checkpoint = Checkpoint(path=path, step=step, stays=stays, written=time.time(), files=files)
            about = {"format": FORMAT, **{name: getattr(checkpoint, name) for name in _kinds(Checkpoint)}}
            (folder / CHECKPOINT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        return checkpoint

    def checkpoints(self, newest: int | None = None) -> list[Checkpoint]:
        """List the saves whose checkpoint.json is readable, the newest first; newest: look at so many at most."""
        return _readable(self.saves()[:newest])

    def loras(self) -> list[Checkpoint]:
        """List what holds LoRA files, the newest first: saves, and sampled steps whose save is gone."""
        found = {each.step: each for each in (*self.sampled(), *self.checkpoints()) if FILES in each.files}
        return [found[step] for step in sorted(found, reverse=True)]

    def sampled(self) -> list[Checkpoint]:
        """List the LoRAs of sampled steps, the newest first."""
        return _readable(self._steps_in(LORAS))

    def saves(self) -> list[Path]:
        """List the folders of all saves, also of unreadable ones, the newest first."""
        return self._steps_in(CHECKPOINTS)

    def _steps_in(self, name: str) -> list[Path]:
        folder = self.path / name
        if not folder.is_dir() or is_elsewhere(folder, self.path):
            return []
        with os.scandir(folder) as entries:  # a run may have thousands
            found = [entry.name for entry in entries if _STEP.fullmatch(entry.name) and not entry.is_symlink()]
        found.sort(key=lambda name: -int(name.removeprefix("step-")))
        return [folder / name for name in found if not WINDOWS or not is_elsewhere(folder / name, folder)]

    def set_aside(self, path: Path) -> Path:
        """Rename an unusable save, so that it is no save any more; return its new path."""
        aside = unused_path(path.with_name(f"damaged-{path.name}"))
        move(path, aside)
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
        """Read the result of the run, None until it is finished or if the file is damaged."""
        values = read_object(self.path / RESULT) or {}
        if unfit(values, {"step": is_count, "finished": is_time}):
            return None
        samples = values.get("samples")
        kinds = {"of": is_text, "files": is_texts}
        return {**values, "samples": samples if isinstance(samples, dict) and not unfit(samples, kinds) else {}}

    def write_summary(self, text: str) -> None:
        """Write the summary for people."""
        with written_whole(self.path / SUMMARY) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_pictures(self, step: int, pictures: Sequence[Mapping[str, Any]]) -> None:
        """Write how the losses of pictures compare, the worst first: {step, pictures: what `watched` tells of each}."""
        write_json(self.path / PICTURES, {"format": FORMAT, "step": step, "pictures": pictures[:MOST_PICTURES]})

    def odd_pictures(self) -> list[dict[str, str]]:
        """List {name, folder: its name, sha256} of the pictures that stood out, the worst first."""
        pictures = (read_object(self.path / PICTURES) or {}).get("pictures")
        found = [each for each in pictures if is_object(each)] if isinstance(pictures, list) else []
        kinds = {"name": is_text, "folder": is_text, "sha256": is_text}
        odd = [each for each in found if each.get("odd") is True and not unfit(each, kinds)]
        return [{kind: printable(each[kind]) for kind in kinds} for each in odd]

    def keep_workflow(self, workflow: Mapping[str, Any]) -> None:
        """Write the workflow that trains the run, unless it is too large to be read again."""
        text = json.dumps(workflow)
        if len(text) <= LARGEST:
            with written_whole(self.path / WORKFLOW) as temporary:
                temporary.write_text(text, encoding="utf-8")

    def keep_picture(self, draw: Callable[[Path], None]) -> None:
        """Keep the picture that stands for the run; `draw` writes it to a path. A later process keeps the first one."""
        if not (self.path / PICTURE).exists():
            with written_whole(self.path / PICTURE) as temporary:
                draw(temporary)

    def workflow(self) -> dict[str, Any] | None:
        """Read the workflow that trained the run; None if it is missing, damaged or no workflow."""
        workflow = read_object(self.path / WORKFLOW) or {}
        return workflow if isinstance(workflow.get("nodes"), list) else None

    def title(self) -> str:
        """Read the title that a person gave the run; "" without one."""
        title = (read_object(self.path / TITLE) or {}).get("title")
        return printable(title[:LONGEST_TITLE]) if is_text(title) else ""

    def rename(self, title: str) -> None:
        """Give the run a title, "" for none; its folder keeps its name. ValueError unless it is one line."""
        title = title.strip()
        if len(title) > LONGEST_TITLE or title != printable(title):
            raise ValueError(f"The title cannot be used; type one line of at most {LONGEST_TITLE} characters.")
        if title:
            write_json(self.path / TITLE, {"title": title})
        else:
            remove(self.path / TITLE)

    def size(self) -> int:
        """Count the bytes of the run's folder."""
        return folder_size(self.path)


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Give a sign of life for the length of a `with` block, also within long steps: the time of a file."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            with suppress(OSError):  # the next one may succeed
                os.utime(path)

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def claiming(runs: Path) -> Iterator[None]:
    """Lock the folder of runs for the length of a `with` block, in which a run is chosen or made, and locked itself.

    Raises RuntimeError if another process holds the lock for CLAIM seconds.
    """
    runs.mkdir(parents=True, exist_ok=True)
    lock = FileLock(runs / CLAIMS, timeout=CLAIM)
    try:
        lock.acquire()
    except Timeout as error:
        raise RuntimeError(
            f"Another process has been choosing a run in {runs} for {CLAIM:.0f} seconds. Wait for it, or end it; then "
            f"{run_again()}."
        ) from error
    try:
        yield
    finally:
        lock.release()


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
    remedy = "restore the file, or delete the folder"
    if linked := next((name for name in PARTS if is_elsewhere(path / name, path)), None):
        raise ValueError(f"{linked} of {path.name} is a link to another place; replace it, or delete the folder.")
    try:
        about = read_json(path / RUN)
    except FileNotFoundError:
        raise ValueError(f"{RUN} of {path.name} is missing; {remedy}.") from None
    except OSError as error:
        raise ValueError(f"{RUN} of {path.name} cannot be read ({reason(error)}); {remedy}.") from error
    except ValueError as error:
        raise ValueError(f"{RUN} of {path.name} is damaged: {error}; {remedy}.") from error
    if not isinstance(about, dict) or not is_count(about.get("format")):
        raise ValueError(f"{RUN} of {path.name} is damaged: it is no description of a run; {remedy}.")
    if about["format"] != FORMAT:
        age, update = ("a newer", "update the pack") if about["format"] > FORMAT else ("an older", "train it again")
        raise ValueError(
            f"The run {path.name} has {age} format ({about['format']}; this LoRA Atelier reads {FORMAT}): {update}."
        )
    kinds = {"key": is_text, "course": is_text, "name": is_text, "steps": is_count, "created": is_time}
    if wrong := unfit({"models": {}, **about}, kinds | {"config": is_object, "models": is_words}):
        raise ValueError(f"{RUN} of {path.name} lacks {wrong[0]}, or it is damaged; {remedy}.")
    return RunFolder(path=path, about=about)


def find_runs(runs: Path, note: Callable[[str], None] | None = None) -> list[RunFolder]:
    """List the runs in a folder, the newest first; other folders, damaged runs and other formats are skipped.

    note: called with one sentence that names the runs that cannot be read.
    """
    found, skipped = [], []
    for path in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            if not path.name.startswith(".") and path.is_dir() and (path / RUN).exists():
                run = open_run(path)
                run.saves()  # raises OSError where they cannot be listed
                found.append(run)
        except (ValueError, OSError):  # whoever opens this run itself reports the reason
            skipped.append(path.name)
    if skipped and note is not None:
        note(
            f"Runs that cannot be read are skipped: {names(skipped)}. The list of runs says why; restore their files "
            f"in {runs}, or delete these folders."
        )
    return sorted(found, key=lambda run: (-run.about["created"], run.path.name))


def is_elsewhere(path: Path, folder: Path) -> bool:
    """Tell whether a path in a folder is a link, or leads through one, to another place."""
    return Path(os.path.realpath(path)) != Path(os.path.realpath(folder)) / path.relative_to(folder)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Read a line of the log; None if it is damaged."""
    try:
        values = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _tail(path: Path, most: int) -> bytes:
    """Read the last bytes of a file, from the beginning of a line on."""
    with open_file(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(max(0, start - 1))
        if start:
            file.readline(most)
        return file.read(most)


def _last_byte(path: Path) -> bytes:
    with open_file(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _readable(paths: Iterable[Path]) -> list[Checkpoint]:
    found = ((path, _read_checkpoint(path)) for path in paths)
    return [c for path, c in found if c is not None and path.name == f"step-{c.step:08}"]


def _read_checkpoint(path: Path) -> Checkpoint | None:
    about, kinds = read_object(path / CHECKPOINT, LARGEST_LIST), _kinds(Checkpoint)
    if about is None or unfit(about, {"format": is_count, **kinds}) or about["format"] != FORMAT:
        return None
    return Checkpoint(path=path, **{name: about[name] for name in kinds})
