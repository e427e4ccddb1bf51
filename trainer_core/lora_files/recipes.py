"""Recipes of resize_lora: scores that say how much each direction of a LoRA's change matters, and what to keep.

A recipe is `fro_ckpt=1,thr=-3.55`: references with weights, and a threshold or a size. The score of a direction is
log10(sigma * rescale) minus the weighted mean of log10 of the references.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.side_by_side import side_by_side
from ..config import setting
from .singular import Singular
from .spectral import SpectralNorm, first_bounds, narrow

MEBIBYTE = 2**20
SMALLEST = 1e-8  # of |u^T W v|: a direction that the model does not use at all
REFERENCES = {
    "spn_lora": "the largest singular value of the LoRA's own change of the layer",
    "fro_lora": "the Frobenius norm of that change",
    "spn_ckpt": "the largest singular value of the model's weight",
    "fro_ckpt": "the Frobenius norm of the model's weight",
    "subspace": "what the model's weight does along the same direction, |u^T W v|",
    "params": "the numbers that the direction takes, rows and columns",
}
OF_WEIGHTS = {"spn_ckpt", "fro_ckpt", "subspace"}
ROUGHLY = 0.1  # spread of the bounds of a spectral norm at which a size first compares all layers
MOST_RECIPES, LONGEST = 20, 1000

Cut = tuple[float, float]  # bounds of a score that what is kept reaches, and what is left out does not


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A parsed recipe."""

    text: str
    weights: Mapping[str, float]  # of references; their sum is 1
    threshold: float | None  # scores from here on are kept
    size: float | None  # instead: MiB of the whole file's tensors, not exceeded
    rescale: float  # multiplies the LoRA's change

    @property
    def needs_model(self) -> bool:
        """Whether a reference is of the model's weights."""
        return bool(OF_WEIGHTS & self.weights.keys())


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeight:
    """The norms and the subspace of a layer's frozen weight, for recipes."""

    fro: float = math.nan
    spn: SpectralNorm | None = None
    subspace: Tensor | None = None  # (n,) |u^T W v| of each direction


def parse_recipes(text: str) -> list[Recipe]:
    """Read recipes that are separated by colons or lines. Raises ValueError with the position of what is wrong."""
    if len(text) > LONGEST:
        raise ValueError(f"{setting('resize.recipe')} has {len(text)} characters; at most {LONGEST} are read.")
    found, at = [], 0
    for piece in re.split(r"([:\n])", text):
        if piece.strip() and piece != ":":
            found.append(_parse_recipe(piece, at))
        at += len(piece)
    if not found:
        raise ValueError(f"{setting('resize.recipe')} is empty; write one such as fro_ckpt=1,thr=-3.5.")
    if len(found) > MOST_RECIPES:
        raise ValueError(f"{setting('resize.recipe')} holds {len(found)} recipes; at most {MOST_RECIPES} are read.")
    return found


def _parse_recipe(text: str, at: int) -> Recipe:
    """Read one recipe, which begins at character `at` of the whole text."""
    weights: dict[str, float] = {}
    settings: dict[str, float] = {}
    known = (*REFERENCES, "thr", "size", "rescale")
    for piece in text.split(","):
        start = at + len(piece) - len(piece.lstrip()) + 1  # as people count
        key, equals, value = (part.strip() for part in piece.partition("="))
        at += len(piece) + 1
        if key not in known:
            raise ValueError(
                f"{setting('resize.recipe')} has {key[:40]!r} at character {start}; it knows {', '.join(known)}."
            )
        if key in weights or key in settings:
            raise ValueError(f"{setting('resize.recipe')} has {key} twice, again at character {start}; write it once.")
        try:
            number = 1.0 if key in REFERENCES and not equals else float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{setting('resize.recipe')} has {value[:40]!r} as {key} at character {start}; write a number, such as "
                f"{key}=1."
            )
        (weights if key in REFERENCES else settings)[key] = number
    total = sum(weights.values())
    if not total:
        raise ValueError(
            f"{setting('resize.recipe')} {text.strip()!r} names no reference with a weight; add one, such as "
            "fro_ckpt=1."
        )
    if ("thr" in settings) == ("size" in settings):
        raise ValueError(
            f"{setting('resize.recipe')} {text.strip()!r} needs either thr or size, such as thr=-3.5 or size=32."
        )
    if settings.get("size", 1) <= 0 or settings.get("rescale", 1) <= 0:
        raise ValueError(
            f"{setting('resize.recipe')} {text.strip()!r} has a size or rescale that is not above 0; set it higher."
        )
    return Recipe(
        text=text.strip(),
        weights={name: weight / total for name, weight in weights.items() if weight},
        threshold=settings.get("thr"),
        size=settings.get("size"),
        rescale=settings.get("rescale", 1.0),
    )


def scores(recipe: Recipe, found: Singular, reference: FrozenWeight) -> Tensor:
    """Score each direction of a layer's change, (n,) float64; -inf for those without any strength."""
    score = (found.sigma * recipe.rescale).log10()
    for name, weight in recipe.weights.items():
        score = score - weight * _reference(name, found, reference)
    return score.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _reference(name: str, found: Singular, reference: FrozenWeight) -> Tensor:
    """Compute log10 of a reference: a number, or one for each direction."""
    if name == "subspace":
        assert reference.subspace is not None
        return reference.subspace.clamp(min=SMALLEST).log10()
    values = {
        "spn_lora": float(found.sigma[0]),
        "fro_lora": found.norm,
        "params": float(len(found.u) + found.vt.shape[1]),
        "fro_ckpt": reference.fro,
        "spn_ckpt": reference.spn.low if reference.spn else math.nan,
    }
    return torch.tensor(values[name], dtype=torch.float64).log10()


def kept_directions(
    recipe: Recipe, layers: Sequence[Singular], references: Sequence[FrozenWeight], bytes_each: int
) -> list[Tensor]:
    """Choose the directions of each layer that a recipe keeps, as masks. bytes_each: of a number in the file.

    size: directions of all layers by their scores, as many as fit.
    """
    each = [scores(recipe, found, of) for found, of in zip(layers, references, strict=True)]
    if recipe.threshold is not None:
        return [score >= recipe.threshold for score in each]
    assert recipe.size is not None
    whole, costs = torch.cat(each), _costs(layers, bytes_each)
    order = whole.sort(descending=True, stable=True).indices
    fits = costs[order].cumsum(0) <= recipe.size * MEBIBYTE
    mask = torch.zeros(len(order), dtype=torch.bool)
    mask[order[fits]] = True
    mask &= whole > -math.inf
    return list(mask.split([len(score) for score in each]))


def cut_by_size(
    recipe: Recipe, layers: Sequence[Singular], references: Sequence[FrozenWeight], bytes_each: int
) -> Cut | None:
    """Bound the best score that a recipe with a size leaves out; None where the norms' bounds decide what it keeps.

    A direction is kept where all that may come before it fit as well, and left out where those that surely do leave
    no room for it. A higher score of any direction makes the best one left out no lower.
    """
    assert recipe.size is not None
    bounds = [score_bounds(recipe, found, of) for found, of in zip(layers, references, strict=True)]
    low, high = (torch.cat(side) for side in zip(*bounds, strict=True))
    costs, room = _costs(layers, bytes_each), recipe.size * MEBIBYTE
    kept = _total_above(high, costs, low) <= room
    gone = _total_above(low, costs, high, right=True) + costs > room
    if not (~(kept | gone) & (high > -math.inf)).any():
        return None
    worst, best = (float(side[_total_above(side, costs, side) > room].max()) for side in (low, high))
    return worst, best


def _total_above(values: Tensor, costs: Tensor, limits: Tensor, *, right: bool = False) -> Tensor:
    """Add up the costs of all values from each limit on; right: without those that are equal to it."""
    order = values.argsort()
    before = torch.cat([costs.new_zeros(1), costs[order].cumsum(0)])
    return before[-1] - before[torch.searchsorted(values[order], limits, right=right)]


def _costs(layers: Sequence[Singular], bytes_each: int) -> Tensor:
    """Count the bytes of each direction of all layers, float64."""
    each = [torch.full((len(f.sigma),), bytes_each * (len(f.u) + f.vt.shape[1])) for f in layers]
    return torch.cat(each).double()


def score_bounds(recipe: Recipe, found: Singular, reference: FrozenWeight) -> tuple[Tensor, Tensor]:
    """Bound the score of each direction, as far as the norm of its layer's weight is known."""
    score = scores(recipe, found, reference)  # by the lower bound of the norm
    spread = reference.spn.spread / math.log(10) if reference.spn else 0.0
    other = score - recipe.weights.get("spn_ckpt", 0.0) * spread
    return torch.minimum(score, other), torch.maximum(score, other)


def touches(recipe: Recipe, found: Singular, reference: FrozenWeight, cut: Cut) -> bool:
    """Tell whether a closer norm of a layer's weight may change what a recipe keeps."""
    if "spn_ckpt" not in recipe.weights or reference.spn is None or not reference.spn.spread:
        return False
    low, high = score_bounds(recipe, found, reference)
    return bool(((low < high) & (low <= cut[1]) & (high >= cut[0])).any())


def frozen_weight_of(weight: Tensor, found: Singular, recipes: Sequence[Recipe]) -> FrozenWeight:
    """Measure a frozen weight (out, in, *kernel) for recipes: only what one of them names, and not the weight itself.

    found: the change of its layer. All weights of a model at once may need more memory than there is. The spectral norm
    is measured as far as each threshold needs; for a size, which compares all layers, roughly.
    """
    names = {name for recipe in recipes for name in recipe.weights}
    matrix = weight.float().flatten(1)
    reference = FrozenWeight(
        fro=float(matrix.norm()) if "fro_ckpt" in names else math.nan,
        spn=first_bounds(matrix) if "spn_ckpt" in names else None,
        subspace=((found.u.t().float() @ matrix) * found.vt).sum(1).abs() if "subspace" in names else None,
    )
    cuts = [(recipe, (recipe.threshold, recipe.threshold)) for recipe in recipes if recipe.threshold is not None]
    sized = any(recipe.threshold is None and "spn_ckpt" in recipe.weights for recipe in recipes)
    while reference.spn is not None and (
        (sized and reference.spn.spread > ROUGHLY) or any(touches(each, found, reference, cut) for each, cut in cuts)
    ):
        narrow(reference.spn, matrix)
    return reference


def settle_sizes(
    recipes: Sequence[Recipe],
    layers: Sequence[Singular],
    references: Sequence[FrozenWeight],
    bytes_each: int,
    matrix: Callable[[int], Tensor],
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Measure spectral norms until each recipe with a size keeps the same directions as by all their digits.

    matrix: reads the weight of a layer by its number. Only weights whose bounds leave it open are read again.
    progress: told the share of layers that are settled.
    """
    needy = [recipe for recipe in recipes if recipe.size is not None and "spn_ckpt" in recipe.weights]
    while True:
        found = [(recipe, cut_by_size(recipe, layers, references, bytes_each)) for recipe in needy]
        cuts = [(recipe, cut) for recipe, cut in found if cut is not None]

        def unsure(number: int, cuts: Sequence[tuple[Recipe, Cut]] = cuts) -> bool:
            return any(touches(recipe, layers[number], references[number], cut) for recipe, cut in cuts)

        numbers = [number for number in range(len(layers)) if unsure(number)]
        progress(1 - len(numbers) / len(layers))
        if not numbers:
            return

        def closer(number: int, unsure: Callable[[int], bool] = unsure) -> None:
            norm = references[number].spn
            assert norm is not None
            enough, weight = norm.spread / 2, matrix(number).float().flatten(1)
            while norm.spread > enough and unsure(number):
                narrow(norm, weight)

        for _ in side_by_side(closer, numbers):
            pass
