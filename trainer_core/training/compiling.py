"""Compile the blocks of a linked model for a run, and compare the compiled pass with the eager one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ..common.wording import count, say
from ..memory import WHOLE, compile_blocks, keep_activations, out_of_memory, short, uncompile
from .compute import FirstPass, first_pass
from .state import Run

# How far a block's gradient may be from the eager one by rounding alone, as a share of its length.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}


@contextmanager
def linked_compiled(run: Run) -> Iterator[None]:
    """Compile the blocks of a linked model inside a `with` block, in its session, and leave them as they were."""
    if run.base.host is None or not run.config.memory.compile:
        yield
        return
    blocks = [unit for unit in run.base.denoiser.units() if unit[1] >= WHOLE]
    with run.base.host.compiling(blocks) as chosen:
        before, run.programs = run.programs, compile_blocks(chosen, run.callbacks.note)
        programs, run.programs.kind = run.programs, before.kind
        programs.in_use, programs.about = bool(chosen), _sentence(len(chosen), len(blocks))
        if not chosen:
            run.callbacks.note(programs.about)
        if written := run.base.denoiser.written:
            written.needless = lambda: programs.in_use
        try:
            yield
        finally:
            programs.in_use = False
            keep_activations(block for block, _ in chosen)  # it lies around the compiled code
            uncompile(chosen)


def _sentence(chosen: int, blocks: int) -> str:
    if not blocks:
        return "No block of this model is compiled: it has none that can run by itself."
    rest = "their weights are cast, streamed, patched or unpacked at each use" if chosen < blocks else ""
    return f"{chosen} of {count(blocks, 'block')} are compiled" + (f"; of the others {rest}." if rest else ".")


def settle_programs(run: Run) -> None:
    """Compare the compiled pass of the first batch with the eager one; where they part, the run stays eager."""
    programs = run.programs
    if run.base.host is None or not programs.in_use or not run.config.memory.compile:
        return
    run.callbacks.phase(say("looking at the first batches"), 0, 1)
    read, scale = run.reader(training=True), run.scaler.get_scale()
    with programs.asleep():
        eager = first_pass(run, read, scale)
        while scale > 1 and not eager.finite:  # float16's scale has not settled yet
            scale /= 2
            eager = first_pass(run, read, scale)
    if why := _why_not(run, eager, lambda: first_pass(run, read, scale)):
        programs.in_use = False
        run.callbacks.note(f"The blocks stay uncompiled: {why}.")
    else:
        run.callbacks.note(programs.about)


def _why_not(run: Run, eager: FirstPass, look: Callable[[], FirstPass]) -> str:
    """Say why a compiled pass cannot take the place of the eager one; "" if it can."""
    programs = run.programs
    bound = ROUNDING[str(run.base.denoiser.dtype).removeprefix("torch.")]
    note, programs.note = programs.note, lambda _: None  # one sentence follows
    try:
        apart = furthest(eager, look())
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        run.network.zero_grad(set_to_none=True)
        if not programs.end_for(error):
            return f"compiled they have no gradients: {short(error)}"
    finally:
        programs.note = note
    if not programs.in_use:
        return f"torch.compile failed: {programs.failure}"
    return "" if apart <= bound else f"compiled a gradient of the first batch differs by {apart:.2g} of its length"


def furthest(one: FirstPass, other: FirstPass) -> float:
    """Measure by how much predictions or gradients of blocks differ at most, as a share of the first one's length."""
    pairs = [(one.prediction, other.prediction)]
    pairs += [(each, other.gradients[name]) for name, each in one.gradients.items()]
    return max(_apart(*pair) for pair in pairs)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-30))
