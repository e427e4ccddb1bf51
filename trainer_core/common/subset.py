"""The samples of a micro-batch that a pass computes, for all that is drawn at random for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Subset(NamedTuple):
    """Some samples of a micro-batch, by their numbers in it, and its size."""

    samples: Sequence[int]
    count: int


# Not for each thread, as backward passes on a device have a thread of their own. No stack, since compiled code, which
# asks what is computed now, would be compiled anew at another depth.
_now: Subset | None = None


def current_subset() -> Subset | None:
    """The samples that are computed now; None: all samples, in their order."""
    return _now


@contextmanager
def computing(subset: Subset | None) -> Iterator[None]:
    """Compute only some samples of the micro-batch inside a `with` block."""
    global _now
    before, _now = _now, subset
    try:
        yield
    finally:
        _now = before
