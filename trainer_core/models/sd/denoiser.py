"""The UNet as a denoiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import Unit
from .conditions import Conditions
from .units import UNQUANTIZED, units


@dataclass(frozen=True)
class UNet:
    """A UNet of Stable Diffusion; implements `Denoiser`."""

    module: Any
    dtype: torch.dtype
    unquantized: tuple[str, ...] = UNQUANTIZED
    written: None = None  # no block writes into its inputs

    def units(self) -> list[Unit]:
        """List the repeated blocks."""
        return units(self.module)

    def predict(self, noised: Tensor, levels: Tensor, conditions: Conditions) -> Tensor:
        """Run the UNet on (B, 4, H, W) noised latents at (B,) timesteps."""
        extra: dict[str, Any] = {}
        if conditions.mask is not None:
            extra["encoder_attention_mask"] = conditions.mask
        if conditions.pooled is not None:
            extra["added_cond_kwargs"] = {"text_embeds": conditions.pooled, "time_ids": conditions.sizes}
        if conditions.painted is not None:
            noised = torch.cat([noised, conditions.painted], dim=1)
        return self.module(noised.to(self.dtype), levels, encoder_hidden_states=conditions.context, **extra).sample
