"""Answer which presets a Train LoRA can take, and what each sets on which node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..trainer_core.common.wording import say
from ..trainer_core.config import ALGORITHMS, Defaults
from ..trainer_core.config.presets import GOALS, LORA, NETWORKS, RECIPES, TOY, memory_of, preset
from ..trainer_core.models.architectures import ARCHITECTURES
from ..trainer_core.workflow.read import LOADED, read_base_model
from .comfyui import folders, session
from .filling import connect, file_of_model, input_of, inputs_of_chain, train_of

EIGHT_BITS = say(
    "So little memory needs the model in 8 bits: set weight_dtype of Load Diffusion Model to fp8_e4m3fn, or use an fp8 "
    "file."
)
TITLES = {**{each.kind: each.title for each in reversed(ARCHITECTURES)}, TOY: "atelier-tiny"}


def offer(prompt: Mapping[str, Any], node: str) -> dict[str, Any]:
    """List {goals, families: {kind, title, memory}, networks: {name: title}, family, unknown, memory}.

    family: that of the model. unknown: why there is none. memory of the answer: gigabytes of this machine's GPU, 0
    without one. Raises ValueError.
    """
    train_of(prompt, node)
    family, unknown = "", ""
    try:
        family = family_of(prompt, node)
    except ValueError as problem:
        unknown = str(problem)
    families = [{"kind": kind, "title": TITLES[kind], "memory": memory_of(kind)} for kind in RECIPES]
    return {
        "goals": list(GOALS),
        "families": families,
        "networks": {each.network: each.title for each in NETWORKS.values()},
        "family": family,
        "unknown": unknown,
        "memory": session.gigabytes(),
    }


def family_of(prompt: Mapping[str, Any], node: str) -> str:
    """Find the family of the model that is linked to a Train LoRA, from its file's header; raises ValueError."""
    from ..trainer_core.models import source_of
    from ..trainer_core.models.sd.family import TOY as OF_TOY
    from .comfyui.connected.architecture import architecture_of_file

    try:
        chosen = read_base_model(prompt, folders, node, connect).config
    except ValueError as problem:
        raise ValueError(say("The model is unknown: {0}.", str(problem).rstrip("."))) from problem
    if chosen.connected is None:
        source = source_of(chosen)
        source.check()
        outline = source.outline()
        title, toy = outline.title, outline.defaults == OF_TOY
        kind = TOY if toy else next((each.kind for each in ARCHITECTURES if each.title == title), "")
    else:
        file = file_of_model(prompt, chosen.path)
        architecture = None if folders.is_toy(file) else architecture_of_file(file)
        kind, title = (TOY, file.stem) if architecture is None else (architecture.kind, architecture.title)
    if kind not in RECIPES:
        raise ValueError(say("There is no preset for {0}.", title))
    return kind


def _untouched(kind: str) -> dict[str, Any]:
    """List what a run takes for a family where the node of a setting is not linked."""
    from ..trainer_core.models.sd.family import TOY as OF_TOY

    row = next((each for each in ARCHITECTURES if each.kind == kind), None)
    defaults = OF_TOY if row is None else Defaults(rank=row.rank, learning_rate=row.learning_rate)
    return {
        "lora.algorithm": "lora",
        "lora.rank": defaults.rank,
        "lora.alpha": defaults.rank,
        "lora.preset": defaults.preset,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": defaults.learning_rate,
        "memory.checkpointing": "auto",
        "memory.offload_weights": "auto",
    }


def settings_of(
    prompt: Mapping[str, Any], node: str, goal: Any, family: Any, memory: Any, network: Any = LORA
) -> dict[str, Any]:
    """List {family: its title, settings: {value, taken} and what `input_of` describes, notes, sources} of a preset.

    taken: a run takes the value anyway, where the node of the setting is not linked. Raises ValueError.
    """
    train_of(prompt, node)
    if not (all(isinstance(each, str) for each in (goal, family, network)) and isinstance(memory, int)):
        raise ValueError("goal, family and network must be texts, and memory a whole number of gigabytes.")
    chosen, untouched = preset(family, goal, memory, network), _untouched(family)
    try:
        known = family_of(prompt, node) == family
    except ValueError:  # the person chose a family, as the model's is unknown
        known = False
    algorithm = inputs_of_chain(prompt, node, "lora").get("algorithm", "lora")
    ranked = not isinstance(algorithm, str) or algorithm not in ALGORITHMS or ALGORITHMS[algorithm].usual_rank
    found = []
    for setting, value in chosen.settings.items():
        section = setting.partition(".")[0]
        if section == "lora" and not ranked and network == LORA:
            continue
        place = input_of(prompt, node, setting)
        if place["kind"] == LOADED and place["node"] is None:
            continue  # a linked model has its own loader
        found.append(
            {**place, "value": value, "taken": (known or section == "memory") and value == untouched.get(setting)}
        )
    notes = [EIGHT_BITS] if chosen.eight_bits else []
    if not ranked and network == LORA:
        notes.append(say("The rank stays, as {0} has other ranks than a LoRA.", algorithm))
    return {"family": TITLES[family], "settings": found, "notes": notes, "sources": list(chosen.sources)}
