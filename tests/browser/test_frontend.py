"""The pack in the real editor: it loads cleanly, its nodes and workflows open, and they queue what they show."""

import re
import time

import pytest
import torch
from in_editor import BASE, CONCEPT, MASKS, PREVIEW, SHOWN, TRAIN, as_tall_as_shown, part
from opened_files import QUEUED, UNKNOWN, inputs
from prompts import DYNAMIC_COMBO, to_prompt
from safetensors.torch import save

from comfy_client import HANGS, ComfyClient
from lora_atelier.dev import ROOT

pytestmark = pytest.mark.browser

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
GONE = """async names => {
    const { api } = await import("/scripts/api.js");
    const from = { app: window.app, api };
    return names.filter(name => name.split(".").reduce((at, part) => at?.[part], from) === undefined);
}"""


def test_every_node_and_option_queues_what_it_shows_also_when_opened_again(editor, comfy, request) -> None:
    """Also proves dev.py's own conversion of workflows against the editor's. Each frontend has every other one."""
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
    if not request.config.getoption("thorough"):
        added = added[request.node.callspec.params["server"] == "newest" :: 2]
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


@pytest.mark.parametrize("opened", ["vue"], indirect=True)
def test_a_node_is_as_tall_as_what_it_shows_and_its_file_says_as_before(editor) -> None:
    """Else a workflow that was only looked at would be called changed, and asked about when it is closed."""
    as_tall_as_shown(editor, "AtelierSaves", "AtelierMemory")


def test_the_preview_runs_by_itself_from_its_button(editor, comfy: ComfyClient) -> None:
    editor.load(part(BASE, CONCEPT, MASKS, PREVIEW, TRAIN, SHOWN))
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
    editor.load(part(CONCEPT, MASKS, PREVIEW))
    written = """([kind, names]) => {
        const of = (type) => window.app.graph.nodes.find(node => node.comfyClass === type);
        const concept = of("AtelierConceptDataset");
        of("AtelierDatasetPreview").onExecuted({ leave_out: [{ kind, nodes: { [concept.id]: names } }] });
    }"""
    for kind, names in (("blurred", ["a.png", "d.png"]), ("near-duplicates", ["a.png", "b? c.png"])):
        editor.run(written, [kind, names])
        button = editor.page.locator(".atelier-leave-out button")
        button.wait_for()
        button.dispatch_event("click")
    value = """() => window.app.graph.nodes.find(node => node.comfyClass === "AtelierConceptDataset")
        .widgets.find(widget => widget.name === "leave_out").value"""
    assert editor.run(value) == "a.png, d.png, b? c.png"


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
