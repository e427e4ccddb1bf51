"""Say how fast frozen weights come from their file: before the run, and in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..common.wording import bytes_of, names
from ..config import MemoryConfig
from ..memory import Kept, kept_layers
from .state import Run


def describe_reading(left: Sequence[Kept], memory: MemoryConfig) -> str:
    """Say what weights in a file cost, by the seconds in which they were read and checked; "" for none."""
    stored: list[Any] = [kept.stored for kept in left]
    files = {each.file for each in stored}
    size, seconds = sum(each.size for each in stored), sum(file.seconds for file in files)
    if not size or not seconds:
        return ""
    uses, why = (2, "") if memory.checkpointing == "0" else (3, ", as blocks are recomputed")
    took = seconds * uses * size / sum(file.bytes for file in files)
    return (
        f"{bytes_of(size)} of frozen weights stay in {_named(files)}, which was just read at {_rate(files)}. Each step "
        f"reads them up to {uses} times{why}: about {took:.1f} s, less where the system keeps the file in its memory."
    )


class Reading:
    """What the steps of a run read from files, since this was built."""

    def __init__(self, run: Run) -> None:
        stored = (kept.stored for kept in kept_layers(run.base.denoiser.module))
        self._files: set[Any] = {each.file for each in stored if each is not None}  # pyright: ignore[reportAttributeAccessIssue]
        self._run, self.first = run, run.at
        self._before = self._now()

    def sentence(self) -> str:
        """Say what a step read, and for how long it waited; "" where weights are in memory, or without a step."""
        steps, numbers = self._run.at - self.first, zip(self._now(), self._before, strict=True)
        read, seconds, waited, passed = (now - before for now, before in numbers)
        if not self._files or not steps or not seconds:
            return ""
        return (
            f"Each step read {bytes_of(read / steps)} of {_named(self._files)} at {bytes_of(read / seconds)} a second, "
            f"and waited {waited / steps:.1f} of {passed / steps:.1f} s for it."
        )

    def _now(self) -> tuple[float, float, float, float]:
        size, seconds = (sum(getattr(file, name) for file in self._files) for name in ("bytes", "seconds"))
        return size, seconds, self._run.stream.waited, time.perf_counter()


def _named(files: set[Any]) -> str:
    return names(sorted(file.name for file in files))


def _rate(files: set[Any]) -> str:
    return f"{bytes_of(sum(file.bytes for file in files) / sum(file.seconds for file in files))} a second"
