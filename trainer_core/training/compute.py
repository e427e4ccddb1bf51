"""Decide by the first batch which blocks multiply in 8 bits; a resumed run keeps what was decided."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.devices import kind_of
from ..common.wording import count, names, say
from ..memory import chosen_compute, hold_rounded, multiply_in, pack, timing_rounding
from ..models import BaseModel
from ..networks.rounded import rounding_layers
from .batch import ReadConditioning
from .calibrate import first_passes
from .state import Run

BOUND = 0.98  # of the cosine to exact, of the prediction and of each block's gradient
TURNS = 2  # passes of which the fastest counts
FASTER = 0.9  # auto takes int8 where a pass takes at most this share of the exact one's time


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What a pass of the first batch gave."""

    prediction: Tensor
    gradients: Mapping[str, Tensor]  # of the trained weights of each block, "" outside of them
    seconds: float

    @property
    def finite(self) -> bool:
        """Tell whether all gradients are finite."""
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


@dataclass(frozen=True, slots=True)
class Nearness:
    """Cosines of a pass to the exact one."""

    prediction: float
    gradient: float  # of all trained weights
    blocks: Mapping[str, float]  # of the gradients of each

    @property
    def least(self) -> float:
        """The smallest of them; a pass that is not finite is not near at all."""
        return min((self.prediction, *self.blocks.values()), key=lambda each: each if each == each else -1.0)


def compute_remarks(kind: str, base: BaseModel, device: torch.device, weights: str) -> list[str]:
    """Say before a run how its frozen layers will multiply; weights: how they are stored."""
    if kind == "exact":
        return []
    if chosen_compute(kind, device, weights) == "exact":
        why = f"as int8 is not measured on {device.type} yet" if device.type != "cpu" else "as int8 does not suit here"
        return [f"compute is auto: frozen layers multiply exactly, {why}."]
    blocks = rounding_layers(base)
    layers = count(sum(map(len, blocks.values())), "frozen linear layer")
    inside = f"{layers} in {count(blocks, 'block')}"
    if not blocks:
        return ["No layer of this model can multiply in 8 bits: its blocks have none with sides in multiples of 16."]
    if kind == "auto":
        return [f"compute is auto: {inside} multiply in int8 if the first batch takes less time by it."]
    imitated = kind == "float8" and not kind_of(device).scaled
    slowly = f" float8 is imitated on {device.type}, more slowly." if imitated else ""
    return [
        f"{inside} multiply in {kind}, all others exactly. The first batch measures how near that is; a block whose "
        f"cosine to exact is below {BOUND} stays exact.{slowly}"
    ]


def settle_compute(run: Run) -> None:
    """Let the frozen layers of a run multiply as its settings ask, by its own earlier decision if it has one."""
    asked = run.config.memory.compute
    kind = chosen_compute(asked, run.device, run.config.base_model.weights)
    blocks = rounding_layers(run.base) if kind != "exact" else {}
    if not blocks:
        run.multiplies_in, run.exact_blocks = "exact", []
        return
    if run.multiplies_in != kind and not (asked == "auto" and run.multiplies_in == "exact"):
        # All processes take what the first one has measured, as time differs.
        run.multiplies_in, run.exact_blocks = run.world.share(_decided(run, kind, blocks, by_time=asked == "auto"))
    chosen = [] if run.multiplies_in == "exact" else [name for name in blocks if name not in run.exact_blocks]
    _multiply(kind, blocks, chosen)
    for name in chosen:
        pack(blocks[name])
    _hold(run, blocks, chosen)


def _decided(run: Run, kind: str, blocks: Mapping[str, Sequence[Any]], *, by_time: bool) -> tuple[str, list[str]]:
    """Decide how a run multiplies, and which blocks stay exact; report it."""
    read, looks, scale = run.reader(training=True), itertools.count(), run.scaler.get_scale()
    compiled, run.programs.in_use = run.programs.in_use, False

    def look(chosen: Iterable[str], turns: int = 1) -> FirstPass:
        _multiply(kind, blocks, chosen)
        if turns > 1:  # what the first of them rounds the others find, as the steps will
            _hold(run, blocks, chosen)
        found = []
        for _ in range(turns):
            run.callbacks.phase(say("looking at the first batches"), min(next(looks), len(blocks)), len(blocks))
            run.callbacks.check()
            found.append(first_pass(run, read, scale))
        return min(found, key=_seconds)

    def takes_less(rounded: FirstPass) -> bool:
        said = f"a pass of the first batch takes {exact.seconds:.2g} s, in int8 {rounded.seconds:.2g} s"
        less = rounded.seconds <= FASTER * exact.seconds
        run.callbacks.note(f"Frozen layers multiply {'in int8' if less else 'exactly'}: {said}.")
        return less

    try:
        exact = look(())
        while scale > 1 and not exact.finite:  # float16's scale has not settled yet
            scale /= 2
            exact = look(())
        rounded = look(blocks, TURNS if by_time else 1)
        if by_time:
            exact = min(exact, look(()), key=_seconds)
            if not takes_less(rounded):
                return "exact", []
        near, chosen = nearness(exact, rounded), list(blocks)
        if near.least < BOUND or near.least != near.least:
            alone = {name: nearness(exact, look([name])).least for name in blocks}
            best = sorted((name for name in blocks if alone[name] >= BOUND), key=lambda name: -alone[name])
            # As many of the best as are near together: each block that is rounded takes them further away.
            few, many = 0, len(best) + 1
            while many - few > 1:
                some = (few + many) // 2
                found = nearness(exact, look(best[:some]))
                few, many, near = (some, many, found) if found.least >= BOUND else (few, some, near)
            chosen = best[:few]
            if by_time and chosen and not takes_less(look(chosen, TURNS)):  # fewer blocks may spare less
                return "exact", []
    finally:
        run.programs.in_use = compiled
    left = [name for name in blocks if name not in chosen]
    _report(run, kind, near, chosen, left)
    return kind, left


def _report(run: Run, kind: str, near: Nearness, chosen: Sequence[str], left: Sequence[str]) -> None:
    if left:
        which = "All blocks stay" if not chosen else f"{names(left)} stay" if len(left) > 1 else f"{left[0]} stays"
        run.callbacks.note(f"{which} exact: in {kind} a cosine to the exact pass is below {BOUND}.")
    if chosen:
        inside = {name: each for name, each in near.blocks.items() if name}
        worst = min(inside, key=inside.__getitem__) if inside else ""
        least = f", in block {worst} {inside[worst]:.4f}" if worst else ""
        run.callbacks.note(
            f"In {kind}, the first batch's prediction has a cosine of {near.prediction:.6f} to the exact one, and its "
            f"gradient of {near.gradient:.4f}{least}."
        )
    about = {"prediction": near.prediction, "gradient": near.gradient, "blocks": dict(near.blocks)}
    run.record("compute", kind=kind, exact_blocks=list(left), **about)


def _multiply(kind: str, blocks: Mapping[str, Sequence[Any]], chosen: Iterable[str]) -> None:
    inside = set(chosen)
    for name, layers in blocks.items():
        multiply_in(kind if name in inside else "", layers)


def _hold(run: Run, blocks: Mapping[str, Sequence[Any]], chosen: Iterable[str]) -> None:
    """Let chosen blocks whose weights another program holds keep them rounded, as far as memory allows."""
    if run.base.host is not None:
        hold_rounded([layer for name in chosen for layer in blocks[name]], run.base.host.holds)


def first_pass(run: Run, read: ReadConditioning, scale: float) -> FirstPass:
    """Predict the first batch and find its gradients, times a scale.

    Its seconds are without those of rounding weights that the steps will find rounded.
    """
    with closing(first_passes(run, read)) as passes:
        seen = next(passes)
        with timing_rounding(run.base.denoiser.module.modules()) as rounding:
            began = time.perf_counter()  # without encoding
            prediction = seen.predict()
            losses = run.objective.loss(prediction, seen)
            if losses.requires_grad:
                (scale * losses.sum()).backward()
            seconds = time.perf_counter() - began - sum(rounding)
    run.network.reverse(False)
    found: dict[str, list[Tensor]] = {}
    for trained in run.network.chosen:
        for parameter in run.network.layers[trained.name].parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.setdefault(trained.block, []).append(gradient.flatten().float())
    run.network.zero_grad(set_to_none=True)
    for term in run.objective.terms:
        term.forget_gradients()
    return FirstPass(prediction.detach().float(), {name: torch.cat(each) for name, each in found.items()}, seconds)


def nearness(exact: FirstPass, other: FirstPass) -> Nearness:
    """Compare a pass with the exact one."""
    blocks = {name: cosine(each, other.gradients[name]) for name, each in exact.gradients.items() if each.any()}
    whole = [torch.cat(list(seen.gradients.values())) if seen.gradients else torch.zeros(1) for seen in (exact, other)]
    return Nearness(cosine(exact.prediction, other.prediction), cosine(*whole), blocks)


def cosine(a: Tensor, b: Tensor) -> float:
    """Compute the cosine between two tensors, in float64; 1 for two of zeros."""
    a, b = a.flatten().cpu().double(), b.flatten().cpu().double()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else float(not a.any() and not b.any())


def _seconds(seen: FirstPass) -> float:
    return seen.seconds
