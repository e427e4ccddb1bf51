"""The workflows that come with the pack, on its toy models, whatever files they name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from lora_atelier.dev import TINY_BASE, TINY_FLOW

KINDS = ("MODEL", "CLIP", "VAE")  # outputs of ComfyUI's loader of checkpoints
LOADERS = {
    "UNETLoader": TINY_FLOW,
    "CLIPLoader": TINY_BASE,
    "DualCLIPLoader": TINY_BASE,
    "LTXAVTextEncoderLoader": TINY_BASE,
    "VAELoader": TINY_FLOW,
}


def on_toy_models(path: Path) -> dict[str, Any]:
    """Read a workflow; its loaders load the toy models, each in place of the file of its kind."""
    workflow = json.loads(path.read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] == "AtelierLoadBaseModel":
            node["widgets_values"][0] = TINY_BASE.name
        if node["type"] == "CheckpointLoaderSimple" and node["widgets_values"][0] != TINY_BASE.name:
            node["widgets_values"][0] = TINY_FLOW.name
        if node["type"] == "AtelierConnectModel" and any(each["name"] == "model_high" for each in node["inputs"]):
            node["widgets_values"][5] = 0.875  # where the noisier expert begins: no toy has two
        if toy := LOADERS.get(node["type"]):
            (own,) = node["outputs"]
            outputs = [{"name": kind, "type": kind, "links": []} for kind in KINDS]
            outputs[KINDS.index(own["type"])] = copy.deepcopy(own)
            node |= {"type": "CheckpointLoaderSimple", "widgets_values": [toy.name], "outputs": outputs}
            for link in workflow["links"]:
                if link[1] == node["id"]:
                    link[2] = KINDS.index(own["type"])
    return workflow


def shorten(prompt: dict, **inputs: dict) -> None:
    """Give the nodes of a prompt other inputs, by their class, where they have them."""
    for node in prompt.values():
        wanted = inputs.get(node["class_type"], {})
        node["inputs"] |= {name: value for name, value in wanted.items() if name in node["inputs"]}
