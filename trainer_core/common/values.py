"""Tell whether values of JSON are what they must be: a stranger may have made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, TypeGuard

from .json_files import LARGEST, read_json
from .wording import printable

MOST_COUNT = 10**12  # steps of a run, bytes of a file
LATEST = 32_503_680_000  # seconds since 1970: the year 3000, the last one that Windows can write as a date
LONGEST_PART = 200  # bytes of a part of a path


def read_object(path: Path, most: int = LARGEST) -> dict[str, Any] | None:
    """Read a JSON object from a file of at most `most` bytes, None if it is missing or damaged."""
    try:
        values = read_json(path, most)
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def unfit(values: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], bool]]) -> list[str]:
    """List the names whose values are missing or not of their kind."""
    return [name for name, fits in kinds.items() if not fits(values.get(name))]


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value is a whole number that a run may have of steps or bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT


def is_time(value: object) -> TypeGuard[float]:
    """Tell whether a value is a time in seconds since 1970 that every system can write as a date."""
    return is_number(value) and 0 <= value < LATEST


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_flag(value: object) -> TypeGuard[bool]:
    """Tell whether a value is true or false."""
    return isinstance(value, bool)


def is_text(value: object) -> TypeGuard[str]:
    """Tell whether a value is a text."""
    return isinstance(value, str)


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Tell whether a value is an object."""
    return isinstance(value, dict)


def is_texts(value: object) -> bool:
    """Tell whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def is_words(value: object) -> bool:
    """Tell whether a value is an object of texts."""
    return isinstance(value, dict) and all(map(is_text, value.values()))


def is_inside(path: object) -> bool:
    """Tell whether a value is a path that leads to a place inside its folder, on every system."""
    parts = PureWindowsPath(path) if isinstance(path, str) else PureWindowsPath("..")  # knows / as well
    return not parts.anchor and ".." not in parts.parts and all(map(is_plain, str(path).split("/")))


def is_plain(token: str) -> bool:
    """Tell whether a text can be part of a file's name, on every system."""
    return token == printable(token) and len(token.encode()) <= LONGEST_PART and not set(token) & set('/\\:*?"<>|')
