"""Parts that have been measured, written to a file after each one, so that a run that is cut short loses nothing."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Part = dict[str, Any]


class PartFailed(RuntimeError):
    """A part could not be measured."""


class Results:
    """The results of one run of the benchmarks; `resume` keeps what a run of the same sources has measured before."""

    def __init__(self, path: Path, measure: Callable[[Part], Any], command: str, *, resume: bool) -> None:
        self.failed: list[str] = []
        self._path, self._measure = path, measure
        self.data: dict[str, Any] = {
            "sources": sources_digest(),
            "date": f"{datetime.date.today()}",
            "commit": commit(),
            "command": command,
            "parts": {},
            "suite": {},
        }
        if resume and path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["sources"] == self.data["sources"]:
                self.data = before

    def get(self, part: Part) -> Any:
        """Return what a part measured, before or now; what fails is told under `left_out` and tried again next time."""
        key = json.dumps(part, sort_keys=True)
        if key not in self.data["parts"]:
            print(" ".join(str(value) for value in part.values()), "...", flush=True)
            try:
                result = self._measure(part)
            except PartFailed as problem:
                print(problem, file=sys.stderr, flush=True)
                self.failed.append(key)
                return {"left_out": f"it failed ({str(problem).strip().splitlines()[-1][:200]})"}
            self.data["parts"][key] = json.loads(json.dumps(result))
            self._write()
        return self.data["parts"][key]

    def set(self, name: str, value: Any) -> None:
        """Keep what has been put together from parts."""
        self.data["suite"][name] = value
        self._write()

    def told(self) -> dict[str, str]:
        """Return what a page says of this run: date, commit and command."""
        return {name: self.data[name] for name in ("date", "commit", "command")}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        os.replace(temporary, self._path)


def child(script: str, *arguments: str) -> Any:
    """Run one script of this folder in a process of its own and return the JSON it writes; raises PartFailed."""
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments, "--out", str(out)]
        with log.open("w", encoding="utf-8") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT).returncode
        if status != 0:
            tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise PartFailed(f"bench: `{' '.join(command[1:])}` ended with status {status}:\n{tail}")
        return json.loads(out.read_text())


def measure_in_child(part: Part) -> Any:
    """Measure a part in a process of its own."""
    return child("stock.py" if part["what"] == "stock" else "worker.py", "--part", json.dumps(part))


def measure_here(part: Part) -> Any:
    """Measure a part in this process, ComfyUI's node excepted, which needs one of its own."""
    if part["what"] == "stock":
        return measure_in_child(part)
    from lora_atelier.bench.worker import measure

    return measure(part)


def sources_digest() -> str:
    """Return what the measured code is, with and without git: sha256 of the sources' paths and contents."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("bench", "trainer_core") for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def stamp() -> str:
    """Return date and commit."""
    return f"{datetime.date.today()}, commit {commit()}"


def commit() -> str:
    """Return the short commit id, marked when files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"
