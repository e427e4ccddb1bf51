"""Read and write TOML: settings as people type them, flat values and tables alone."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError with the line and column of what is wrong."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found,no-redef]
        except ImportError as error:
            raise ValueError("reading TOML needs Python 3.11, or the package tomli; install it") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:  # what Python says of a number of thousands of digits
        raise ValueError("a number of it is too long") from error


def write_toml(values: Mapping[str, Any], comment: str = "") -> str:
    """Write a table; None and empty tables are left out. comment: lines at its top."""
    head = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*head, *_table(values, "")]).strip() + "\n"


def _table(values: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the lines of a table: its plain values, then the tables in it."""
    for key, value in values.items():
        if value is not None and not _is_table(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in values.items():
        full = f"{name}.{_key(key)}" if name else _key(key)
        if not _is_table(value) or not value:
            continue
        for each in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{full}]]" if isinstance(value, list) else f"[{full}]"
            yield from _table(each, full)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(each, Mapping) for each in value))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):  # as JSON writes it, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
