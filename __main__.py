"""The command line: python custom_nodes/lora-atelier train RUN, for a folder of whatever name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def start(comfyui: Path, *, cpu: bool) -> None:
    """Make ComfyUI's modules importable, and choose its device."""
    sys.path.insert(0, str(comfyui))
    import comfy.cli_args
    import utils.install_util  # noqa: F401  # first, as in ComfyUI: its nodes put another `utils` before it

    comfy.cli_args.args.cpu = cpu  # read when ComfyUI chooses its device


def connected(comfyui: Path, cpu: bool, document: Any, node: str) -> Any:
    """Load the models that a workflow links into Use Connected Model, by ComfyUI's own nodes."""
    start(comfyui, cpu=cpu)
    from lora_atelier.nodes.comfyui.headless import connect

    return connect(document, node)


def checked(comfyui: Path, model: Path | None) -> Any:
    """Start the check of LoRA files by ComfyUI's loader."""
    start(comfyui, cpu=True)
    from lora_atelier.nodes.comfyui.offline import loader

    return loader(model)


if __name__ == "__main__":
    if sys.version_info < (3, 10):
        sys.exit(f"LoRA Atelier needs Python 3.10 or newer; this is {sys.version.split()[0]}")
    folder = Path(__file__).absolute().parent
    # This folder holds a package `nodes`, and ComfyUI has a module of that name.
    sys.path[:] = [path for path in sys.path if Path(path).absolute() != folder]
    pack = sys.modules["lora_atelier"] = ModuleType("lora_atelier")
    pack.__path__ = [str(folder)]

    from lora_atelier.trainer_core.commands import ComfyUI, main

    try:
        sys.exit(main(comfyui=ComfyUI(connected, checked)))
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("lora_atelier"):
            raise
        sys.exit(
            f"{missing.name} is not installed for this Python. Run this by the Python that starts ComfyUI; `doctor` in "
            "place of the command lists what is missing."
        )
