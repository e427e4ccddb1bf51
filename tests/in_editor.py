"""Short ways to what the editor shows: a few nodes of the tour, as all take it seconds, and a run nobody trained."""

from __future__ import annotations

import json
import time
from typing import Any

from run_folders import make_run

from comfy_client import ComfyServer
from lora_atelier.dev import TOUR
from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.runs import RunFolder

BASE, CONCEPT, MASKS, PREVIEW, OPTIMIZER, LORA, TRAIN, SHOWN, SAVES = 2, 3, 4, 5, 7, 9, 12, 14, 22  # ids in the tour
TRAINING = (BASE, CONCEPT, MASKS, TRAIN, SAVES)
# Of nodes of a file, and of new ones: the height as shown, what all inputs need, and what the file then says.
HEIGHTS = """async names => {
    const make = name => window.LiteGraph.createNode(name), needed = names.map(name => make(name).computeSize());
    await window.app.loadGraphData({ last_node_id: names.length, last_link_id: 0, links: [], version: 0.4,
        nodes: names.map((type, i) => ({ id: i + 1, type, pos: [50, 50], size: needed[i], flags: {}, order: i, mode: 0,
            properties: {} })) });
    const { graph } = window.app;
    names.forEach(name => graph.add(make(name)));
    const heights = () =>
        graph.nodes.map((node, i) => [node.size[1], needed[i % names.length][1], node.serialize().size[1]]);
    for (let frame = 0; frame < 300 && heights().some(([shown, all]) => shown >= all); frame++)
        await new Promise(done => requestAnimationFrame(done));
    return [heights().slice(0, names.length), heights().slice(names.length)];
}"""


def part(*kept: int) -> dict[str, Any]:
    """Read the tour's nodes of these ids, and the links between them."""
    workflow = json.loads(TOUR.read_text(encoding="utf-8"))
    nodes = [node for node in workflow["nodes"] if node["id"] in kept]
    links = [link for link in workflow["links"] if link[1] in kept and link[3] in kept]
    numbers = {link[0] for link in links}
    for node in nodes:
        for slot in node["inputs"]:
            slot["link"] = slot["link"] if slot["link"] in numbers else None
        for slot in node["outputs"]:
            slot["links"] = [number for number in slot["links"] or () if number in numbers]
    return {**workflow, "nodes": nodes, "links": links, "groups": []}


def values_of(workflow: dict[str, Any], node: int) -> list[Any]:
    """Give the values of a node's widgets, to be changed."""
    return next(each["widgets_values"] for each in workflow["nodes"] if each["id"] == node)


def finished(server: ComfyServer, name: str, workflow: str, node: str, *, steps: int) -> RunFolder:
    """Make a run that finished, with two saves, which a node of a workflow shows once a page asks."""
    runs, shown = server.base / "output" / "atelier" / "runs", server.base / "user" / "__atelier" / "shown.json"
    run = make_run(runs, name, saves=(2, steps), logged=steps, finished=steps, steps=steps)
    known = json.loads(shown.read_text(encoding="utf-8")) if shown.exists() else {}
    shown.parent.mkdir(parents=True, exist_ok=True)
    write_json(shown, {**known, f"{workflow}/{node}": [run.path.name, time.time()]})
    return run


def as_tall_as_shown(editor: Any, *kinds: str) -> None:
    """Check in Nodes 2.0 that nodes are as tall as what they show, and a file's height stays what it was.

    A new node has no file. The editor may shrink it before the pack does, to what it writes then.
    """
    of_file, new = editor.run(HEIGHTS, [*kinds])
    assert len(of_file) == len(new) == len(kinds)
    for shown, taken, written in of_file:
        assert shown < taken == written, f"{shown} of {taken} are shown, {written} written"
    for shown, taken, _ in new:
        assert shown < taken, f"{shown} of {taken} are shown"
