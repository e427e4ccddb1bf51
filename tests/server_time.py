"""The processor time of this process, of those that it has started, and of servers; needs no package, as the demo."""

from __future__ import annotations

import os
from pathlib import Path

_servers: set[int] = set()  # process ids of servers at work
_gone = [0.0]  # seconds of servers that have ended and were no children of this process


def server_starts(number: int) -> None:
    """Count a server from now on."""
    _servers.add(number)


def server_ends(number: int, *, child: bool) -> None:
    """Stop looking at a server, just before it ends; the system adds up the time of children by itself."""
    _gone[0] += 0.0 if child else _of_process(number)
    _servers.discard(number)


def spent() -> float:
    """Add up the seconds of this process and of all that it has started, such as servers and a browser at work."""
    times, left = os.times(), _children(os.getpid())
    seconds = times.user + times.system + times.children_user + times.children_system
    while left:
        number = left.pop()
        seconds += _of_process(number, ended=True)
        left += _children(number)
    return seconds


def _children(number: int) -> list[int]:
    """List the processes that a process has started and that live; none where the system does not tell."""
    try:
        texts = [path.read_text(encoding="ascii") for path in Path(f"/proc/{number}/task").glob("*/children")]
    except OSError:
        return []
    return [int(each) for text in texts for each in text.split()]


def _of_process(number: int, *, ended: bool = False) -> float:
    """Read the seconds of a living process, and of its own that have `ended`; 0 where the system does not tell."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11 : 15 if ended else 13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def of_servers() -> float:
    """Add up the seconds of servers, which the system does not add to those of this process."""
    return _gone[0] + sum(map(_of_process, _servers))
