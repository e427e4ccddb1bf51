"""What is set from afar, by a guess or a preset: which node and input of a prompt take each setting of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..trainer_core.config import BaseModelConfig, ConnectedConfig
from ..trainer_core.config.forms import FORMS
from ..trainer_core.config.rows import Row
from ..trainer_core.models import Chosen
from ..trainer_core.workflow.read import LOADED, TRAIN
from .comfyui import folders

# The node that has the settings of a section, by Train LoRA's input for it.
NODES = {
    "base_model": ("base_model", LOADED),
    "lora": ("lora_config", "AtelierLoraConfig"),
    "optimizer": ("optimizer", "AtelierOptimizer"),
    "memory": ("memory", "AtelierMemory"),
}
FILES = {"unet_name": "diffusion_models", "ckpt_name": "checkpoints"}  # inputs of ComfyUI's loaders


def train_of(prompt: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Find a Train LoRA in a prompt; raises ValueError."""
    train = prompt.get(node)
    if not isinstance(train, dict) or train.get("class_type") != TRAIN or not isinstance(train.get("inputs"), dict):
        raise ValueError("There is no such Train LoRA in the prompt.")
    return train


def connect(_: Any, key: str) -> Chosen:
    """Stand for a linked model, which is not loaded; its path is the id of its node."""
    return Chosen(BaseModelConfig(path=key, connected=ConnectedConfig()))


def input_of(prompt: Mapping[str, Any], node: str, setting: str) -> dict[str, Any]:
    """Describe the input that takes a setting of a run ("lora.rank"): {setting, widget, where, node, kind, into}.

    node: the id of the node that has it; None where it is not linked. Then `kind` is the class to add, and `into` the
    node and the input to link it to; None where nothing can be added.
    """
    section, _, field = setting.partition(".")
    socket, kind = NODES.get(section, ("", TRAIN))
    form = FORMS[kind]
    found = {"setting": _named(form.inputs, field).input, "widget": widget_of(form.inputs, field), "where": form.title}
    if not socket:
        return {**found, "node": node, "kind": kind, "into": None}
    last = node
    for key in _chain(prompt, node, socket):
        if prompt[key].get("class_type") == kind:
            return {**found, "node": key, "kind": kind, "into": None}
        last = key
    takes = FORMS.get(prompt[last].get("class_type", ""))
    free = takes and any(each.name == socket for each in takes.inputs) and socket not in prompt[last]["inputs"]
    return {**found, "node": None, "kind": kind, "into": [last, socket] if free else None}


def inputs_of_chain(prompt: Mapping[str, Any], node: str, section: str) -> dict[str, Any]:
    """Collect the inputs of the node that has a section's settings; {} where it is not linked."""
    socket, kind = NODES[section]
    chain = (prompt[key] for key in _chain(prompt, node, socket))
    return next((each.get("inputs", {}) for each in chain if each.get("class_type") == kind), {})


def _chain(prompt: Mapping[str, Any], node: str, socket: str) -> Iterator[str]:
    """Yield the nodes that are linked to each other by inputs of one name, from a node on."""
    key, seen = node, set[str]()
    while isinstance(entry := prompt.get(key), dict) and key not in seen:
        seen.add(key)
        if key != node:
            yield key
        link = entry.get("inputs", {}).get(socket)
        key = str(link[0]) if isinstance(link, list) and link else ""


def _named(rows: tuple[Row, ...], field: str) -> Row:
    """Find the row of a field among a node's inputs, or inside of a choice."""
    inner = [each for row in rows for option in row.options.values() for each in option]
    return next(each for each in (*rows, *inner) if each.name == field)


def widget_of(rows: tuple[Row, ...], field: str) -> str:
    """Name the widget of a field: that of an input inside of a choice begins with the choice's name."""
    for row in rows:
        if row.name == field:
            return row.input
        if any(each.name == field for option in row.options.values() for each in option):
            return f"{row.input}.{_named(rows, field).input}"
    raise KeyError(field)


def file_of_model(prompt: Mapping[str, Any], key: str) -> Path:
    """Find the file of the model that is linked to a Use Connected Model; raises ValueError where none is named."""
    for each in (key, *_chain(prompt, key, "model")):
        inputs = prompt.get(each, {}).get("inputs", {})
        for name, kind in FILES.items():
            if isinstance(file := inputs.get(name), str):
                return folders.file_path(kind, file, f"{name} of the model's loader")
    raise ValueError(
        "The file of the linked model is unknown before it is loaded. Use Connected Model names what suits it when it "
        "runs."
    )
