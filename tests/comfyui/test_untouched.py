"""A run needs three nodes: what is not linked suits the model, and nodes linked as they are change nothing."""

from pathlib import Path

import pytest
from train_graph import CHECKPOINT, node

from comfy_client import ComfyClient
from lora_atelier.dev import DYNAMIC_COMBO, TINY_BASE, is_widget

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
OPTIONAL = {  # inputs of Train LoRA, and the nodes that may be linked into them
    "optimizer": "AtelierOptimizer",
    "scheduler": "AtelierScheduler",
    "lora_config": "AtelierLoraConfig",
    "objective": "AtelierObjective",
    "buckets": "AtelierBuckets",
    "memory": "AtelierMemory",
    "saves": "AtelierSaves",
}


def untouched(info: dict, inputs: dict | None = None, prefix: str = "") -> dict:
    """Return the values of a node's widgets as they are when it is put on the canvas."""
    values = {}
    groups = info["input"] if inputs is None else inputs
    for name, spec in {**groups.get("required", {}), **groups.get("optional", {})}.items():
        if not is_widget(spec):
            continue
        options = spec[1] if len(spec) > 1 else {}
        if spec[0] == DYNAMIC_COMBO:
            first = options["options"][0]
            values |= {prefix + name: first["key"]} | untouched(info, first["inputs"], f"{prefix}{name}.")
        else:
            choices = options.get("options") or (spec[0] if isinstance(spec[0], list) else [None])
            values[prefix + name] = options.get("default", choices[0])
    return values


def test_three_nodes_are_a_run_and_untouched_ones_change_nothing(comfy: ComfyClient, pictures: Path) -> None:
    info = comfy.object_info()
    graph = {
        "base": node("AtelierLoadBaseModel", **{**untouched(info["AtelierLoadBaseModel"]), "checkpoint": CHECKPOINT}),
        "data": node("AtelierConceptDataset", **{**untouched(info["AtelierConceptDataset"]), "folder": pictures.name}),
        "train": node("AtelierTrain", **{**untouched(info["AtelierTrain"]), "steps": 1, "name": pictures.name}),
    }
    graph["train"]["inputs"] |= {"base_model": ["base", 0], "dataset": ["data", 0]}
    first = comfy.queue(graph)
    assert first.ok, first.error
    (said,) = first.outputs["train"]["text"]
    assert "Taken as suits Stable Diffusion 1: rank 16, learning rate 0.0001, resolution 128" in said
    assert set(OPTIONAL) < set(info["AtelierTrain"]["input"]["optional"])
    linked = {**graph, **{name: node(kind, **untouched(info[kind])) for name, kind in OPTIONAL.items()}}
    linked["train"] = node("AtelierTrain", **graph["train"]["inputs"], **{name: [name, 0] for name in OPTIONAL})
    again = comfy.queue(linked)
    assert again.ok, again.error
    assert again.outputs["train"]["text"][0].startswith("Already trained in ")
