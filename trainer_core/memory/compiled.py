"""Compile the repeated blocks of a denoiser with torch.compile, and run uncompiled where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .gradient_checkpointing import WHOLE, Unit

PROGRAMS = 128  # compiled programs of one function at most


class Compiling(NamedTuple):
    """What the compiler is asked for."""

    budget: float = 1.0  # share of what a block would keep for its backward pass that it may keep
    graphs: bool = False  # CUDA graphs: the kernels are recorded once and started together


PLAIN = Compiling()


class Backend:
    """A backend of torch.compile with settings that hold for its own work alone, not for the process.

    The choice of what is kept and what is recomputed is made there.
    """

    def __init__(self, backend: Any, kind: Compiling) -> None:
        self.backend, self.kind = backend, kind

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph, and choose what it keeps."""
        from torch._dynamo import lookup_backend
        from torch._functorch import config

        graphs = {"config_patches": {"triton.cudagraphs": True}} if self.kind.graphs else {}
        with config.patch(activation_memory_budget=self.kind.budget):
            return lookup_backend(self.backend)(graph, inputs, **graphs)


class Programs:
    """The compiled blocks of a model; once one fails to compile, all run uncompiled."""

    def __init__(self, note: Callable[[str], None], backend: Any = "inductor") -> None:
        self.note, self.in_use, self.kind = note, True, PLAIN
        # One for all blocks, or equal ones would share no program.
        self._backends: dict[Compiling, Any] = {PLAIN: backend}
        self._recorded = False  # whether steps may have recorded CUDA graphs

    def backend(self, kind: Compiling) -> Any:
        """Give the backend that compiles so."""
        if kind not in self._backends:
            self._backends[kind] = Backend(self._backends[PLAIN], kind)
        return self._backends[kind]

    def begin_step(self) -> None:
        """Let recorded kernels write over what those of the step before left.

        Without this call torch would guess where a step begins, and guess wrong where there are several passes.
        """
        if self.kind.graphs and self.in_use:
            torch.compiler.cudagraph_mark_step_begin()
            self._recorded = True

    def free(self) -> None:
        """Free what CUDA graphs hold, and forget where steps began: other programs of the process mark none."""
        if self._recorded:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()
            self._recorded = False

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

    def __init__(self, forward: Callable[..., Any], programs: Programs) -> None:
        self.forward, self.programs = forward, programs
        self._compiled: dict[Compiling, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward, or the plain one after a block failed to compile."""
        if self.programs.in_use:
            # Without gradients nothing is kept. Samplers keep predictions, which recorded kernels would write over.
            kind = self.programs.kind if torch.is_grad_enabled() else PLAIN
            if kind not in self._compiled:
                self._compiled[kind] = torch.compile(self.forward, backend=self.programs.backend(kind))
            try:
                return self._compiled[kind](*args, **kwargs)
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
    programs = Programs(note, backend)
    for block in (unit for unit, least in units if least >= WHOLE):
        block.forward = Compiled(block.forward, programs)
    return programs
