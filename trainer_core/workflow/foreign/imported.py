"""What a file of another trainer says in our words: the settings, what has no counterpart, and what is open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...config import OPTIMIZERS
from ...config.naming import SECTIONS
from ...config.rows import without_effect

Convert = Callable[[Any], Any]


class Given:
    """The settings of a file over the defaults of its program; remembers which were read.

    defaults: of every setting that the program knows, by name. A value left out is the program's default, and a default
    is never reported: what is written of a setting without a counterpart counts only where it differs.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given, self._defaults = dict(given), defaults
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        """Read a setting; its default where the file has none, or null."""
        self._read.add(name)
        value = self._given.get(name)
        return self._defaults.get(name) if value is None else value

    def ignore(self, names: Iterable[str]) -> None:
        """Skip settings that the program itself does not look at beside the others."""
        self._read.update(names)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the settings that nobody read, and whose value is not the default."""
        for name, value in self._given.items():
            if name not in self._read and not _same(value, self._defaults.get(name)):
                yield name, value


def _same(value: Any, default: Any) -> bool:
    """Tell whether a value says no more than the default: off, empty and null are one."""
    empty = (None, "", False, [], {})
    return value == default or (value in empty and default in empty)


@dataclass(slots=True)
class Imported:
    """The settings that were found, and what was not."""

    program: str = ""  # and its version, where the file tells it
    name: str = "my_lora"
    values: dict[str, Any] = field(default_factory=dict)  # nested, as a TOML of ours has them
    left: list[str] = field(default_factory=list)  # settings without a counterpart, as `name = value`
    open: list[str] = field(default_factory=list)  # what a person still has to choose, a sentence each
    family: str = ""  # of a model that Load Base Model cannot load: as ComfyUI names it
    models: dict[str, str] = field(default_factory=dict)  # its files by role: diffusion_model, vae, text_encoder_1 …

    def put(self, setting: str, value: Any) -> None:
        """Set one of our settings by its full name."""
        *parts, last = setting.split(".")
        section = self.values
        for part in parts:
            section = section.setdefault(part, {})
        section[last] = value

    def leave(self, name: str, value: Any) -> None:
        """List a setting that has no counterpart; what is secret is named without its value."""
        self.left.append(name if is_secret(name) else f"{name} = {value!r:.80}")

    def concept(self, **values: Any) -> None:
        """Add a concept."""
        self.values.setdefault("dataset", {}).setdefault("concepts", []).append(values)

    def drop_without_effect(self) -> None:
        """Drop settings that do not act beside the others: the programs ignore them in silence, ours refuses them."""
        _drop(self.values, "")


def is_secret(name: str) -> bool:
    """Tell whether a setting holds a key or a token of a person."""
    words = name.lower().replace("-", "_").rpartition(".")[2]
    return words.endswith(("api_key", "token", "password", "secret")) or "secrets" in words


def _drop(values: Any, section: str) -> None:
    for each in values if isinstance(values, list) else [values]:
        if isinstance(each, dict):
            for name in without_effect(SECTIONS[section], each) if section in SECTIONS else ():
                each.pop(name)
            for name, inner in each.items():
                _drop(inner, name)


def optimizer_named(kind: str) -> str | None:
    """Find our name of an optimizer by theirs; None for one that the table lacks."""
    plain = kind.rpartition(".")[2].lower().replace("_", "")
    ours = {name.replace("_", ""): name for name in OPTIMIZERS}
    others = {"sgdnesterov": "sgd", "sgdnesterov8bit": "sgd8bit", "adamwschedulefree": "schedulefree_adamw"}
    return others.get(plain) or ours.get(plain)
