"""The MODEL, CLIP and VAE that a person has linked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTENTION = "optimized_attention_override"  # among a MODEL's transformer_options: what computes its attention


@dataclass(frozen=True, eq=False)
class LinkedModels:
    """Models that ComfyUI has loaded, as they are wired."""

    model: Any  # ModelPatcher
    clip: Any
    vae: Any
    sampled: Any = None  # ModelPatcher that draws the samples, with the LoRA on it; None: `model`
    high: Any = None  # ModelPatcher of the expert for high noise, and `model` is that for low; None: `model` is alone
    vision: Any = None  # the CLIP_VISION by which `model` sees the first and last frames of clips; None: without
