"""What predicts in a linked MODEL, what it reads, and which of its layers a LoRA can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....trainer_core.common.axes import Framing
from ....trainer_core.memory.written import Watched
from ....trainer_core.models import Conditioning, Layer
from ....trainer_core.models.base import Slice, Unit
from . import experts, names
from . import layers as layers_of
from .denoiser import BatchConditions
from .wired import Wired


class ConnectedDenoiser:
    """The denoiser of a linked MODEL; implements `Denoiser`."""

    unquantized: tuple[str, ...] = ()

    def __init__(self, wired: Wired) -> None:
        self._wired = wired

    @property
    def module(self) -> Any:
        """The denoiser itself, or both experts; None after `free`."""
        found = [each.model.diffusion_model for each in self._wired.denoisers]
        return nn.ModuleList(found) if len(found) > 1 else next(iter(found), None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self._wired.model.model.get_dtype_inference()

    def units(self) -> list[Unit]:
        """List the repeated blocks, also of trained text encoders; none where they cannot be recomputed."""
        if self._wired.units is not None:
            return self._wired.units
        return [unit for each in self._wired.denoisers for unit in layers_of.units(each.model.diffusion_model)]

    @property
    def written(self) -> Watched:
        """The care for blocks that may write into what the backward pass needs."""
        return self._wired.written

    def predict(self, noised: Tensor, levels: Tensor, conditions: BatchConditions) -> Tensor:
        """Compute the raw output."""
        return experts.predict(self._wired, noised, levels, conditions)


class ConnectedConditions:
    """The conditions of batches for a linked MODEL; implements `ConditionsOfBatch`."""

    without_data = None  # such a MODEL cannot run on the meta device

    def __init__(self, wired: Wired) -> None:
        self._wired = wired

    def batch(
        self,
        captions: Sequence[Conditioning],
        framings: Sequence[Framing],
        device: torch.device,
        painted: Tensor | None = None,
        references: Sequence[Sequence[Tensor]] = (),
    ) -> BatchConditions:
        """Join the conditions of a batch on a device; captions of unequal lengths run one after another."""
        assert self._wired.denoiser is not None
        form = self._wired.latents
        shape = (form.channels, *form.axes(framings[0].size))
        return self._wired.denoiser.conditions(captions, framings, shape, device, references, painted)


class ConnectedLayers:
    """The layers of a linked MODEL's denoiser and of its text encoders; implements `Layers`."""

    def __init__(self, wired: Wired) -> None:
        self._wired = wired

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the denoiser's blocks, in their order."""
        return tuple(layers_of.blocks(self._wired.model.model.diffusion_model))

    def listed(self) -> list[Layer]:
        """List the layers of the denoiser, and of text encoders; those left out cannot be trained."""
        out = self._wired.left_out
        return [layer._replace(trainable=False) if layer.name in out else layer for layer in self._wired.listed]

    def layouts(self, setting: str) -> list[list[str]]:
        """List the possible block orders of a list setting of LoRA Config."""
        return layers_of.block_layouts(self._wired.model.model.diffusion_model, setting)

    def further_names(self) -> Mapping[str, tuple[str, Slice | None]]:
        """Map diffusers' names of layers, which ComfyUI does not know for every architecture."""
        own = {layer.path: layer.name for layer in self._wired.layers}
        layers = names.diffusers_layers(self._wired.model.model)
        return {name: (own[path], piece) for name, (path, piece) in layers.items()}

    def made_for(self, widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
        """Guess the family that a LoRA file was made for; "" if nothing tells."""
        return names.made_for(widths, metadata)
