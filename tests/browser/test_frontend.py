"""The pack in the real editor: it loads cleanly, its nodes and workflows open, and they queue what they show."""

import json
import re
import time
from itertools import combinations

import pytest
import torch
from prompts import DYNAMIC_COMBO, to_prompt
from safetensors.torch import save

from comfy_client import HANGS, ComfyClient
from lora_atelier.dev import ROOT, TOUR

pytestmark = pytest.mark.browser

WORKFLOWS = sorted(ROOT.glob("workflows/*.json"))
STOCK = ["CheckpointLoaderSimple", "CLIPTextEncode", "KSampler", "EmptyLatentImage", "SaveImage", "LossGraphNode"]

ADD = """nodes => nodes.map(([type, combo, option], i) => {
    const node = window.LiteGraph.createNode(type);
    node.pos = [60 + 420 * (i % 10), 60 + 640 * Math.floor(i / 10)];
    window.app.graph.add(node);
    if (combo) node.widgets.find(widget => widget.name === combo).value = option;
    for (const widget of node.widgets ?? []) { // values of their own show whether one lands in another's place
        const { name, value, serialize, options } = widget;
        if (serialize === false) continue;
        if (typeof value === "number" && options?.min < value) widget.value = options.min;
        else if (typeof value === "string" && !options?.values) widget.value = `${name} of ${i}`;
    }
    return node.id;
})"""
QUEUED = "async () => await window.app.graphToPrompt()"
UNKNOWN = "types => types.filter(type => !(type in window.LiteGraph.registered_node_types))"
GONE = """async names => {
    const { api } = await import("/scripts/api.js");
    const from = { app: window.app, api };
    return names.filter(name => name.split(".").reduce((at, part) => at?.[part], from) === undefined);
}"""
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


def test_every_node_and_option_queues_what_it_shows_also_when_opened_again(editor, comfy: ComfyClient) -> None:
    """Also proves dev.py's own conversion of workflows against the editor's."""
    info = comfy.first_info()
    ours = sorted(kind for kind in info if kind.startswith("Atelier"))
    assert ours, "the server has no node of this pack"
    assert editor.run(UNKNOWN, [*ours, *STOCK]) == []
    options = [
        (kind, name, option["key"])
        for kind in ours
        for group in info[kind]["input"].values()
        for name, spec in group.items()
        if spec[0] == DYNAMIC_COMBO
        for option in spec[1]["options"]
    ]
    added = [*((kind, "", "") for kind in [*ours, *STOCK]), *options]
    nodes = editor.run(ADD, added)
    editor.fit()
    shown = editor.run(QUEUED)
    for node, (kind, combo, option) in zip(nodes, added, strict=True):
        queued = shown["output"][str(node)]
        assert queued["class_type"] == kind
        assert not combo or queued["inputs"][combo] == option
    assert inputs(to_prompt(shown["workflow"], info)) == inputs(shown["output"])
    editor.run("() => window.app.graph.clear()")
    editor.load(shown["workflow"])
    assert inputs(editor.run(QUEUED)["output"]) == inputs(shown["output"])


def test_the_editor_has_what_the_page_touches(editor) -> None:
    text = (ROOT / "docs" / "comfyui.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:app|api)\.[\w.]+)`", text)
    # The editor sets these when the pointer first moves over the canvas, and when the queue runs by itself.
    late = {"app.canvas.constructor.active_canvas", "app.ui.autoQueueEnabled"}
    assert len(names) > 20 and set(editor.run(GONE, names)) <= late


def test_the_shipped_workflows_open_complete_with_room_for_every_node(editor, comfy: ComfyClient) -> None:
    for path in WORKFLOWS:
        workflow = json.loads(path.read_text(encoding="utf-8"))
        editor.load(workflow)
        assert editor.run(UNKNOWN, [node["type"] for node in workflow["nodes"]]) == []
        assert editor.run("() => window.app.graph.nodes.length") == len(workflow["nodes"])
        assert inputs(to_prompt(workflow, comfy.first_info())) == inputs(editor.run(QUEUED)["output"])
        editor.screenshot(f"{path.stem}-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
        boxes = editor.run(NODES)
        assert [f"{one[0]} lies on {two[0]}" for one, two in combinations(boxes, 2) if overlap(one, two)] == []
        for kind, words in (("AtelierTrain", ".atelier-status"), ("AtelierScheduler", ".atelier-schedule")):
            nodes = [box for box in boxes if f"({kind})" in box[0]]
            parts = editor.run(PARTS, words)
            assert bool(parts) == bool(nodes)
            outside = [part for part in parts if not any(within(part, n) for n in nodes)]
            assert not outside or path.name.endswith(".app.json"), f"{outside} not in {nodes}"  # there they fill a form


HEIGHTS = """async names => {
    const { graph } = window.app, found = [];
    for (const name of names) {
        const node = window.LiteGraph.createNode(name);
        graph.add(node);
        found.push(node.computeSize()[1]);
    }
    for (let frame = 0; frame < 20; frame++) await new Promise(done => requestAnimationFrame(done));
    return graph.nodes.map((node, i) => [node.size[1], found[i], graph.serialize().nodes[i].size[1]]);
}"""


@pytest.mark.parametrize("opened", ["vue"], indirect=True)
def test_a_node_is_as_tall_as_what_it_shows_and_its_file_says_as_before(editor) -> None:
    """Else a workflow that was only looked at would be called changed, and asked about when it is closed."""
    for shown, taken, written in editor.run(HEIGHTS, ["AtelierSaves", "AtelierMemory"]):
        assert shown < taken <= written


def overlap(one: Box, two: Box) -> bool:
    """Tell whether two boxes have more than an edge in common."""
    return one[1] < two[3] and two[1] < one[3] and one[2] < two[4] and two[2] < one[4]


def within(one: Box, two: Box) -> bool:
    """Tell whether a box lies inside another, to a unit of rounding."""
    return two[1] - 1 <= one[1] and two[2] - 1 <= one[2] and one[3] <= two[3] + 1 and one[4] <= two[4] + 1


def inputs(prompt: dict) -> dict:
    """Return class and inputs by node id: what a prompt computes, without its titles."""
    return {node: (entry["class_type"], entry["inputs"]) for node, entry in prompt.items()}


def test_the_preview_runs_by_itself_from_its_button(editor, comfy: ComfyClient) -> None:
    editor.load(json.loads(TOUR.read_text(encoding="utf-8")))
    queue = comfy.get("/queue")  # of the tests before
    waiting = {prompt for each in queue.values() for _, prompt, *_ in each}
    known = waiting | set(comfy.get("/history"))
    if editor.vue:
        editor.page.get_by_role("button", name="Show what will be trained").click()
    else:
        editor.run("""() => window.app.graph.nodes.find(node => node.comfyClass === "AtelierDatasetPreview").widgets
            .find(widget => widget.name === "Show what will be trained").callback()""")
    since = time.monotonic()
    while not (new := [each for key, each in comfy.get("/history").items() if key not in known]):
        assert time.monotonic() - since < HANGS
        editor.settle()
    (ended,) = new
    editor.page.locator(".atelier-says").filter(has_text="13 pictures").first.wait_for()
    editor.screenshot(f"says-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    ran = {ended["prompt"][2][node]["class_type"] for node in ended["outputs"]}
    assert "AtelierDatasetPreview" in ran and not ran & {"AtelierTrain", "SaveImage"}


def test_a_button_of_the_preview_writes_names_into_the_concept(editor) -> None:
    editor.load(json.loads(TOUR.read_text(encoding="utf-8")))
    written = """([kind, names]) => {
        const of = (type) => window.app.graph.nodes.find(node => node.comfyClass === type);
        const concept = of("AtelierConceptDataset");
        of("AtelierDatasetPreview").onExecuted({ leave_out: [{ kind, nodes: { [concept.id]: names } }] });
    }"""
    for kind, names in (("blurred", ["a.png"]), ("near-duplicates", ["a.png", "b? c.png"])):
        editor.run(written, [kind, names])
        button = editor.page.locator(".atelier-leave-out button")
        button.wait_for()
        button.dispatch_event("click")
    value = """() => window.app.graph.nodes.find(node => node.comfyClass === "AtelierConceptDataset")
        .widgets.find(widget => widget.name === "leave_out").value"""
    assert editor.run(value) == "a.png, b? c.png"


UPLOAD = """async ([name, bytes]) => {
    const node = window.app.graph.nodes.find(node => node.comfyClass === "AtelierLoadLoraFile");
    node.onDragDrop({ dataTransfer: { files: [new File([new Uint8Array(bytes)], name)] } });
}"""
CHOSEN = """() => window.app.graph.nodes.find(node => node.comfyClass === "AtelierLoadLoraFile").widgets
    .find(widget => widget.name === "lora_name").value"""


def test_a_lora_of_this_computer_is_uploaded_and_chosen(editor, server, comfy: ComfyClient) -> None:
    editor.run(ADD, [("AtelierLoadLoraFile", "", "")])
    editor.fit()
    if editor.vue:
        editor.page.get_by_role("button", name="Upload a LoRA").wait_for()
    name, uploads = f"upload-{editor.version}-{editor.vue}.safetensors", server.base / "input" / "loras"
    data = save({"x.lora_up.weight": torch.ones(4, 2), "x.lora_down.weight": torch.ones(2, 4)})
    editor.run(UPLOAD, ["notes.txt", [1, 2, 3]])
    editor.page.get_by_text("notes.txt is no .safetensors file; choose another one.").first.wait_for()
    editor.run(UPLOAD, [name, list(data)])
    editor.page.wait_for_function(f"name => ({CHOSEN})() === name", arg=f"uploaded: {name}")
    assert (uploads / name).read_bytes() == data and not (uploads / "notes.txt").exists()
    (entry,) = editor.run(QUEUED)["output"].values()
    assert entry["inputs"] == {"lora_name": f"uploaded: {name}"}
    prompt = {"x": entry, "show": {"class_type": "PreviewAny", "inputs": {"source": ["x", 1]}}}
    result = comfy.queue(prompt)
    assert result.ok, result.error
    editor.screenshot(f"upload-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
