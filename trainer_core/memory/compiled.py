"""Compile the repeated blocks of a denoiser with torch.compile, and run uncompiled where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .gradient_checkpointing import WHOLE, Unit
from .out_of_place import out_of_place

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
            return lookup_backend(self.backend)(out_of_place(graph), inputs, **graphs)


class Programs:
    """The compiled blocks of a model; once one fails to compile, all run uncompiled."""

    def __init__(self, note: Callable[[str], None], backend: Any = "inductor") -> None:
        self.note, self.in_use, self.kind = note, True, PLAIN
        self._backend = backend
        # One of a kind for all blocks, or equal ones would share no program.
        self._backends: dict[Compiling, Backend] = {}
        self.failure = ""  # why compiling failed
        self.about = ""  # a sentence on what is compiled, for once that is sure
        self._recorded = False  # whether steps may have recorded CUDA graphs

    def backend(self, kind: Compiling) -> Backend:
        """Give the backend that compiles so."""
        return self._backends.setdefault(kind, Backend(self._backend, kind))

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

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Let all blocks run uncompiled inside a `with` block."""
        before, self.in_use = self.in_use, False
        try:
            yield
        finally:
            self.in_use = before

    def end_for(self, error: RuntimeError) -> bool:
        """Tell whether an error comes from the compiler; if so, switch compiling off and send a note.

        The backward pass is compiled when it first runs, so it may be the one that fails.
        """
        from torch._dynamo.exc import TorchDynamoException

        if not self.in_use or not isinstance(error, TorchDynamoException):
            return False
        self.in_use, self.failure = False, short(error)
        self.note(f"torch.compile failed, so training continues without it: {self.failure}")
        return True


def short(error: Exception) -> str:
    """Shorten an error's text to one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


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
                with _compiling():
                    return self._compiled[kind](*args, **kwargs)
            except RuntimeError as error:
                if not self.programs.end_for(error):
                    raise
        return self.forward(*args, **kwargs)


@contextmanager
def _compiling() -> Iterator[None]:
    """Let this block's code be compiled where all other code of the process runs as it is written."""
    if not hasattr(torch.compiler, "set_stance"):  # an older torch, in which nothing holds the compiler off
        yield
        return
    with torch.compiler.set_stance("default"):
        yield


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


def uncompile(units: Iterable[Unit]) -> None:
    """Give compiled blocks the forward back that they had before `compile_blocks`."""
    for block, _ in units:
        if isinstance(wrapped := block.__dict__.get("forward"), Compiled):
            del block.__dict__["forward"]  # it hides the forward of the class
            if block.forward != wrapped.forward:
                block.forward = wrapped.forward
