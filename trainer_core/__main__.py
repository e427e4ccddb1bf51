"""The command line: python -m trainer_core lora … and runs …, from the pack's folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .runs.cli import main as runs


def lora(arguments: Sequence[str]) -> int:
    """Run a tool for LoRA files."""
    from .lora_files.cli import main  # imported here, so that other commands need not wait for torch

    return main(arguments)


COMMANDS = {"lora": lora, "runs": runs}


def main() -> int:
    """Hand the rest of the command line to the command that it names; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer_core", description="LoRA Atelier in a shell.")
    parser.add_argument(
        "command",
        choices=COMMANDS,
        help="lora: tools for LoRA files; runs: list, show, verify, export, average and clean runs",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command; --help lists them")
    options = parser.parse_args()
    return COMMANDS[options.command](options.arguments)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main())
