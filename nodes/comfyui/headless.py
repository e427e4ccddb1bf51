"""Run the loaders of a workflow without a server, for the models that are linked into Use Connected Model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

import nodes as comfyui_nodes

from ...trainer_core.config.forms import FORMS
from ...trainer_core.models import Chosen
from ...trainer_core.workflow.canvas import form_of, nested_inputs, prompt_of
from ..connect_model import AtelierConnectModel
from .folders import register_assets
from .tiny import register_tiny_model

CONNECT = "AtelierConnectModel"


def connect(document: Any, key: str) -> Chosen:
    """Run all that leads to a Use Connected Model of a workflow or a prompt; return its output.

    key: the node's id in the prompt. Raises ValueError for nodes that are not ComfyUI's own.
    """
    asyncio.run(comfyui_nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    register_tiny_model()
    register_assets()
    kinds: dict[str, Any] = {**comfyui_nodes.NODE_CLASS_MAPPINGS, CONNECT: AtelierConnectModel}
    known = {name: form_of(name, kind.INPUT_TYPES()) for name, kind in kinds.items()} | FORMS
    prompt, results = prompt_of(document, known), {}
    with torch.inference_mode():
        return _run(prompt, key, kinds, results)[0]


def _run(prompt: Mapping[str, Any], key: str, kinds: Mapping[str, Any], results: dict[str, Any]) -> Any:
    """Run a node after those that it is linked to; return its outputs."""
    if key in results:
        return results[key]
    node = prompt[key]
    kind = kinds.get(node["class_type"])
    if kind is None:
        raise ValueError(
            f"without a page only ComfyUI's own nodes run, and {node['class_type']} is of another pack, or "
            "of a newer ComfyUI; load the model by those"
        )
    inputs = {}
    for name, value in node["inputs"].items():
        linked = isinstance(value, list) and len(value) == 2 and str(value[0]) in prompt
        inputs[name] = _run(prompt, str(value[0]), kinds, results)[value[1]] if linked else value
    newer = hasattr(kind, "define_schema")
    function = getattr(kind if newer else kind(), kind.FUNCTION)
    output = function(**(nested_inputs(inputs) if newer else inputs))
    output = output.get("result", ()) if isinstance(output, dict) else output
    results[key] = getattr(output, "result", output) or ()
    return results[key]
