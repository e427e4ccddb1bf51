"""Bound how much of large files lies in memory at once, over all threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .cancel import look

MOST_AT_ONCE = 2**31  # bytes of all files that are held; one alone may be larger
WAIT = 0.1  # seconds between two looks for a Cancel
_turn = threading.Condition()
_held: list[int] = []  # bytes of each


@contextmanager
def held(size: int) -> Iterator[None]:
    """Hold so many bytes for a `with` block, once they fit beside those of others; never within another one."""
    with _turn:
        while _held and sum(_held) + size > MOST_AT_ONCE:
            look()
            _turn.wait(WAIT)
        _held.append(size)
    try:
        yield
    finally:
        with _turn:
            _held.remove(size)
            _turn.notify_all()
