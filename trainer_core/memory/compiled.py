"""torch.compile of a UNet's repeated blocks, and what happens where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .checkpoint import blocks

PROGRAMS = 128  # of one function


class Programs:
    """The compiled blocks of a model: all of them, or none any more once one could not be compiled."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self.in_use = note, True

    def end_for(self, error: RuntimeError) -> bool:
        """Tell whether an error is the compiler's while blocks are compiled; then none is any more, and that is said.

        Programs of the backward pass are made when it is first run, so that it may be the one that fails.
        """
        from torch._dynamo.exc import TorchDynamoException

        if not self.in_use or not isinstance(error, TorchDynamoException):
            return False
        self.in_use = False
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        self.note(f"compile is on but does not work here, so the run goes on without it: {reason}")
        return True


class Compiled:
    """A forward that is compiled when it is first called, and stays as it was where that fails."""

    def __init__(self, forward: Callable[..., Any], programs: Programs, backend: Any) -> None:
        self.forward, self.compiled, self.programs = forward, torch.compile(forward, backend=backend), programs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, compiled as long as all could be."""
        if self.programs.in_use:
            try:
                return self.compiled(*args, **kwargs)
            except RuntimeError as error:
                if not self.programs.end_for(error):
                    raise
        return self.forward(*args, **kwargs)


@contextmanager
def room_for_programs(on: bool) -> Iterator[None]:
    """Let the compiler keep a program for every shape of a block for the length of a `with` block.

    It gives up a function after eight; a UNet's resnets alone have a dozen shapes, twice: with gradients and without.
    """
    if not on:
        yield
        return
    import torch._dynamo as dynamo

    name = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    with dynamo.config.patch({name: PROGRAMS}):
        yield


def compile_blocks(unet: nn.Module, note: Callable[[str], None], backend: Any = "inductor") -> Programs:
    """Compile every repeated block by itself: blocks that are alike share one compilation.

    note: is told in one sentence when it cannot be done here. backend: torch.compile's. Call it before `recompute`,
    which stays outside.
    """
    programs = Programs(note)
    for block in blocks(unet):
        block.forward = Compiled(block.forward, programs, backend)
    return programs
