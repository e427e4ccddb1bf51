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


Start = Callable[[Path, Path | None], Loader]  # by ComfyUI's folder and a model's file, if named; raises ImportError


def loader_of(start: Start | None, comfyui: Path | None, model: Path | None) -> Loader:
    """Start ComfyUI's loader; where it cannot start nothing is checked, and the report says so."""
    if start is None or comfyui is None or not (comfyui / "comfy" / "sd.py").is_file():
        where = f"There is no ComfyUI in {comfyui}" if comfyui else "No ComfyUI is around the pack"
        return _unchecked(f"{where}, so its loader has not checked the file; name its folder by --comfyui.")
    try:
        return start(comfyui, model)
    except ImportError as error:
        return _unchecked(f"ComfyUI's loader has not checked the file: {error}. Start with ComfyUI's Python.")


def _unchecked(report: str) -> Loader:
    return Loader(lambda _: None, lambda _: True, report)
