"""Run a command of the command line: errors are one sentence on stderr."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable


def run_command(command: Callable[[Namespace], int], options: Namespace) -> int:
    """Call a command and return its exit status: 2 for an error, which is printed."""
    try:
        return command(options)
    except OSError as error:
        sentence = f"{error.filename}: {error.strerror}." if error.filename else str(error)
    except (ValueError, RuntimeError) as error:
        sentence = str(error)
    print(sentence, file=sys.stderr)
    return 2
