"""LoKr: the delta is the Kronecker product of a small matrix and a larger one (Edalati et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from ...common.axes import convolve
from .form import Kronecker, Parts, scale_of
from .product import ProductLayer, wide
from .shape import Matrix

if TYPE_CHECKING:
    from ...config import LoraConfig

LEFT = ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"})  # the parts that make W1
RIGHT = ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"})
PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")


def factorise(size: int, factor: int) -> tuple[int, int]:
    """Split a size into two factors, the smaller first, as LyCORIS does.

    A positive factor that divides the size is one of the two. Otherwise the smaller one is the largest divisor that is
    at most `factor` (-1: no limit) and at most the square root of the size.
    """
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    small, large = 1, size
    for divisor in range(2, math.isqrt(size) + 1):
        if 0 < factor < divisor:
            break
        if size % divisor == 0:
            small, large = divisor, size // divisor
    return small, large


class LokrLayer(ProductLayer):
    """delta = scale * kron(W1, W2), never built: x is reshaped and multiplied by one factor, then the other.

    W1: lokr_w1 (out_l, in_m) or lokr_w1_a lokr_w1_b; W2: lokr_w2 (out_k, in_n, *kernel) or lokr_w2_a lokr_w2_b with
    the kernel in the second, or in Tucker's form (rank, out_k), (rank, in_n) and lokr_t2 (rank, rank, *kernel). The
    last factor of W2 starts at zero. Two whole factors have no rank, so their scale is 1.
    """

    takes = (*ProductLayer.takes, "factor", "decompose_both", "full_matrix", "tucker")
    endings: ClassVar = {part: (part,) for part in PARTS}
    forms: ClassVar = {frozenset(left | right): "LoKr" for left in LEFT for right in RIGHT}
    multiplied = ("lokr_w1", "lokr_w1_a")
    plus = ("lokr_w2", "lokr_w2_b")

    def __init__(
        self,
        base: Matrix,
        rank: int,
        alpha: float,
        *,
        factor: int = -1,
        decompose_both: bool = False,
        full_matrix: bool = False,
        tucker: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(base, rank, alpha, **common)
        outputs, inputs, *kernel = self.shape
        (out_l, out_k), (in_m, in_n) = factorise(outputs, factor), factorise(inputs, factor)
        core = tucker and math.prod(kernel) > 1
        if not full_matrix and decompose_both and rank < max(out_l, in_m) / 2:
            self.init_uniform("lokr_w1_a", out_l, rank)
            self.init_uniform("lokr_w1_b", rank, in_m)
        else:
            self.init_uniform("lokr_w1", out_l, in_m)
        init_last = self.init_zero if self.scalar is None else self.init_uniform
        if full_matrix or rank >= max(out_k, in_n) / 2:
            init_last("lokr_w2", out_k, in_n, *kernel)
            return
        self.init_uniform("lokr_w2_a", *((rank, out_k) if core else (out_k, rank)))
        init_last("lokr_w2_b", rank, in_n if core else in_n * math.prod(kernel))
        if core:
            self.init_uniform("lokr_t2", rank, rank, *kernel)

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load the factors of a file; a whole W2 of a convolution may be stored as a matrix."""
        if (whole := parts.get("lokr_w2")) is not None:
            parts = {**parts, "lokr_w2": whole.reshape(len(whole), -1, *self.shape[2:])}
        super().load(parts, alpha)

    @property
    def scale(self) -> float:
        """alpha / rank, or 1 when both factors are whole."""
        whole = self._parameters["lokr_w1"] is not None and self._parameters["lokr_w2"] is not None
        return 1.0 if whole else self.alpha / self.rank

    def _part(self, name: str, like: Tensor) -> Tensor:
        return cast(Tensor, self._parameters[name]).to(like.dtype)

    def _left(self) -> Tensor:
        """Compute W1 times the trained scalar, (out_l, in_m)."""
        return self.with_scalar(_left(self._parameters))

    def _right(self) -> Tensor:
        """Compute the whole W2, (out_k, in_n, *kernel)."""
        right = _right(self._parameters)
        return right.reshape(len(right), -1, *self.shape[2:])

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute base_output + delta(x); base_output may be overwritten."""
        left = self._left().to(x.dtype)
        if self.geometry:
            return base_output.add_(self._convolve(x, left).view(base_output.shape), alpha=self.scale)
        out_l, in_m = left.shape
        rows = x.reshape(-1, self.shape[1] // in_m)  # (tokens * in_m, in_n)
        if self._parameters["lokr_w2"] is None:
            # W1 acts between the thin factors of W2, where it costs least. With the rank as the leading axis, all three
            # are plain products without copies.
            hidden = self.drop_ranks(self._part("lokr_w2_b", x)) @ rows.t()  # (rank, tokens * in_m)
            hidden = (hidden.view(-1, in_m) @ left.t()).view(len(hidden), -1)  # (rank, tokens * out_l)
            flat = base_output.reshape(-1, self.shape[0] // out_l)
            last = self._part("lokr_w2_a", x).t().contiguous()
            return torch.addmm(flat, hidden.t(), last, alpha=self.scale).view(base_output.shape)
        hidden = rows @ self._part("lokr_w2", x).t()  # (tokens * in_m, out_k)
        hidden = hidden.view(-1, in_m, hidden.shape[-1])
        grouped = base_output.reshape(-1, out_l, hidden.shape[-1])
        mixed = torch.baddbmm(grouped, left.expand(len(hidden), -1, -1), hidden, alpha=self.scale)
        return mixed.view(base_output.shape)

    def _convolve(self, x: Tensor, left: Tensor) -> Tensor:
        """Apply kron(W1, W2) to x (batch, in, *axes): (batch * out_l, out_k, …)."""
        (out_l, in_m), batch = left.shape, len(x)
        grouped = x.reshape(batch * in_m, self.shape[1] // in_m, *x.shape[2:])

        def mix(y: Tensor) -> Tensor:
            return (left @ y.reshape(batch, in_m, -1)).view(batch * out_l, *y.shape[1:])

        if self._parameters["lokr_w2"] is not None:
            right = self._part("lokr_w2", x)
            if out_l < in_m:  # as few convolutions as possible
                return convolve(mix(grouped), right, **self.geometry)
            return mix(convolve(grouped, right, **self.geometry))
        a, b = self._part("lokr_w2_a", x), self.drop_ranks(self._part("lokr_w2_b", x))
        if self._parameters["lokr_t2"] is not None:
            hidden = convolve(convolve(grouped, self.as_kernel(b)), self._part("lokr_t2", x), **self.geometry)
            return convolve(mix(hidden), self.as_kernel(a.t()))
        hidden = convolve(grouped, b.view(len(b), -1, *self.shape[2:]), **self.geometry)
        return convolve(mix(hidden), self.as_kernel(a))

    def delta_weight(self) -> Tensor:
        """Compute the delta in the base weight's shape, at least float32, detached."""
        return self.scale * _kronecker(wide(self._left()), wide(self._right()))

    def delta_norm(self) -> Tensor:
        """Compute the delta's Frobenius norm: the product of the norms of its factors."""
        left, right = (torch.linalg.vector_norm(wide(side)) for side in (self._left(), self._right()))
        return self.scale * left * right

    @staticmethod
    def remarks(config: LoraConfig) -> list[str]:
        """Tell how Tucker's form is saved."""
        said = "LoKr with tucker is saved with a whole second factor, since ComfyUI cannot load its core."
        return [said] if config.tucker else []

    @classmethod
    def settings_of(cls, parts: Collection[str]) -> dict[str, Any]:
        """Its factors tell the form."""
        return {
            "tucker": "lokr_t2" in parts,
            "decompose_both": "lokr_w1_a" in parts,
            "full_matrix": "lokr_w1" in parts and "lokr_w2" in parts,
        }

    @classmethod
    def rank_of(cls, parts: Parts) -> int:
        """The rank of W2, else that of W1, else 1."""
        return next((len(parts[part]) for part in ("lokr_w2_b", "lokr_w1_b") if part in parts), 1)

    @classmethod
    def product_of(cls, parts: Parts, alpha: float) -> Kronecker:
        """Compute both whole factors; where they are no products, there is no rank, and the scale is 1."""
        scale = 1.0 if {"lokr_w1", "lokr_w2"} <= set(parts) else scale_of(alpha, cls.rank_of(parts))
        return Kronecker(_left(parts).contiguous(), _right(parts).contiguous(), scale)

    @classmethod
    def delta_of(cls, parts: Parts, alpha: float) -> Tensor:
        """Compute scale * kron(W1, W2)."""
        left, right, scale = cls.product_of(parts, alpha)
        return scale * _kronecker(left, right)

    @classmethod
    def comfy_form(cls, parts: Parts, alpha: float) -> tuple[dict[str, Tensor], float]:
        """Multiply Tucker's core into two whole factors: ComfyUI fails on a core, and leaves such layers out.

        A whole W2 becomes a matrix, but that of a kernel of two axes, which alone ComfyUI reads.
        """
        found = dict(parts)
        if "lokr_t2" in parts:
            left, right, scale = cls.product_of({part: wide(tensor) for part, tensor in parts.items()}, alpha)
            others = {part: tensor for part, tensor in parts.items() if part not in cls.endings}
            found = {**others, "lokr_w1": left, "lokr_w2": scale * right}
        if "lokr_w2" in found and found["lokr_w2"].ndim != 4:
            found["lokr_w2"] = found["lokr_w2"].flatten(1)
        return found, alpha


def _left(parts: Parts) -> Tensor:
    """Compute W1, (out_l, in_m)."""
    whole = parts.get("lokr_w1")
    return parts["lokr_w1_a"] @ parts["lokr_w1_b"] if whole is None else whole


def _right(parts: Parts) -> Tensor:
    """Compute W2, (out_k, in_n, *kernel), or of two factors without a core (out_k, in_n * k)."""
    if (whole := parts.get("lokr_w2")) is not None:
        return whole
    a, b, core = parts["lokr_w2_a"], parts["lokr_w2_b"], parts.get("lokr_t2")
    return a @ b if core is None else torch.einsum("i j ..., j n, i k -> k n ...", core, b, a)


def _kronecker(left: Tensor, right: Tensor) -> Tensor:
    """Compute the Kronecker product of W1 (out_l, in_m) and W2 (out_k, in_n, *kernel)."""
    return torch.kron(left.view(*left.shape, *(1,) * (right.ndim - 2)), right.contiguous())
