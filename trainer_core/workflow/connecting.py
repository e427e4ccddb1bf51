"""Find the models that a workflow links into Use Connected Model: only where ComfyUI is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..models import Chosen

# Loads by ComfyUI's folder, whether it shall use the CPU, the workflow, the node's id.
Load = Callable[[Path, bool, Any, str], Chosen]


def connector(
    comfyui: Path | None = None, *, cpu: bool = True, load: Load | None = None
) -> Callable[[Any, str], Chosen]:
    """Build the function that reads the base model of such a workflow; it raises ValueError without ComfyUI.

    load: only where ComfyUI's modules can be imported.
    """

    def connect(document: Any, node: str) -> Chosen:
        if load is None or comfyui is None or not (comfyui / "comfy" / "sd.py").is_file():
            where = f"there is none in {comfyui}" if comfyui else "none is around the pack"
            raise ValueError(
                f"it trains on a model that ComfyUI's own nodes load, and {where}; name ComfyUI's folder by --comfyui, "
                "and start with its Python"
            )
        return load(comfyui, cpu, document, node)

    return connect
