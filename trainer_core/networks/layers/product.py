"""The base class of layers whose delta is a product: initialisation, loading, and low-rank products of activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...common.axes import convolve
from ...common.rng import generator
from .layer import NetworkLayer
from .shape import Matrix, geometry_of, weight_shape


class ProductLayer(NetworkLayer):
    """A layer that adds scale * (a product of small matrices), float32 parameters named as in files.

    parts: the parameters of all forms of the layer; those of other forms are None. scalar: with use_scalar, a trained
    number that multiplies the delta; only it starts at zero then.
    """

    parts: tuple[str, ...] = ()
    scalar: nn.Parameter | None

    def __init__(
        self, base: Matrix, rank: int, alpha: float, *, name: str, seed: int, use_scalar: bool = False
    ) -> None:
        super().__init__()
        self.shape = weight_shape(base)
        self.rank, self.alpha = rank, float(alpha)
        self.geometry = geometry_of(base)
        self._purpose = f"init/{name}", seed
        for part in self.parts:
            self.register_parameter(part, None)
        self.scalar = nn.Parameter(torch.zeros(())) if use_scalar else None

    def as_kernel(self, matrix: Tensor) -> Tensor:
        """View a matrix (n, m) as a kernel of this layer whose sizes are 1; that of a linear layer stays a matrix."""
        return matrix.view(*matrix.shape, *(1,) * (len(self.shape) - 2))

    def init_uniform(self, part: str, *shape: int, draws: torch.Generator | None = None) -> None:
        """Fill a parameter Kaiming-uniform with a = sqrt(5): uniform within 1 / sqrt(size of a row)."""
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        uniform = torch.rand(shape, generator=draws or self._draws(part))
        self.register_parameter(part, nn.Parameter(uniform * (2 * bound) - bound))

    def init_normal(self, part: str, *shape: int, std: float) -> None:
        """Fill a parameter with normal draws."""
        self.register_parameter(part, nn.Parameter(std * torch.randn(shape, generator=self._draws(part))))

    def init_zero(self, part: str, *shape: int) -> None:
        """Fill a parameter with zeros."""
        self.register_parameter(part, nn.Parameter(torch.zeros(shape)))

    def _draws(self, part: str) -> torch.Generator:
        purpose, seed = self._purpose
        return generator(seed, f"{purpose}/{part}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load the parameters of a file, with its form and rank; alpha 0 stands for the rank."""
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
        """The rank of the parameters."""
        raise NotImplementedError

    def factors(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose product is the delta."""
        return tuple(p for part in self.parts if (p := self._parameters[part]) is not None)

    def drop_ranks(self, factor: Tensor) -> Tensor:
        """Mask the ranks of a factor (rank, …) that dropout excludes from this micro-batch."""
        mask = self.dropouts.rank_mask(1, len(factor), factor) if self.dropouts else None
        return factor if mask is None else factor * mask.view(-1, *(1,) * (factor.ndim - 1))

    def with_scalar(self, factor: Tensor) -> Tensor:
        """Multiply one factor of the product by the trained scalar, if any."""
        return factor if self.scalar is None else factor * self.scalar

    def file_tensors(self, folded: str) -> dict[str, Tensor]:
        """Collect the parameters by part, and alpha; the part `folded` is multiplied by the scalar."""
        tensors = {part: p.detach() for part in self.parts if (p := self._parameters[part]) is not None}
        tensors[folded] = self.with_scalar(tensors[folded]).detach()
        return {**tensors, "alpha": torch.tensor(self.alpha)}


def wide(tensor: Tensor) -> Tensor:
    """Detach a tensor and convert it to at least float32."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def add_low_rank(
    x: Tensor, base_output: Tensor, down: Tensor, up: Tensor, scale: float, geometry: Mapping[str, Any]
) -> Tensor:
    """Compute base_output + scale * up(down(x)); a convolution's base_output is overwritten.

    down: (rank, in, *kernel), up: (out, rank, *ones), both in x's dtype. The rank is the row count of every thin
    matrix: BLAS is several times faster on few rows than on few columns, here and in the backward pass.
    """
    if geometry:
        return base_output.add_(convolve(convolve(x, down, **geometry), up), alpha=scale)
    hidden = down @ x.reshape(-1, x.shape[-1]).t()  # (rank, tokens)
    flat = base_output.reshape(-1, base_output.shape[-1])
    return torch.addmm(flat, hidden.t(), up.t().contiguous(), alpha=scale).view(base_output.shape)
