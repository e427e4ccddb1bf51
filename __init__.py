"""LoRA Atelier: train LoRAs inside ComfyUI."""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./js"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
