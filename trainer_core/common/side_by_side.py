"""Do work in other threads: for many items at once, for one that a Cancel is to leave at once, or meanwhile."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import torch

from .cancel import droppable, fail, look
from .in_pieces import InPieces

MOST = 8  # at once, as each holds memory
SOON = 0.05  # seconds between two looks for a Cancel
GRACE = 0.2  # seconds that threads get after one, to end by themselves
Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of all items in their order: one on each processor, each with one thread of torch.

    For work of many small steps, where threads within a step wait for each other longer than they compute.
    """
    threads = torch.get_num_threads()
    try:
        yield from _in_threads(work, list(items), min(threads, MOST), 1)
    finally:
        torch.set_num_threads(threads)  # of threads to come


def cancelled_at_once(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function work in a thread of its own, so that a Cancel is heard at once.

    Nothing ends a call of torch: what one still computes is dropped, a second of work at most (`in_pieces`).
    """

    @functools.wraps(work)
    def heard(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return next(_in_threads(lambda _: work(*args, **kwargs), [None], 1, torch.get_num_threads()))

    return heard


def begin(work: Callable[[], Result]) -> Future[Result]:
    """Begin work in a thread of its own, with one thread of torch; `result_of` waits for it.

    An error there is raised by the caller's next `look`, too. A Cancel, or an error that leaves a block of `droppable`
    around the call, ends it at its own next `look`.
    """
    future: Future[Result] = Future()
    threads, begun = torch.get_num_threads(), threading.Event()

    @torch.no_grad()
    def work_on() -> None:
        torch.set_num_threads(1)
        begun.set()
        with _Outcome(future):
            try:
                future.set_result(work())
            except Exception as error:
                fail(error)
                raise

    threading.Thread(target=copy_context().run, args=(work_on,), daemon=True).start()
    begun.wait()
    torch.set_num_threads(threads)  # of threads to come
    return future


def result_of(future: Future[Result]) -> Result:
    """Wait for work that was begun, and return its result or raise its error; a Cancel is heard at once."""
    while not wait([future], timeout=SOON).done:
        look()
    return future.result()


class Awaited:
    """A field of a dataclass whose value may be work that was begun: whoever reads it waits for the result."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember under which name instances hold the value."""
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the value, once it is there."""
        if instance is None:
            raise AttributeError(self._name)  # no default
        if isinstance(value := instance.__dict__[self._name], Future):
            value = instance.__dict__[self._name] = result_of(value)
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        """Hold a value, or the work that gives it."""
        instance.__dict__[self._name] = value


def _in_threads(work: Callable[[Item], Result], items: list[Item], most: int, threads: int) -> Iterator[Result]:
    """Yield the results of all items in their order, of `most` threads, each with some threads of torch.

    After a Cancel or an error they end at their next `look`; nobody waits for longer than a moment.
    """
    futures: list[Future[Result]] = [Future() for _ in items]
    left, taking = iter(zip(items, futures, strict=True)), threading.Lock()

    @torch.no_grad()  # which other threads are not in
    def work_on() -> None:
        torch.set_num_threads(threads)
        while True:
            with taking:
                item, future = next(left, (None, None))
            if future is None:
                return
            with _Outcome(future), InPieces():
                look()
                future.set_result(work(item))  # type: ignore[arg-type]

    at_work: list[threading.Thread] = []
    try:
        with droppable():
            for _ in items[:most]:  # daemons: no program waits for them at its end
                at_work.append(threading.Thread(target=copy_context().run, args=(work_on,), daemon=True))
                at_work[-1].start()
            for future in futures:
                result = result_of(future)
                look()
                yield result
    finally:
        end = time.monotonic() + GRACE
        for thread in at_work:
            thread.join(max(0.0, end - time.monotonic()))


class _Outcome(AbstractContextManager[None]):
    """Hand an error on to whoever waits for a result."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None:
            self._future.set_exception(error)
        return True
