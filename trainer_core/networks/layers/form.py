"""How LoRA files hold a kind of layer: its parts, and what they make of a weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...common.exact import exact

Parts = Mapping[str, Any]  # of Tensor, or None for a part that a form does not have
ALPHA, MAGNITUDE, BIAS = "alpha", "dora_scale", "diff_b"  # parts that layers of several kinds may have
BESIDE = {ALPHA: (ALPHA,), MAGNITUDE: (MAGNITUDE,)}  # endings of such parts


class LowRank(NamedTuple):
    """A delta in two factors: scale * up @ down, (out, r) and (r, in * k), k the product of the kernel."""

    up: Tensor
    down: Tensor
    scale: float
    kernel: tuple[int, ...]  # () for linear layers


class Kronecker(NamedTuple):
    """A delta as a Kronecker product: scale * kron(left, right), (out_l, in_m) and (out_k, in_n, *kernel)."""

    left: Tensor
    right: Tensor
    scale: float


class FileForm:
    """How LoRA files hold the layers of one kind, and what these do to a weight; all without a DoRA's magnitude.

    parts: tensors of a layer, by their names in `endings`; computed in their dtype. alpha: 0 stands for the rank.
    """

    endings: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # of tensors' names, by part: ours, then patterns of others'
    forms: ClassVar[Mapping[frozenset[str], str]] = {}  # the parts that make a layer, and its name for people
    multiplied: ClassVar[tuple[str, ...]] = ()  # the parts that a factor on the delta multiplies
    of_weight: ClassVar[bool] = False  # the change is a function of the frozen weight
    decomposes: ClassVar[bool] = True  # with a magnitude it is a DoRA
    scaled: ClassVar[bool] = True  # alpha scales the change; else it limits it, and 0 is no limit
    exact_rank: ClassVar[bool] = False  # the rank of the parts is that of the delta

    @classmethod
    def holds(cls, parts: Parts) -> bool:
        """Tell whether parts are of this kind."""
        return any(part in parts for part in cls.endings)

    @classmethod
    def settings_of(cls, parts: Collection[str]) -> dict[str, Any]:
        """Give the settings of LoRA Config with which a layer has these parts, beside the defaults."""
        del parts
        return {}

    @classmethod
    def rank_of(cls, parts: Parts) -> int:
        """Read the rank that the parts have; 1 for kinds without one."""
        del parts
        return 1

    @classmethod
    def inputs_of(cls, parts: Parts) -> int:
        """Read the number of inputs of the weight; 0 where the parts do not tell."""
        del parts
        return 0

    @classmethod
    def is_flat(cls, parts: Parts) -> bool:
        """Tell whether parts change no matrix: a norm, or a bias alone."""
        del parts
        return False

    @classmethod
    def delta_of(cls, parts: Parts, alpha: float) -> Tensor:
        """Compute the delta at strength 1, (out, in, *kernel) or with the last axes flat; not for `of_weight`."""
        raise NotImplementedError

    @classmethod
    def change_of(cls, weight: Tensor, parts: Parts, alpha: float, strength: float) -> Tensor:
        """Compute the change of a weight at a strength, in its shape."""
        return strength * cls.delta_of(parts, alpha).reshape(weight.shape)

    @classmethod
    def product_of(cls, parts: Parts, alpha: float) -> LowRank | Kronecker | None:
        """Give the small factors of the delta; None where it has none that are less work than the delta."""
        del parts, alpha
        return None

    @classmethod
    def norm_of(cls, parts: Parts, alpha: float) -> float:
        """Compute the Frobenius norm of the delta; not for `of_weight`."""
        return float(exact(cls.delta_of({part: tensor.float() for part, tensor in parts.items()}, alpha)).norm())

    @classmethod
    def fits(cls, parts: Parts, weight: torch.Size) -> bool:
        """Tell whether parts fit a weight of this shape; all on the meta device. RuntimeError or ValueError: no."""
        delta = cls.delta_of(parts, 0.0)
        return delta.shape[0] == weight[0] and delta.numel() == weight.numel()

    @classmethod
    def comfy_form(cls, parts: Parts, alpha: float) -> tuple[dict[str, Tensor], float]:
        """Write parts and alpha in a form that ComfyUI loads."""
        return dict(parts), alpha


def scale_of(alpha: float, rank: int) -> float:
    """Compute alpha / rank; 1 for alpha 0."""
    return alpha / rank if alpha else 1.0


def with_core(core: Tensor, side: Tensor) -> Tensor:
    """Multiply Tucker's core (m, n, *kernel) by a side (n, in): (m, in, *kernel)."""
    return torch.einsum("m n ..., n i -> m i ...", core, side)
