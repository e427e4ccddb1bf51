"""What every layer of a network is: it stands beside one frozen layer and changes what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from .dora import EPS, column_norms, frozen_weight, magnitude_factor, per_column, per_output, row_norms
from .dropout import Dropouts


class NetworkLayer(nn.Module):
    """Beside one frozen layer: `enter` may change what goes into it, `forward` what comes out, `leave` the result.

    A new layer changes nothing, to the last bit. While a network is attached, `frozen` is the frozen layer, for those
    that need its weight or bias; it is no child, so the frozen model stays the frozen model.
    """

    frozen: nn.Module | None = None
    dropouts: Dropouts | None = None  # what is left out while it learns; None: nothing ever
    lr_factor: float = 1.0  # multiplies the learning rate of its model
    sees_entered: bool = True  # forward gets what `enter` returned; False: what `enter` got
    by_output: bool = False  # a DoRA's magnitudes are of outputs, not of inputs
    plus: tuple[str, ...] = ()  # parameters that LoRA+ moves faster: those that begin with 0 beside another
    no_decay: tuple[str, ...] = ("scalar", "magnitude")  # parameters that weight decay leaves alone

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("magnitude", None)
        self.norms: Tensor | None = None  # of the frozen weight when the layer became a DoRA, shaped as in its file

    def decompose(self, base: nn.Module, *, by_output: bool = False) -> None:
        """Make this a DoRA (Liu et al. 2024): a magnitude per input is trained, too, or with by_output one per output.

        `magnitude` (in,) or (out,) is how far it has moved from ||W|| + EPS: it begins with 0, so that a new layer
        changes nothing whatever form its weights and the frozen ones are kept in, and takes the same steps as the
        magnitude. By output it multiplies V / ||W||, as ComfyUI does, by input V / ||V||.
        """
        self.by_output = by_output
        self.norms = self._norms(frozen_weight(base, torch.float32))
        self.magnitude = nn.Parameter(torch.zeros_like(self.norms.flatten()))

    def _norms(self, weight: Tensor) -> Tensor:
        """Return the norms of a weight along the magnitudes' axis, (1, in[, 1, 1]) or (out, 1[, 1, 1])."""
        ones = (1,) * (weight.ndim - 2)
        return row_norms(weight).view(-1, 1, *ones) if self.by_output else column_norms(weight).view(1, -1, *ones)

    def enter(self, x: Tensor) -> Tensor:
        """Return what the frozen layer gets instead of x: of a DoRA each input by its factor, else x."""
        if self.magnitude is None or self.by_output:
            return x
        assert self.frozen is not None
        factor = magnitude_factor(self.magnitude, frozen_weight(self.frozen, x.dtype), self.low_rank, self.delta_weight)
        factor = factor.to(x.dtype)
        kept = self.dropouts.samples(x) if self.dropouts else None
        if kept is not None:
            factor = 1 + kept[:, None] * (factor - 1)
        return x * per_column(factor, x, channels=isinstance(self.frozen, nn.Conv2d))

    def leave(self, output: Tensor) -> Tensor:
        """Return what leaves instead of the changed output: of a DoRA by output each one by its factor."""
        if self.magnitude is None or not self.by_output:
            return output
        assert self.frozen is not None
        with torch.no_grad():
            norms = row_norms(frozen_weight(self.frozen, output.dtype))
        moved = (self.magnitude / (norms + EPS)).to(output.dtype)
        kept = self.dropouts.samples(output) if self.dropouts else None
        if kept is not None:
            moved = kept[:, None] * moved
        bias = cast(Tensor | None, self.frozen.bias)
        return per_output(moved, output, bias, channels=isinstance(self.frozen, nn.Conv2d))

    def forward(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Return the changed output; base_output is the frozen layer's own result for x = enter(…)."""
        left_out = self.dropouts is not None and self.dropouts.layers > 0
        return self.where_kept(self.change(x, base_output.clone() if left_out else base_output), base_output)

    def where_kept(self, changed: Tensor, plain: Tensor) -> Tensor:
        """Return `changed` for the samples that the layer acts on, `plain` for those it is left out of."""
        kept = self.dropouts.samples(changed) if self.dropouts else None
        return changed if kept is None else torch.where(kept.view(-1, *(1,) * (changed.ndim - 1)) > 0, changed, plain)

    def change(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Return the changed output of all samples; base_output may be overwritten."""
        raise NotImplementedError

    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """Return (out, R), (R, in * k * k) whose product is `delta_weight`, flat; None where there is no such pair."""
        return None

    def delta_weight(self) -> Tensor:
        """Return what is added to the frozen weight, float32, in its shape; without a DoRA's magnitude."""
        raise NotImplementedError

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Return what the frozen weight has become, float32, in its own shape."""
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        changed = weight + self.delta_weight()
        if self.magnitude is None:
            return changed
        own = self._norms(weight)
        divisor = own if self.by_output else self._norms(changed)
        return changed * ((own + EPS + self.magnitude.detach().view(own.shape)) / (divisor + EPS))

    def factors(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters of which `delta_weight` is a product, () where its norm is not bounded."""
        return ()

    @torch.no_grad()
    def delta_norm(self) -> Tensor:
        """Return the Frobenius norm of `delta_weight`, a float32 scalar on the device."""
        pair = self.low_rank()
        return torch.linalg.vector_norm(self.delta_weight()) if pair is None else pair_norm(*pair)

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Begin with what a file holds of this layer, parts as files.ENDINGS names them; alpha 0 stands for the rank.

        The file's form and rank count, not those that the layer was built with. Raises ValueError for parts that the
        layer cannot begin with.
        """
        raise ValueError(
            f"a layer of {', '.join(sorted(parts))} cannot be continued; use the file beneath a new LoRA instead."
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return what the file holds of this layer, by kohya's or LyCORIS' suffixes; a DoRA's magnitude is added."""
        raise NotImplementedError

    def load_magnitude(self, magnitude: Tensor) -> None:
        """Begin with a DoRA's magnitude of a file, along the layer's axis; a 1x1 convolution's may be of a matrix.

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
                "of a layer and cannot be continued; use the file beneath a new LoRA instead."
            )
        self.magnitude.data.copy_((magnitude.float().view(self.norms.shape) - self.norms - EPS).flatten())

    def magnitude_tensors(self) -> dict[str, Tensor]:
        """Return a DoRA's magnitude, (1, in[, 1, 1]) or (out, 1[, 1, 1]), by its suffix, nothing of other layers."""
        if self.magnitude is None:
            return {}
        assert self.norms is not None
        moved = self.magnitude.detach().to(self.norms.device, torch.float32)
        return {"dora_scale": self.norms + EPS + moved.view(self.norms.shape)}


def pair_norm(up: Tensor, down: Tensor) -> Tensor:
    """Return ||up @ down||_F of (out, R) and (R, n) from R x R products alone."""
    return ((up.t() @ up) * (down @ down.t())).sum().clamp(min=0).sqrt()
