"""What a new user meets: templates with names, a quickstart on one screen, an app, a blueprint, one's own language."""

import json

import pytest
from looks import BEHIND, COVERED, CUT, DROP, EMPTY, MOST_EMPTY, NOTE, OURS, UNCOVERED, faint
from opened_files import lacks

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import PACK, QUICKSTART, ROOT, START, TINY_BASE, TINY_CLIP, TINY_FLOW

pytestmark = pytest.mark.browser

COMMAND = "name => window.app.extensionManager.command.execute(name)"
PANEL = "Workspace.ToggleSidebarTab.atelier-runs"
READABLE = 0.6  # of the size that texts have at 100 %; the classic renderer leaves them out below 0.572
OPEN_TEMPLATE = """([workflow, name]) =>
    window.app.loadGraphData(workflow, true, true, name, { openSource: 'template' })"""
TEMPLATES = sorted(path for path in (ROOT / "workflows").glob("*.json") if ".app" not in path.stem)
PROMPT = "async () => (await window.app.graphToPrompt()).output"
# Whether the card of a template shows its picture: the first element around the name that holds a picture is the card.
PICTURED = """name => {
    const texts = [...document.querySelectorAll("[role=dialog] *")].filter(each => each.textContent.trim() === name);
    const cards = texts.map(text => {
        let card = text;
        while (card && !card.querySelector("img")) card = card.parentElement;
        return card;
    });
    return cards.some(card => card && [...card.querySelectorAll("img")].some(each => each.naturalWidth > 0));
}"""
# The labels that the classic renderer draws, and the Vue one shows.
LABELS = "() => window.app.graph.nodes.flatMap(node => [node.title, ...(node.widgets ?? []).map(w => w.label)])"


def quickstart() -> dict:
    """Return the shipped quickstart."""
    return json.loads(QUICKSTART.read_text(encoding="utf-8"))


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_templates_have_names_and_pictures(editor) -> None:
    editor.run(COMMAND, "Comfy.BrowseTemplates")
    dialog = editor.page.get_by_role("dialog")
    dialog.get_by_text("LoRA Atelier", exact=True).click()
    names = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    for name in names:  # a card asks for its picture only once the page has drawn it in view
        dialog.get_by_text(name, exact=True).first.scroll_into_view_if_needed()
        editor.page.wait_for_function(PICTURED, arg=name)
    assert all(name in dialog.get_by_text(name, exact=True).all_text_contents() for name in names)
    editor.screenshot(f"templates-{editor.version}")
    editor.page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")


@pytest.mark.parametrize(
    "width,height,panel",
    [
        (1280, 720, False),
        pytest.param(1600, 900, False, marks=pytest.mark.thorough),
        pytest.param(1600, 900, True, marks=pytest.mark.thorough),
    ],
)
def test_templates_open_whole_and_readable(
    editor, server: ComfyServer, width: int, height: int, panel: bool, request: pytest.FixtureRequest
) -> None:
    """As from the list of templates, which the editor fits into its window: no link behind a node, no node beneath the
    minimap, no empty room, and all that the pack writes in letters that one reads: on nodes, and in notes, whose end
    is seen, too.

    panel: whether a side panel is open. What ComfyUI itself draws, the titles and inputs of nodes, is as small as it is
    anywhere at that scale. Each frontend opens every other one."""
    comfy = ComfyClient(server.url)
    size = editor.page.viewport_size
    editor.page.set_viewport_size({"width": width, "height": height})
    renderer, found = "vue" if editor.vue else "litegraph", {}
    renderer += "-panel" if panel else ""
    thorough = request.config.getoption("thorough")
    try:
        editor.settle()
        if panel:
            editor.run(COMMAND, PANEL)
        for path in TEMPLATES if thorough else TEMPLATES[request.node.callspec.params["server"] == "newest" :: 2]:
            workflow = json.loads(path.read_text(encoding="utf-8"))
            editor.run(OPEN_TEMPLATE, [workflow, path.stem])
            editor.page.wait_for_function(
                "count => window.app.graph.nodes.length === count", arg=len(workflow["nodes"])
            )
            editor.settle()
            wrong = lacks(editor, comfy, path, workflow) + editor.run(BEHIND) + editor.run(CUT)
            wrong += editor.run(COVERED)
            wrong += faint(editor.page, OURS) + [each for each in editor.run(EMPTY, editor.vue) if each[1] > MOST_EMPTY]
            found[path.stem] = (editor.run("() => window.app.canvas.ds.scale"), wrong)
            editor.screenshot(f"{path.stem.split()[0]}-{width}-{renderer}-{editor.version}")
        assert {name: each for name, each in found.items() if each[0] < READABLE or each[1]} == {}
    finally:
        if panel:
            editor.run(COMMAND, PANEL)
        editor.page.set_viewport_size(size)


def test_each_copy_of_a_template_is_a_workflow_of_its_own(editor) -> None:
    """Runs are shown by the workflow's id: a file with one would show what another copy trained."""
    found = set()
    for _ in range(2):
        editor.load(quickstart())
        found.add(editor.run("() => window.app.graph.id"))
    assert len(found) == 2


def test_a_new_base_model_stands_on_one_that_it_takes(editor) -> None:
    names = editor.run("""() => {
        const node = window.LiteGraph.createNode("AtelierLoadBaseModel");
        window.app.graph.add(node);
        const { value, options } = node.widgets.find((widget) => widget.name === "checkpoint");
        return [value, ...options.values];
    }""")
    assert names[0] == names[1] and names[-3:] == [TINY_BASE.name, TINY_CLIP.name, TINY_FLOW.name]


# Whether the sentence is seen from its first line on, and more than one: a path in it may be long.
IN_VIEW = """() => {
    const status = [...document.querySelectorAll(".atelier-status")].find(each => each.checkVisibility());
    const { left, top } = status.getBoundingClientRect();
    return [4, 44].every(y => status.contains(document.elementFromPoint(left + 4, top + y)));
}"""


def test_the_start_opens_as_an_app(editor, server: ComfyServer) -> None:
    """By itself, from the list of templates: five inputs, named in words, the state of the run, what went wrong."""
    path = START.with_name(f"{START.stem}.app.json")
    workflow = json.loads(path.read_text(encoding="utf-8"))
    size = editor.page.viewport_size
    editor.page.set_viewport_size({"width": 1280, "height": 720})
    editor.run(OPEN_TEMPLATE, [workflow, "1 Start here.app"])
    for name in ("checkpoint", "folder", "trigger word", "name", "steps"):
        editor.page.get_by_text(name, exact=True).locator("visible=true").first.wait_for()
    assert editor.page.get_by_text("batch_size", exact=True).locator("visible=true").count() == 0
    status = editor.page.locator(".atelier-status:visible")
    status.get_by_text("No run yet").wait_for()
    assert lacks(editor, ComfyClient(server.url), path, workflow) == []
    editor.run("""() => {
        const node = window.app.graph.nodes.find((each) => each.comfyClass === "AtelierConceptDataset");
        node.widgets.find((each) => each.name === "folder").value = "no such folder";
    }""")
    editor.run("async () => await window.app.queuePrompt(0, 1)")
    status.get_by_text("There is no folder 'no such folder'").wait_for()
    editor.close_tours(IN_VIEW)
    editor.settle()
    editor.screenshot(f"app-{editor.version}")
    for said in (0, 1):  # as a graph, where the dataset's node says it; and as an app again
        editor.run(COMMAND, "Comfy.ToggleLinear")
        editor.page.wait_for_function(
            """said => [...document.querySelectorAll(".atelier-status")].filter(
                each => each.checkVisibility() && each.textContent.includes("There is no folder")).length === said""",
            arg=said,
        )
    editor.run(COMMAND, "Comfy.ToggleLinear")
    editor.page.set_viewport_size(size)
    editor.settle()


def test_the_blueprint_trains_with_five_inputs(editor, server: ComfyServer) -> None:
    comfy = ComfyClient(server.url)
    ours = {
        each["name"]: key for key, each in comfy.get("/global_subgraphs").items() if PACK in each["info"]["node_pack"]
    }
    assert ours.keys() == {path.stem for path in (ROOT / "subgraphs").glob("*.json")}
    for key in ours.values():
        editor.load(json.loads(comfy.get(f"/global_subgraphs/{key}")["data"]))
    names = editor.run("() => window.app.graph.nodes[0].widgets.map(widget => widget.name)")
    assert names == ["checkpoint", "folder", "trigger_word", "name", "steps"]
    editor.screenshot(f"blueprint-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    kinds = {node["class_type"]: node["inputs"] for node in editor.run(PROMPT).values()}
    nodes = ("LoadBaseModel", "ConceptDataset", "Saves", "Train", "Sample")
    assert kinds.keys() == {f"Atelier{each}" for each in nodes}
    assert kinds["AtelierTrain"]["steps"] == 1000 and kinds["AtelierSaves"]["sample_prompts"] == "{caption}"


# Whether every button that Train LoRA shows is seen whole: its words fit in it, and it lies within the view.
WHOLE = """() => {
    const shown = [...document.querySelectorAll(".atelier-train button")].filter((each) => each.checkVisibility());
    return shown.length >= 3 && shown.every((button) => {
        const [box, room] = [button, button.closest(".atelier-train")].map((each) => each.getBoundingClientRect());
        return box.width && button.scrollWidth <= button.clientWidth && box.right <= room.right + 1;
    });
}"""
LANGUAGES = {
    # Title, label of steps, a button, and of a file of another trainer what has no counterpart.
    "zh": ("训练 LoRA (Atelier)", "步数", "推测设置", "这里没有对应项的设置"),
    "ja": ("LoRA 学習 (Atelier)", "ステップ数", "設定を推定", "ここに対応するものがない設定"),
}


@pytest.mark.usefixtures("opened")  # whose language stays; a page of its own need not be loaded again for it
@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
@pytest.mark.parametrize(
    "language", ["ja", pytest.param("zh", marks=pytest.mark.thorough)]
)  # Japanese words are longer
def test_everything_speaks_the_language_of_the_editor(open_editor, server: ComfyServer, language: str) -> None:
    comfy, (title, label, button, left) = ComfyClient(server.url), LANGUAGES[language]
    try:
        comfy.request("/settings", {"Comfy.Locale": language})
        editor = open_editor(vue=False, fresh=False)
        editor.run("""() => {
            const node = window.LiteGraph.createNode("AtelierTrain");
            window.app.graph.add(node);
        }""")
        labels = editor.run(LABELS)
        assert title in labels and label in labels
        for renderer in ("vue", "litegraph"):
            editor.render(vue=renderer == "vue")
            editor.fit()
            editor.page.get_by_role("button", name=button).wait_for()
            editor.page.wait_for_function(WHOLE)
            editor.screenshot(f"{language}-{renderer}-{editor.version}")
        editor.run(DROP, ["a.toml", 'pretrained_model_name_or_path = "m"\n"odd <b>" = 3\n'])
        editor.page.wait_for_function("() => window.app.graph.nodes.some(node => node.type === 'MarkdownNote')")
        editor.page.wait_for_function(UNCOVERED)
        assert f"**{left}**" in (note := editor.run(NOTE)) and "- odd \\<b> = 3" in note
        editor.settle()
        editor.page.close()
        assert editor.errors == []
    finally:
        comfy.request("/settings", {"Comfy.Locale": "en"})
