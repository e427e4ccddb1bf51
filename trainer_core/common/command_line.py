"""What the commands of the command line share: the program's name, ComfyUI's folder, errors as one sentence."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from .disk_errors import why
from .wording import OUT_OF_RAM, is_out_of_ram

PROGRAM = "python custom_nodes/lora-atelier"  # how help texts and messages call the pack's folder


def comfyui_around() -> Path | None:
    """Find the ComfyUI whose custom_nodes hold the pack; None if the pack lies elsewhere."""
    nodes = Path(__file__).absolute().parents[3]
    return nodes.parent if nodes.name == "custom_nodes" else None


def run_command(command: Callable[[Namespace], int], options: Namespace) -> int:
    """Call a command and return its exit status: 2 for an error, which is printed."""
    try:
        return command(options)
    except OSError as error:
        sentence = f"{error.filename}: {why(error)}." if error.filename else str(error)
    except (ValueError, RuntimeError, MemoryError) as error:
        sentence = OUT_OF_RAM if is_out_of_ram(error) else str(error)
    print(sentence, file=sys.stderr)
    return 2
