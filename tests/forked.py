"""Processes that share the tests are forked from one that has collected them: what is tested is imported once.

That process begins when xdist does. xdist takes this file for a Python, and starts it for each of its own: it hands
its files and arguments over, and ends with what is forked for it.
"""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from multiprocessing.context import BaseContext
from pathlib import Path

import warm

TESTS = Path(__file__).parent
# Elsewhere large libraries do not survive a fork, or there is none. Nor does a GPU that one of them has asked for. A
# socket's path has at most 107 characters.
POSSIBLE = warm.POSSIBLE and not Path("/dev/nvidiactl").exists() and len(tempfile.gettempdir()) < 80


def source(folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], str]:
    """Start the process that collects what pytest does with these arguments; return it, and a command for forks of it.

    folder: gets its socket, which takes the command's questions from now on.
    """
    place = str(folder / "socket")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listening:
        listening.bind(place)
        listening.listen()
        number = listening.fileno()
        command = [sys.executable, __file__, str(number), *arguments]
        process = subprocess.Popen(command, env=environment, pass_fds=[number], preexec_fn=warm.end_with_parent)
    return process, shlex.join([sys.executable, __file__, place])


def context() -> BaseContext:
    """Return how a test starts a process of its own: with all imported, where the system can."""
    return multiprocessing.get_context("fork" if POSSIBLE else "spawn")


def serve(listening: socket.socket, arguments: list[str]) -> None:
    """Collect, then fork for whoever asks; returns in each fork when that has done its work."""
    import pytest  # in this process alone: those that ask for forks are to start soon

    with redirect_stdout(io.StringIO()):
        failed = pytest.main([*arguments, "-n0", "--collect-only", "--capture=no"]) == pytest.ExitCode.INTERRUPTED
    if failed:  # the forks say so, which must not find half a module
        for name, module in [*sys.modules.items()]:
            if Path(getattr(module, "__file__", None) or "").is_relative_to(TESTS) and name != "__main__":
                del sys.modules[name]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forks answer to it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they end
    while True:
        asker, _ = listening.accept()
        job, files, *_ = socket.recv_fds(asker, 2**20, 3)
        if os.fork() == 0:
            break
        for file in (*files, asker.detach()):
            os.close(file)
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    warm.become(files, **json.loads(job))


def ask(place: str, arguments: list[str]) -> None:
    """Let a fork run what a Python is started with, on this process's files; wait for its end."""
    told = [each for each in arguments if each != "-u"]
    job = {"arguments": told, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(place)
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        os.closerange(0, 3)
        server.recv(1)  # nothing is sent; the fork holds the other end


if __name__ == "__main__":
    where, *given = sys.argv[1:]
    if where.isdecimal():
        serve(socket.socket(fileno=int(where)), given)
    else:
        ask(where, given)
