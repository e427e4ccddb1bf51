"""What a finished run says to try next, where its figures show that something would do better."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import setting
from .effect import NOTHING

WEAK = 0.01  # relative change of a prediction below which a LoRA is hardly seen: docs/learning.md
FEWEST = 4  # measurements of the validation loss that say anything
AFTER = 3  # measurements since the lowest, so that it was no blip
RISEN = 0.02  # share of the lowest validation loss by which the last one exceeds it
FALLEN = 0.1  # share of all that the validation loss fell that fell in the last quarter
LEAST_FALL = 0.01  # share of a loss that counts as a fall
SURE = 3.0  # standard errors of the fall of the training loss
LONG = 200  # steps whose losses tell a fall from chance
LONGER = 1.5  # times the steps, where a run was too short


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a run has measured."""

    losses: Sequence[float]  # of each step, NaN where it was not finite
    validation: Sequence[tuple[int, float]]  # (steps finished, loss); at 0 before the first step
    prediction: float | None  # by how much the LoRA changes a prediction, relative
    noise_scale: tuple[float, float, float] | None  # low, estimate, high in pictures
    batch_size: int
    accumulate: int
    epochs: int = 0  # of the run, where its length is set in epochs
    keeps_best: bool = False
    rated: bool = True  # the learning rate is set, not found by the optimizer


def advise(figures: Figures) -> list[str]:
    """List a sentence on each setting that the figures say to change; none where they say nothing."""
    measured = [(step, loss) for step, loss in figures.validation if step and math.isfinite(loss)]
    enough = len(measured) >= FEWEST
    found = [_overfit(figures, measured) if enough else ""]
    weak = _weak(figures)
    if not found[0] and not weak:
        found.append(_short(figures, measured) if enough else _still_falling(figures))
    return [sentence for sentence in (*found, weak, _small_batch(figures)) if sentence]


def _overfit(figures: Figures, measured: Sequence[tuple[int, float]]) -> str:
    """Say that the validation loss was lowest well before the end, and rose since."""
    step, lowest = min(measured, key=lambda each: each[1])
    after, last = [each for each in measured if each[0] > step], measured[-1][1]
    if len(after) < AFTER or last <= lowest * (1 + RISEN):
        return ""
    risen = f"The validation loss rose by {last / lowest - 1:.0%} since step {step}"
    start = next((loss for at, loss in figures.validation if not at), math.inf)
    if lowest >= start:
        return (
            f"{risen}, and never fell below its start: set {setting('optimizer.learning_rate')} lower, or add pictures."
        )
    if figures.keeps_best:
        return ""  # the LoRA is that of the lowest one
    return f"{risen}: set {_length(figures, step)}, or {setting('train.keep_best')} to on."


def _short(figures: Figures, measured: Sequence[tuple[int, float]]) -> str:
    """Say that the validation loss was lowest at the end, after a last quarter in which it still fell."""
    last = measured[-1]
    before = [loss for step, loss in measured if step <= 0.75 * last[0]]
    if not before or last[1] > min(loss for _, loss in measured):
        return ""
    highest, fallen = max(loss for _, loss in measured), before[-1] - last[1]
    if fallen < max(FALLEN * (highest - last[1]), LEAST_FALL * last[1]):
        return ""
    return f"The validation loss still fell at the end: set {_length(figures, round(LONGER * last[0]))}."


def _still_falling(figures: Figures) -> str:
    """Say that the training loss fell from the third quarter of the steps to the last, beyond chance."""
    count = len(figures.losses)
    parts = figures.losses[count // 2 : 3 * count // 4], figures.losses[3 * count // 4 :]
    third, fourth = ([loss for loss in part if math.isfinite(loss)] for part in parts)
    if count < LONG or min(len(third), len(fourth)) < 2:
        return ""
    before, after = statistics.fmean(third), statistics.fmean(fourth)
    error = math.sqrt(statistics.variance(third) / len(third) + statistics.variance(fourth) / len(fourth))
    if before - after <= max(SURE * error, LEAST_FALL * before):
        return ""
    return f"The loss still fell in the last quarter: set {_length(figures, round(LONGER * count))}."


def _weak(figures: Figures) -> str:
    """Say that the LoRA hardly changes a prediction; `describe_effect` names one that changes none."""
    moved = figures.prediction
    if moved is None or not NOTHING < moved < WEAK or not figures.rated:
        return ""
    return (
        f"The LoRA changes a prediction by {moved:.2%} only: set {setting('optimizer.learning_rate')} about 3 times "
        "higher."
    )


def _small_batch(figures: Figures) -> str:
    """Say that the gradients of a step are mostly noise, by the lower end of the measured noise scale."""
    batch = figures.batch_size * figures.accumulate
    if figures.noise_scale is None or batch >= figures.noise_scale[0]:
        return ""
    wanted = math.ceil(figures.noise_scale[0] / figures.batch_size)
    return f"Gradients of {batch} at a time are mostly noise: set {setting('train.accumulate')} to {wanted}."


def _length(figures: Figures, steps: int) -> str:
    """Name the setting of the length, and its value for a number of steps."""
    if figures.epochs:
        return f"{setting('train.epochs')} to {max(1, round(figures.epochs * steps / len(figures.losses)))}"
    return f"{setting('train.steps')} to {steps}"
