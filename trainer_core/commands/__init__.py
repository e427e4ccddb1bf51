"""The command line: python custom_nodes/lora-atelier train, plan, export, import, runs, lora, doctor.

A new verb is a module here and a line of `COMMANDS`. One below `runs` or `lora` is in `runs/cli.py` or
`lora_files/cli.py`.
"""

from __future__ import annotations

import argparse
import codecs
import locale
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..common.command_line import PROGRAM
from ..common.windows import WINDOWS
from ..config.rows import read_in_a_shell


class ComfyUI(NamedTuple):
    """What only ComfyUI's own modules can do; None where they cannot be imported."""

    load: Any  # loads the models that a workflow links; `workflow.connecting.Load`
    checks: Any  # starts the check of LoRA files; `lora_files.loader.Start`


NO_COMFYUI = ComfyUI(None, None)


def train(arguments: Sequence[str], comfyui: ComfyUI) -> int:
    """Train a run."""
    from .train import main  # each command is imported when it is called, so that the others need not wait for torch

    return main(arguments, comfyui.load)


def plan(arguments: Sequence[str], comfyui: ComfyUI) -> int:
    """Tell what a run will do."""
    from .plan import main

    return main(arguments, comfyui.load)


def export(arguments: Sequence[str], _: ComfyUI) -> int:
    """Write a TOML of a workflow, or a workflow of a TOML."""
    from .convert import main

    return main(arguments)


def import_(arguments: Sequence[str], _: ComfyUI) -> int:
    """Read the settings of another trainer."""
    from .convert import main_import

    return main_import(arguments)


def runs(arguments: Sequence[str], _: ComfyUI) -> int:
    """List, check, export and delete runs."""
    from ..runs.cli import main

    return main(arguments)


def lora(arguments: Sequence[str], comfyui: ComfyUI) -> int:
    """Run a tool for LoRA files."""
    from ..lora_files.cli import main

    return main(arguments, comfyui.checks)


def doctor(arguments: Sequence[str], _: ComfyUI) -> int:
    """Look at an installation."""
    from .doctor import main

    return main(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str], ComfyUI], int], str]] = {
    "train": (train, "train a run without a page"),
    "plan": (plan, "what a run will do: steps, buckets, crops, memory, time"),
    "export": (export, "write a TOML of a workflow or a run, or a workflow of a TOML"),
    "import": (import_, "read the settings of sd-scripts or OneTrainer: a TOML and a workflow"),
    "runs": (runs, "list, show, verify, export, average and clean runs"),
    "lora": (lora, "tools for LoRA files"),
    "doctor": (doctor, "what is wrong with this installation"),
}


def main(arguments: Sequence[str] | None = None, comfyui: ComfyUI = NO_COMFYUI) -> int:
    """Hand the rest of the command line to the command that it names; return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # A file or another program gets UTF-8, as on other systems; Windows' own encoding lacks most signs. Where
        # somebody has chosen another one (PYTHONIOENCODING), it stays.
        given, own = stream.encoding or "utf-8", locale.getpreferredencoding(False)
        chosen = codecs.lookup(given) != codecs.lookup(own)
        encoding = None if chosen or stream.isatty() or not WINDOWS else "utf-8"
        stream.reconfigure(encoding=encoding, errors="backslashreplace")  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(prog=PROGRAM, description="LoRA Atelier in a shell.")
    listed = "; ".join(f"{name}: {text}" for name, (_, text) in COMMANDS.items())
    parser.add_argument("command", choices=COMMANDS, metavar="command", help=listed)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command; --help lists them")
    options = parser.parse_args(arguments)
    with read_in_a_shell():
        return COMMANDS[options.command][0](options.arguments, comfyui)
