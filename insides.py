"""Name what a newer ComfyUI has lost of what the nodes use; docs/comfyui.md lists all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PACK = Path(__file__).parent
COMFYUI = re.compile(r"(comfy\w*|nodes|server|execution|folder_paths|node_helpers|latent_preview|app)(\.|$)")


def missing_in_comfyui(problem: BaseException) -> str:
    """Say which part of ComfyUI an error of ours misses, as one that a newer version has lost; "" for another error."""
    name = _missed(problem)
    trace, last = problem.__traceback__, ""
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
        last = last if file.startswith("<") else file  # what imports is frozen into Python
    if not COMFYUI.match(name) or not Path(last).is_relative_to(PACK):
        return ""
    from comfyui_version import __version__

    return (
        f"ComfyUI {__version__} has no {name}, which LoRA Atelier uses. Update LoRA Atelier; until then use an older "
        "ComfyUI."
    )


def _missed(problem: BaseException) -> str:
    """Find the dotted name that an error did not find; "" if it is of another kind."""
    if isinstance(problem, ImportError):
        inner = re.match(r"cannot import name '(\w+)'", str(problem))
        return f"{problem.name or ''}.{inner[1]}" if inner else problem.name or ""
    if not isinstance(problem, AttributeError) or problem.obj is None:
        return ""
    owner: Any = problem.obj
    if getattr(owner, "__name__", None) is None:
        owner = type(owner)
    above = "" if "__path__" in vars(owner) or not hasattr(owner, "__module__") else f"{owner.__module__}."
    return f"{above}{owner.__name__}.{problem.name}"
