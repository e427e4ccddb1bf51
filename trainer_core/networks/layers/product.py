"""What layers share whose delta is made of products: how they begin, and how two thin matrices act on activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...common.rng import generator
from .layer import NetworkLayer
from .lora import weight_shape


class ProductLayer(NetworkLayer):
    """Adds scale * (a product of small matrices) to one frozen layer's weight, float32 parameters named as in files.

    parts: all parameters that any form of the layer has; those of another form are None. scalar: with use_scalar a
    number that multiplies the delta and begins with 0; then nothing else does.
    """

    parts: tuple[str, ...] = ()
    scalar: nn.Parameter | None

    def __init__(
        self, base: nn.Linear | nn.Conv2d, rank: int, alpha: float, *, name: str, seed: int, use_scalar: bool = False
    ) -> None:
        super().__init__()
        self.shape = weight_shape(base)
        self.rank, self.alpha = rank, float(alpha)
        self.geometry: dict[str, Any] = {}
        if isinstance(base, nn.Conv2d):
            self.geometry = {"stride": base.stride, "padding": base.padding, "dilation": base.dilation}
        self._purpose = f"init/{name}", seed
        for part in self.parts:
            self.register_parameter(part, None)
        self.scalar = nn.Parameter(torch.zeros(())) if use_scalar else None

    def begin_uniform(self, part: str, *shape: int) -> None:
        """Fill a parameter as Kaiming does with a = sqrt(5): uniform within 1 / sqrt(size of a row)."""
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        draws = torch.rand(shape, generator=self._draws(part))
        self.register_parameter(part, nn.Parameter(draws * (2 * bound) - bound))

    def begin_normal(self, part: str, *shape: int, std: float) -> None:
        """Fill a parameter with normal draws."""
        self.register_parameter(part, nn.Parameter(std * torch.randn(shape, generator=self._draws(part))))

    def begin_zero(self, part: str, *shape: int) -> None:
        """Fill a parameter with zeros."""
        self.register_parameter(part, nn.Parameter(torch.zeros(shape)))

    def _draws(self, part: str) -> torch.Generator:
        purpose, seed = self._purpose
        return generator(seed, f"{purpose}/{part}")

    @property
    def scale(self) -> float:
        """Return alpha / rank."""
        return self.alpha / self.rank

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Begin with what a file holds: its form and rank count, alpha 0 stands for the rank."""
        if strange := set(parts) - set(self.parts):
            super().load({part: parts[part] for part in strange}, alpha)
        for part in self.parts:
            found = parts.get(part)
            self.register_parameter(part, None if found is None else nn.Parameter(found.detach().float().clone()))
        self.rank = self.file_rank()
        self.alpha = float(alpha or self.rank)
        if self.scalar is not None:
            self.scalar.data.fill_(1)

    def file_rank(self) -> int:
        """Return the rank that the parameters have."""
        raise NotImplementedError

    def factors(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters whose product is the delta."""
        return tuple(p for part in self.parts if (p := self._parameters[part]) is not None)

    def ranks_kept(self, factor: Tensor) -> Tensor:
        """Return a factor (rank, …) without the ranks that are left out of this micro-batch."""
        mask = self.dropouts.rank_mask(1, len(factor), factor) if self.dropouts else None
        return factor if mask is None else factor * mask.view(-1, *(1,) * (factor.ndim - 1))

    def with_scalar(self, factor: Tensor) -> Tensor:
        """Return one factor of the product with the trained number in it."""
        return factor if self.scalar is None else factor * self.scalar

    def file_tensors(self, folded: str) -> dict[str, Tensor]:
        """Return the parameters by their parts and alpha; the trained number lies in the part `folded`."""
        tensors = {part: p.detach() for part in self.parts if (p := self._parameters[part]) is not None}
        tensors[folded] = self.with_scalar(tensors[folded]).detach()
        return {**tensors, "alpha": torch.tensor(self.alpha)}


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, at least float32."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def add_low_rank(
    x: Tensor, base_output: Tensor, down: Tensor, up: Tensor, scale: float, geometry: Mapping[str, Any]
) -> Tensor:
    """Return base_output + scale * up(down(x)); a convolution's base_output is overwritten.

    down: (rank, in[, k, k]), up: (out, rank[, 1, 1]), both in x's dtype. The rank is the row count of every thin
    matrix: BLAS is several times faster on few rows than on few columns, here and in the backward pass.
    """
    if geometry:
        return base_output.add_(F.conv2d(F.conv2d(x, down, **geometry), up), alpha=scale)
    hidden = down @ x.reshape(-1, x.shape[-1]).t()  # (rank, tokens)
    flat = base_output.reshape(-1, base_output.shape[-1])
    return torch.addmm(flat, hidden.t(), up.t().contiguous(), alpha=scale).view(base_output.shape)
