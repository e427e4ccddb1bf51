"""Full fine-tuning as a network: trained differences of whole weights and biases, of norms, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...common.axes import convolve
from .form import BIAS, Parts
from .layer import NetworkLayer
from .product import wide
from .shape import Matrix, geometry_of, weight_shape

Norm = nn.GroupNorm | nn.LayerNorm


class FullLayer(NetworkLayer):
    """W' = W + diff, b' = b + diff_b; both differences start at zero. A layer without bias gets none."""

    endings: ClassVar = {"diff": ("diff", "w_norm"), BIAS: (BIAS, "b_norm")}  # of a weight, and of a norm
    forms: ClassVar = dict.fromkeys((frozenset({"diff"}), frozenset()), "full difference")  # the latter: bias alone
    multiplied = ("diff",)
    decomposes = False
    of_norm: ClassVar[bool] = False

    def __init__(self, base: Matrix | Norm) -> None:
        super().__init__()
        shape = weight_shape(base)
        self.diff = nn.Parameter(torch.zeros(shape))
        self.diff_b = nn.Parameter(torch.zeros(shape[0])) if base.bias is not None else None
        self.geometry = geometry_of(base)

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute base_output + diff x + diff_b; base_output may be overwritten."""
        diff, diff_b = self._differences(x.dtype)
        if self.geometry:
            return base_output.add_(convolve(x, diff, diff_b, **self.geometry))
        return base_output + F.linear(x, diff, diff_b)

    def _differences(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return self.diff.to(dtype), None if self.diff_b is None else self.diff_b.to(dtype)

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load the differences of a file."""
        if not set(parts) <= {name for name, _ in self.named_parameters()}:
            super().load(parts, alpha)
        for part, tensor in parts.items():
            getattr(self, part).data.copy_(tensor)

    def factors(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose product is the delta."""
        return (self.diff,)

    def delta_weight(self) -> Tensor:
        """The weight's difference, at least float32, detached."""
        return wide(self.diff)

    def tensors(self) -> dict[str, Tensor]:
        """Collect the differences by LyCORIS' endings."""
        found = zip(self.endings.values(), (self.diff, self.diff_b), strict=True)
        return {endings[self.of_norm]: tensor.detach() for endings, tensor in found if tensor is not None}

    @classmethod
    def is_flat(cls, parts: Parts) -> bool:
        """Tell whether it is of a norm, or of a bias alone."""
        return "diff" not in parts or parts["diff"].ndim < 2

    @classmethod
    def delta_of(cls, parts: Parts, alpha: float) -> Tensor:
        """The difference itself; it has no scale."""
        del alpha
        return parts["diff"]


class NormLayer(FullLayer):
    """Differences of a norm, whose output is linear in weight and bias: the norm of x with diff and diff_b is added."""

    of_norm = True

    def __init__(self, base: Norm) -> None:
        super().__init__(base)
        self.groups = base.num_groups if isinstance(base, nn.GroupNorm) else 0
        self.eps = base.eps

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute base_output + the norm of x with the differences as weight and bias."""
        diff, diff_b = self._differences(x.dtype)
        if self.groups:
            return base_output + F.group_norm(x, self.groups, diff, diff_b, self.eps)
        return base_output + F.layer_norm(x, diff.shape, diff, diff_b, self.eps)

    def factors(self) -> tuple[nn.Parameter, ...]:
        """Empty: the differences of a norm are no matrix, so their size is not limited."""
        return ()
