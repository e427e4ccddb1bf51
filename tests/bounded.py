"""Fail a test that hangs, on an idle and on a busy machine alike: count processor time, not waiting."""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

LAST_RESORT = 1200  # seconds by the clock, after which C code that never returns ends the process


@contextmanager
def bounded(cpu_seconds: float) -> Iterator[None]:
    """Fail a `with` block in which this process computes for more than `cpu_seconds`; blocks are not nested.

    Where the system has a timer of computed time (not on Windows), the block is interrupted where it hangs.
    """

    def interrupt(*_: object) -> None:
        raise AssertionError(f"still computing after {cpu_seconds} s of processor time")

    timer = hasattr(signal, "setitimer")
    if timer:
        before = signal.signal(signal.SIGPROF, interrupt)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    faulthandler.dump_traceback_later(LAST_RESORT, exit=True)
    began = time.process_time()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if timer:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
    used = time.process_time() - began
    assert used <= cpu_seconds, f"computed for {used:.1f} s instead of {cpu_seconds} s at most"
