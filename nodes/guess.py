"""Guess the settings of a Train LoRA from all that is linked to it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..trainer_core.common.wording import say
from ..trainer_core.config import BaseModelConfig, Defaults, fill
from ..trainer_core.models import source_of
from ..trainer_core.workflow.read import read_workflow
from .comfyui import folders, session
from .filling import connect, file_of_model, input_of, train_of

NEEDED = {"base_model": "Load Base Model or Use Connected Model", "dataset": "Concept Dataset"}
ELSEWHERE = {"rank": "lora.rank", "learning_rate": "optimizer.learning_rate"}  # not on Train LoRA
_guessing = threading.Lock()  # an estimate takes the processor for seconds


def guess(prompt: Mapping[str, Any], node: str) -> list[dict[str, Any]]:
    """List {value, reason, taken} and what `input_of` describes for each guess of a Train LoRA; raises ValueError.

    prompt: all that leads to it. taken: the run would take that value anyway, where its node is not linked.
    """
    from ..trainer_core.data.plan import build_plan  # here, so that ComfyUI starts fast
    from ..trainer_core.data.scan import Index, scan
    from ..trainer_core.preflight.guess import find_inputs, fits_memory, guess_settings

    train = train_of(prompt, node)
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
            title, defaults = family_of(prompt, config.base_model)
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
        each._asdict()
        | input_of(prompt, node, ELSEWHERE.get(each.setting, f"train.{each.setting}"))
        | {"taken": now.get(each.setting) == each.value}
        for each in guesses
    ]


def _read(prompt: Mapping[str, Any], node: str) -> Any:
    """Read the configuration of a run; ValueError in a whole sentence."""
    try:
        return read_workflow(prompt, folders, node, connect).config
    except ValueError as problem:
        raise ValueError(f"There is no guess yet: {str(problem).rstrip('.')}.") from problem
    except RecursionError:
        raise ValueError("There is no guess for so many nodes in a row.") from None


def family_of(prompt: Mapping[str, Any], base: BaseModelConfig) -> tuple[str, Defaults]:
    """Find title and defaults of the model that is linked to a Use Connected Model, from the header of its file."""
    from ..trainer_core.models.sd.family import TOY
    from .comfyui.connected.architecture import architecture_of_file, defaults_of

    file = file_of_model(prompt, base.path)
    architecture = architecture_of_file(file)
    usual = defaults_of(architecture)
    if folders.is_toy(file):
        return file.stem, replace(TOY, clip_step=usual.clip_step, clip_rate=usual.clip_rate)
    return architecture.title, usual
