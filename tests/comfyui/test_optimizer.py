"""The Optimizer node in real ComfyUIs: each optimizer with its own inputs, and what an older prompt is told."""

import re

import pytest
from train_graph import node

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.trainer_core.config import OPEN, OPTIMIZERS, OptimizerConfig


def own_inputs(comfy: ComfyClient) -> dict[str, dict]:
    """Return the inputs of each option of `name`, in their order."""
    spec = comfy.get("/object_info/AtelierOptimizer")["AtelierOptimizer"]["input"]["required"]["name"]
    return {option["key"]: option["inputs"]["required"] for option in spec[1]["options"]}


def configured(comfy: ComfyClient, prompt: dict) -> str:
    """Return the configuration that comes out of an Optimizer, as text."""
    result = comfy.queue({"optimizer": prompt, "show": node("PreviewAny", source=["optimizer", 0])})
    assert result.ok, result.error
    return result.outputs["show"]["text"][0]


def test_every_optimizer_runs_with_its_own_inputs(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    inputs = own_inputs(comfy)
    assert list(inputs) == list(OPTIMIZERS)
    assert list(inputs["adamw"]) == [
        *("learning_rate", "text_encoder_learning_rate", "weight_decay", "beta1", "beta2", "eps")
    ]  # and max_grad_norm next: the order in which workflows keep values
    for name, own in inputs.items():
        for key, (kind, options) in own.items():
            assert options["tooltip"] and "default" in options, f"{name}.{key}"
            if kind in ("INT", "FLOAT"):
                assert options["min"] <= options["default"] <= options["max"], f"{name}.{key}"
        values = {f"name.{key}": options["default"] for key, (_, options) in own.items()}
        shown = configured(comfy, node("AtelierOptimizer", **{"name": name, **values, "max_grad_norm": 0.5}))
        assert shown == str(OptimizerConfig(name=name, learning_rate=OPEN, max_grad_norm=0.5))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"learning_rate": 1e-4}, "Required input is missing: (name.)?learning_rate"),  # as before DynamicCombo
        ({"name.learning_rate": 1000.0}, "learning_rate"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_by_the_inputs_name(
    any_server: ComfyServer, values: dict, sentence: str
) -> None:
    comfy = ComfyClient(any_server.url)
    own = {f"name.{key}": options["default"] for key, (_, options) in own_inputs(comfy)["adamw"].items()}
    if "learning_rate" in values:
        own = {}
    prompt = node("AtelierOptimizer", **{"name": "adamw", "max_grad_norm": 1.0, **own, **values})
    result = comfy.queue({"optimizer": prompt, "show": node("PreviewAny", source=["optimizer", 0])})
    assert result.status == "rejected"
    assert re.search(sentence, result.error), result.error
