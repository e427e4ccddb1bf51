"""Average saves of one run into one LoRA, or runs that differ by their seed.

The former is an exponential moving average of its weights, found after the training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..common.cancel import look
from ..common.side_by_side import cancelled_at_once
from ..common.wording import count, names
from ..config import setting
from .combine import Summand, merge_loras
from .formats import FileLayer
from .lora import Lora, tensors_of, with_history
from .read import LoraFile, load_lora


def average_weights(steps: Sequence[int], width: float) -> list[float]:
    """Compute how much of each save an average takes; their sum is 1.

    width: the standard deviation of the averaged steps, as a share of the run's length (sigma_rel of Karras et al.
    2024, arXiv 2312.02696): the profile is t^gamma up to the last save. Each save stands for the steps that are nearer
    to it than to other saves. Raises ValueError for a width outside of what such a profile can have.
    """
    if not 0 < width < 1 / math.sqrt(12):  # that of gamma 0: all steps alike
        raise ValueError(f"{setting('average.width')} is {width:g}; set it above 0 and below {1 / math.sqrt(12):.3f}.")
    # sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), the variance of t under t^gamma on [0, 1].
    roots = np.roots([1, 7, 16 - width**-2, 12 - width**-2])
    gamma = float(max(root.real for root in roots if abs(root.imag) < 1e-9))
    last = steps[-1]
    borders = [0.0, *((a + b) / 2 / last for a, b in pairwise(steps)), 1.0]
    sums = [border ** (gamma + 1) for border in borders]
    return [after - before for before, after in pairwise(sums)]


def average_saves(saves: Sequence[tuple[int, Path]], width: float) -> tuple[LoraFile, list[float]]:
    """Average the LoRA files of one run's saves, given with their steps; also return the share of each.

    The factors are averaged, not their products: as an average during the training does, and all saves of a run share
    what their factors mean. Raises ValueError for fewer than two saves, and for files that differ in more than values.
    """
    saves = sorted(saves)
    if len(saves) < 2:
        raise ValueError(
            f"An average needs two saves or more; the run has {count(len(saves), 'save')} with a LoRA. Set "
            f"{setting('saves.save_every')} lower, and keep_last higher, and train again."
        )
    shares = average_weights([step for step, _ in saves], width)
    last = load_lora(saves[-1][1])
    sums = {
        name: {part: t.double() * shares[-1] for part, t in layer.tensors.items()}
        for name, layer in last.layers.items()
    }
    for (_, path), share in zip(saves[:-1], shares[:-1], strict=True):
        look()
        other = load_lora(path)
        if _shape(other) != _shape(last):
            raise ValueError(f"{path.name} and {saves[-1][1].name} have other layers; average saves of one run.")
        for name, layer in other.layers.items():
            for part, tensor in layer.tensors.items():
                sums[name][part] += share * tensor.double()
    layers = {
        name: FileLayer(
            source=name,
            kind=layer.kind,
            tensors={part: sums[name][part].to(tensor.dtype) for part, tensor in layer.tensors.items()},
            alpha=layer.alpha,
        )
        for name, layer in last.layers.items()
    }
    return LoraFile(name=last.name, layers=layers, metadata=last.metadata), shares


@cancelled_at_once
def mean_of_seeds(files: Sequence[tuple[int, Path]], rank: int = 0) -> tuple[Lora, str]:
    """Average the changes that LoRAs of several seeds make, given with these; also return a line on what is kept.

    Their factors mean nothing to one another, so the products are averaged: for rank 0 exactly, by the factors side by
    side, whose ranks add up; else by the nearest LoRA of that rank.
    """
    loras = [load_lora(path) for _, path in files]
    summands = [Summand(lora, 1 / len(loras)) for lora in loras]
    merged = merge_loras(summands, "svd" if rank else "sum", rank=rank)
    seeds = [seed for seed, _ in files]
    about = with_history(loras[0].metadata, "average", {"seeds": seeds, "rank": rank}, merged.layers)
    said = f"The mean of {count(seeds, 'seed')}: {names(map(str, seeds))}. Kept {merged.kept:.1%} of it."
    return Lora(tensors_of(merged.layers), about), said


def _shape(lora: LoraFile) -> dict[str, tuple]:
    return {
        name: (layer.alpha, *sorted((part, tuple(tensor.shape)) for part, tensor in layer.tensors.items()))
        for name, layer in lora.layers.items()
    }


@cancelled_at_once
def averaged_lora(saves: Sequence[tuple[int, Path]], width: float) -> tuple[Lora, str]:
    """Average saves as `average_saves` does; return the LoRA with its metadata, and a line for each save's share."""
    averaged, shares = average_saves(saves, width)
    steps, layers = sorted(step for step, _ in saves), averaged.layers.values()
    made = Lora(
        tensors_of(layers), with_history(averaged.metadata, "average", {"width": width, "steps": steps}, layers)
    )
    return made, "\n".join(f"step {step}: {share:.1%}" for step, share in zip(steps, shares, strict=True))
