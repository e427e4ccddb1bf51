"""What every layer of a network is: it stands beside one frozen layer and changes what comes out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class NetworkLayer(nn.Module):
    """Beside one frozen layer: `enter` may change what goes into it, `forward` what comes out.

    A new layer changes nothing, to the last bit. While a network is attached, `frozen` is the frozen layer, for those
    that need its weight or bias; it is no child, so the frozen model stays the frozen model.
    """

    frozen: nn.Module | None = None
    lr_factor: float = 1.0  # multiplies the learning rate of its model
    plus: tuple[str, ...] = ()  # parameters that LoRA+ moves faster: those that begin with 0 beside another
    no_decay: tuple[str, ...] = ("scalar", "magnitude")  # parameters that weight decay leaves alone

    def enter(self, x: Tensor) -> Tensor:
        """Return what the frozen layer gets instead of x; most change nothing here."""
        return x

    def forward(self, x: Tensor, base_output: Tensor) -> Tensor:
        """Return the changed output; base_output is the frozen layer's own result for x = enter(…)."""
        raise NotImplementedError

    def changed_weight(self, weight: Tensor) -> Tensor:
        """Return what the frozen weight has become, float32, in its own shape."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return what the file holds of this layer, by kohya's or LyCORIS' suffixes."""
        raise NotImplementedError

    def load(self, parts: Mapping[str, Tensor], alpha: float) -> None:
        """Begin with what a file holds of this layer, parts as files.ENDINGS names them; alpha 0 stands for the rank.

        The file's form and rank count, not those that the layer was built with. Raises ValueError for parts that the
        layer cannot begin with.
        """
        raise ValueError(
            f"a layer of {', '.join(sorted(parts))} cannot be continued; use the file beneath a new LoRA instead."
        )

    def load_magnitude(self, magnitude: Tensor) -> None:
        """Begin with a DoRA's magnitude of a file, (1, in[, 1, 1]). Raises ValueError for one along another axis."""
        raise ValueError("a DoRA layer cannot be continued; use the file beneath a new LoRA instead.")
