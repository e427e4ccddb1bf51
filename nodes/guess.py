"""Guess the settings of a Train LoRA from all that is linked to it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ..trainer_core.common.wording import say
from ..trainer_core.config import BaseModelConfig, ConnectedConfig, Defaults, fill
from ..trainer_core.models import Chosen
from ..trainer_core.workflow.read import TRAIN, read_workflow
from .comfyui import folders, session

NEEDED = {"base_model": "Load Base Model or Use Connected Model", "dataset": "Concept Dataset"}
WIDGETS = {"rank": ("lora_config", "rank"), "learning_rate": ("optimizer", "name.learning_rate")}  # of other nodes
OF = {"lora_config": ("AtelierLoraConfig", "LoRA Config"), "optimizer": ("AtelierOptimizer", "Optimizer")}
FILES = {"unet_name": "diffusion_models", "ckpt_name": "checkpoints"}  # inputs of ComfyUI's loaders
_guessing = threading.Lock()  # an estimate takes the processor for seconds


def guess(prompt: Mapping[str, Any], node: str) -> list[dict[str, Any]]:
    """List {setting, value, reason, node, widget, where, taken} for each guess of a Train LoRA; raises ValueError.

    prompt: all that leads to it. node of an answer: the id of the node whose widget takes the value; None where that
    node is not linked, whose display name is `where`. taken: the run would take that value anyway.
    """
    from ..trainer_core.data.plan import build_plan  # here, so that ComfyUI starts fast
    from ..trainer_core.data.scan import Index, scan
    from ..trainer_core.models import source_of
    from ..trainer_core.preflight.guess import find_inputs, fits_memory, guess_settings

    train = prompt.get(node)
    if not isinstance(train, dict) or train.get("class_type") != TRAIN or not isinstance(train.get("inputs"), dict):
        raise ValueError("There is no such Train LoRA in the prompt.")
    for name, title in NEEDED.items():
        if name not in train["inputs"]:
            raise ValueError(
                say("Nothing is linked to {0} of Train LoRA; link {1} there, then guess again.", name, title)
            )
    if session.at_work():
        raise ValueError(say("A LoRA is being trained now, so that the free memory is unknown; guess again after it."))
    with _guessing:
        config = _read(prompt, node)
        linked = config.base_model.connected is not None
        if linked:
            title, defaults = _family(prompt, config.base_model)
        else:
            source = source_of(config.base_model)
            source.check()
            base = source.outline()
            title, defaults = base.title, base.defaults
        filled = fill(config, defaults)
        with Index(folders.index_file()) as index:
            manifest = scan(filled.dataset, index, access=folders.access())
        plan = build_plan(manifest, filled.dataset, filled.train)
        fits = None if linked else fits_memory(filled, plan, *session.free_to_train())
        guesses = guess_settings(find_inputs(config, plan, title, defaults, fits))
    now = {"rank": filled.lora.rank, "learning_rate": filled.optimizer.learning_rate}
    return [
        each._asdict() | _input_of(prompt, node, each.setting) | {"taken": now.get(each.setting) == each.value}
        for each in guesses
    ]


def _read(prompt: Mapping[str, Any], node: str) -> Any:
    """Read the configuration of a run; ValueError in a whole sentence."""

    def connect(_: Any, key: str) -> Chosen:
        return Chosen(BaseModelConfig(path=key, connected=ConnectedConfig()))

    try:
        return read_workflow(prompt, folders, node, connect).config
    except ValueError as problem:
        raise ValueError(f"There is no guess yet: {str(problem).rstrip('.')}.") from problem
    except RecursionError:
        raise ValueError("There is no guess for so many nodes in a row.") from None


def _family(prompt: Mapping[str, Any], base: BaseModelConfig) -> tuple[str, Defaults]:
    """Find title and defaults of the model that is linked to a Use Connected Model, from the header of its file."""
    from .comfyui.connected.architecture import architecture_of_file, defaults_of

    key, seen = base.path, set[str]()
    while key not in seen and isinstance(entry := prompt.get(key), dict):
        seen.add(key)
        inputs = entry.get("inputs", {})
        for name, kind in FILES.items():
            if isinstance(file := inputs.get(name), str):
                architecture = architecture_of_file(folders.file_path(kind, file, f"{name} of the model's loader"))
                return architecture.title, defaults_of(architecture)
        link = inputs.get("model")
        key = str(link[0]) if isinstance(link, list) and link else ""
    raise ValueError(
        "The file of the linked model is unknown before it is loaded. Use Connected Model names what suits it when it "
        "runs."
    )


def _input_of(prompt: Mapping[str, Any], node: str, setting: str) -> dict[str, Any]:
    """Find the node and the widget that take a setting."""
    if setting not in WIDGETS:
        return {"node": node, "widget": setting, "where": "Train LoRA"}
    socket, widget = WIDGETS[setting]
    kind, title = OF[socket]
    key, seen = node, set[str]()
    while key not in seen:
        seen.add(key)
        entry = prompt.get(key, {})
        if entry.get("class_type") == kind:
            return {"node": key, "widget": widget, "where": title}
        link = entry.get("inputs", {}).get(socket)
        key = str(link[0]) if isinstance(link, list) and link else ""
    return {"node": None, "widget": widget, "where": title}
