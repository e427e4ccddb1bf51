"""JSON: read what may come from strangers, bounded in size, depth and digits; write what every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
LARGEST = 16 * MEBIBYTE  # bytes of a file
DEEPEST = 64  # levels of lists and objects
MOST_DIGITS = 300  # of an integer; floats hold 308


def read_json(path: Path, most: int = LARGEST) -> Any:
    """Read a JSON file of at most `most` bytes; raises OSError, or ValueError with a short reason and no excerpt."""
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ValueError("not a file")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most / MEBIBYTE:.0f} MiB")
    return parse_json(content)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, with NaN and Infinity as Python writes them; ValueError with a short reason and no excerpt."""
    try:
        value = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (line {error.lineno}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise ValueError("not text in UTF-8") from None
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    _check_depth(value)
    return value


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None in a value, or in an object: JSON has no word for them."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer of more than {MOST_DIGITS} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        if not level:
            return
        parts = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level = [part for part in parts if isinstance(part, (dict, list))]
    if level:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
