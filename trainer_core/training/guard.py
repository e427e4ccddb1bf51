"""What is wrapped around a step: less memory where it runs out, votes between processes, backups, broken updates."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..config import MemoryConfig, setting
from ..memory import BUDGETS, FULL, WHOLE, give_back, keep_activations, out_of_memory, recompute
from ..memory.messages import looked_at_with_less, never_fits, repeated_with_less
from ..optim import arguments, sum_of_norms
from .prepare import apply_memory
from .saving import Saving
from .state import Run
from .step import StepNumbers, count, describe_step, parameters_of

NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run
OVERFLOW_LIMIT = 20  # the same in float16, where each overflow halves the loss scale
MOST_TRIES = 2  # of a step: with less memory it is repeated once


def looked_at(run: Run, ladder: list[MemoryConfig], look: Callable[[Run], None]) -> None:
    """Look at the first batches; where memory runs out, do so once more with the next settings of the ladder.

    ladder: as of `Guard`; settings that do not suffice are taken off it. Each process does this by itself, as no other
    waits for it before all are done.
    """
    try:
        with _without_budget(run):
            return look(run)
    except RuntimeError as error:
        if not out_of_memory(error) or len(ladder) == 1:
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed pass
    give_back(run.device)
    ladder[:] = _smaller(ladder, compiled=False)
    apply_memory(run, ladder[0])
    run.callbacks.note(looked_at_with_less(ladder[0]))
    with _without_budget(run):
        look(run)


@contextmanager
def _without_budget(run: Run) -> Iterator[None]:
    """Recompute blocks where a look runs them uncompiled: they would keep all that the compiler does not."""
    denoiser, budget = run.base.denoiser, run.memory.checkpointing in BUDGETS
    blocks = [unit for unit, least in denoiser.units() if least >= WHOLE] if budget else []
    recompute([(block, WHOLE) for block in blocks], FULL, copies=denoiser.written is not None)
    try:
        yield
    finally:
        keep_activations(blocks)


def _smaller(ladder: Sequence[MemoryConfig], *, compiled: bool) -> list[MemoryConfig]:
    """List the settings below the first ones; another budget is none where nothing is compiled."""
    now = ladder[0].checkpointing
    return [each for each in ladder[1:] if compiled or each.checkpointing not in BUDGETS or each.checkpointing == now]


class Repeat(Exception):
    """Another process takes the step again, and so does this one."""


class Guard:
    """Guards the steps of a run: a step that fails is repeated with less memory, undone, or explained."""

    def __init__(self, run: Run, ladder: Sequence[MemoryConfig], saving: Saving) -> None:
        """Guard from the next step on; ladder: the memory settings in use, then those for when memory runs out."""
        self._run, self._ladder, self._saving = run, list(ladder), saving
        self._first = run.at  # the optimizer allocates its state in this step, which may run out of memory
        self._at, self._tries = -1, 0
        self._not_finite: list[str] = []  # descriptions of the last steps, if their updates were skipped

    @contextmanager
    def attempt(self) -> Iterator[Callable[[StepNumbers], StepNumbers]]:
        """Attempt the next step in a `with` block; yields what the step's numbers go through at its end.

        The block ends without an error where the step is to be repeated. Raises RuntimeError where that would not help:
        the next settings of the ladder fail, too, or memory runs out in an update after the first, which cannot be
        undone.
        """
        run, first = self._run, self._run.at == self._first
        if run.at != self._at:
            self._at, self._tries = run.at, 0
        if first:
            self._saving.back_up()
        self._tries += 1
        run.programs.begin_step()
        try:
            yield self._keep
        except Repeat:
            self._undo(back=True)
        except RuntimeError as error:
            broken = not run.updating and run.programs.end_for(error)
            if not broken and not out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed step
            if broken:
                self._undo()
                self._tries -= 1  # without compiling it is another step
                return
            updating = run.updating
            # The other processes have finished their update, and hear of this in `_keep`.
            if updating and first:
                run.world.agree(("repeat",))
            self._undo(back=updating and first)
            smaller = _smaller(self._ladder, compiled=run.programs.in_use)
            if (updating and not first) or self._tries == MOST_TRIES or not smaller:
                raise RuntimeError(never_fits(run.at + 1, run.memory)) from None
            self._ladder = smaller
            apply_memory(run, self._ladder[0])
            run.callbacks.note(repeated_with_less(run.at + 1, self._ladder[0]))

    def _keep(self, numbers: StepNumbers) -> StepNumbers:
        """Count a step, and check that it left sound weights; back up the state before a skipped update is counted."""
        run, first = self._run, self._run.at == self._first
        step = run.at
        # The first backup of a series stays, so that `check` goes back to before it.
        if not numbers.finite:
            self._saving.back_up()
        count(run, numbers)
        if numbers.finite:
            self._check_weights()
        if first and "repeat" in run.world.agree(()).words:
            if self._tries == MOST_TRIES:
                raise RuntimeError(never_fits(step + 1, run.memory))
            raise Repeat
        if numbers.finite:
            self._saving.drop_backup()
            self._not_finite = []
        else:
            self._not_finite.append(describe_step(run, step, numbers))
        return numbers

    def _undo(self, *, back: bool = False) -> None:
        """Free what a failed step holds; back: also restore the state before it."""
        self._run.optimizer.zero_grad(set_to_none=True)
        give_back(self._run.device)
        if back:
            self._saving.roll_back()

    def _check_weights(self) -> None:
        """Raise RuntimeError if the last update made weights that are not finite, with the run as before if it can.

        Such weights are never saved, so that without a backup the last save stays.
        """
        run, settings = self._run, self._run.config.optimizer
        # One number tells of all: it is finite only where every weight is.
        run.weights_norm = sum_of_norms(parameters_of(run))
        if math.isfinite(run.weights_norm):
            return
        step, before = run.at, "stopped before that step was saved"
        if self._saving.roll_back():
            before = f"went back to step {run.at} and stopped"
        remedy = f"{setting('optimizer.learning_rate')} lower"
        if arguments(settings).get("eps") == 0:
            own = f"{setting('options.eps')} to 1e-08"
            remedy = own if settings.name != "custom" else f"eps=1e-8 in {setting('options.arguments')}"
        raise RuntimeError(
            f"Step {step} made weights that are not finite, although loss and gradients were, so the run {before}; set "
            f"{remedy}."
        )

    def check(self) -> None:
        """Raise RuntimeError after too many steps in a row that were not finite, with the run as it was before them."""
        run, skipped = self._run, self._not_finite
        if len(skipped) == (OVERFLOW_LIMIT if run.scaler.is_enabled() else NOT_FINITE_LIMIT):
            self._saving.roll_back()
            raise RuntimeError(
                f"Loss or gradient was not finite {len(skipped)} times in a row, so the run went back to step "
                f"{run.at} and stopped: {'; '.join(skipped[-NOT_FINITE_LIMIT:])}. Check these pictures, set "
                f"{setting('optimizer.learning_rate')} lower, or set {setting('base_model.precision')} to float32 or "
                "bfloat16."
            )
