"""Bound the processor time of a block, so that a test of endless work fails instead of hanging."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bounded(cpu_seconds: float) -> Iterator[None]:
    """Fail if a block takes more seconds of the processor; what else the machine does counts nothing."""
    start = time.process_time()
    yield
    assert time.process_time() - start < cpu_seconds
