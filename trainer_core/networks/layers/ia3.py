"""(IA)^3: a trained factor for each output, or each input, of a layer (Liu et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .dora import EPS, frozen_weight, per_column, per_output
from .form import ALPHA, MAGNITUDE
from .layer import NetworkLayer
from .product import wide
from .shape import Matrix, weight_shape

if TYPE_CHECKING:
    from ...config import LoraConfig

INPUT_SIDE = ("ff_net_2", "mlp_fc2")  # layers whose inputs are multiplied: the last of each feed-forward network


class Ia3Layer(NetworkLayer):
    """W' = diag(1 + v) W, or W diag(1 + v) on the input side; the bias is unchanged, v starts at zero.

    ia3: v, (out,) or (in,).
    """

    takes = ("name",)

    def __init__(self, base: Matrix, *, name: str) -> None:
        super().__init__()
        self.shape = weight_shape(base)
        self.axis = 1 if name.endswith(INPUT_SIDE) else 0
        self.ia3 = nn.Parameter(torch.zeros(self.shape[self.axis]))

    @staticmethod
    def remarks(config: LoraConfig) -> list[str]:
        """Tell how it is saved."""
        said = "(IA)^3 is saved as an equal DoRA that only changes magnitudes, since ComfyUI cannot load (IA)^3."
        return [] if config.bake else [said]

    def enter(self, x: Tensor) -> Tensor:
        """Compute x (1 + v) on the input side."""
        if not self.axis:
            return x
        factor = per_column(self.ia3.to(x.dtype), x, channels=len(self.shape) > 2)
        return self.where_active(torch.addcmul(x, x, factor), x)

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute (base_output - b) (1 + v) + b on the output side."""
        if self.axis:
            return base_output
        bias = cast(Tensor | None, self._attached().bias)
        return per_output(self.ia3.to(base_output.dtype), base_output, bias, channels=len(self.shape) > 2)

    def _attached(self) -> nn.Module:
        assert self.frozen is not None, "the network is not attached"
        return self.frozen

    def _along(self, tensor: Tensor) -> Tensor:
        """Reshape numbers per output to (out, 1, …), per input to (1, in, 1, …)."""
        return tensor.view(*(1,) * self.axis, -1, *(1,) * (len(self.shape) - 1 - self.axis))

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load v from the magnitudes of a file; needs the frozen layer."""
        self.ia3.data = (parts[MAGNITUDE].flatten().float() / self._norm().cpu() - 1).to(self.ia3.device)

    def _norm(self) -> Tensor:
        """Compute the norms of the frozen weight's rows or columns, EPS added, float32."""
        rows = frozen_weight(self._attached(), torch.float32).transpose(0, self.axis).flatten(1)
        return torch.linalg.vector_norm(rows, dim=1) + EPS

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Multiply the rows or columns of a weight by 1 + v, at least float32."""
        return wide(weight) * (1 + self._along(wide(self.ia3)))

    def tensors(self) -> dict[str, Tensor]:
        """Build an equal DoRA that changes only magnitudes, since ComfyUI does not know (IA)^3."""
        outputs, inputs, *kernel = self.shape
        ones = (1,) * len(kernel)
        v = self.ia3.detach().float()
        return {
            "lora_down.weight": v.new_zeros(1, inputs, *kernel),
            "lora_up.weight": v.new_zeros(outputs, 1, *ones),
            ALPHA: torch.tensor(1.0),
            MAGNITUDE: self._along(self._norm().to(v.device) * (1 + v)),
        }
