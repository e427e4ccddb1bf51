"""Compile the repeated blocks of a denoiser with torch.compile, and run uncompiled where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .gradient_checkpointing import WHOLE, Unit

PROGRAMS = 128  # compiled programs of one function at most


class Programs:
    """The compiled blocks of a model; once one fails to compile, all run uncompiled."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.in_use = note, True

    def end_for(self, error: RuntimeError) -> bool:
        """Tell whether an error comes from the compiler; if so, switch compiling off and send a note.

        The backward pass is compiled when it first runs, so it may be the one that fails.
        """
        from torch._dynamo.exc import TorchDynamoException

        if not self.in_use or not isinstance(error, TorchDynamoException):
            return False
        self.in_use = False
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        self.note(f"torch.compile failed, so training continues without it: {reason}")
        return True


class Compiled:
    """A forward that is compiled at its first call, and runs uncompiled if that fails."""

    def __init__(self, forward: Callable[..., Any], programs: Programs, backend: Any) -> None:
        self.forward, self.compiled, self.programs = forward, torch.compile(forward, backend=backend), programs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward, or the plain one after a block failed to compile."""
        if self.programs.in_use:
            try:
                return self.compiled(*args, **kwargs)
            except RuntimeError as error:
                if not self.programs.end_for(error):
                    raise
        return self.forward(*args, **kwargs)


@contextmanager
def room_for_programs(on: bool) -> Iterator[None]:
    """Raise the compiler's limit of programs per function for the length of a `with` block.

    The default is eight; one kind of block can have a dozen shapes, each with and without gradients.
    """
    if not on:
        yield
        return
    import torch._dynamo as dynamo

    name = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    with dynamo.config.patch({name: PROGRAMS}):
        yield


def compile_blocks(units: Iterable[Unit], note: Callable[[str], None], backend: Any = "inductor") -> Programs:
    """Compile every repeated block by itself, so that equal blocks share one compilation.

    note: called with a sentence if compiling fails. backend: torch.compile's. Call it before `recompute`, which stays
    outside the compiled code.
    """
    programs = Programs(note)
    for block in (unit for unit, least in units if least >= WHOLE):
        block.forward = Compiled(block.forward, programs, backend)
    return programs
