"""Recipes of resize_lora: scores that say how much each direction of a LoRA's change matters, and what to keep.

A recipe is `fro_ckpt=1,thr=-3.55`: references with weights, and a threshold or a size. The score of a direction is
log10(sigma * rescale) minus the weighted mean of log10 of the references.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.rng import generator
from .singular import Singular

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
BLOCK = 2**20  # numbers of a weight that are multiplied at once: they fit into a processor's cache
DOUBT = 0.05  # the probability that an upper bound of a spectral norm is too low
MOST_RECIPES, LONGEST = 20, 1000


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
class Reference:
    """What recipes need to know of the frozen weight of a layer."""

    fro: float
    spn: float
    subspace: Tensor | None = None  # (n,) |u^T W v| of each direction


def parse_recipes(text: str, setting: str = "recipe of Resize LoRA") -> list[Recipe]:
    """Read recipes that are separated by colons or lines. Raises ValueError with the place of what is wrong."""
    if len(text) > LONGEST:
        raise ValueError(f"{setting} has {len(text)} characters; at most {LONGEST} are read.")
    found, at = [], 0
    for piece in re.split(r"([:\n])", text):
        if piece.strip() and piece != ":":
            found.append(_parse_recipe(piece, at, setting))
        at += len(piece)
    if not found:
        raise ValueError(f"{setting} is empty; write one such as fro_ckpt=1,thr=-3.5.")
    if len(found) > MOST_RECIPES:
        raise ValueError(f"{setting} holds {len(found)} recipes; at most {MOST_RECIPES} are read.")
    return found


def _parse_recipe(text: str, at: int, setting: str) -> Recipe:
    """Read one recipe, which begins at character `at` of the whole text."""
    weights: dict[str, float] = {}
    settings: dict[str, float] = {}
    known = (*REFERENCES, "thr", "size", "rescale")
    for piece in text.split(","):
        start = at + len(piece) - len(piece.lstrip()) + 1  # as people count
        key, equals, value = (part.strip() for part in piece.partition("="))
        at += len(piece) + 1
        if key not in known:
            raise ValueError(f"{setting} has {key[:40]!r} at character {start}; it knows {', '.join(known)}.")
        if key in weights or key in settings:
            raise ValueError(f"{setting} has {key} twice, again at character {start}; write it once.")
        try:
            number = 1.0 if key in REFERENCES and not equals else float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{setting} has {value[:40]!r} as {key} at character {start}; write a number, such as {key}=1."
            )
        (weights if key in REFERENCES else settings)[key] = number
    total = sum(weights.values())
    if not total:
        raise ValueError(f"{setting} {text.strip()!r} names no reference with a weight; add one, such as fro_ckpt=1.")
    if ("thr" in settings) == ("size" in settings):
        raise ValueError(f"{setting} {text.strip()!r} needs either thr or size, such as thr=-3.5 or size=32.")
    if settings.get("size", 1) <= 0 or settings.get("rescale", 1) <= 0:
        raise ValueError(f"{setting} {text.strip()!r} has a size or rescale that is not above 0; set it higher.")
    return Recipe(
        text=text.strip(),
        weights={name: weight / total for name, weight in weights.items() if weight},
        threshold=settings.get("thr"),
        size=settings.get("size"),
        rescale=settings.get("rescale", 1.0),
    )


def scores(recipe: Recipe, found: Singular, reference: Reference | None) -> Tensor:
    """Score each direction of a layer's change, (n,) float64; -inf for those without any strength."""
    score = (found.sigma * recipe.rescale).log10()
    for name, weight in recipe.weights.items():
        score = score - weight * _reference(name, found, reference)
    return score.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _reference(name: str, found: Singular, reference: Reference | None) -> Tensor:
    """Compute log10 of a reference: a number, or one for each direction."""
    if name == "subspace":
        assert reference is not None and reference.subspace is not None
        return reference.subspace.clamp(min=SMALLEST).log10()
    values = {
        "spn_lora": float(found.sigma[0]),
        "fro_lora": found.norm,
        "params": float(len(found.u) + found.vt.shape[1]),
        "fro_ckpt": reference.fro if reference else math.nan,
        "spn_ckpt": reference.spn if reference else math.nan,
    }
    return torch.tensor(values[name], dtype=torch.float64).log10()


def kept_directions(
    recipe: Recipe, layers: Sequence[Singular], references: Sequence[Reference | None], bytes_each: int
) -> list[Tensor]:
    """Choose the directions of each layer that a recipe keeps, as masks. bytes_each: of a number in the file.

    size: directions of all layers by their scores, as many as fit.
    """
    each = [scores(recipe, found, of) for found, of in zip(layers, references, strict=True)]
    if recipe.threshold is not None:
        return [score >= recipe.threshold for score in each]
    assert recipe.size is not None
    costs = torch.cat(
        [torch.full_like(s, bytes_each * (len(f.u) + f.vt.shape[1])) for s, f in zip(each, layers, strict=True)]
    )
    order = torch.cat(each).sort(descending=True, stable=True).indices
    fits = costs[order].cumsum(0) <= recipe.size * MEBIBYTE
    mask = torch.zeros(len(order), dtype=torch.bool)
    mask[order[fits]] = True
    mask &= torch.cat(each) > -math.inf
    return list(mask.split([len(score) for score in each]))


def reference_of(weight: Tensor, found: Singular, recipes: Sequence[Recipe]) -> Reference:
    """Measure a frozen weight (out, in[, k, k]) for recipes: only what one of them names, and not the weight itself.

    found: the change of its layer. All weights of a model at once may need more memory than there is.
    """
    names = {name for recipe in recipes for name in recipe.weights}
    matrix = weight.float().flatten(1)
    reference = Reference(
        fro=float(matrix.norm()) if "fro_ckpt" in names else math.nan,
        spn=math.nan,
        subspace=((found.u.t().float() @ matrix) * found.vt).sum(1).abs() if "subspace" in names else None,
    )
    needy = [recipe for recipe in recipes if "spn_ckpt" in recipe.weights]

    def decided(low: float, high: float) -> bool:
        """Tell whether every norm between two bounds keeps the same directions: scores are monotonic in it."""
        if any(recipe.threshold is None for recipe in needy):
            return False  # a size compares the scores of all layers
        sides = [replace(reference, spn=spn) for spn in (low, high)]
        pairs = ((kept_directions(recipe, [found], [side], 0)[0] for side in sides) for recipe in needy)
        return all(torch.equal(*pair) for pair in pairs)

    return replace(reference, spn=spectral_norm(matrix, decided)) if needy else reference


def spectral_norm(
    matrix: Tensor,
    enough: Callable[[float, float], bool] = lambda _low, _high: False,
    tolerance: float = 1e-3,
    most: int = 64,
) -> float:
    """Compute the largest singular value by Lanczos' method on M^T M, to a tolerance or as far as it matters.

    enough: told a lower and an upper bound; it stops where any number between them would do. The upper bound is wrong
    for less than one start in 20, whatever M is: after k steps from a random start, an eigenvalue of M^T M is found to
    a share x but with probability 1.648 sqrt(n) exp(-sqrt(x) (2k - 1)) (Kuczynski & Wozniakowski 1992).
    tolerance: a thousandth is 0.0004 of a score, which thresholds give in hundredths; the estimate is seldom reached.
    The error of the largest eigenvalue is at most the residual, and the residual squared over the gap to the next one
    (Parlett 1998, section 11.7), here to the next one found. Steps are kept at right angles to each other (Golub & Van
    Loan 2013, section 10.1). Each reads M once, in blocks of rows that stay in the processor's cache.
    """
    from scipy.linalg import eigh_tridiagonal  # LAPACK for matrices of 32 rows waits for threads; this does not

    norm = float(matrix.norm())
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()
    size = tall.shape[1]
    if enough(norm / size**0.5, norm) or not norm:
        return norm
    blocks = tall.split(max(64, BLOCK // size))
    start = torch.randn(size, generator=generator(0, "spectral norm"), dtype=matrix.dtype)
    basis, diagonal, beside, largest = (start / start.norm())[None], [], [], 0.0
    steps = min(most, size)
    for step in range(steps):
        look()
        after = torch.zeros_like(start)
        for block in blocks:
            after = torch.addmv(after, block.t(), block @ basis[-1])
        diagonal.append(float(after @ basis[-1]))
        for _ in range(2):
            after = after - basis.t() @ (basis @ after)
        rest = max(float(after.norm()), torch.finfo(after.dtype).tiny)
        if step % 2 or step + 1 == steps:
            values, vectors = eigh_tridiagonal(diagonal, beside)
            largest, residual = max(float(values[-1]), 0.0), rest * abs(float(vectors[-1, -1]))
            gap = largest - float(values[-2:][0])
            if residual * min(1.0, residual / gap if gap else 1.0) <= 2 * tolerance * largest:  # of the square
                break
            missing = (math.log(1.648 * size**0.5 / DOUBT) / (2 * step + 1)) ** 2
            if missing < 1 and enough(largest**0.5, min(norm, (largest / (1 - missing)) ** 0.5)):
                break
        beside.append(rest)
        basis = torch.cat([basis, after[None] / rest])
    return largest**0.5
