"""LoRA Atelier: train LoRAs inside ComfyUI."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import AtelierExtension

WEB_DIRECTORY = "./js"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint() -> AtelierExtension:
    """Import the nodes, which need ComfyUI's modules, and return the extension that ComfyUI loads."""
    from .nodes import AtelierExtension

    return AtelierExtension()
