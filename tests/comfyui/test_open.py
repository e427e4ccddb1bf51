"""Settings that are left open: three nodes are a whole run, and optional nodes as they are change nothing of it."""

import json
import re
from pathlib import Path

import pytest
from odd_prompts import defaults
from train_graph import CHECKPOINT, node

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE
from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.config.forms.run import PARTS

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")

INTO_TRAIN = {
    "optimizer": "AtelierOptimizer",
    "scheduler": "AtelierScheduler",
    "objective": "AtelierObjective",
    "buckets": "AtelierBuckets",
    "memory": "AtelierMemory",
    "saves": "AtelierSaves",
    **{form.title.lower(): kind for kind, form in PARTS.items()},
}


def test_every_optional_link_into_a_run_is_known_here() -> None:
    sockets = {
        each.name
        for each in FORMS["AtelierTrain"].inputs
        if each.optional and (each.socket or "").startswith("ATELIER")
    }
    assert sockets - {"lora_config"} == INTO_TRAIN.keys()


def whole(comfy: ComfyClient, pictures: Path, info: dict) -> dict:
    """Return a prompt of three nodes with all their defaults, but for the length and the names."""

    def plain(kind: str, **inputs: object) -> dict:
        return node(kind, **{**defaults(info[kind]["input"]), **inputs})

    return {
        "base": plain("AtelierLoadBaseModel", checkpoint=CHECKPOINT),
        "data": plain("AtelierConceptDataset", folder=pictures.name),
        "train": plain("AtelierTrain", base_model=["base", 0], dataset=["data", 0], name=pictures.name, steps=1),
    }


def test_three_nodes_are_a_run_and_untouched_optional_nodes_change_nothing(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    info = comfy.object_info()
    graph = whole(comfy, pictures, info)
    first = comfy.queue(graph)
    assert first.ok, first.error
    assert (
        "Left open, so taken from the defaults for atelier-tiny: rank 16, alpha 16, preset full, "
        "learning rate 0.003" in first.outputs["train"]["text"][0]
    )
    folder = server.base / "output" / "atelier" / "runs"
    (run,) = folder.glob(f"{pictures.name}-*")
    config = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]
    assert (config["train"]["resolution"], config["lora"]["rank"], config["optimizer"]["learning_rate"]) == (
        128,
        16,
        0.003,
    )
    assert config["dataset"]["concepts"][0]["captions"]["dropout"] == 0.05

    def linked(prompt: dict, name: str, kind: str, **links: object) -> dict:
        train = {**prompt["train"]["inputs"], name: [name, 0]}
        one = node(kind, **{**defaults(info[kind]["input"]), **links})
        return {**prompt, name: one, "train": node("AtelierTrain", **train)}

    together = linked(graph, "dataset", "AtelierAugment", dataset=["data", 0])
    for name, kind in INTO_TRAIN.items():
        together = linked(together, name, kind)
    for kind in ("AtelierLoraConfig", "AtelierExistingLora", "AtelierEmbedding"):
        prompt = linked(together, "lora_config", kind)
        result = comfy.queue(prompt)
        assert result.ok, f"{kind}: {result.error}"
        text = result.outputs["train"]["text"][0]
        assert re.match("Already trained", text), f"{kind}: {text}"
    assert [path.name for path in folder.glob(f"{pictures.name}-*")] == [run.name]


def test_a_forgotten_folder_is_refused_before_anything_runs(comfy: ComfyClient, pictures: Path) -> None:
    graph = whole(comfy, pictures, comfy.object_info())
    graph["data"]["inputs"]["folder"] = ""
    result = comfy.queue(graph)
    assert result.status == "rejected"
    assert "set it to the folder of your pictures, or to atelier:concept_example" in result.error
