"""Warnings about an algorithm, shown before the run."""

from __future__ import annotations

from ..config import LoraConfig
from .layers import LAYERS


def remarks_on_algorithm(config: LoraConfig) -> list[str]:
    """List warnings about an algorithm whose training or file may surprise."""
    found = LAYERS[config.algorithm].remarks(config)
    if config.dora and not config.bake:
        found.append(
            "DoRA is trained as ComfyUI merges it on a GPU, in float16. Where it merges in float32, as on a CPU, "
            "pictures differ slightly."
        )
    return found
