"""A setting is one row: its default, range, unit and words, and what it acts with. All else is derived from rows.

A row stands at its field, as `noise_offset: float = row(0.0, "Shifts …", 0, 1)`. From it follow the check of the
configuration, the node's input and tooltip, the reading and writing of workflows and files, and the setting's name in
messages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

Span = tuple[()] | tuple[float, float] | tuple[float, float, float]
# What a setting decides of a run: the course of its steps; only the result of these, as their number or the form of the
# file; or no weight at all. A file's name decides nothing, as its content counts instead.
Decides = Literal["course", "result", "nothing"]
WIDGETS = {bool: "BOOLEAN", int: "INT", float: "FLOAT", str: "STRING", tuple: "STRING"}  # ComfyUI's names


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A setting, or an input of a node that is none."""

    words: str  # its tooltip
    default: Any = None  # of the configuration
    low: float = -math.inf
    high: float = math.inf
    open: Any = None  # the value that leaves it open, which may lie outside of its range; the node stands at it
    step: float | None = None  # of the node's arrows
    round: float | None = 1e-4  # what the node rounds a float to
    unit: str = ""  # as messages write it after a number
    advanced: bool = False  # shown only on request
    optional: bool = False  # came later: older prompts lack it
    decides: Decides = "course"
    acts_with: tuple[str, tuple[str, ...]] | None = None  # another setting, and its choices with which this one acts
    beside: bool = False  # stands beside that setting on the node, not inside of its choices
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the node's, by the choice that it stands in
    label: str = ""  # its name on the node; "" = that of the field
    node: str = ""  # the title of its node; "" = that of the configuration
    placeholder: str | None = None
    multiline: bool = False
    socketless: bool | None = None  # cannot be linked
    controlled: bool = False  # a seed, which the editor may change after each run
    listed: bool = False  # a choice among files, which only ComfyUI knows
    socket: str = ""  # the type of what is linked into it; "" = it has a widget
    # Found from the field:
    name: str = ""
    kind: type = str  # bool, int, float, str or tuple, which the node shows as text
    item: type = str  # of each value of a tuple; its range is theirs
    choices: tuple[str, ...] = ()
    options: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)  # of a choice: the rows inside of each

    @property
    def type(self) -> str:
        """Its type on the canvas, as ComfyUI names it."""
        return self.socket or ("COMBO" if self.choices or self.listed else WIDGETS[self.kind])

    @property
    def input(self) -> str:
        """Its name on the node."""
        return self.label or self.name

    @property
    def shown(self) -> Any:
        """The value that the node starts with."""
        value = self.default if self.open is None else self.open
        return joined(value) if isinstance(value, tuple) else value

    @property
    def lowest(self) -> float:
        """The lowest number that the node takes."""
        return self.low if self.open is None else min(self.low, self.open)

    @property
    def widget(self) -> bool:
        """Tell whether a value can be typed or chosen on the node."""
        return not self.socket

    def allows(self, value: Any) -> bool:
        """Tell whether a number lies in the range or leaves the setting open; NaN does not."""
        return self.low <= value <= self.high or (self.open is not None and value == self.open)

    @property
    def range(self) -> str:
        """Describe the numbers that it allows."""
        low, high = f"{self.low:.10g}", f"{self.high:.10g}"
        limit = f"at least {low}" if self.high == math.inf else f"between {low} and {high}"
        outside = self.open is not None and not self.low <= self.open <= self.high
        return (
            limit
            + (f" {self.unit}" if self.unit else "")
            + (f", or {self.open:g} for what suits the model" if outside else "")
        )


def row(default: Any, words: str, span: Span = (), **more: Any) -> Any:
    """Declare a field of a configuration with its row; span: its lowest and highest number, and the node's step.

    more: further fields of `Row`.
    """
    return field(default=default, metadata={"row": Row(words=words, default=default, **limits(span), **more)})


def needed(words: str, span: Span = (), **more: Any) -> Any:
    """Declare a field without a default with its row."""
    return field(metadata={"row": Row(words=words, **limits(span), **more)})


def aside(**more: Any) -> Any:
    """Declare a field without a row that decides no weight."""
    return field(metadata={"decides": "nothing"}, **more)


def decides(each: dataclasses.Field[Any]) -> Decides:
    """Find what a field of a configuration decides; a section that decides nothing has no field that does."""
    return each.metadata["row"].decides if "row" in each.metadata else each.metadata.get("decides", "course")


def limits(span: Span) -> dict[str, float]:
    """Name the numbers of a span."""
    return dict(zip(("low", "high", "step"), span, strict=False))


@functools.cache
def rows_of(config: type) -> dict[str, Row]:
    """Find the rows of a configuration's fields, in their order."""
    hints = typing.get_type_hints(config)
    return {
        each.name: replace(each.metadata["row"], name=each.name, **_form_of(hints[each.name]))
        for each in dataclasses.fields(config)
        if "row" in each.metadata
    }


def _form_of(hint: Any) -> dict[str, Any]:
    """Read kind and choices from an annotation; `X | None` counts as X."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _form_of(next(each for each in args if each is not type(None)))
    if origin is tuple:
        return {"kind": tuple, "item": args[0]}
    return {"choices": args} if origin is Literal else {"kind": origin or hint}


def without_effect(config: type, values: Mapping[str, Any]) -> list[str]:
    """List settings that are changed and do not act, as another choice is made than those that they act with."""
    rows = rows_of(config)
    chosen = {name: each.default for name, each in rows.items()} | dict(values)
    return [
        name
        for name, each in rows.items()
        if each.acts_with and each.acts_with[0] in rows
        if chosen[name] != each.default and chosen[each.acts_with[0]] not in each.acts_with[1]
    ]


def arranged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Arrange rows as a node shows them: those that act with some choices only stand inside of these."""
    listed = list(rows)
    inputs = {each.name for each in listed}
    inner = [each for each in listed if each.acts_with and each.acts_with[0] in inputs and not each.beside]

    def inside(outer: Row, choice: str) -> tuple[Row, ...]:
        own = [each for each in inner if each.acts_with and each.acts_with[0] == outer.name]
        return tuple(
            replace(each, default=each.defaults.get(choice, each.default), words=words_in(each, choice))
            for each in own
            if each.acts_with and choice in each.acts_with[1]
        )

    def whole(outer: Row) -> Row:
        options = {choice: (*outer.options.get(choice, ()), *inside(outer, choice)) for choice in outer.choices}
        return replace(outer, options=options if any(options.values()) else {})

    return tuple(whole(each) for each in listed if each not in inner)


def words_in(each: Row, choice: str) -> str:
    """Write a row's words for a choice that it stands in: {default} is its default there."""
    return each.words.format(default=each.defaults.get(choice, each.default)) if each.defaults else each.words


def described(words: Mapping[str, str]) -> str:
    """Describe choices by the words of each, neighbours with the same words together."""
    alike = groupby(words, key=lambda choice: words[choice])
    return " ".join(f"{', '.join(choices)}: {same}." for same, choices in alike)


def inputs_of(config: Any) -> dict[str, Any]:
    """Write the fields of a configuration as its nodes' inputs: by their names there, lists as text."""
    rows = rows_of(type(config))
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return {
        rows[name].input if name in rows else name: joined(value) if isinstance(value, tuple) else value
        for name, value in values.items()
    }


def joined(values: Iterable[Any]) -> str:
    """Write a list as the text of an input."""
    return ", ".join(str(value) if isinstance(value, str) else repr(value) for value in values)


# --- the name of a setting in messages ------------------------------------------------------------------------

_reader: list[Literal["page", "shell"]] = ["page"]  # who reads messages; a process has one kind of reader


@contextmanager
def read_in_a_shell() -> Iterator[None]:
    """Name settings by their full name in a run's file inside a `with` block, not by their node."""
    _reader.append("shell")
    try:
        yield
    finally:
        _reader.pop()


def in_a_shell() -> bool:
    """Tell whether messages are read in a shell."""
    return _reader[-1] == "shell"


def for_reader(page: str, shell: str) -> str:
    """Choose the words for who reads: those for the page, or those for a shell."""
    return shell if in_a_shell() else page


def named(section: str, each: Row, node: str) -> str:
    """Name a setting for who reads: "rank of LoRA Config" in the page, "lora.rank" in a shell."""
    return for_reader(f"{each.input} of {each.node or node}", f"{section}.{each.name}")
