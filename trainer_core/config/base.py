"""The base class of all settings: frozen, strict when read, with a stable digest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

LONGEST_TEXT = 10_000  # characters; bounds the time that reading a text takes, and the length of messages
LARGEST = 1e30  # of any number
ConfigT = TypeVar("ConfigT", bound="Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Base of every configuration: strict reading, plain writing, a stable digest."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to nested dicts, lists and scalars, for `from_dict` and JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls: type[ConfigT], values: dict[str, Any]) -> ConfigT:
        """Build from nested plain values; raises ValueError that names an unknown key."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{cls.__name__} has no setting {unknown}; it has {sorted(known)}.")
        hints = _hints(cls)
        return cls(**{name: _read(hints[name], value) for name, value in values.items()})

    def canonical_json(self) -> str:
        """Write this configuration as its one JSON text: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """Compute the sha256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode("utf-8", "surrogatepass")).hexdigest()

    def replace(self: ConfigT, **changes: Any) -> ConfigT:
        """Copy with some fields changed; the copy is checked again."""
        return dataclasses.replace(self, **changes)


def _read(hint: Any, value: Any) -> Any:
    """Turn plain JSON values back into the annotated type: nested configs and tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return tuple(_read(args[0], item) for item in value)
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(value)
    return value


@functools.cache
def _hints(cls: type[Config]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_choices(config: Config) -> None:
    """Refuse a value outside its Literal, endless text and endless numbers, by name; store whole floats as floats.

    4 and 4.0 are the same setting and must have the same digest.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and len(text) > LONGEST_TEXT for text in texts):
            raise ValueError(f"{name} has a text of more than {LONGEST_TEXT} characters; shorten it.")
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise ValueError(f"{name} is too large, or no number; set it below {LARGEST:g}.")
        if hint is float:
            object.__setattr__(config, name, float(getattr(config, name)))
        if typing.get_origin(hint) is Literal and getattr(config, name) not in typing.get_args(hint):
            raise ValueError(f"{name} is {getattr(config, name)!r:.80}; choose one of {list(typing.get_args(hint))}.")


def check_path(config: Config, name: str) -> None:
    """Refuse a path with NUL or half characters, for which the system's functions raise ValueError."""
    if re.search("[\0\ud800-\udc7f\udd00-\udfff]", getattr(config, name)):
        raise ValueError(f"{name} contains NUL or half characters, which no path can have; write it again.")


def check_open(config: Config, name: str, open_value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a number outside [low, high] that is not the one that leaves the setting open."""
    if getattr(config, name) != open_value:
        check_range(config, name, low, high, f", or {open_value:g} for what suits the model")


def check_range(config: Config, name: str, low: float, high: float = float("inf"), otherwise: str = "") -> None:
    """Refuse a number outside [low, high] (NaN included); otherwise: what the message allows besides."""
    value = getattr(config, name)
    if not low <= value <= high:
        limit = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {value}; it must be {limit}{otherwise}.")
