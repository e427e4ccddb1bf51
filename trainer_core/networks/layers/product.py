"""The base class of layers whose delta is a product: initialisation, loading, and low-rank products of activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...common.axes import convolve
from ...common.rng import generator
from .form import ALPHA
from .layer import NetworkLayer
from .shape import Matrix, geometry_of, weight_shape


class ProductLayer(NetworkLayer):
    """A layer that adds scale * (a product of small matrices), float32 parameters named as the parts of its files.

    The parameters of other forms of the layer are None. scalar: with use_scalar, a trained number that multiplies the
    delta; only it starts at zero then.
    """

    takes: ClassVar[tuple[str, ...]] = ("rank", "alpha", "name", "seed", "use_scalar")
    scalar: nn.Parameter | None

    def __init__(
        self, base: Matrix, rank: int, alpha: float, *, name: str, seed: int, use_scalar: bool = False
    ) -> None:
        super().__init__()
        self.shape = weight_shape(base)
        self.rank, self.alpha = rank, float(alpha)
        self.geometry = geometry_of(base)
        self._purpose = f"init/{name}", seed
        for part in self.endings:
            self.register_parameter(part, None)
        self.scalar = nn.Parameter(torch.zeros(())) if use_scalar else None

    def as_kernel(self, matrix: Tensor) -> Tensor:
        """View a matrix (n, m) as a kernel of this layer whose sizes are 1; that of a linear layer stays a matrix."""
        return matrix.view(*matrix.shape, *(1,) * (len(self.shape) - 2))

    def init_uniform(self, part: str, *shape: int, draws: torch.Generator | None = None) -> None:
        """Fill a parameter Kaiming-uniform with a = sqrt(5): uniform within 1 / sqrt(size of a row)."""
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        uniform = torch.rand(shape, generator=draws or self._draws(part))
        if not uniform.is_meta:  # an outline has no values, and torch takes ten times as long for them as for numbers
            uniform.mul_(2 * bound).sub_(bound)
        self.register_parameter(part, nn.Parameter(uniform))

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
        if strange := set(parts) - set(self.endings):
            super().load({part: parts[part] for part in strange}, alpha)
        for part in self.endings:
            found = parts.get(part)
            self.register_parameter(part, None if found is None else nn.Parameter(found.detach().float().clone()))
        self.rank = self.rank_of(parts)
        self.alpha = float(alpha or self.rank)
        if self.scalar is not None:
            self.scalar.data.fill_(1)

    def factors(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose product is the delta."""
        return tuple(p for part in self.endings if (p := self._parameters[part]) is not None)

    def drop_ranks(self, factor: Tensor) -> Tensor:
        """Mask the ranks of a factor (rank, …) that dropout excludes from this micro-batch."""
        mask = self.dropouts.rank_mask(1, len(factor), factor) if self.dropouts else None
        return factor if mask is None else factor * mask.view(-1, *(1,) * (factor.ndim - 1))

    def with_scalar(self, factor: Tensor) -> Tensor:
        """Multiply one factor of the product by the trained scalar, if any."""
        return factor if self.scalar is None else factor * self.scalar

    def tensors(self) -> dict[str, Tensor]:
        """Collect the parameters by their endings in files, times the scalar, and alpha."""
        parts: dict[str, Tensor] = {part: p for part in self.endings if (p := self._parameters[part]) is not None}
        parts |= {part: self.with_scalar(parts[part]) for part in self.multiplied if part in parts}
        return self.as_file(parts, self.alpha)

    def as_file(self, parts: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
        """Name parts and alpha by their endings in files, in a form that ComfyUI loads."""
        parts, alpha = self.comfy_form({part: tensor.detach() for part, tensor in parts.items()}, alpha)
        return {**{self.endings[part][0]: tensor for part, tensor in parts.items()}, ALPHA: torch.tensor(alpha)}


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
