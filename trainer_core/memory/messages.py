"""The messages for running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..config import MemoryConfig, setting
from .device import out_of_memory
from .setup import describe


def to_lower(memory: MemoryConfig) -> str:
    """Name the settings that lower what a step needs."""
    encodings = f", or {setting('memory.encodings')} to disk" if memory.encodings == "none" else ""
    return (
        f"Lower batch_size (raise accumulate by the same factor) or the {setting('train.resolution')}, or set "
        f"{setting('base_model.weights')} to float8 or nf4{encodings}."
    )


def are_free(free: float, memory: MemoryConfig) -> str:
    """Say how many bytes a run may take, and what it leaves to other programs."""
    left = f" beside the {memory.keep_free:g} GB of {setting('memory.keep_free')}" if memory.keep_free else ""
    return f"{max(free, 0) / 1e9:.1f} GB are free{left}"


def repeated_with_less(step: int, memory: MemoryConfig) -> str:
    """Say that a step is repeated with settings that need less memory."""
    return f"Out of memory at step {step}; the step is repeated with {describe(memory)}."


def looked_at_with_less(memory: MemoryConfig) -> str:
    """Say that the first batches are looked at again with settings that need less memory."""
    return f"Out of memory at the first batches, which begin the network; they are read again with {describe(memory)}."


def never_fits(step: int, memory: MemoryConfig) -> str:
    """Say that a step does not fit, even with the smallest settings."""
    return f"Out of memory at step {step} with {describe(memory)}. {to_lower(memory)}"


@contextmanager
def out_of_memory_explained(state: Callable[[], tuple[int, MemoryConfig]]) -> Iterator[None]:
    """Turn an out-of-memory error in a `with` block into a RuntimeError that names the step, the settings and a remedy.

    state: returns the number of finished steps and the memory settings in use.
    """
    ran_out = False
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        ran_out = True
    if ran_out:  # outside of the handler, so that nothing holds the tensors of the failed work
        at, memory = state()
        when = f"after step {at}" if at else "before the first step"
        raise RuntimeError(f"Out of memory {when} with {describe(memory)}. {to_lower(memory)}")
