"""What an opened workflow must have in the editor: each node, with its values, in room of its own."""

from itertools import combinations
from pathlib import Path
from typing import Any

from prompts import to_prompt

from comfy_client import ComfyClient

QUEUED = "async () => await window.app.graphToPrompt()"
UNKNOWN = "types => types.filter(type => !(type in window.LiteGraph.registered_node_types))"
NODES = """() => window.app.graph.nodes.map(node => {
    const [left, top, width, height] = node.boundingRect;
    return [`${node.title} (${node.type})`, left, top, left + width, top + height];
})"""
# The parts of a widget of ours that are seen, in the graph's units.
PARTS = """words => {
    const { scale, offset } = window.app.canvas.ds, from = window.app.canvas.canvas.getBoundingClientRect();
    const x = pixel => (pixel - from.left) / scale - offset[0], y = pixel => (pixel - from.top) / scale - offset[1];
    return [...document.querySelectorAll(words)].filter(part => part.checkVisibility()).map(part => {
        const box = part.getBoundingClientRect();
        return [part.textContent, x(box.left), y(box.top), x(box.right), y(box.bottom)];
    });
}"""
Box = tuple[str, float, float, float, float]  # whose, left, top, right, bottom


def inputs(prompt: dict) -> dict:
    """Return class and inputs by node id: what a prompt computes, without its titles."""
    return {node: (entry["class_type"], entry["inputs"]) for node, entry in prompt.items()}


def lacks(editor: Any, comfy: ComfyClient, path: Path, workflow: dict) -> list[str]:
    """List what an opened workflow lacks: nodes, what dev.py queues for it, room for a node or in one."""
    found = [f"no {kind} in the editor" for kind in editor.run(UNKNOWN, [node["type"] for node in workflow["nodes"]])]
    if (count := editor.run("() => window.app.graph.nodes.length")) != len(workflow["nodes"]):
        found.append(f"{count} nodes of {len(workflow['nodes'])}")
    ours, theirs = inputs(to_prompt(workflow, comfy.first_info())), inputs(editor.run(QUEUED)["output"])
    found += [
        f"node {node} queues {theirs.get(node)}" for node in {**ours, **theirs} if ours.get(node) != theirs.get(node)
    ]
    boxes = editor.run(NODES)
    found += [f"{one[0]} lies on {two[0]}" for one, two in combinations(boxes, 2) if overlap(one, two)]
    for kind, words in (("AtelierTrain", ".atelier-status"), ("AtelierScheduler", ".atelier-schedule")):
        nodes = [box for box in boxes if f"({kind})" in box[0]]
        parts = editor.run(PARTS, words)
        if bool(parts) != bool(nodes):
            found.append(f"{len(nodes)} {kind} with {len(parts)} {words}")
        if not path.name.endswith(".app.json"):  # there they fill a form
            found += [f"{part} lies in no {kind}" for part in parts if not any(within(part, node) for node in nodes)]
    return found


def overlap(one: Box, two: Box) -> bool:
    """Tell whether two boxes have more than an edge in common."""
    return one[1] < two[3] and two[1] < one[3] and one[2] < two[4] and two[2] < one[4]


def within(one: Box, two: Box) -> bool:
    """Tell whether a box lies inside another, to a unit of rounding."""
    return two[1] - 1 <= one[1] and two[2] - 1 <= one[2] and one[3] <= two[3] + 1 and one[4] <= two[4] + 1
