"""From the rows of a node to its schema for ComfyUI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..trainer_core.config.forms import FORMS
from ..trainer_core.config.rows import Row
from .sockets import CATEGORY, io, titled


def schema(
    node: str,
    description: str,
    aliases: Sequence[str],
    outputs: Sequence[io.Output],
    lists: Mapping[str, Sequence[str]] | None = None,
    **more: Any,
) -> io.Schema:
    """Build the schema of a node of FORMS. lists: the files of each choice among files, by its input."""
    form = FORMS[node]
    return io.Schema(
        node_id=node,
        display_name=titled(form.title),
        category=CATEGORY,
        description=description,
        search_aliases=list(aliases),
        inputs=inputs_of(form.inputs, lists or {}),
        outputs=list(outputs),
        **more,
    )


def outputs_of(node: str, *tooltips: str) -> list[io.Output]:
    """Build the outputs of a node of FORMS."""
    outputs = zip(FORMS[node].outputs, tooltips, strict=True)
    return [io.Custom(kind).Output(display_name=name, tooltip=tooltip) for (name, kind), tooltip in outputs]


def inputs_of(rows: Iterable[Row], lists: Mapping[str, Sequence[str]]) -> list[io.Input]:
    """Build the inputs of rows."""
    return [input_of(each, lists) for each in rows]


def input_of(row: Row, lists: Mapping[str, Sequence[str]]) -> io.Input:
    """Build the input of a row; what a row says nothing of stays out of the schema."""
    common: dict[str, Any] = {"optional": row.optional, "tooltip": row.words}
    if row.socket:
        return io.Custom(row.socket).Input(row.input, **common)
    if row.options:
        options = [io.DynamicCombo.Option(key, inputs_of(inner, lists)) for key, inner in row.options.items()]
        extra = {"advanced": True} if row.advanced else None
        return io.DynamicCombo.Input(row.input, options=options, extra_dict=extra, **common)
    common |= {"default": row.shown, "advanced": row.advanced or None, "socketless": row.socketless}
    if row.type == "COMBO":
        options = list(lists[row.input] if row.listed else row.choices)
        return io.Combo.Input(row.input, options=options, **common)
    if row.type == "BOOLEAN":
        return io.Boolean.Input(row.input, **common)
    if row.type == "STRING":
        return io.String.Input(row.input, placeholder=row.placeholder, multiline=row.multiline, **common)
    if row.type == "INT":
        control = io.ControlAfterGenerate.fixed if row.controlled else None
        limits = {"min": int(row.lowest), "max": int(row.high), "step": row.step}
        return io.Int.Input(row.input, control_after_generate=control, **limits, **common)
    # Whole numbers are written as such in JSON, and the snapshot would change with the way that a row is typed.
    numbers = {"min": row.lowest, "max": row.high, "step": row.step, "default": row.shown}
    common |= {name: None if number is None else float(number) for name, number in numbers.items()}
    return io.Float.Input(row.input, round=row.round, **common)
