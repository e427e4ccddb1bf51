"""Proof that a MODEL's gradients are right: passes forward and backward, central differences, recomputed blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import hypot
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....trainer_core.common.exact import exact
from ....trainer_core.memory import LEVELS, copied_before_written, keep_activations, recompute
from ....trainer_core.models.base import Unit
from .gradients import WRONG
from .observed import Observed
from .stopped import where_stopped

CHANGES = (0.1, 0.03, 0.01, 0.003, 0.001)  # of the loss, as shares, by which its slope is measured
APART, ROUNDED = 0.05, 0.2  # slopes that are one but for rounding and bends, in float32 and in half of its bits
SIDEWAYS, SURE = 6, 2  # directions that tell rounding, and by how many of its sizes a slope is off for certain
EARLIEST = 4  # the share of layers that are tried by themselves
INSTEAD = "Update ComfyUI and the node pack that the MODEL is from, or link another MODEL"
WRONG_SLOPE = f"this MODEL cannot be trained, as the loss does not follow its gradients, first before {{}}. {INSTEAD}"
OWN_CHECKPOINTS = "set gradient checkpointing of the node that loads it to off"
WORDS = {  # why a pass with gradients fails, by what torch says
    r"does not require grad": f"as no gradient leaves its code, which may recompute blocks itself: {OWN_CHECKPOINTS}",
    r"checkpoint": f"as its code recomputes blocks itself: {OWN_CHECKPOINTS}",
    r"implement .*backward": "as a function in its code has no backward pass",
    r"inference tensor": "as its code keeps tensors of inference mode to itself, which autograd cannot save",
    r"in-?place operation": "as its code writes into what the backward pass needs",
    r"out=\.\.\. arguments": "as its code writes results into memory of its own, which has no gradient",
    r"not implemented": "as it has operators without a backward pass for its numbers: load it in bfloat16 or float32",
}

Pairs = Sequence[tuple[Tensor, Tensor]]  # parameters and their gradients


class Proof(NamedTuple):
    """What passes forward and backward have shown."""

    idle: list[str]  # layers without a gradient
    gradients: dict[str, Pairs]  # of the first pass, by layer, where there are any


def prove(
    runs: Sequence[Callable[[], Tensor]],
    layers: Mapping[str, nn.Module],
    observed: Observed,
    off: float = APART,
) -> Proof:
    """Try passes forward and backward, and find the layers that get no gradient from any.

    runs: each predicts from the smallest batch, the same each time; two at first, as models that keep something between
    passes fail in the second. layers: those that are trained, by name. observed: watches the passes. off: by how much
    slopes may differ. Raises ValueError for a model that cannot be trained. Gradients are cleared.
    """
    passes, losses = list[dict[str, Pairs]](), list[float]()
    for run in runs:
        _clear(layers)
        prediction = None
        with copied_before_written():
            try:
                with observed.watching():
                    prediction = run()
                if prediction.isfinite().all():
                    prediction.float().square().mean().backward()
                    losses.append(float(prediction.detach().double().square().mean()))
            except torch.OutOfMemoryError:
                raise
            except WRONG as error:
                raise ValueError(_why(error, observed, prediction)) from error
        if not prediction.isfinite().all():
            raise ValueError("this MODEL predicts numbers that are not finite; load it in bfloat16 or float32")
        found = {
            name: [(p, p.grad) for p in layer.parameters() if p.grad is not None] for name, layer in layers.items()
        }
        if not all(gradient.isfinite().all() for pairs in found.values() for _, gradient in pairs):
            raise ValueError("gradients of this MODEL are not finite; load it in bfloat16 or float32")
        passes.append(
            {name: kept for name, pairs in found.items() if (kept := [each for each in pairs if each[1].any()])}
        )
        _clear(layers)
    if not any(passes):
        raise ValueError(
            refused(observed.lost) if observed.lost else "this MODEL cannot be trained: no layer gets a gradient"
        )
    _check_slopes(runs, losses, passes, list(observed.order), observed.lost, off)
    return Proof([name for name in layers if not any(name in found for found in passes)], passes[0])


def _check_slopes(
    runs: Sequence[Callable[[], Tensor]],
    losses: Sequence[float],
    passes: Sequence[Mapping[str, Pairs]],
    order: Sequence[str],
    lost: str,
    off: float,
) -> None:
    """Raise ValueError where a loss does not change along its gradients as they say.

    All layers are tried in the first pass, and the earliest in the last: their gradients come through all others.
    """
    for number, (run, loss, found) in enumerate(zip(runs, losses, passes, strict=True)):
        moving = [name for name in order if name in found]
        some = moving if number == 0 else moving[: -(-len(moving) // EARLIEST)]
        if name := _last_wrong(run, loss, found, some, off):
            raise ValueError(refused(lost) if lost else WRONG_SLOPE.format(name))


def _last_wrong(
    run: Callable[[], Tensor], loss: float, found: Mapping[str, Pairs], some: Sequence[str], off: float
) -> str:
    """Name the last of some layers along whose gradient the loss does not change as it says; "" for none.

    Numbers of few bits swallow small changes of many layers at once, so that each half of them is asked again.
    """
    if not some or slopes_agree(run, loss, [found[name] for name in some], off):
        return ""
    if len(some) == 1:
        return some[0]
    half = len(some) // 2
    return _last_wrong(run, loss, found, some[half:], off) or _last_wrong(run, loss, found, some[:half], off)


def _why(error: Exception, observed: Observed, prediction: Tensor | None) -> str:
    """Name what keeps a pass from having a gradient."""
    if custom := observed.custom_in(error):
        return refused(custom)
    if prediction is not None and not prediction.requires_grad and observed.lost:
        return refused(observed.lost)
    where = where_stopped(error)
    words = (sentence for pattern, sentence in WORDS.items() if re.search(pattern, str(error), re.I))
    why = next(words, f"as its code stops with an error{where} where gradients are on; the log has it")
    return f"this MODEL cannot be trained, {why}. {INSTEAD}"


def refused(operators: str) -> str:
    return f"this MODEL cannot be trained, as operators hand no gradient on: {operators}. {INSTEAD}"


@torch.no_grad()
def slopes_agree(run: Callable[[], Tensor], loss: float, layers: Sequence[Pairs], off: float = APART) -> bool:
    """Tell whether the loss changes along gradients as they say, by central differences; each layer counts alike.

    loss: of the pass as it is. layers: the parameters of each, and their gradients. Where rounding hides the change, it
    is no evidence, and the answer is yes.
    """
    norms = [float(sum(exact(gradient).square().sum() for _, gradient in each) ** 0.5) for each in layers]
    steps = [[(p, g / norm) for p, g in each] for each, norm in zip(layers, norms, strict=True)]
    expected, slopes = sum(norms), list[float]()

    def slope(change: float, towards: Sequence[Pairs] = steps) -> float:
        return _odd(run, towards, change * loss / expected) / (2 * change * loss)

    for change in CHANGES:
        slopes.append(slope(change))
        if abs(slopes[0] - 1) < off:
            return True
    # Of two steps that agree: larger ones are bent, smaller ones rounded away.
    sure = [(abs(one - two), i) for i, (one, two) in enumerate(pairwise(slopes)) if abs(one - two) < off * abs(one)]
    draws = torch.Generator().manual_seed(0)
    sideways = [[_sideways(each, draws) for each in steps] for _ in range(SIDEWAYS if sure else 0)]
    for _, first in sorted(sure):
        if abs(slopes[first] - 1) < off:
            return True
        # By how much slopes in other directions differ between these steps is what rounding does, alike at each step.
        pair = CHANGES[first : first + 2]
        apart = fmean((slope(pair[0], each) - slope(pair[1], each)) ** 2 for each in sideways) ** 0.5
        sizes = [apart / hypot(change / pair[0], change / pair[1]) for change in pair]
        if all(abs(slopes[first + i] - 1) >= off + SURE * size for i, size in enumerate(sizes)):
            return False
    return True


def _odd(run: Callable[[], Tensor], steps: Sequence[Pairs], by: float) -> float:
    """The loss at parameters moved by as many steps, less that at parameters moved back by them."""
    moved = [pair for each in steps for pair in each]
    before, losses = [parameter.clone() for parameter, _ in moved], list[float]()
    try:
        for sign in (by, -by):
            for (parameter, step), own in zip(moved, before, strict=True):
                parameter.copy_(own + sign * step)
            losses.append(_loss(run))
    finally:
        for (parameter, _), own in zip(moved, before, strict=True):
            parameter.copy_(own)
    return losses[0] - losses[1]


def _sideways(steps: Pairs, draws: torch.Generator) -> Pairs:
    """Draw a step of a layer at a right angle to its gradient, nearly as long; steps: along it, of length 1."""
    drawn = [torch.randn(step.shape, generator=draws).to(step) for _, step in steps]
    length = sum(one.square().sum() for one in drawn) ** 0.5
    along = sum((one * step).sum() for one, (_, step) in zip(drawn, steps, strict=True))
    return [(parameter, (one - along * step) / length) for one, (parameter, step) in zip(drawn, steps, strict=True)]


def _loss(run: Callable[[], Tensor]) -> float:
    return float(run().double().square().mean())


def recomputes(
    run: Callable[[], Tensor],
    layers: Mapping[str, nn.Module],
    plain: Mapping[str, Pairs],
    blocks: Sequence[Unit],
    bound: float,
) -> bool:
    """Tell whether gradients stay the same where all of some blocks are recomputed, or parts of blocks.

    Some blocks do something else the second time.

    plain: gradients of a pass without that, by layer. bound: of their relative difference. Gradients are cleared.
    """
    recompute(blocks, LEVELS[-1], copies=True)
    try:
        with copied_before_written():
            run().float().square().mean().backward()
        given = {id(p): gradient for pairs in plain.values() for p, gradient in pairs}
        found = {id(p): p.grad for layer in layers.values() for p in layer.parameters() if p.grad is not None}
    except torch.OutOfMemoryError:
        raise
    except WRONG:
        return False
    finally:
        keep_activations(block for block, _ in blocks)
        _clear(layers)
    size = sum(exact(gradient).square().sum() for gradient in given.values())
    difference = sum(_squared(given.get(key), found.get(key)) for key in given.keys() | found.keys())
    return bool(difference <= bound**2 * size)


def _squared(one: Tensor | None, other: Tensor | None) -> Any:
    """The sum of squares of a difference; an absent gradient is one of zeros, as recomputed blocks give."""
    if one is None or other is None:
        return sum(exact(each).square().sum() for each in (one, other) if each is not None)
    return exact(one - other).square().sum()


def _clear(layers: Mapping[str, nn.Module]) -> None:
    for layer in layers.values():
        layer.zero_grad(set_to_none=True)
