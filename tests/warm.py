"""Python programs that start in a fraction of their time: forked from a process with large libraries imported.

Used as the module subprocess where POSSIBLE. All else of a program is its own: arguments, environment, folder, log,
signals, how it ends. Run as a program this file reads what to start from its input, a line of JSON each.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import IO, Any

# What ComfyUI imports when it starts, and our nodes when they first run; each where it is installed.
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


class Popen:
    """A started program, as much like subprocess.Popen as the tests need.

    command: [Python, script or -c and code, argument …]. stdout: an open file, to whose end goes all that is printed.
    stdin: PIPE, or nothing to read.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        stdout: IO[Any],
        stdin: int | None = None,
        stderr: int = STDOUT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert stderr == STDOUT and stdin in (None, PIPE)
        self._server, self.stdin, self.returncode = _server(command[0]), None, None
        arguments = [str(part) for part in command[1:]]
        job = {"arguments": arguments, "folder": str(cwd), "log": stdout.name, "given": os.devnull}
        if stdin == PIPE:
            read, write = os.pipe()
            self.stdin, job["given"] = os.fdopen(write, "wb"), f"/proc/{os.getpid()}/fd/{read}"
        self.pid: int = self._ask({**job, "environment": dict(env or os.environ)})
        if self.stdin:
            os.close(read)  # the server has opened it

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._server.stdin and self._server.stdout
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._server.stdin, flush=True)
        if not (answer := self._server.stdout.readline()):
            raise RuntimeError(f"The process that starts programs for tests ended with status {self._server.wait()}.")
        return json.loads(answer)

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

    def communicate(self) -> None:
        """Give it nothing more to read, and wait for its end."""
        if self.stdin:
            self.stdin.close()
        self.wait()

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


def run(command: Sequence[str], **options: Any) -> Popen:
    """Start a program and wait for its end."""
    process = Popen(command, **options)
    process.wait()
    return process


@functools.cache
def _server(python: str) -> subprocess.Popen[str]:
    alone: dict[str, Any] = {"start_new_session": True, "preexec_fn": end_with_parent}
    return subprocess.Popen([python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **alone)


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
        given, log = os.open(job.pop("given"), os.O_RDONLY), os.open(job.pop("log"), os.O_WRONLY | os.O_APPEND)
        process = os.fork()
        if process == 0:
            become((given, log, log), **job)
            return
        os.close(given)
        os.close(log)
        print(process, flush=True)


def become(files: Sequence[int], arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run in this process what Python is started with, a script or -c; files: to read, to print, for errors."""
    os.setsid()
    end_with_parent()
    for number, answer in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, answer)  # as in a terminal, whatever the parent ignores
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in set(files):
        os.close(file)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # the parent may have read on in its own
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-c":
        code, sys.argv, sys.path[0] = arguments[1], ["-c", *arguments[2:]], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    serve()
