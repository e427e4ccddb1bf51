"""LoRA on linear and convolution layers, computed on the activations (Hu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..rng import generator
from .layer import NetworkLayer


def weight_shape(layer: nn.Linear | nn.Conv2d) -> tuple[int, ...]:
    """Return the shape of a frozen layer's weight, in whatever form it is kept."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size


class LoraLayer(NetworkLayer):
    """delta(x) = scale * up(down(x)) beside one frozen layer; `up` starts at zero, so delta starts at zero.

    down: (rank, in[, k, k]) and up: (out, rank[, 1, 1]), float32 parameters. alpha is a plain number.
    """

    plus = ("up",)

    def __init__(self, base: nn.Linear | nn.Conv2d, rank: int, alpha: float, *, name: str, seed: int) -> None:
        super().__init__()
        outputs, *inputs = weight_shape(base)
        ones = (1,) * (len(inputs) - 1)
        bound = 1 / math.sqrt(math.prod(inputs))  # kaiming uniform with a = sqrt(5)
        down = torch.rand(rank, *inputs, generator=generator(seed, f"init/{name}")) * (2 * bound) - bound
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(outputs, rank, *ones))
        self.rank, self.alpha = rank, float(alpha)
        self.scale = self.alpha / rank
        self.geometry: dict[str, Any] = {}
        if isinstance(base, nn.Conv2d):
            self.geometry = {"stride": base.stride, "padding": base.padding, "dilation": base.dilation}

    def forward(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Return base_output + delta(x); base_output is the frozen layer's own result and may be overwritten."""
        down, up = self.down.to(x.dtype), self.up.to(x.dtype)
        if self.geometry:
            hidden = F.conv2d(x, down, **self.geometry)
            return base_output.add_(F.conv2d(hidden, up), alpha=self.scale)
        # The rank is the row count of every thin matrix, here and in the backward pass that autograd derives: BLAS is
        # several times faster on few rows than on few columns. Out of place, because nn.Linear returns a view, and
        # autograd pays for writing into a view with copies of the whole gradient.
        hidden = down @ x.reshape(-1, x.shape[-1]).t()  # (rank, tokens)
        flat = base_output.reshape(-1, base_output.shape[-1])
        return torch.addmm(flat, hidden.t(), up.t().contiguous(), alpha=self.scale).view(base_output.shape)

    def delta_weight(self) -> Tensor:
        """Return scale * up @ down in the base weight's shape, float32."""
        down = self.down.detach().float()
        return (self.scale * self.up.detach().float().flatten(1) @ down.flatten(1)).view(-1, *down.shape[1:])

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Return W + delta, float32."""
        return weight.float() + self.delta_weight()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors under kohya's suffixes."""
        return {
            "lora_down.weight": self.down.detach(),
            "lora_up.weight": self.up.detach(),
            "alpha": torch.tensor(self.alpha),
        }

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Begin with `down` and `up` of an earlier run; a 1x1 convolution's may be stored as matrices."""
        if set(parts) != {"down", "up"}:
            super().load(parts, alpha)
        self.down.data.copy_(parts["down"].reshape(self.down.shape))
        self.up.data.copy_(parts["up"].reshape(self.up.shape))
