"""GLoRA: low-rank changes of a layer's input and of its output (Chavan et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...common.axes import convolve
from ...config import setting
from .deltas import glora_delta
from .product import ProductLayer, add_low_rank, wide
from .shape import Matrix


class GloraLayer(ProductLayer):
    """W' = W + scale * (W A + B) with A = a1 a2 on the inputs and B = b1 b2; a2 and b2 start at zero.

    a1: (in, rank, *ones), a2: (rank, in, *ones), b1: (out, rank, *ones), b2: (rank, in, *kernel).
    """

    parts = ("a1", "a2", "b1", "b2")
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

    def file_rank(self) -> int:
        """The rank of the parameters."""
        return cast(Tensor, self._parameters["b2"]).shape[0]

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
        a1, a2, b1, b2 = (wide(self._part(part)).flatten(1) for part in self.parts)
        weight, scale = wide(weight), self.scale * (1.0 if self.scalar is None else float(self.scalar.detach()))
        return weight + scale * glora_delta(weight, a1, a2, b1, b2)

    def tensors(self) -> dict[str, Tensor]:
        """Collect the tensors by LyCORIS' suffixes."""
        tensors = self.file_tensors("a1")
        tensors["b1"] = self.with_scalar(tensors["b1"]).detach()
        return {**{f"{part}.weight": tensors[part] for part in self.parts}, "alpha": tensors["alpha"]}
