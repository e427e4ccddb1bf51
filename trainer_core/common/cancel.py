"""Look for a Cancel in long work that knows nothing of its caller: hashing, reading, planning, estimating."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


class NoLongerWanted(Exception):
    """Ends work in another thread whose caller was cancelled; nobody sees it."""


@dataclass(slots=True)
class _Scope:
    check: Callable[[], None]  # raises to cancel
    thread: int = field(default_factory=threading.get_ident)  # the one that may be cancelled
    cancelled: bool = False
    failure: Exception | None = None  # of work in another thread, to be raised in this one


_scope: ContextVar[_Scope | None] = ContextVar("scope of a Cancel", default=None)


@contextmanager
def cancellable(check: Callable[[], None] | None) -> Iterator[None]:
    """Let `look` call `check`, which raises to cancel, for the length of a `with` block; None: nothing cancels it."""
    token = _scope.set(None if check is None else _Scope(check))
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def droppable() -> Iterator[None]:
    """Let threads with a copy of the context end at their next `look`, once an error leaves the `with` block."""
    around = _scope.get()
    token = _scope.set(scope := _Scope(lambda: _look(around)))
    try:
        yield
    except BaseException:
        scope.cancelled = True
        raise
    finally:
        _scope.reset(token)


def fail(error: Exception) -> None:
    """Let the next `look` of the thread that this one works for raise an error, too."""
    if (scope := _scope.get()) is not None and not isinstance(error, NoLongerWanted):
        scope.failure = error


def look() -> None:
    """Raise what `check` of the innermost `cancellable` raises; called ten times a second or more.

    A check may raise only once. Threads with a copy of the context raise NoLongerWanted after it.
    """
    _look(_scope.get())


def _look(scope: _Scope | None) -> None:
    if scope is None:
        return
    if threading.get_ident() != scope.thread:
        if scope.cancelled:
            raise NoLongerWanted
        return
    try:
        if scope.failure is not None:
            raise scope.failure
        scope.check()
    except BaseException:
        scope.cancelled = True
        raise
