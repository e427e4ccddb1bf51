"""LoKr: the delta is the Kronecker product of a small matrix and a larger one (Edalati et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...common.axes import convolve
from .deltas import comfy_parts, kronecker, lokr_left, lokr_right
from .product import ProductLayer, wide
from .shape import Matrix


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

    parts = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
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

    def file_rank(self) -> int:
        """The rank of W2, else that of W1, else 1."""
        found = (self._parameters[part] for part in ("lokr_w2_b", "lokr_w1_b"))
        return next((p.shape[0] for p in found if p is not None), 1)

    @property
    def scale(self) -> float:
        """alpha / rank, or 1 when both factors are whole."""
        whole = self._parameters["lokr_w1"] is not None and self._parameters["lokr_w2"] is not None
        return 1.0 if whole else self.alpha / self.rank

    def _part(self, name: str, like: Tensor) -> Tensor:
        return cast(Tensor, self._parameters[name]).to(like.dtype)

    def _left(self) -> Tensor:
        """Compute W1 times the trained scalar, (out_l, in_m)."""
        return self.with_scalar(lokr_left(self._parameters))

    def _right(self) -> Tensor:
        """Compute the whole W2, (out_k, in_n, *kernel)."""
        right = lokr_right(self._parameters)
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
        return self.scale * kronecker(wide(self._left()), wide(self._right()))

    def delta_norm(self) -> Tensor:
        """Compute the delta's Frobenius norm: the product of the norms of its factors."""
        left, right = (torch.linalg.vector_norm(wide(side)) for side in (self._left(), self._right()))
        return self.scale * left * right

    def tensors(self) -> dict[str, Tensor]:
        """Collect the tensors by LyCORIS' suffixes, as ComfyUI reads them; Tucker's form as two whole factors.

        ComfyUI fails on lokr_t2 and does not change such layers.
        """
        if self._parameters["lokr_t2"] is None:
            return comfy_parts(self.file_tensors("lokr_w1" if self._parameters["lokr_w1"] is not None else "lokr_w1_a"))
        right = (self.scale * self._right().detach()).contiguous()
        whole = {"lokr_w1": self._left().detach(), "lokr_w2": right, "alpha": torch.tensor(self.alpha)}
        return comfy_parts(whole)
