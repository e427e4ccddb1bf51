"""Python programs that start in a fraction of their time: forked from a process with large libraries imported.

Run as a program this file reads what to start from its input, a line of JSON each. All else of a program is its own:
arguments, environment, folder, log, signals, how it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# What ComfyUI imports when it starts, and our nodes when they first run, where it is installed.
LIBRARIES = (
    "torch._dynamo",
    "torchvision",
    "torchaudio",
    "torchsde",
    "scipy.stats",
    "transformers.modeling_utils",
    "transformers.models.clip.modeling_clip",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.autoencoders.autoencoder_tiny",
    "comfy_kitchen",
    "kornia",
    "spandrel",
    "aiohttp.web",
    "sqlalchemy.orm",
    "alembic.command",
    "pydantic",
    "av",
)
POSSIBLE = sys.platform == "linux"  # elsewhere large libraries do not survive a fork, or there is none


class Process:
    """A started program, with the part of subprocess.Popen that tests of servers need."""

    def __init__(self, ask: Any, pid: int) -> None:
        self._ask, self.pid = ask, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it has ended, below 0 by which signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for its end; raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent(python: str) -> subprocess.Popen[str]:
    alone: dict[str, Any] = {"start_new_session": True, "preexec_fn": end_with_parent}
    command = [python, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **alone)


def start(command: list[str], folder: Path, log: Path) -> Process:
    """Start a command, [Python, script, argument …], in a folder; what it prints goes to the end of a log."""
    parent = _parent(command[0])
    assert parent.stdin and parent.stdout

    def ask(question: Mapping[str, Any]) -> Any:
        print(json.dumps(question), file=parent.stdin, flush=True)
        return json.loads(parent.stdout.readline())

    job = {"arguments": command[1:], "folder": str(folder), "log": str(log), "environment": dict(os.environ)}
    return Process(ask, ask(job))


def end_with_parent() -> None:
    """Let the calling process end with its parent, however that ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def serve() -> None:
    """Start the programs that the input asks for; returns in each of them, ready to run."""
    for name in LIBRARIES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        if "ended" in job:
            found, status = os.waitpid(job["ended"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if found else None), flush=True)
            continue
        process = os.fork()
        if process == 0:
            run(**job)
            return
        print(process, flush=True)


def run(arguments: list[str], folder: str, log: str, environment: dict[str, str]) -> None:
    """Run a script in this process as Python runs one that it is started with."""
    os.setsid()
    end_with_parent()
    for number, answer in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, answer)  # as in a terminal, whatever the parent ignores
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for place, flags in ((log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), (os.devnull, os.O_RDONLY)):
        opened = os.open(place, flags)
        for number in (1, 2) if place == log else (0,):
            os.dup2(opened, number)
        os.close(opened)
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
