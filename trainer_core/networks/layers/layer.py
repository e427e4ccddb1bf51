"""The base class of all network layers: a layer changes the output of one frozen layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from ...config import put_beneath
from .dora import EPS, column_norms, frozen_weight, magnitude_factor, per_column, per_output, row_norms
from .dropout import Dropouts
from .form import MAGNITUDE, FileForm
from .shape import CONVOLUTIONS

if TYPE_CHECKING:
    from ...config import LoraConfig


class NetworkLayer(FileForm, nn.Module):
    """A trained layer beside one frozen layer. `enter` changes its input, `forward` its output, `leave` the result.

    A new layer changes nothing, bitwise. While a network is attached, `frozen` is the frozen layer, for its weight and
    bias; it is not a child, so its parameters are not trained.
    """

    takes: ClassVar[tuple[str, ...]] = ()  # rank, alpha, name, seed, and settings of LoRA Config that it is built with
    frozen: nn.Module | None = None
    dropouts: Dropouts | None = None  # None: no dropout
    reversed: bool = False  # applied as at strength -1, for layers that add to the output
    lr_factor: float = 1.0  # multiplies the learning rate of its part
    uses_changed_input: bool = True  # forward gets the output of `enter`; False: its input
    by_output: bool = False  # a DoRA has a magnitude per output, not per input
    plus: tuple[str, ...] = ()  # parameters with LoRA+'s higher rate: the factors that start at zero
    no_decay: tuple[str, ...] = ("scalar", "magnitude")  # parameters without weight decay

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("magnitude", None)
        self.norms: Tensor | None = None  # of the frozen weight when the layer became a DoRA, shaped as in its file

    @staticmethod
    def remarks(config: LoraConfig) -> list[str]:
        """List warnings about settings of this kind whose training or file may surprise."""
        del config
        return []

    def decompose(self, base: nn.Module, *, by_output: bool = False) -> None:
        """Make this a DoRA (Liu et al. 2024): train a magnitude per input, or with by_output per output, too.

        `magnitude` (in,) or (out,) is its difference from ||W|| + EPS. It starts at zero, so that a new layer changes
        nothing in any number format, and gets the same gradient as the magnitude. By output the magnitude multiplies
        V / ||W||, as in ComfyUI, by input V / ||V||.
        """
        self.by_output = by_output
        self.norms = self._norms(frozen_weight(base, torch.float32))
        self.magnitude = nn.Parameter(torch.zeros_like(self.norms.flatten()))

    def _norms(self, weight: Tensor) -> Tensor:
        """Compute the norms of a weight along the magnitudes' axis, (1, in, *ones) or (out, 1, *ones)."""
        ones = (1,) * (weight.ndim - 2)
        return row_norms(weight).view(-1, 1, *ones) if self.by_output else column_norms(weight).view(1, -1, *ones)

    def enter(self, x: Tensor) -> Tensor:
        """Scale the inputs by the DoRA factors; identity for other layers."""
        if self.magnitude is None or self.by_output:
            return x
        assert self.frozen is not None
        weight = frozen_weight(self.frozen, x.dtype, x.device)
        factor = magnitude_factor(self.magnitude, weight, self.low_rank, self.delta_weight).to(x.dtype)
        active = self.dropouts.sample_mask(x) if self.dropouts else None
        if active is not None:
            factor = 1 + active[:, None] * (factor - 1)
        return x * per_column(factor, x, channels=isinstance(self.frozen, CONVOLUTIONS))

    def leave(self, output: Tensor) -> Tensor:
        """Scale the outputs by the factors of a DoRA by output; identity for other layers."""
        if self.magnitude is None or not self.by_output:
            return output
        assert self.frozen is not None
        with torch.no_grad():
            norms = row_norms(frozen_weight(self.frozen, output.dtype, output.device))
        moved = (self.magnitude / (norms + EPS)).to(output.dtype)
        active = self.dropouts.sample_mask(output) if self.dropouts else None
        if active is not None:
            moved = active[:, None] * moved
        bias = cast(Tensor | None, self.frozen.bias)
        return per_output(moved, output, bias, channels=isinstance(self.frozen, CONVOLUTIONS))

    def forward(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute the changed output; base_output is the frozen layer's own output for enter(…)."""
        left_out = self.dropouts is not None and self.dropouts.layers > 0
        return self.where_active(self.change(x, base_output.clone() if left_out else base_output), base_output)

    def where_active(self, changed: Tensor, plain: Tensor) -> Tensor:
        """Select `changed` for samples that the layer acts on, `plain` for those that dropout excludes."""
        active = self.dropouts.sample_mask(changed) if self.dropouts else None
        return (
            changed if active is None else torch.where(active.view(-1, *(1,) * (changed.ndim - 1)) > 0, changed, plain)
        )

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Compute the changed output of all samples; base_output may be overwritten."""
        raise NotImplementedError

    def thin(self, x: Tensor) -> tuple[Tensor, Tensor, float] | None:
        """Give down (R, in), up (out, R) and scale in x's dtype where the change of all samples is scale * up(down(x)).

        None: it is not, or dropout may change it.
        """
        del x
        return None

    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """Factor `delta_weight`, flat, into (out, R) and (R, in * k); None for layers without such factors."""
        return None

    def delta_weight(self) -> Tensor:
        """Compute the change of the frozen weight, float32, in its shape; without a DoRA's magnitude."""
        raise NotImplementedError

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Compute the frozen weight with this layer's change, float32, in its own shape."""
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        changed = weight + self.delta_weight()
        if self.magnitude is None:
            return changed
        own = self._norms(weight)
        divisor = own if self.by_output else self._norms(changed)
        return changed * ((own + EPS + self.magnitude.detach().view(own.shape)) / (divisor + EPS))

    def factors(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose product is `delta_weight`; () for layers whose norm is never limited."""
        return ()

    @torch.no_grad()
    def delta_norm(self) -> Tensor:
        """Compute the Frobenius norm of `delta_weight`, a float32 scalar on the device."""
        pair = self.low_rank()
        return torch.linalg.vector_norm(self.delta_weight()) if pair is None else pair_norm(*pair)

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Load this layer from a file, parts named as in `endings`; alpha 0 stands for the rank.

        Form and rank of the file replace those that the layer was built with. Raises ValueError for other parts than
        this layer's.
        """
        raise ValueError(f"a layer of {', '.join(sorted(parts))} cannot be continued; {put_beneath()}.")

    def tensors(self) -> dict[str, Tensor]:
        """Collect the tensors for the file by kohya's or LyCORIS' suffixes, without a DoRA's magnitude."""
        raise NotImplementedError

    def load_magnitude(self, magnitude: Tensor) -> None:
        """Load a DoRA's magnitude, along the layer's axis; that of a 1x1 convolution may be stored as for a matrix.

        Raises ValueError for another shape.
        """
        if (
            self.norms is None
            or self.magnitude is None
            or magnitude.ndim < 2
            or magnitude.numel() != self.norms.numel()
        ):
            raise ValueError(
                f"a DoRA magnitude of shape {tuple(magnitude.shape)} is neither along the inputs nor along the outputs "
                f"of a layer and cannot be continued; {put_beneath()}."
            )
        self.magnitude.data.copy_((magnitude.float().view(self.norms.shape) - self.norms - EPS).flatten())

    def magnitude_tensors(self) -> dict[str, Tensor]:
        """Collect a DoRA's magnitude, (1, in, *ones) or (out, 1, *ones), by its suffix; {} for other layers."""
        if self.magnitude is None:
            return {}
        assert self.norms is not None
        moved = self.magnitude.detach().to(self.norms.device, torch.float32)
        return {MAGNITUDE: self.norms + EPS + moved.view(self.norms.shape)}


def pair_norm(up: Tensor, down: Tensor) -> Tensor:
    """Compute ||up @ down||_F of (out, R) and (R, n) from R x R products."""
    return ((up.t() @ up) * (down @ down.t())).sum().clamp(min=0).sqrt()
