"""Where a setting of a run's file stands on the canvas: its node, and its name there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..base import Config
from ..naming import SECTIONS
from ..optimizer import OptimizerConfig
from ..optimizer_table import OPTIMIZERS
from ..rows import Row, rows_of, words_in
from . import FORMS


class Place(NamedTuple):
    """The place of a setting."""

    section: tuple[str, ...]  # of the run's file, with the numbers of concepts and the like
    node: str  # its id, "" for none
    title: str  # of the node, or the section
    input: str  # its path on the node, as other languages know it: on_existing.run
    words: str  # its tooltip
    usual: tuple[Any, ...]  # values that nobody needs to set

    def is_usual(self, value: Any) -> bool:
        """Tell whether a value is the default, or leaves the setting open."""
        return any(value == usual and isinstance(value, bool) == isinstance(usual, bool) for usual in self.usual)


@functools.lru_cache(maxsize=4096)
def place_of(name: str, optimizer: str = "") -> Place:
    """Find the place of a setting by its full name in a run's file: "dataset.concepts.1.captions.prefix".

    optimizer: the run's, whose own parameters have its defaults.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        section = tuple(parts[:length])
        config = _config(".".join(part for part in section if not part.isdecimal()))
        if config is not None:
            if config is OptimizerConfig and parts[length] == "options" and optimizer in OPTIMIZERS:
                return _place_of_option(section, parts[-1], optimizer)
            return _place_in(config, section, parts[length:])
    return Place(tuple(parts[:-1]), "", ".".join(parts[:-1]), parts[-1], "", (None,))


@functools.cache
def _config(section: str) -> type[Config] | None:
    return next((config for config in SECTIONS.values() if section == config.SECTION), None)


def _place_in(config: type[Config], section: tuple[str, ...], rest: list[str]) -> Place:
    row = rows_of(config).get(rest[0])
    title = (row.node if row else "") or config.NODE
    node = next((node for node, form in FORMS.items() if form.title == title), "")
    paths = _paths(node) if node else {}
    usual = _usual(config, rest[0])
    if row is None:
        return Place(section, node, title, rest[-1], "", usual)
    return Place(section, node, title, paths.get(rest[0], row.input), row.words, usual)


def _place_of_option(section: tuple[str, ...], name: str, optimizer: str) -> Place:
    """Find the place of an optimizer's own parameter, which stands inside of the optimizer's choice."""
    place = _place_in(OptimizerConfig, section, ["name"])
    row = next((each for each in OPTIMIZERS[optimizer].settings if each.name == name), Row(name=name, words=""))
    words = words_in(row, optimizer)
    return place._replace(input=f"{place.input}.{row.input}", words=words, usual=(None, row.default, row.open))


def _usual(config: type[Config], name: str) -> tuple[Any, ...]:
    """List the values of a field, or of its items, that nobody needs to set; None stands for what is empty."""
    field = next((each for each in dataclasses.fields(config) if each.name == name), None)
    row = rows_of(config).get(name)
    found = [] if field is None or field.default is dataclasses.MISSING else [field.default]
    found += [row.default, row.open] if row else []
    each = (item for value in found for item in (value if isinstance(value, tuple) else (value,)))
    return (None, *(item for item in each if isinstance(item, bool | int | float | str)))


@functools.cache
def _paths(node: str) -> dict[str, str]:
    """Map the settings of a node to their paths on it."""
    return {row.name: path for row, path in _walk(FORMS[node].inputs, "") if row.widget}


def _walk(rows: Iterable[Row], before: str) -> Iterator[tuple[Row, str]]:
    for row in rows:
        path = f"{before}{row.input}"
        yield row, path
        for inner in row.options.values():
            yield from _walk(inner, f"{path}.")
