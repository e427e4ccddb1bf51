"""The base class of all settings: frozen, strict when read, with a stable digest."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from .algorithms import instead_of
from .rows import Decides, Row, decides, named, rows_of, without_effect

LONGEST_TEXT = 10_000  # characters; bounds the time that reading a text takes, and the length of messages
LARGEST = 1e30  # of any number
ConfigT = TypeVar("ConfigT", bound="Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Base of every configuration: strict reading, plain writing, a stable digest."""

    SECTION: ClassVar[str] = ""  # where it stands in a run's file
    NODE: ClassVar[str] = ""  # the title of the node that sets it

    def __post_init__(self) -> None:
        check_values(self)
        self.check()

    def check(self) -> None:
        """Raise ValueError for settings that do not go together."""

    @classmethod
    def named(cls, name: str) -> str:
        """Name a setting for messages: by its node in the page, by its full name in a run's file in a shell."""
        return named(cls.SECTION, rows_of(cls).get(name) or Row(name=name, words=""), cls.NODE)

    def to_dict(self) -> dict[str, Any]:
        """Convert to nested dicts, lists and scalars, for `from_dict` and JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def changes(self, deciding: Collection[Decides]) -> dict[str, Any]:
        """Convert what decides one of these to nested plain values as `to_dict`, without what has its default."""
        found = {}
        for field in (each for each in dataclasses.fields(self) if decides(each) in deciding):
            value = getattr(self, field.name)
            usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if value != usual:
                found[field.name] = _plain(value, deciding)
        return json.loads(json.dumps(found))

    @classmethod
    def from_dict(cls: type[ConfigT], values: dict[str, Any], where: str = "") -> ConfigT:
        """Build from nested plain values; raises ValueError that names an unknown or missing key, or a wrong type.

        where: name of this configuration in messages, with a dot at its end.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - fields.keys()):
            instead = instead_of(unknown[0]) or nearest(unknown[0], fields, where)
            raise ValueError(f"There is no setting {where}{unknown[0]:.80}; {instead}")
        for name, field in fields.items():
            if name not in values and field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"The setting {where}{name} is missing.")
        hints = _hints(cls)
        return cls(**{name: _read(hints[name], value, where + name) for name, value in values.items()})

    def canonical_json(self) -> str:
        """Write this configuration as its one JSON text: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """Compute the sha256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode("utf-8", "surrogatepass")).hexdigest()

    def replace(self: ConfigT, **changes: Any) -> ConfigT:
        """Copy with some fields changed; the copy is checked again."""
        return dataclasses.replace(self, **changes)


def nearest(unknown: str, known: Iterable[str], where: str = "") -> str:
    """Suggest the known name that is most like an unknown one, or list all; where: written before the name."""
    near = difflib.get_close_matches(unknown, known := sorted(known), 1)
    return f"did you mean {where}{near[0]}?" if near else f"there are {', '.join(known)}."


def _plain(value: Any, deciding: Collection[Decides]) -> Any:
    """Write a value of a field as `changes` does."""
    if isinstance(value, Config):
        return value.changes(deciding)
    return [_plain(each, deciding) for each in value] if isinstance(value, tuple) else value


# What a plain value may be for an annotated type, and how messages name it.
KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
    dict: (dict, "a table"),
    tuple: ((list, tuple), "a list"),
}


def _read(hint: Any, value: Any, name: str) -> Any:
    """Turn plain JSON values back into the annotated type: nested configs and tuples; name: for messages."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(next(a for a in args if a is not type(None)), value, name)
    if isinstance(hint, type) and issubclass(hint, Config):
        return value if isinstance(value, hint) else hint.from_dict(of_kind(dict, value, name), f"{name}.")
    if origin is tuple:
        items = enumerate(of_kind(tuple, value, name), 1)
        return tuple(_read(args[0], item, f"{name}.{number}") for number, item in items)
    return of_kind(str if origin is Literal else origin or hint, value, name)


def of_kind(kind: Any, value: Any, name: str) -> Any:
    """Return a value of a kind; raises ValueError for another one."""
    wanted, words = KINDS[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r:.80} and must be {words}.")
    return value


@functools.cache
def _hints(cls: type[Config]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_values(config: Config) -> None:
    """Refuse what no row allows: choices, ranges, endless text and numbers, and settings that do not act.

    Whole floats become floats: 4 and 4.0 are the same setting and must have the same digest.
    """
    cls = type(config)
    rows, hints = rows_of(cls), _hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        hint, each = hints[name], rows.get(name)
        value: Any = getattr(config, name)
        title = cls.named(name)
        for one in value if typing.get_origin(hint) is tuple else (value,):
            _check_size(one, title)
            if each:
                check_value(each, of_kind(each.item, one, title) if each.kind is tuple else one, title)
        if hint is float:
            object.__setattr__(config, name, float(value))
        if each and each.item is float:
            object.__setattr__(config, name, tuple(map(float, value)))
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            raise ValueError(f"{title} is {value!r:.80}; choose one of {list(typing.get_args(hint))}.")
    for name in without_effect(cls, {name: getattr(config, name) for name in rows}):
        choice, kinds = rows[name].acts_with or ("", ())
        raise ValueError(
            f"{name} works with {choice} {' or '.join(kinds)} only, and {choice} is {getattr(config, choice)}; set "
            f"{cls.named(name)} to {_written(rows[name].default)}."
        )


def check_value(each: Row, value: Any, title: str) -> None:
    """Refuse a value that is none of a row's choices, or outside of its range; title: for the message."""
    if each.choices and value not in each.choices:
        if instead := instead_of(value) if isinstance(value, str) else "":
            raise ValueError(f"{title} is {value!r:.80}, which is not here; {instead}.")
        raise ValueError(f"{title} is {value!r:.80}; choose one of {list(each.choices)}.")
    if isinstance(value, int | float) and not each.allows(value):
        raise ValueError(f"{title} is {value}; it must be {each.range}.")


def _check_size(value: Any, title: str) -> None:
    """Refuse endless text and numbers, and NaN."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"{title} has a text of more than {LONGEST_TEXT} characters; shorten it.")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ValueError(f"{title} is too large, or no number; set it below {LARGEST:g}.")


def _written(value: Any) -> str:
    """Write a value as a person sets it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "nothing" if value in ("", ()) else f"{value}"


def check_path(config: Config, name: str) -> None:
    """Refuse a path with NUL or half characters, for which the system's functions raise ValueError."""
    check_text(getattr(config, name), config.named(name))


def check_text(path: str, name: str) -> None:
    """Refuse a path as `check_path` does; name: for the message."""
    if re.search("[\0\ud800-\udc7f\udd00-\udfff]", path):
        raise ValueError(f"{name} contains NUL or half characters, which no path can have; write it again.")
