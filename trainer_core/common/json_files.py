"""Read JSON of any origin: bounded in size, depth and length of numbers, and refused in a few words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DEEPEST = 64  # levels of lists and objects
MOST_DIGITS = 300  # of a whole number; a float has no more
MOST_BYTES = 16 * 2**20


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a JSON file of at most `most` bytes; raises ValueError with a short reason, and OSError from the disk."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"larger than {most / 2**20:g} MiB")
    return parse_json(data)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError with a short reason, which holds nothing of the text."""
    try:
        value = json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (line {error.lineno}, column {error.colno})") from None
    except UnicodeDecodeError:
        raise ValueError("not text in UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    level = _containers([value])
    for _ in range(DEEPEST):
        level = _containers(part for each in level for part in (each.values() if isinstance(each, dict) else each))
    if level:
        raise _too_deep()
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a whole number of more than {MOST_DIGITS} digits")
    return int(digits)


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, (dict, list))]


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {DEEPEST} levels deep")
