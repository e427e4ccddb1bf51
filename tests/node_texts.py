"""What the translations say of a node, from its schema as `/object_info` gives it."""

import re
from collections.abc import Mapping
from typing import Any

from prompts import DYNAMIC_COMBO


def inputs(schema: dict) -> dict:
    """Return the inputs of a node, required and optional; those of a dynamic combo's options as combo.option.field."""
    found = {**schema["input"].get("required", {}), **schema["input"].get("optional", {})}
    for name, (kind, details) in list(found.items()):
        for option in details["options"] if kind == DYNAMIC_COMBO else []:
            own = inputs({"input": option["inputs"]})
            found |= {f"{name}.{option['key']}.{field}": spec for field, spec in own.items()}
    return found


def tooltips(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the tooltips of each input by its name in the editor: combo.field for all options of a dynamic combo."""
    found: dict[str, set[str]] = {}
    for key, (_, details) in inputs(dict(schema)).items():
        found.setdefault(".".join(key.split(".")[::2]), set()).add(details["tooltip"])
    return found


def labels(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return what each input is called on its node, by its name in the editor."""
    found = inputs(dict(schema)).items()
    return {".".join(key.split(".")[::2]): each.get("display_name", key.rpartition(".")[2]) for key, (_, each) in found}


def texts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a node in the form of ComfyUI's file nodeDefs.json.

    It has one tooltip for an input: one that differs between the options of a combo is left to the node itself.
    """
    known: dict[str, Any] = {}
    called = labels(schema)
    for name, tips in tooltips(schema).items():
        known[name.replace(".", "_")] = {"name": called[name]}
        if len(tips) == 1:
            known[name.replace(".", "_")]["tooltip"] = escaped(*tips)
    told = zip(schema["output_name"], schema["output_tooltips"], strict=True)
    return {
        "display_name": escaped(schema["display_name"]),
        "description": escaped(schema["description"]),
        "inputs": known,
        "outputs": {str(i): {"name": name, "tooltip": escaped(tip)} for i, (name, tip) in enumerate(told)},
    }


def escaped(text: str) -> str:
    """Write a text for vue-i18n, which reads braces, @ and | as its own."""
    return re.sub(r"[{}@|]", lambda found: f"{{'{found[0]}'}}", text)


def unescaped(text: str) -> str:
    """Read a text as vue-i18n shows it."""
    return re.sub(r"\{'([{}@|])'\}", r"\1", text)
