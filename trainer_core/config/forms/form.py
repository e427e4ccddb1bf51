"""The form of a node: its title, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..rows import Row, Span, arranged, limits


class Form(NamedTuple):
    """A node of a run: its title, inputs and outputs."""

    title: str
    inputs: tuple[Row, ...]
    outputs: tuple[tuple[str, str], ...]  # names and types


def form(title: str, inputs: Iterable[Row], *outputs: str) -> Form:
    """Build a form; outputs: types of sockets of ours, without their beginning."""
    return Form(title, arranged(inputs), tuple((kind, f"ATELIER_{kind}") for kind in outputs))


def own(name: str, default: Any, words: str, span: Span = (), **more: Any) -> Row:
    """Describe an input that belongs to no configuration; its type is that of its default."""
    return Row(name=name, kind=type(default), default=default, words=words, **limits(span), **more)


def linked(name: str, kind: str, words: str, optional: bool = False) -> Row:
    """Describe an input that only takes a link."""
    return Row(name=name, socket=kind, words=words, optional=optional)
