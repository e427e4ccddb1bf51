"""Measure parts one by one and write the results after each, so that an interrupted run loses nothing."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from lora_atelier.bench.cases import CACHE, ROOT, Part, company, limit
from lora_atelier.dev import script as run_script

WAITS = "its turn has not come; `--resume` measures it"
POLL = 0.1  # seconds
WORKERS = Path(__file__).parent
# Of parts; the others are worker.py's.
SCRIPTS = {"stock": "stock.py", "connected": "connected_sides.py", "large": "large_sides.py"}


class PartFailed(RuntimeError):
    """Raised when a part could not be measured."""


class Measures(Protocol):
    """An object that measures one part after another."""

    def measure(self, part: Part, seconds: float) -> Any:
        """Measure a part; raises PartFailed, also after this many seconds."""

    def end(self) -> None:
        """Free all memory that it holds."""


class Results:
    """The results of one run of the benchmarks; `resume` keeps the parts measured from the same sources."""

    def __init__(self, path: Path, start: Callable[[Part], Measures], command: str, *, resume: bool) -> None:
        self.failed: list[str] = []
        self._path, self._start = path, start
        self.data: dict[str, Any] = {
            "sources": sources_digest(),
            "date": f"{datetime.date.today()}",
            "commit": commit(),
            "command": command,
            "parts": {},
            "left_out": {},
        }
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["sources"] == self.data["sources"]:
                self.data = before
            else:
                print(f"bench: other sources measured {path}; every part is measured again.", flush=True)

    def measure(self, parts: Sequence[Part], *, share_process: bool = False, seconds: float = float("inf")) -> None:
        """Measure in order the parts that are not measured yet, failed ones last.

        share_process: parts that may share a process do. seconds: for all parts; a part whose limit exceeds the rest
        waits for another call. A failure is noted under `left_out`, and repeated in the next call.
        """
        until = time.monotonic() + seconds
        todo = [part for part in parts if key(part) not in self.data["parts"]]
        process, before = None, None
        try:
            for part in sorted(todo, key=lambda part: self.data["left_out"].get(key(part), WAITS) != WAITS):
                if time.monotonic() + limit(part) > until:
                    self.data["left_out"].setdefault(key(part), WAITS)
                    continue
                if process and not (share_process and company(part) == company(before)):
                    process.end()
                    process = None
                process, before = process or self._start(part), part
                print(" ".join(str(value) for value in part.values()), "...", flush=True)
                try:
                    result = process.measure(part, limit(part))
                except PartFailed as problem:
                    print(problem, file=sys.stderr, flush=True)
                    self.failed.append(key(part))
                    self.leave_out(part, f"it failed ({str(problem).strip().splitlines()[-1][:200]})")
                    process.end()
                    process = None
                else:
                    self.data["parts"][key(part)] = json.loads(json.dumps(result))
                    self.data["left_out"].pop(key(part), None)
                self.write()
        finally:
            if process:
                process.end()
        self.write()

    def leave_out(self, part: Part, why: str) -> None:
        """Note the reason why a part is not measured in this call."""
        self.data["left_out"][key(part)] = why

    def about(self) -> dict[str, str]:
        """Date, commit and command of the measurements, for the page."""
        return {name: self.data[name] for name in ("date", "commit", "command")}

    def waiting(self) -> int:
        """Count the parts that wait for another call."""
        return list(self.data["left_out"].values()).count(WAITS)

    def write(self) -> None:
        """Write the file whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        os.replace(temporary, self._path)


def key(part: Part) -> str:
    """Build the name of a part in the file."""
    return json.dumps(part, sort_keys=True)


def found(data: dict[str, Any], part: Part) -> Any:
    """Look up a part's measurement, or under `left_out` the reason why it has none."""
    return data["parts"].get(key(part)) or {"left_out": data["left_out"].get(key(part), WAITS)}


class Child:
    """A process that measures parts, one at a time; compiled code is cached for the next process."""

    def __init__(self, part: Part) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="atelier-bench-")
        self._out, self._numbers = Path(self._folder.name), count()
        command = run_script(sys.executable, WORKERS / SCRIPTS.get(part["what"], "worker.py"))
        compiled = {"TORCHINDUCTOR_CACHE_DIR": str(CACHE / "compiled"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        with (self._out / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--out", str(self._out)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **compiled},
            )

    def measure(self, part: Part, seconds: float) -> Any:
        """Measure a part; raises PartFailed, also after this many seconds."""
        out, until = self._out / f"{next(self._numbers)}.json", time.monotonic() + seconds
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(part).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; the wait below reports it
        while not out.exists():
            status = self._process.poll()
            if status is not None and not out.exists():
                tail = (self._out / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
                raise PartFailed(f"bench: {key(part)} ended with status {status}:\n{tail}")
            if time.monotonic() > until:
                raise PartFailed(f"bench: {key(part)}:\nit took longer than its limit of {seconds:g} s")
            time.sleep(POLL)
        return json.loads(out.read_text(encoding="utf-8"))

    def end(self) -> None:
        """End the process and its children."""
        for pid in [*descendants(self._process.pid), self._process.pid]:
            try:
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            except (ProcessLookupError, PermissionError):
                continue  # it has ended by itself
        self._process.communicate()
        self._folder.cleanup()


def descendants(pid: int) -> list[int]:
    """List the ids of all descendants of a process (Linux; none elsewhere)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    found, new = [], {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found += new
    return found


def publish(folder: Path, number: int, result: Any) -> None:
    """Send a part's result to the waiting process."""
    temporary = folder / "result.tmp"
    temporary.write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, folder / f"{number}.json")


def child(script: str, *arguments: str, env: Mapping[str, str | None] | None = None) -> Any:
    """Run one script of this folder in a separate process and return its JSON; raises PartFailed.

    env: changes of the environment; None takes a variable away.
    """
    variables = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log.txt"
        command = [*run_script(sys.executable, WORKERS / script), *arguments, "--out", str(out)]
        with log.open("w", encoding="utf-8") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=variables).returncode
        if status != 0:
            tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise PartFailed(f"bench: `{' '.join([script, *arguments])}` ended with status {status}:\n{tail}")
        return json.loads(out.read_text())


def sources_digest() -> str:
    """Hash the measured code, with and without git: paths and contents of the sources."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("bench", "trainer_core") for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def stamp() -> str:
    """Date and commit, for the page."""
    return f"{datetime.date.today()}, commit {commit()}"


def commit() -> str:
    """The short commit id, marked when files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"
