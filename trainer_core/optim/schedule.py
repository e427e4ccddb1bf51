"""The learning rate schedules: the factor on the learning rate as a pure function of the step."""

from __future__ import annotations

import functools
import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from ..common.wording import count
from ..config import SchedulerConfig, setting
from ..config.scheduler import RESTARTS
from .expression import read_expression

NAMES = ("t", "step", "total")  # variables of an expression


class Curve(NamedTuple):
    """The learning rate curve of one run; a run that extends another one has the curve of that one."""

    length: int  # steps that the shape is made for
    last: int  # the step whose factor all later steps keep


def curve_of(steps: int, config: SchedulerConfig) -> Curve:
    """Build the curve of a run of `steps` that extends no other one."""
    return Curve(config.planned_steps or steps, steps - 1)


def factor_on(curve: Curve, step: int, config: SchedulerConfig) -> float:
    """Compute the factor on the learning rate at an optimizer step of a run with this curve.

    Warm-up starts above 0 and reaches the shape's first value at its last step. After its end the shape keeps its
    last value.
    """
    step, length, warmup = min(step, curve.last), curve.length, _warmup(curve.length, config)
    if step < warmup:
        return (step + 1) / warmup * _curve(0, length - warmup, config)
    return _curve(min(step, length) - warmup, length - warmup, config)


def lr_factor(step: int, steps: int, config: SchedulerConfig) -> float:
    """Compute the factor at any step, also one after the end, of a run of `steps` that extends no other one."""
    return factor_on(Curve(config.planned_steps or steps, step), step, config)


def warmup_steps(steps: int, config: SchedulerConfig) -> int:
    """Count the warm-up steps of a run of `steps`; a percentage is of the curve's length."""
    return _warmup(config.planned_steps or steps, config)


def _warmup(length: int, config: SchedulerConfig) -> int:
    if config.warmup_unit == "percent":
        return (length * config.warmup_steps + 50) // 100
    return config.warmup_steps


def check_curve(config: SchedulerConfig) -> None:
    """Raise ValueError for an invalid expression or invalid points, for runs of any length."""
    if config.name == "expression":
        read_expression(config.expression, NAMES)
    elif config.name == "points":
        _read_points(config.points)


def check_length(steps: int, config: SchedulerConfig) -> None:
    """Raise ValueError for a curve that does not fit a run of `steps`, or that is 0 for its remaining steps."""
    length, warmup = config.planned_steps or steps, warmup_steps(steps, config)
    if warmup >= min(length, steps):
        asked = (
            f"{config.warmup_steps} percent, {count(warmup, 'step')}"
            if config.warmup_unit == "percent"
            else str(warmup)
        )
        of = f"the run has {count(steps, 'step')}" if steps <= length else f"planned_steps is {length}"
        raise ValueError(f"warmup_steps is {asked}, and {of}; set {setting('scheduler.warmup_steps')} below that.")
    if config.name == "rex_restarts":
        _cycle_borders(length - warmup, config)
    elif config.name in RESTARTS and config.cycles > length - warmup:
        raise ValueError(
            f"cycles is {config.cycles}, more than the {count(length - warmup, 'step')} after the warm-up. Set "
            f"{setting('scheduler.cycles')} lower."
        )
    if steps > length and lr_factor(length, steps, config) == 0:
        raise ValueError(
            f"planned_steps is {length}, the run has {count(steps, 'step')}, and the curve ends at a learning rate of "
            f"0. Set {setting('scheduler.min_lr_ratio')} above 0, or planned_steps to {steps} for a curve over the "
            "whole run."
        )


def check_schedule(steps: int, config: SchedulerConfig) -> None:
    """Raise ValueError for a curve that fails in a run of `steps`; an expression is evaluated at every step."""
    check_curve(config)
    check_length(steps, config)
    if config.name != "expression":
        return
    factors = [lr_factor(step, steps, config) for step in range(steps)]  # raises at the first that is none
    if not any(factors):
        raise ValueError(
            f"The expression {config.expression!r} is 0 at every step, so nothing is trained; change "
            f"{setting('scheduler.expression')}."
        )


def _curve(done: int, length: int, config: SchedulerConfig) -> float:
    """Compute the factor of a curve of `length` steps, `done` steps (0..length) after the warm-up."""
    low, high = config.min_lr_ratio, 1.0
    if config.name == "rex_restarts":  # a cycle's own peak, which is not below the floor
        high = max(low, config.gamma ** _cycle(done, length, config)[0])
    elif config.name == "one_cycle" and done < config.rise_share * length:
        low = max(low, config.start)
    return low + (high - low) * FORMULAS[config.name](done, length, config)


def _cosine(position: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * position))


def _cosine_with_restarts(done: int, length: int, config: SchedulerConfig) -> float:
    # Whole numbers, so that a restart cannot be missed by rounding.
    return 0.0 if done == length else _cosine(config.cycles * done % length / length)


def _warmup_stable_decay(done: int, length: int, config: SchedulerConfig) -> float:
    position = max(0.0, 1 - (1 - done / length) / config.decay_share)  # in the part that falls
    if config.decay_shape == "cosine":
        return _cosine(position)
    return 1 - (position if config.decay_shape == "linear" else math.sqrt(position))


def _rex(position: float, d: float) -> float:
    """Compute the reflected exponential decay (arXiv 2107.04197, with d = 1/2)."""
    return (1 - position) / ((1 - d) + d * (1 - position))


def _rex_restarts(done: int, length: int, config: SchedulerConfig) -> float:
    return _rex(_cycle(done, length, config)[1], config.d)


def _cycle(done: int, length: int, config: SchedulerConfig) -> tuple[int, float]:
    """Find the cycle that a step of rex_restarts belongs to, and its position 0..1 in it."""
    borders = _cycle_borders(length, config)
    cycle = min(bisect_right(borders, done), config.cycles) - 1
    return cycle, (done - borders[cycle]) / (borders[cycle + 1] - borders[cycle])


@functools.lru_cache(maxsize=16)
def _cycle_borders(length: int, config: SchedulerConfig) -> list[int]:
    """List the first step of each cycle, and the end; a cycle is `cycle_multiplier` times as long as the last one."""
    sums = list(itertools.accumulate((config.cycle_multiplier**i for i in range(config.cycles)), initial=0.0))
    borders = [math.floor(length * part / sums[-1] + 0.5) for part in sums]
    if any(a == b for a, b in itertools.pairwise(borders)):
        raise ValueError(
            f"cycles is {config.cycles} and cycle_multiplier is {config.cycle_multiplier:g}: in {length} steps after "
            f"the warm-up some cycles have no step. Set {setting('scheduler.cycles')} lower, or cycle_multiplier "
            "nearer to 1."
        )
    return borders


def _one_cycle(done: int, length: int, config: SchedulerConfig) -> float:
    """Rise by half a cosine, then fall by half a cosine (Smith & Topin 2017)."""
    position = done / length
    if done < config.rise_share * length:
        return 1 - _cosine(position / config.rise_share)
    return _cosine((position - config.rise_share) / (1 - config.rise_share))


def _expression(done: int, length: int, config: SchedulerConfig) -> float:
    where = {"t": done / length, "step": float(done), "total": float(length)}
    try:
        value = read_expression(config.expression, NAMES)(where)
        if value < 0:
            raise ValueError(f"is {value:g}, below 0")
    except ValueError as problem:
        raise ValueError(
            f"The expression {config.expression!r} {problem} at t = {where['t']:g} and step = {done}; it must be "
            "a number of 0 or more at every step."
        ) from None
    return value


def _points(done: int, length: int, config: SchedulerConfig) -> float:
    position, (positions, factors) = done / length, _read_points(config.points)
    after = bisect_right(positions, position)
    if after in (0, len(positions)):
        return factors[min(after, len(factors) - 1)]
    share = (position - positions[after - 1]) / (positions[after] - positions[after - 1])
    return factors[after - 1] + share * (factors[after] - factors[after - 1])


@functools.lru_cache(maxsize=16)
def _read_points(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Parse "0:0, 0.1:1, 1:0" into positions and factors; raises ValueError that names the wrong point."""
    pairs = []
    for part in re.split(r"[,;\n]", text):
        if not part.strip():
            continue
        shown = part.strip()[:50]
        try:
            position, factor = (float(number) for number in part.split(":"))
        except ValueError:
            raise ValueError(f"points has {shown!r}; write position:factor, for example 0.1:1.") from None
        if not 0 <= position <= 1 or (pairs and position < pairs[-1][0]):
            raise ValueError(f"points has {shown!r}; positions lie between 0 and 1, each after the one before.")
        if not 0 <= factor < math.inf:
            raise ValueError(f"points has {shown!r}; a factor must be 0 or more.")
        pairs.append((position, factor))
    if not any(factor for _, factor in pairs):
        raise ValueError(f"points is {text[:50]!r}; it needs at least one point with a factor above 0.")
    positions, factors = zip(*pairs, strict=True)
    return positions, factors


FORMULAS: dict[str, Callable[[int, int, SchedulerConfig], float]] = {  # steps done, of how many -> 0..1
    "constant": lambda done, length, config: 1.0,
    "linear": lambda done, length, config: 1 - done / length,
    "cosine": lambda done, length, config: _cosine(done / length),
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_soft_restarts": lambda done, length, config: _cosine((2 * config.cycles - 1) * done / length),
    "polynomial": lambda done, length, config: (1 - done / length) ** config.power,
    "inverse_sqrt": lambda done, length, config: 1 / math.sqrt(1 + done / config.timescale),
    "warmup_stable_decay": _warmup_stable_decay,
    "rex": lambda done, length, config: _rex(done / length, config.d),
    "rex_restarts": _rex_restarts,
    "one_cycle": _one_cycle,
    "expression": _expression,
    "points": _points,
}
