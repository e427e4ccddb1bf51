"""The places in its micro-batch of the samples that a pass computes, for all that is drawn for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Places(NamedTuple):
    """The places of some samples, and the size of their micro-batch."""

    samples: Sequence[int]
    count: int


_now: list[Places | None] = [None]  # not for each thread: backward passes on a device have a thread of their own


def places() -> Places | None:
    """The places of the samples that are computed now; None: those of all, in their order."""
    return _now[-1]


@contextmanager
def computing(part: Places | None) -> Iterator[None]:
    """Compute only some samples of the micro-batch inside a `with` block."""
    _now.append(part)
    try:
        yield
    finally:
        _now.pop()
