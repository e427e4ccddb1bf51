"""torch.compile of a UNet's repeated blocks, and what happens where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .checkpoint import blocks

PROGRAMS = 128  # of one function


class Compiled:
    """A forward that is compiled when it is first called, and stays as it was where that fails."""

    def __init__(
        self, forward: Callable[..., Any], note: Callable[[str], None], shared: list[bool], backend: Any
    ) -> None:
        self.forward, self.compiled = forward, torch.compile(forward, backend=backend)
        self.note, self.gave_up = note, shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it compiled; once one block could not be compiled, none is any more, and the person is told."""
        from torch._dynamo.exc import TorchDynamoException

        if not self.gave_up:
            try:
                return self.compiled(*args, **kwargs)
            except TorchDynamoException as error:
                self.gave_up.append(True)
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                self.note(f"compile is on but does not work here, so the run goes on without it: {reason}")
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


def compile_blocks(unet: nn.Module, note: Callable[[str], None], backend: Any = "inductor") -> None:
    """Compile every repeated block by itself: blocks that are alike share one compilation.

    note: is told in one sentence when it cannot be done here. backend: torch.compile's. Call it before `recompute`,
    which stays outside.
    """
    shared: list[bool] = []
    for block in blocks(unet):
        block.forward = Compiled(block.forward, note, shared, backend)
