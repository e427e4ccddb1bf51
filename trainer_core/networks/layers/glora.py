"""GLoRA: low-rank changes of a layer's input and of its output (Chavan et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...common.axes import convolve
from ...config import setting
from .form import Parts, scale_of
from .product import ProductLayer, add_low_rank, wide
from .shape import Matrix


class GloraLayer(ProductLayer):
    """W' = W + scale * (W A + B) with A = a1 a2 on the inputs and B = b1 b2; a2 and b2 start at zero.

    a1: (in, rank, *ones), a2: (rank, in, *ones), b1: (out, rank, *ones), b2: (rank, in, *kernel).
    """

    endings: ClassVar = {part: (f"{part}.weight",) for part in ("a1", "a2", "b1", "b2")}
    forms: ClassVar = {frozenset(endings): "GLoRA"}
    multiplied = ("a1", "b1")
    of_weight = True
    plus = ("a2", "b2")
    uses_changed_input = False

    def __init__(self, base: Matrix, rank: int, alpha: float, **common: Any) -> None:
        super().__init__(base, rank, alpha, **common)
        outputs, inputs, *kernel = self.shape
        if rank == outputs == inputs:  # readers could then mistake the four matrices for the older file layout
            raise ValueError(
                f"GLoRA files cannot store rank {rank}, the size of this layer; set {setting('lora.rank')} to another."
            )
        ones = (1,) * len(kernel)
        init_last = self.init_zero if self.scalar is None else self.init_uniform
        self.init_uniform("a1", inputs, rank, *ones)
        init_last("a2", rank, inputs, *ones)
        self.init_uniform("b1", outputs, rank, *ones)
        init_last("b2", rank, inputs, *kernel)

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load the matrices of a file; those of a convolution may be stored flat."""
        ones = (1,) * (len(self.shape) - 2)
        shapes = {part: (-1, *self.shape[1:]) if part == "b2" else (*t.shape[:2], *ones) for part, t in parts.items()}
        super().load({part: tensor.reshape(shapes[part]) for part, tensor in parts.items()}, alpha)

    def factors(self) -> tuple[nn.Parameter, ...]:
        """Empty: the delta also contains the frozen weight, so it is no product of parameters."""
        return ()

    def _part(self, name: str) -> Tensor:
        return cast(Tensor, self._parameters[name])

    def enter(self, x: Tensor) -> Tensor:
        """Compute x + scale * A x."""
        up, down = self.with_scalar(self._part("a1")).to(x.dtype), self._part("a2").to(x.dtype)
        if self.geometry:
            entered = torch.add(x, convolve(convolve(x, down), up), alpha=self.scale)
        else:
            entered = add_low_rank(x, x, down, up, self.scale, {})
        return self.where_active(entered, x)

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute base_output + scale * B x; x is the input of `enter`, base_output may be overwritten."""
        up, down = self.with_scalar(self._part("b1")).to(x.dtype), self._part("b2").to(x.dtype)
        return add_low_rank(x, base_output, down, up, self.scale, self.geometry)

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Compute W + scale * (W A + B), at least float32."""
        weight, scale = wide(weight), self.scale * (1.0 if self.scalar is None else float(self.scalar.detach()))
        return weight + scale * _delta(weight, {part: wide(self._part(part)) for part in self.endings})

    @classmethod
    def rank_of(cls, parts: Parts) -> int:
        """The rows of a2."""
        return len(parts["a2"])

    @classmethod
    def change_of(cls, weight: Tensor, parts: Parts, alpha: float, strength: float) -> Tensor:
        """Compute strength * scale * (W a1 a2 + b1 b2)."""
        return strength * (scale_of(alpha, cls.rank_of(parts)) * _delta(weight, parts))

    @classmethod
    def fits(cls, parts: Parts, weight: torch.Size) -> bool:
        """Tell whether the product with a weight of this shape has its shape."""
        return cls.change_of(torch.empty(weight, device="meta"), parts, 0.0, 1.0).shape == weight


def _delta(weight: Tensor, parts: Parts) -> Tensor:
    """Compute W a1 a2 + b1 b2 of a weight (out, in, *kernel) in its shape."""
    a1, a2, b1, b2 = (parts[part].flatten(1) for part in ("a1", "a2", "b1", "b2"))
    return torch.einsum("o i ..., i j -> o j ...", weight, a1 @ a2) + (b1 @ b2).view(weight.shape)
