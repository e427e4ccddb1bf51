"""LoRA Atelier: train LoRAs inside ComfyUI."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import AtelierExtension

WEB_DIRECTORY = "./js"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint() -> AtelierExtension:
    """Import the nodes, which need ComfyUI's modules, and return the extension that ComfyUI loads.

    Raises RuntimeError where this ComfyUI lacks something that they need.
    """
    try:
        from .nodes import AtelierExtension
    except (AttributeError, ImportError) as problem:
        from .insides import missing_in_comfyui

        if sentence := missing_in_comfyui(problem):
            raise RuntimeError(sentence) from problem
        raise
    return AtelierExtension()
