"""The pack in the real editor: it loads cleanly, its nodes and workflows open, and they queue what they show."""

import json
from pathlib import Path

import pytest

from comfy_client import ComfyClient
from lora_atelier.dev import DYNAMIC_COMBO, ROOT, to_prompt

pytestmark = pytest.mark.browser

WORKFLOWS = sorted(ROOT.glob("workflows/*.json"))
STOCK = ["CheckpointLoaderSimple", "CLIPTextEncode", "KSampler", "EmptyLatentImage", "SaveImage", "LossGraphNode"]

ADD = """types => types.forEach((type, i) => {
    const node = window.LiteGraph.createNode(type);
    node.pos = [60 + 420 * (i % 6), 60 + 520 * Math.floor(i / 6)];
    window.app.graph.add(node);
})"""
UNKNOWN = "() => window.app.graph.nodes.map(n => n.type).filter(t => !(t in window.LiteGraph.registered_node_types))"


def our_types(comfy: ComfyClient) -> list[str]:
    """Return the pack's node ids as the server lists them."""
    return sorted(kind for kind in comfy.object_info() if kind.startswith("Atelier"))


def test_the_pack_loads_without_errors(editor, comfy: ComfyClient) -> None:
    assert our_types(comfy), "the server has no node of this pack"
    registered = editor.run("() => Object.keys(window.LiteGraph.registered_node_types)")
    assert set(our_types(comfy)) <= set(registered)
    assert editor.errors == []


def test_every_node_can_be_added_and_queues_what_it_shows(editor, comfy: ComfyClient) -> None:
    """Also proves dev.py's own conversion of workflows against the editor's."""
    kinds = [*our_types(comfy), *STOCK]
    editor.run(ADD, kinds)
    editor.run("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    editor.settle()
    shown = editor.run("async () => await window.app.graphToPrompt()")
    assert sorted(entry["class_type"] for entry in shown["output"].values()) == sorted(kinds)
    converted = to_prompt(shown["workflow"], comfy.object_info())
    assert inputs(converted) == inputs(shown["output"])
    assert editor.errors == []


CHOOSE = """choices => choices.map(([type, combo, option], i) => {
    const node = window.LiteGraph.createNode(type);
    node.pos = [60 + 380 * (i % 8), 60 + 640 * Math.floor(i / 8)];
    window.app.graph.add(node);
    node.widgets.find(widget => widget.name === combo).value = option;
    return node.id;
})"""


def test_every_option_of_a_dynamic_combo_queues_what_it_shows_also_when_opened_again(
    editor, comfy: ComfyClient
) -> None:
    info = comfy.object_info()
    choices = [
        (kind, name, option["key"])
        for kind in our_types(comfy)
        for group in info[kind]["input"].values()
        for name, spec in group.items()
        if spec[0] == DYNAMIC_COMBO
        for option in spec[1]["options"]
    ]
    nodes = editor.run(CHOOSE, choices)
    editor.run("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    editor.settle()
    shown = editor.run("async () => await window.app.graphToPrompt()")
    for node, (_, name, option) in zip(nodes, choices, strict=True):
        assert shown["output"][str(node)]["inputs"][name] == option
    assert inputs(to_prompt(shown["workflow"], info)) == inputs(shown["output"])
    editor.run("() => window.app.graph.clear()")
    editor.load(shown["workflow"])
    again = editor.run("async () => await window.app.graphToPrompt()")
    assert inputs(again["output"]) == inputs(shown["output"])
    assert editor.errors == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_shipped_workflow_opens_complete(editor, comfy: ComfyClient, path: Path) -> None:
    workflow = json.loads(path.read_text(encoding="utf-8"))
    editor.load(workflow)
    assert editor.run(UNKNOWN) == []
    assert editor.run("() => window.app.graph.nodes.length") == len(workflow["nodes"])
    assert editor.page.get_by_text("Missing Node", exact=False).count() == 0
    shown = editor.run("async () => (await window.app.graphToPrompt()).output")
    assert inputs(to_prompt(workflow, comfy.object_info())) == inputs(shown)
    assert editor.errors == []


def inputs(prompt: dict) -> dict:
    """Return class and inputs by node id: what a prompt computes, without its titles."""
    return {node: (entry["class_type"], entry["inputs"]) for node, entry in prompt.items()}
