"""Make a LoRA smaller: the best approximation of every layer's change at a lower rank, by a rule or by recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, get_args

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.side_by_side import cancelled_at_once, side_by_side
from ..common.wording import count
from ..config import node, setting
from .formats import BIAS, MAGNITUDE, PLAIN, FileLayer
from .read import LoraFile
from .recipes import FrozenWeight, Recipe, frozen_weight_of, kept_directions, settle_sizes
from .singular import Singular, decompose, low_rank

RankMode = Literal["rank", "sv_ratio", "sv_cumulative", "sv_fro"]
RANK_MODES: tuple[RankMode, ...] = get_args(RankMode)
ROUGH = 0.6  # share of the time that layers take before a size compares them, in progress bars
NOTHING = 1e-6  # a largest singular value up to this is a layer without effect

ReadWeight = Callable[[str], Tensor]  # the frozen weight of a layer, by its name in the file
Progress = Callable[[float], None]  # told the share of the work that is done


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRule:
    """How many singular values of a layer stay."""

    mode: RankMode = "rank"
    value: float = 0.0  # of all modes but rank
    rank: int = 0  # at most; 0: no limit
    conv_rank: int = 0  # at most, of convolutions; 0: as rank
    tool: str = "resize"  # that sets it, for messages

    def __post_init__(self) -> None:
        if self.mode == "rank" and self.rank < 1:
            raise ValueError(f"{setting(f'{self.tool}.rank')} is {self.rank}; set it to 1 or more.")
        if self.mode == "sv_ratio" and not self.value >= 1:
            raise ValueError(f"{setting(f'{self.tool}.sv_ratio')} is {self.value:g}; set it to 1 or more, such as 10.")
        if self.mode in ("sv_cumulative", "sv_fro") and not 0 < self.value <= 1:
            raise ValueError(
                f"{setting(f'{self.tool}.{self.mode}')} is {self.value:g}; set it above 0, up to 1, such as 0.9."
            )

    def settings(self) -> dict[str, str | float]:
        """Give its numbers, for the metadata of a LoRA."""
        return {"mode": self.mode, "value": self.value, "rank": self.rank, "conv_rank": self.conv_rank}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRanks:
    """The ranks of one layer before and after, and the share of its change that is kept."""

    name: str
    old_rank: int
    new_rank: int  # 0: the layer is left out
    kept: float  # share of the Frobenius norm, 0..1
    of_weight: float = math.nan  # what is lost, relative to the norm of the model's weight; NaN: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """A smaller LoRA: its layers, and what became of each that was resized."""

    layers: list[FileLayer]
    ranks: list[LayerRanks]
    recipe: str = ""


def _untold(_: float) -> None:
    """Tell nobody."""


@cancelled_at_once
def resize(lora: LoraFile, rule: RankRule, weight: ReadWeight | None = None, progress: Progress = _untold) -> Resized:
    """Lower the rank of every layer by a rule; ranks are those of sd-scripts' networks/resize_lora.py.

    weight: needed for layers `of_weight`. Layers without a matrix stay as they are. Raises ValueError where nothing
    can be resized.
    """
    layers, ranks = [], []
    for number, (name, layer) in enumerate(lora.layers.items()):
        progress(number / len(lora.layers))
        found = decomposed(layer, weight)
        if found is None:
            layers.append(layer)
            continue
        rank = kept_rank(rule, found.sigma, min(len(found.u), found.vt.shape[1]), convolution=bool(found.kernel))
        mask = torch.arange(len(found.sigma)) < min(rank, rank_of(layer) or rank)
        layers.append(_cut(layer, found, mask))
        ranks.append(_ranks(name, layer, found, mask))
    return Resized(layers=layers, ranks=_any(ranks, lora))


@cancelled_at_once
def resize_by_recipes(
    lora: LoraFile,
    recipes: Sequence[Recipe],
    weight: ReadWeight | None = None,
    progress: Progress = _untold,
    *,
    bytes_each: int = 2,
) -> list[Resized]:
    """Lower the rank of every layer by each of some recipes; each layer is decomposed once.

    weight: needed for references of the model, and for layers `of_weight`. bytes_each: of a number in the file, for
    `size`. A layer of which nothing is kept is left out. Raises ValueError where a recipe keeps nothing at all.
    """
    if weight is None and (needy := next((recipe for recipe in recipes if recipe.needs_model), None)):
        raise ValueError(f"The recipe {needy.text} compares with the model; link the MODEL to {node('resize')}.")
    untouched, names, found = [], [], []
    references: list[FrozenWeight] = []
    measures = weight is not None and any(recipe.needs_model for recipe in recipes)
    first = ROUGH if measures and any(recipe.size is not None for recipe in recipes) else 1.0
    reading = Lock()

    def read(name: str) -> Tensor:
        assert weight is not None
        with reading:
            return weight(name)

    def measured(name: str) -> tuple[Singular | None, FrozenWeight]:
        one = decomposed(lora.layers[name], read if weight else None)
        return one, frozen_weight_of(read(name), one, recipes) if one and measures else FrozenWeight()

    for number, (name, (one, reference)) in enumerate(
        zip(lora.layers, side_by_side(measured, lora.layers), strict=True)
    ):
        progress(first * number / len(lora.layers))
        if one is None:
            untouched.append(lora.layers[name])
            continue
        names.append(name)
        found.append(one)
        references.append(reference)
    if not names:
        _any([], lora)
    if measures:
        settle_sizes(
            recipes,
            found,
            references,
            bytes_each,
            lambda number: read(names[number]),
            lambda share: progress(first + (1 - first) * share),
        )
    resized = []
    for recipe in recipes:
        masks = kept_directions(recipe, found, references, bytes_each)
        if not any(mask.any() for mask in masks):
            raise ValueError(f"The recipe {recipe.text} keeps nothing of {lora.name}; set thr lower, or size higher.")
        factor = recipe.rescale
        parts = list(zip(names, [replace(one, sigma=one.sigma * factor) for one in found], masks, strict=True))
        layers = [_cut(lora.layers[name], one, mask, factor) for name, one, mask in parts if mask.any()]
        ranks = [
            replace(_ranks(name, lora.layers[name], one, mask), of_weight=_lost(one, mask, reference))
            for (name, one, mask), reference in zip(parts, references, strict=True)
        ]
        resized.append(
            Resized(
                layers=[*layers, *(_weaker(layer, factor) for layer in untouched)],
                ranks=_any(ranks, lora),
                recipe=recipe.text,
            )
        )
    return resized


def kept_rank(rule: RankRule, sigma: Tensor, full: int, *, convolution: bool = False) -> int:
    """Compute how many singular values a rule keeps; full: how many the whole matrix has.

    As sd-scripts: the number that meets the rule is held between 1 and full - 1, and one is added to it.
    """
    most = (rule.conv_rank if convolution and rule.conv_rank else rule.rank) or full
    if not len(sigma) or float(sigma[0]) <= NOTHING:
        return 1
    if rule.mode == "rank":
        return min(most, len(sigma))
    if rule.mode == "sv_ratio":
        index = int((sigma > sigma[0] / rule.value).sum())
    else:
        sums = sigma.cumsum(0) if rule.mode == "sv_cumulative" else sigma.square().cumsum(0)
        target = rule.value if rule.mode == "sv_cumulative" else rule.value**2
        index = int(torch.searchsorted(sums / sums[-1], target)) + 1
    return min(max(1, min(index, full - 1)) + 1, most, len(sigma))


def rank_of(layer: FileLayer) -> int:
    """The rank that a layer of a file has; 0 for kinds whose rank is not that of their change."""
    return layer.form.rank_of(layer.tensors) if layer.form.exact_rank else 0


def decomposed(layer: FileLayer, weight: ReadWeight | None) -> Singular | None:
    """Decompose the change of a layer; None where it has no matrix: a norm, or a bias alone."""
    look()
    if layer.flat:
        return None
    return decompose(layer, weight(layer.source) if layer.of_weight and weight else None)


def _cut(layer: FileLayer, found: Singular, mask: Tensor, factor: float = 1.0) -> FileLayer:
    """Build the plain LoRA of some directions of a layer's change; its scale alpha / rank stays.

    A plain LoRA of which all is kept stays as it is, to the bit.
    """
    if layer.kind == PLAIN and mask.all() and factor == 1 and len(mask) == rank_of(layer):
        return layer
    kept = replace(found, u=found.u[:, mask], sigma=found.sigma[mask], vt=found.vt[mask])
    rank = len(kept.sigma)
    scale = abs(layer.scale(rank_of(layer))) if rank_of(layer) and "mid" not in layer.tensors else 1.0
    dtype = next(tensor.dtype for part, tensor in layer.tensors.items() if part not in (BIAS, MAGNITUDE))
    if dtype.itemsize < 2:
        dtype = torch.float16
    cut = low_rank(kept, rank, source=layer.source, alpha=rank * (scale or 1.0), dtype=dtype)
    bias = {BIAS: scaled(layer.tensors[BIAS], factor)} if BIAS in layer.tensors else {}
    return replace(cut, tensors={**cut.tensors, **bias})


def _weaker(layer: FileLayer, factor: float) -> FileLayer:
    """Scale a layer without a matrix: a norm, or a bias alone."""
    return replace(layer, tensors={part: scaled(tensor, factor) for part, tensor in layer.tensors.items()})


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a factor in float32; 1 keeps every bit."""
    return tensor if factor == 1 else (tensor.float() * factor).to(tensor.dtype)


def _ranks(name: str, layer: FileLayer, found: Singular, mask: Tensor) -> LayerRanks:
    whole = found.norm
    kept = float(found.sigma[mask].norm()) / whole if whole else 1.0
    old = rank_of(layer) or int((found.sigma > found.sigma[0] * 1e-7).sum())
    return LayerRanks(name=name, old_rank=old, new_rank=int(mask.sum()), kept=kept)


def _lost(found: Singular, mask: Tensor, reference: FrozenWeight) -> float:
    """What is left out of a change, relative to the norm of the model's weight."""
    return float(found.sigma[~mask].norm()) / reference.fro if reference.fro else math.nan


def _any(ranks: list[LayerRanks], lora: LoraFile) -> list[LayerRanks]:
    if not ranks:
        raise ValueError(f"{lora.name} has no layer with a rank to lower; choose another LoRA.")
    return ranks


def describe_ranks(resized: Resized) -> str:
    """Describe what became of each layer, the total first, then a line for each."""
    gone = [layer for layer in resized.ranks if not layer.new_rank]
    before, after = (sum(getattr(layer, name) for layer in resized.ranks) for name in ("old_rank", "new_rank"))
    worst = min(resized.ranks, key=lambda layer: layer.kept)
    lines = [
        *([f"Recipe {resized.recipe}:"] if resized.recipe else []),
        f"{count(resized.ranks, 'layer')}: ranks add up to {after}, before to {before}. Least is kept of {worst.name}: "
        f"{worst.kept:.1%} of its change.",
        *([f"{count(gone, 'layer')} left out: {', '.join(layer.name for layer in gone)}."] if gone else []),
    ]
    for layer in resized.ranks:
        known = "" if math.isnan(layer.of_weight) else f", {layer.of_weight:.2e} of the weight lost"
        lines.append(f"{layer.name}: rank {layer.old_rank} -> {layer.new_rank}, {layer.kept:.2%} kept{known}")
    return "\n".join(lines)
