"""Workflows as the editor saves them, as prompts for a real server."""

from __future__ import annotations

from collections import deque
from typing import Any

from lora_atelier.trainer_core.config.forms import Form
from lora_atelier.trainer_core.workflow.canvas import DYNAMIC_COMBO, NOTES, form_of, prompt_of, widget_values


def to_prompt(workflow: dict, object_info: dict) -> dict:
    """Convert a workflow to a prompt, by the inputs that a server tells of."""
    return prompt_of(workflow, {name: form(name, each) for name, each in object_info.items()})


def form(name: str, info: dict) -> Form:
    """Read the form of a node from its entry in /object_info."""
    return form_of(info.get("display_name") or name, info["input"], info.get("input_order"))


def take_widgets(info: dict, values: list) -> tuple[dict, list]:
    """Take a value for each widget of a node, by name; return them, and the values that are left."""
    left = deque(values)
    return dict(widget_values(form("", info).inputs, left)), list(left)


def is_widget(spec: list[Any]) -> bool:
    """Tell whether an input of /object_info has a widget."""
    (row,) = form_of("", {"required": {"it": spec}}).inputs
    return row.widget


__all__ = ["DYNAMIC_COMBO", "NOTES", "form", "is_widget", "take_widgets", "to_prompt"]
