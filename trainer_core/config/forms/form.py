"""The form of a node: its title, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..rows import Row, arranged


class Form(NamedTuple):
    """A node of a run: its title, inputs and outputs."""

    title: str
    inputs: tuple[Row, ...]
    outputs: tuple[tuple[str, str], ...]  # names and types


def form(title: str, inputs: Iterable[Row], *outputs: str) -> Form:
    """Build a form; outputs: types of sockets of ours, without their beginning."""
    return Form(title, arranged(inputs), tuple((kind, f"ATELIER_{kind}") for kind in outputs))


def linked(name: str, kind: str, words: str, optional: bool = False) -> Row:
    """Describe an input that only takes a link."""
    return Row(name=name, socket=kind, words=words, optional=optional)
