"""ComfyUI's own loader, which checks a LoRA file before it gets its name: only where ComfyUI is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Loader(NamedTuple):
    """What ComfyUI's loader says of LoRA files."""

    check: Callable[[Path], None]  # raises ValueError for a file with a layer that it does not take
    knows: Callable[[str], bool]  # whether it takes a layer of a name
    report: str  # how far files are checked, one sentence


# By ComfyUI's folder and a model's file, if one is named; set where nodes can be imported. Raises ImportError.
load: Callable[[Path, Path | None], Loader] | None = None


def loader_of(comfyui: Path | None, model: Path | None) -> Loader:
    """Start ComfyUI's loader; where it cannot start nothing is checked, and the report says so."""
    if load is None or comfyui is None or not (comfyui / "comfy" / "sd.py").is_file():
        where = f"There is no ComfyUI in {comfyui}" if comfyui else "No ComfyUI is around the pack"
        return _unchecked(f"{where}, so its loader has not checked the file; name its folder by --comfyui.")
    try:
        return load(comfyui, model)
    except ImportError as error:
        return _unchecked(f"ComfyUI's loader has not checked the file: {error}. Start with ComfyUI's Python.")


def _unchecked(report: str) -> Loader:
    return Loader(lambda _: None, lambda _: True, report)
