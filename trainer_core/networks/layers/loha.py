"""LoHa: the delta is the elementwise product of two low-rank matrices (Hyeon-Woo et al. 2022)."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from ...common.axes import convolve
from .deltas import LOHA_SIDES, comfy_parts, loha_sides, pairs_of_ranks
from .product import ProductLayer, add_low_rank, wide
from .shape import Matrix


class LohaLayer(ProductLayer):
    """delta = scale * (a1 b1) * (a2 b2), elementwise; a2 starts at zero.

    hada_w1_a, hada_w2_a: (out, rank), hada_w1_b, hada_w2_b: (rank, in * k). In Tucker's form of a convolution the
    two are (rank, out) and (rank, in), and each product has a core hada_t1, hada_t2: (rank, rank, *kernel).
    """

    parts = (*LOHA_SIDES, "hada_t1", "hada_t2")
    plus = ("hada_w2_a",)

    def __init__(self, base: Matrix, rank: int, alpha: float, *, tucker: bool = False, **common: Any) -> None:
        super().__init__(base, rank, alpha, **common)
        outputs, inputs, *kernel = self.shape
        core = tucker and math.prod(kernel) > 1
        wide = inputs if core else inputs * math.prod(kernel)
        for number, std in ((1, 0.1), (2, 0.1 if self.scalar is not None else 0.0)):
            side = (rank, outputs) if core else (outputs, rank)
            if std:
                self.init_normal(f"hada_w{number}_a", *side, std=std)
            else:
                self.init_zero(f"hada_w{number}_a", *side)
            self.init_normal(f"hada_w{number}_b", rank, wide, std=1)
            if core:
                self.init_normal(f"hada_t{number}", rank, rank, *kernel, std=0.1)

    def file_rank(self) -> int:
        """The rank of the parameters."""
        return self._parameters["hada_w1_b"].shape[0]  # type: ignore[union-attr]

    def _sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute a1, b1, a2, b2: (out, rank) and (rank, in * k) each, Tucker's core multiplied into b."""
        a1, b1, a2, b2 = loha_sides(self._parameters)
        return a1, b1, self.with_scalar(a2), b2

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute base_output + delta(x); base_output may be overwritten."""
        a1, b1, a2, b2 = self._sides()
        b2 = self.drop_ranks(b2)
        if self._is_thin():
            up, down = (factor.to(x.dtype) for factor in pairs_of_ranks(a1, b1, a2, b2))
            kernel = down.view(-1, *self.shape[1:])
            return add_low_rank(x, base_output, kernel, self.as_kernel(up), self.scale, self.geometry)
        sides = (side.to(x.dtype) for side in (a1, b1, a2, b2))
        return cast(Tensor, _Hadamard.apply(x, base_output, *sides, self.scale, self.shape, self.geometry))

    def _is_thin(self) -> bool:
        """Tell whether the delta, which is also a LoRA of rank^2, is less work in that form."""
        outputs, inputs = self.shape[0], math.prod(self.shape[1:])
        return self.rank**2 * (outputs + inputs) <= outputs * inputs

    @torch.no_grad()
    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """Factor the delta into (out, rank^2) and (rank^2, in * k); None if these are not thin."""
        if not self._is_thin():
            return None
        up, down = pairs_of_ranks(*(wide(side) for side in self._sides()))
        return self.scale * up, down

    def delta_weight(self) -> Tensor:
        """Compute the delta in the base weight's shape, at least float32, detached."""
        a1, b1, a2, b2 = (wide(side) for side in self._sides())
        return (self.scale * (a1 @ b1) * (a2 @ b2)).view(self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Collect the tensors by LyCORIS' suffixes, as ComfyUI reads them."""
        return comfy_parts(self.file_tensors("hada_w1_a"))


class _Hadamard(torch.autograd.Function):
    """Add delta(x) with the whole delta, which the backward pass recomputes instead of storing it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base_output: Tensor,
        a1: Tensor,
        b1: Tensor,
        a2: Tensor,
        b2: Tensor,
        scale: float,
        shape: tuple[int, ...],
        geometry: dict[str, Any],
    ) -> Tensor:
        ctx.save_for_backward(x, a1, b1, a2, b2)
        ctx.scale, ctx.shape, ctx.geometry = scale, shape, geometry
        delta = ((a1 @ b1).mul_(a2 @ b2)).mul_(scale).view(shape)
        if geometry:
            return convolve(x, delta, **geometry).add_(base_output)
        flat = base_output.reshape(-1, shape[0])
        return torch.addmm(flat, x.reshape(-1, shape[1]), delta.t()).view(base_output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grad = grads[0]
        x, a1, b1, a2, b2 = ctx.saved_tensors
        need_x = ctx.needs_input_grad[0]
        first, second = a1 @ b1, a2 @ b2
        delta = (first * second).mul_(ctx.scale).view(ctx.shape) if need_x or ctx.geometry else None
        if ctx.geometry:
            g, none = ctx.geometry, (0,) * (len(ctx.shape) - 2)
            args = (None, g["stride"], g["padding"], g["dilation"], False, none, 1, (need_x, True, False))
            grad_x, grad_delta, _ = torch.ops.aten.convolution_backward(grad, x, delta, *args)
        else:
            rows = grad.reshape(-1, ctx.shape[0])
            grad_x = (rows @ delta).view(x.shape) if delta is not None else None
            grad_delta = rows.t() @ x.reshape(-1, ctx.shape[1])
        del delta
        grad_delta = grad_delta.flatten(1).mul_(ctx.scale)
        first.mul_(grad_delta)  # from here on: the gradients of the second product and the first
        second.mul_(grad_delta)
        of_sides = (second @ b1.t(), a1.t() @ second, first @ b2.t(), a2.t() @ first)
        return grad_x, grad, *of_sides, None, None, None
