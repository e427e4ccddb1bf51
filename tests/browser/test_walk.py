"""The walk of somebody who has never trained anything: open, run, reload, fail, mend, run on own pictures, take a LoRA.

Each screen is measured as it stands, at the size at which it opens, and its picture is kept.
"""

import json
import os
import re
import shutil

import pytest
from in_editor import as_tall_as_shown, finished
from looks import faint, faults
from train_graph import draw_pictures

from comfy_client import ComfyServer
from lora_atelier.dev import START

pytestmark = pytest.mark.browser

CATEGORY, CARD = "LoRA Atelier", START.stem
VALUE = """([name, value]) => {
    const node = window.app.graph.nodes.find(each => each.subgraph);
    const widget = node.widgets.find(each => each.name === name);
    widget.value = value;
    widget.callback?.(value);
}"""
GET = "name => window.app.graph.nodes.find(each => each.subgraph).widgets.find(each => each.name === name).value"
# Where a person presses an input: in the page's pixels.
PLACE = """([name, vue]) => {
    const node = window.app.graph.nodes.find(each => each.subgraph), { ds, canvas } = window.app.canvas;
    const widget = node.widgets.find(each => each.name === name), box = canvas.getBoundingClientRect();
    if (!vue) return [box.left + (node.pos[0] + 0.6 * node.size[0] + ds.offset[0]) * ds.scale,
        box.top + (node.pos[1] + widget.y + 10 + ds.offset[1]) * ds.scale];
    const within = document.querySelector(`[data-node-id="${node.id}"]`), words = widget.label ?? name;
    const label = [...within.querySelectorAll("*")].find(each => !each.children.length &&
        each.textContent.trim() === words).getBoundingClientRect(), y = label.top + label.height / 2;
    const field = [...within.querySelectorAll("input, textarea")].map(each => each.getBoundingClientRect())
        .find(({ top, bottom }) => top < y && y < bottom);
    return [field.left + field.width / 2, y];
}"""
SIZES = "() => Object.fromEntries(window.app.graph.serialize().nodes.map(({ id, size }) => [id, size.map(Math.round)]))"
READY = "() => window.app?.extensionManager?.workflow?.activeWorkflow"
PICTURED = """() => {
    const node = window.app.graph.nodes.find(each => each.type === "SaveImage");
    return node.imgs?.length || document.querySelector(`[data-node-id="${node.id}"] img`);
}"""
TAB = "() => window.app.extensionManager.command.execute('Workspace.ToggleSidebarTab.atelier-runs')"
# Ways to fail beside the three of which pictures are kept: what somebody sets, and what the node then says.
WRONG = [
    ("folder", "empty", r"The folder .*empty is empty; put pictures"),
    (
        "folder",
        "notes.txt",
        r"notes\.txt is a file; set folder of Train a LoRA to the folder that holds your pictures",
    ),
    (
        "checkpoint",
        "words.safetensors",
        r"words\.safetensors is not a whole safetensors file \(8 bytes\); get it again",
    ),
    ("steps", -5, r"steps of Train a LoRA is -5; set it to a number from 1 to 1000000"),
    ("name", "../mine", r"The name '\.\./mine' cannot be a file name; use up to 100 letters"),
]
MOST_ACTIONS = 8  # to train on pictures that lie in a folder: a press is one, and a text written
# In place of the template's, which take a minute; more where pictures to show are taken.
STEPS = int(os.environ.get("ATELIER_WALK_STEPS", "4"))
# Samplers' steps: what is drawn says nothing before hundreds of training steps, and is drawn in and after each run.
DRAWN = """() => {
    const { nodes } = window.app.graph.nodes.find(each => each.subgraph).subgraph;
    for (const [kind, name] of [["AtelierSample", "steps"], ["AtelierSaves", "sample_steps"]])
        nodes.find(each => each.comfyClass === kind).widgets.find(each => each.name === name).value = 2;
}"""
# The workflow, and the number of Train LoRA in it.
TRAIN = """() => {
    const { graph } = window.app, node = graph.nodes.find(each => each.subgraph);
    return [graph.id, `${node.id}:${node.subgraph.nodes.find(each => each.comfyClass === "AtelierTrain").id}`];
}"""


def write(editor, name: str, text: str) -> int:
    """Write a text into an input of the node, by mouse and keyboard; return how many actions that takes."""
    page = editor.page
    place = editor.run(PLACE, [name, editor.vue])
    page.mouse.move(*place)  # before the press, as a hand does: the canvas takes the first press on a page that has
    editor.settle()  # seen no mouse for one of the node, not of its input
    page.mouse.click(*place)
    if not editor.vue:
        page.locator(".graphdialog .value").wait_for()  # the canvas asks in a field of its own
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    page.wait_for_function(f"([name, text]) => ({GET})(name) === text", arg=[name, text])
    return 2


@pytest.fixture
def walker(editor, server: ComfyServer):
    """Give an editor of a small screen, and what somebody could take for pictures and a model."""
    if (mine := server.base / "input" / "my_pictures").exists():  # of the walk in the other renderer
        shutil.rmtree(mine)
    (server.base / "input" / "empty").mkdir(exist_ok=True)
    (server.base / "input" / "notes.txt").write_text("no folder", encoding="utf-8")
    model = server.base / "models" / "checkpoints" / "words.safetensors"
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_text("no model", encoding="utf-8")
    size = editor.page.viewport_size
    editor.page.set_viewport_size({"width": 1280, "height": 720})
    editor.settle()
    yield editor
    editor.page.set_viewport_size(size)


def test_a_first_walk(walker, server: ComfyServer, pytestconfig) -> None:
    """The first run is trained with --thorough, as the one on own pictures is in every run."""
    editor, page = walker, walker.page
    name = f"walk {'vue' if editor.vue else 'litegraph'} {editor.version}"
    found: dict[str, list[str]] = {}

    def looked() -> list[str]:
        """Measure what stands there once all of it has come: pictures are fetched after the words."""
        for _ in range(60):
            editor.settle()
            if not (now := faults(editor)):
                return []
            page.wait_for_timeout(500)
        return now

    def seen(screen: str) -> None:
        if now := looked():
            found[screen] = now
        editor.screenshot(f"walk-{screen}-{'vue' if editor.vue else 'litegraph'}-{editor.version}")

    def run() -> None:
        page.get_by_role("button", name="Run", exact=True).first.click()

    status = page.locator(".atelier-status:visible")

    # First sight: the list of templates, and its first card.
    editor.run("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(CATEGORY, exact=True).click()
    dialog.get_by_text(CARD, exact=True).first.wait_for()
    titles = [title for title in dialog.locator("h3").all_text_contents() if title.split()[0].isdecimal()]
    assert [int(title.split()[0]) for title in titles[:4]] == [1, 1, 2, 3]  # of the server, in any order
    dialog.get_by_text(CARD, exact=True).first.click()
    page.wait_for_function("() => window.app.graph.nodes.some(node => node.subgraph)")
    dialog.wait_for(state="hidden")
    seen("1-opened")
    sizes = editor.run(SIZES)

    def shorten() -> None:
        editor.run(VALUE, ["steps", STEPS])
        if "ATELIER_WALK_STEPS" not in os.environ:
            editor.run(DRAWN)

    # Run.
    shorten()
    editor.run(VALUE, ["name", name])
    if pytestconfig.getoption("thorough"):
        run()
        status.get_by_text(f"Finished after {STEPS} steps").first.wait_for()
        page.wait_for_function(PICTURED)
        seen("2-finished")
    else:
        finished(server, name, *editor.run(TRAIN), steps=STEPS)
    assert editor.run(SIZES) == sizes

    # Reload: the page stands as it did, and a file keeps no room for what the nodes show of this run.
    workflow = editor.run("() => window.app.graph.serialize()")
    page.goto(server.url, wait_until="domcontentloaded")
    page.wait_for_function(READY)
    page.wait_for_function("() => window.app.graph.nodes.some(node => node.subgraph)")
    assert editor.run("() => window.app.graph.serialize().nodes.length") == len(workflow["nodes"])
    status.get_by_text(f"Finished after {STEPS} steps").first.wait_for()
    seen("3-reloaded")
    shorten()  # the editor keeps what a person sets

    # Fail, read why, and mend it.
    actions = write(editor, "folder", "my_pictures")
    run()
    status.get_by_text("There is no folder 'my_pictures'").first.wait_for()
    status.get_by_text("Below is the run before.").first.wait_for()
    seen("4-failed")
    draw_pictures(server.base / "input" / "my_pictures", captions=False)
    run()
    status.get_by_text(re.compile(r"caption")).first.wait_for()
    seen("5-failed-again")
    for picture in (server.base / "input" / "my_pictures").glob("*.png"):
        # Other words in the other renderer, or its run would be that of this one.
        picture.with_suffix(".txt").write_text("a circle" if editor.vue else "a disc", encoding="utf-8")
    for setting, wrong, words in WRONG:
        before = editor.run(GET, setting)
        editor.run(VALUE, [setting, wrong])
        run()
        status.get_by_text(re.compile(words)).first.wait_for()
        if now := looked():
            found[f"{setting} {wrong}"] = now
        editor.run(VALUE, [setting, before])
    actions += write(editor, "trigger_word", "mychar") + write(editor, "name", f"{name} of mine")
    run()
    assert actions + 1 <= MOST_ACTIONS
    status.get_by_text(f"Finished after {STEPS} steps").first.wait_for()
    page.wait_for_function(PICTURED)
    seen("6-mended")
    assert editor.run(SIZES) == sizes

    # A failure then: what the node shows is as large as what it says, as before.
    (server.base / "input" / "my_pictures" / "half.png").write_bytes(b"\x89PNG\r\n")
    run()
    status.get_by_text("half.png").first.wait_for()
    seen("7-failed-after-it")
    (server.base / "input" / "my_pictures" / "half.png").unlink()

    # The run is in the list, and its LoRA is taken.
    editor.run(TAB)
    tab = page.locator(".atelier-runs")
    tab.get_by_role("listitem").filter(has_text=f"{name} of mine").get_by_role("button").click()
    tab.get_by_role("heading", name=f"{name} of mine").wait_for()
    editor.settle()
    editor.screenshot(f"walk-8-runs-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    if now := faint(page, ".atelier-runs *"):
        found["8-runs"] = now
    tab.get_by_role("button", name="Use this LoRA").first.click()
    field = page.get_by_role("dialog").get_by_role("textbox")
    field.fill(f"taken/{name}")
    field.press("Enter")
    page.get_by_text(f"Saved in models/loras: {name}.safetensors").first.wait_for()
    assert (server.base / "models" / "loras" / "taken" / f"{name}.safetensors").is_file()
    editor.run(TAB)
    assert found == {}, json.dumps(found, indent=1)

    if editor.vue:  # the page was loaded anew with Nodes 2.0, where other tests change the renderer of an open one
        editor.run("() => window.app.graph.clear()")
        as_tall_as_shown(editor, "AtelierSaves")
