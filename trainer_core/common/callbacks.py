"""How a run reports progress to its caller, and how the caller stops it: one small object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


class Norms(NamedTuple):
    """Norms of the layers' deltas after scale_weight_norms has limited them."""

    shrunk: int  # layers that were larger
    mean: float  # Frobenius norm
    largest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """The numbers of one optimizer step."""

    step: int  # steps finished so far, 1..steps
    steps: int
    loss: float  # mean over the samples of the step; NaN when it was not finite
    grad_norm: float  # before clipping
    learning_rates: Mapping[str, float]  # by the names of the optimizer's groups, see Network.groups
    updated: bool  # False: loss or gradient was not finite, the weights stayed as they were
    seconds: float  # wall time of the step
    epoch: float  # visits of the whole dataset so far
    masked_area: float | None = None  # mean of the loss masks of the step, None without masks
    norms: Norms | None = None  # with scale_weight_norms, after an update
    concepts: Mapping[str, float] = field(default_factory=dict)  # mean loss of the samples of each concept in the step
    noise_scale: float | None = None  # running gradient noise scale in pictures, None until it is known
    peak_memory: int | None = None  # most bytes in use on the GPU so far, None without one


def _ignore(*_: object) -> None:
    return None


def _nothing() -> Collection[str]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """Progress out, interruption in. Every field may be left at its default."""

    phase: Callable[[str, int, int], None] = _ignore  # (phase, done, total) while loading, scanning, encoding, sampling
    run: Callable[[Path, bool], None] = _ignore  # called once: the run's folder; False: its result is reused
    step: Callable[[StepReport], None] = _ignore
    validation: Callable[[int, float], None] = _ignore  # (steps finished, mean loss of the validation pictures)
    # With validation_levels: (steps finished, mean loss of the validation pictures at each of these noise levels).
    validation_levels: Callable[[int, Mapping[int, float]], None] = _ignore
    note: Callable[[str], None] = _ignore  # one sentence for the user
    check: Callable[[], None] = _ignore  # called between micro-steps and pictures; raises to stop the run
    # Called once when a run resumes: (losses, losses of each concept, validation losses) so far.
    resumed: Callable[[Sequence[float], Mapping[str, Sequence[float]], Sequence[tuple[int, float]]], None] = _ignore
    samples: Callable[[int, Sequence[Path]], None] = _ignore  # (steps finished, pictures drawn then, at least one)
    saved: Callable[[int], None] = _ignore  # (steps finished) once a save before the end is on the disk
    best: Callable[[int, float], None] = _ignore  # (steps finished, validation loss) whenever it is the lowest so far
    # Called once after each step; returns the user's wishes since the last call: "stop" (end after this step and
    # save), "save", "sample".
    asked: Callable[[], Collection[str]] = _nothing
