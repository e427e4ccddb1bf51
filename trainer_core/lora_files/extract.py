"""Extract a LoRA: what turns one model into another, layer by layer, at low ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.rng import generator
from ..common.side_by_side import cancelled_at_once
from ..common.wording import count
from ..config import node
from ..networks.layers.svd import EXACT_SIZE, largest_singular
from .formats import FileLayer
from .read import list_some
from .resize import Progress, RankRule, kept_rank
from .singular import Singular, low_rank

ReadTensor = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extracted:
    """An extracted LoRA, and how much of the difference of both models it holds."""

    layers: list[FileLayer]
    kept: dict[str, float]  # share of each layer's difference, by the norm
    same: int  # layers without a difference
    whole: float  # share of the difference of all layers

    def describe(self) -> str:
        """Say what was found, the total first, then a line for each layer."""
        ranks = {layer.source: len(layer.tensors["down"]) for layer in self.layers}
        lines = [
            f"{count(self.layers, 'layer')} differ and hold {self.whole:.2%} of the difference; "
            f"{count(self.same, 'layer')} are equal."
        ]
        return "\n".join(
            [*lines, *(f"{name}: rank {rank}, {self.kept[name]:.2%} kept" for name, rank in ranks.items())]
        )


@cancelled_at_once
def extract(
    tuned: Mapping[str, ReadTensor],
    base: Mapping[str, ReadTensor],
    rule: RankRule,
    *,
    titles: tuple[str, str] = ("the tuned model", "the base model"),
    dtype: torch.dtype = torch.float16,
    progress: Progress = lambda _: None,
) -> Extracted:
    """Extract the LoRA that turns `base` into `tuned`, read one layer at a time.

    tuned, base: readers of weights by the layers' names in LoRA files. Text encoders that only one model has are left
    out. The rank of each layer is that of `resize`. Raises ValueError for models of different kinds, for weights that
    are not finite, and for models without a difference.
    """
    names = _common(tuned, base, titles)
    layers, kept, squares, same = [], {}, [0.0, 0.0], 0
    for number, name in enumerate(names):
        look()
        progress(number / len(names))
        one, other = tuned[name](), base[name]()
        if one.shape != other.shape:
            raise ValueError(
                f"{name} has the shape {tuple(one.shape)} in {titles[0]} and {tuple(other.shape)} in {titles[1]}; "
                f"link two models of one kind to {node('extract')}."
            )
        delta = one.float() - other.float()
        norm = float(delta.double().norm())
        if not norm < float("inf"):
            raise ValueError(f"{name} holds values that are not finite; choose another model for {node('extract')}.")
        if not norm:
            same += 1
            continue
        found = _decompose(delta, rule, name)
        rank = kept_rank(rule, found.sigma, min(one.shape[0], one[0].numel()), convolution=one.ndim > 2)
        layers.append(low_rank(found, rank, source=name, dtype=dtype))
        own = float(found.sigma[:rank].norm())
        kept[name] = min(1.0, own / norm)
        squares = [squares[0] + own**2, squares[1] + norm**2]
    if not layers:
        raise ValueError(f"{titles[0]} and {titles[1]} have equal weights, so there is nothing to extract.")
    whole = min(1.0, (squares[0] / squares[1]) ** 0.5)
    return Extracted(layers=layers, kept=kept, same=same, whole=whole)


def _common(tuned: Mapping[str, ReadTensor], base: Mapping[str, ReadTensor], titles: tuple[str, str]) -> list[str]:
    """List the layers of both; raises ValueError for a layer of a denoiser that only one of them has."""
    alone = [name for name in tuned.keys() ^ base.keys() if not _is_text(name)]
    if alone:
        owner, other = titles if alone[0] in tuned else titles[::-1]
        raise ValueError(
            f"{owner} has {count(alone, 'layer')} that {other} lacks ({list_some(sorted(alone))}); link two models of "
            f"one kind to {node('extract')}."
        )
    return [name for name in tuned if name in base]


def _is_text(name: str) -> bool:
    return name.startswith(("lora_te", "text_encoders."))


def _decompose(delta: Tensor, rule: RankRule, name: str) -> Singular:
    """Decompose a difference: its largest singular values where a rank is given, else all of them.

    All come from the eigenvalues of the smaller Gram matrix in float64, which is many times faster than a full
    decomposition and exact to about 1e-8 of the largest one.
    """
    flat, kernel = delta.flatten(1), tuple(delta.shape[2:])
    if rule.mode == "rank":
        rank = rule.conv_rank if kernel and rule.conv_rank else rule.rank
        u, sigma, vt = largest_singular(flat, rank, generator(0, f"extract/{name}"))
        return Singular(u=u.double(), sigma=sigma.double(), vt=vt.double(), kernel=kernel)
    flat = flat.double()
    if min(flat.shape) <= EXACT_SIZE:
        u, sigma, vt = torch.linalg.svd(flat, full_matrices=False)
        return Singular(u=u, sigma=sigma, vt=vt, kernel=kernel)
    wide = flat.shape[0] <= flat.shape[1]
    squares, vectors = torch.linalg.eigh(flat @ flat.t() if wide else flat.t() @ flat)
    sigma, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    other = (vectors.t() @ flat if wide else flat @ vectors) / sigma.clamp(min=1e-300).unsqueeze(1 if wide else 0)
    u, vt = (vectors, other) if wide else (other, vectors.t())
    return Singular(u=u, sigma=sigma, vt=vt, kernel=kernel)
