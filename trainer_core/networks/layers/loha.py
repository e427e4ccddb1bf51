"""LoHa: the delta is the elementwise product of two low-rank matrices (Hyeon-Woo et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from ...common.axes import convolve
from ...config import setting
from .form import LowRank, Parts, scale_of, with_core
from .product import ProductLayer, add_low_rank, wide
from .shape import Matrix

if TYPE_CHECKING:
    from ...config import LoraConfig

MAX_RANK = 32  # above it, products of normal draws grow so large that runs end in NaN
MATRICES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
CORES = ("hada_t1", "hada_t2")


class LohaLayer(ProductLayer):
    """delta = scale * (a1 b1) * (a2 b2), elementwise; a2 starts at zero.

    hada_w1_a, hada_w2_a: (out, rank), hada_w1_b, hada_w2_b: (rank, in * k). In Tucker's form of a convolution the
    two are (rank, out) and (rank, in), and each product has a core hada_t1, hada_t2: (rank, rank, *kernel).
    """

    takes = (*ProductLayer.takes, "tucker")
    endings: ClassVar = {part: (part,) for part in (*MATRICES, *CORES)}
    forms: ClassVar = {frozenset(MATRICES): "LoHa", frozenset((*MATRICES, *CORES)): "LoHa"}
    multiplied = ("hada_w1_a",)
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

    @staticmethod
    def remarks(config: LoraConfig) -> list[str]:
        """Warn of a large rank."""
        if (rank := max(config.rank, config.conv_rank)) <= MAX_RANK:
            return []
        return [
            f"LoHa of rank {rank} gives matrices of that rank squared, which easily overflow to NaN; set rank and "
            f"{setting('lora.conv_rank')} to {MAX_RANK} or less."
        ]

    def _sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute a1, b1, a2, b2: (out, rank) and (rank, in * k) each, Tucker's core multiplied into b."""
        a1, b1, a2, b2 = _sides(self._parameters)
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

    @classmethod
    def settings_of(cls, parts: Collection[str]) -> dict[str, Any]:
        """Tucker's cores tell the form."""
        return {"tucker": "hada_t1" in parts}

    @classmethod
    def rank_of(cls, parts: Parts) -> int:
        """The rows of b1."""
        return len(parts["hada_w1_b"])

    @classmethod
    def inputs_of(cls, parts: Parts) -> int:
        """The columns of b1."""
        return parts["hada_w1_b"].shape[1:].numel()

    @classmethod
    def delta_of(cls, parts: Parts, alpha: float) -> Tensor:
        """Compute scale * (a1 b1) * (a2 b2), in Tucker's form (out, in, *kernel)."""
        a1, b1, a2, b2 = _sides(parts)
        delta = scale_of(alpha, cls.rank_of(parts)) * (a1 @ b1) * (a2 @ b2)
        return delta.unflatten(1, (-1, *parts["hada_t1"].shape[2:])) if "hada_t1" in parts else delta

    @classmethod
    def product_of(cls, parts: Parts, alpha: float) -> LowRank | None:
        """Write it as a LoRA of rank^2, as long as that is thin."""
        a1, b1, a2, b2 = _sides(parts)
        if len(b1) * len(b2) >= min(len(a1), b1.shape[1]):
            return None
        kernel = parts["hada_t1"].shape[2:] if "hada_t1" in parts else ()
        return LowRank(*pairs_of_ranks(a1, b1, a2, b2), scale_of(alpha, cls.rank_of(parts)), kernel)

    @classmethod
    def comfy_form(cls, parts: Parts, alpha: float) -> tuple[dict[str, Tensor], float]:
        """Multiply cores into the sides, but those of two axes, which alone ComfyUI reads."""
        if "hada_t1" not in parts or parts["hada_t1"].ndim == 4:
            return dict(parts), alpha
        others = {part: tensor for part, tensor in parts.items() if part not in cls.endings}
        sides = _sides({part: wide(tensor) for part, tensor in parts.items()})
        return others | {part: side.contiguous() for part, side in zip(MATRICES, sides, strict=True)}, alpha


def _sides(parts: Parts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write a LoHa as (a1 b1) * (a2 b2), (out, rank) and (rank, in * k) each, with Tucker's cores in b."""
    sides = []
    for number in (1, 2):
        a, b, core = parts[f"hada_w{number}_a"], parts[f"hada_w{number}_b"], parts.get(f"hada_t{number}")
        sides += [a, b] if core is None else [a.t(), with_core(core, b).flatten(1)]
    return sides[0], sides[1], sides[2], sides[3]


def pairs_of_ranks(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> tuple[Tensor, Tensor]:
    """Build up (out, rank^2), down (rank^2, n) with up @ down = (a1 b1) * (a2 b2), from all pairs of ranks."""
    return (a1[:, :, None] * a2[:, None, :]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)


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
