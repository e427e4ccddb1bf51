"""The run on Train LoRA in the real editor: while it trains, after a reload, in a second tab, on no other node."""

import copy
import json
import re
import uuid
from dataclasses import replace

import pytest
from in_editor import SAVES, TRAIN, TRAINING, finished, part, values_of
from looks import LEAST_LETTERS, faint

from comfy_client import ComfyClient
from lora_atelier.dev import QUICKSTART, ROOT

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("unhurried")]

STEPS = 11  # the place of sample_steps among the values of Saves & Samples
SAVED = f"() => window.app.graph.getNodeById({TRAIN}).serialize().widgets_values"
PROMPT = f"async () => Object.keys((await window.app.graphToPrompt()).output[{TRAIN}].inputs)"
ALL = "alive => { const b = [...document.querySelectorAll('.atelier-train [data-ask]')]; return b.length === 4 && "
ALL += "b.every(button => (button.style.display !== 'none') === alive); }"
STATUS = "words => new RegExp(words).test(document.querySelector('.atelier-status')?.textContent)"
# The number of colours in the graph's picture: one where nothing is drawn.
COLOURS = """() => {
    const canvas = [...document.querySelectorAll(".atelier-graph canvas")].find((each) => each.offsetHeight);
    if (!canvas?.width) return 0;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""
# The letters of the graph's picture, in pixels at 100 %.
PEN = """() => [...document.querySelectorAll(".atelier-graph canvas")].filter((each) => each.offsetHeight)
    .map((each) => parseFloat(each.getContext("2d").font))"""
ANY = "words => [...document.querySelectorAll('.atelier-status')].some(s => new RegExp(words).test(s.textContent))"
COUNT = """() => {
    let count = 0;
    window.app.api.addEventListener("atelier.run", () => count++);
    return () => count;
}"""
STAND_IN = 1  # the node of the blueprint that stands for its subgraph
# Whether the view lies within the node that stands for the subgraph, which is as wide as the view needs.
IN_ITS_NODE = """id => {
    const node = window.app.graph.getNodeById(id);
    const view = [...document.querySelectorAll(".atelier-train")].find((each) => each.offsetHeight);
    if (!view) return false;
    const [[x, y], [width, height]] = [node.pos, node.size], { ds } = window.app.canvas;
    const box = view.getBoundingClientRect();
    const left = (x + ds.offset[0]) * ds.scale, top = (y + ds.offset[1]) * ds.scale, edge = 2;
    return box.left >= left - edge && box.right <= left + width * ds.scale + edge && box.top >= top - edge &&
        box.bottom <= top + Math.max(height, node.boundingRect[3]) * ds.scale + edge;
}"""
QUEUE = f"async () => await window.app.queuePrompt(0, 1, ['{TRAIN}'])"
READY = "() => window.app?.extensionManager?.workflow?.activeWorkflow"


def training(name: str, identity: str = "") -> dict:
    """Return a workflow with a run of a name that would end too late for a test; identity: by default a new one."""
    workflow = part(*TRAINING)
    values_of(workflow, TRAIN)[:5] = [name, 100_000, 0, 1, 64]  # steps, epochs, batch_size, resolution
    values_of(workflow, SAVES)[STEPS] = 2
    return {**workflow, "id": identity or str(uuid.uuid4())}


def wait(page, words: str) -> None:
    """Wait until the node's status says `words`, a regular expression."""
    page.wait_for_function(STATUS, arg=words)


def ask(page, name: str, answer: str) -> None:
    """Press a button and wait for the server's answer."""
    page.get_by_role("button", name=name).click()
    page.get_by_text(answer).first.wait_for()  # it may be repeated for screen readers


# Each frontend shows one run in both renderers, one after the other: how long a run takes is no matter of the page, and
# the widget must live through a change of the renderer anyway.
@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_a_run_shows_on_its_node_wherever_its_workflow_is_open_and_on_no_other(
    editor, visitor, server, pytestconfig
) -> None:
    page, workflow = editor.page, training("live")
    editor.load(workflow)
    values, saved = values_of(workflow, TRAIN), editor.run(SAVED)
    assert saved[: len(values)] == values and set(saved[len(values) :]) <= {"resume"}
    assert "run" not in editor.run(PROMPT)
    wait(page, "^No run yet")
    page.wait_for_function(ALL, arg=False)

    # During the run: status, graph, buttons, samples, notes; in both renderers.
    editor.alone(TRAIN)
    editor.run(QUEUE)
    page.wait_for_function(ALL, arg=True)
    for renderer in ("vue", "litegraph"):
        editor.render(vue=renderer == "vue")
        editor.alone(TRAIN)
        wait(page, r"^step \d+ of 100000$")
        page.get_by_text(re.compile("left · .* · loss ")).wait_for()
        page.locator(".atelier-memory").get_by_text(re.compile("of .* GB used, .* GB free")).wait_for()
        page.wait_for_function(f"() => ({COLOURS})() > 3")
        if renderer == "vue":
            ask(page, "Save now", "The run will be saved after this step.")
        else:
            ask(page, "Sample now", "Samples will be drawn after this step.")
            page.locator(".atelier-samples button").nth(1).wait_for()
        editor.settle()
        editor.screenshot(f"train-{renderer}-{editor.version}")
    assert "mossling" in page.locator(".atelier-notes").text_content()

    # The large view: arrow keys go from prompt to prompt.
    page.locator(".atelier-samples button:last-child").first.click()  # the LoRA of the oldest one may go meanwhile
    large = page.locator(".atelier-large")
    large.get_by_text("red background").wait_for()
    large.get_by_role("button", name="Use this LoRA", exact=True).wait_for()  # of a step that only drew samples
    page.keyboard.press("ArrowDown")
    large.get_by_text("green background").wait_for()
    page.keyboard.press("Escape")
    large.wait_for(state="detached")

    is_there_again(editor, workflow)
    if pytestconfig.getoption("thorough"):  # a second tab knows no more than the page does after a reload
        other = replace(editor, page=visitor.new_page())
        other.page.goto(server.url, wait_until="domcontentloaded")
        other.page.wait_for_function(READY)
        is_there_again(other, workflow)
        other.page.close()

    # Another workflow, whose nodes have the same numbers.
    editor.load(training("live"))
    wait(page, "^No run yet")
    seen = page.evaluate_handle(COUNT)
    page.wait_for_function("count => count() > 2", arg=seen)
    wait(page, "^No run yet")

    its_twin_shows_none(editor, workflow)
    another_waits(editor, server)
    editor.load(workflow)
    ask(page, "Stop and keep", "The run stops after this step; the next nodes get the LoRA so far.")
    wait(page, r"^Stopped after step \d+ of 100000")


def is_there_again(editor, workflow: dict) -> None:
    """Open the workflow of a run at work: the nodes are new, and all of the run is there again."""
    editor.load(workflow)
    editor.alone(TRAIN)
    editor.page.wait_for_function(ALL, arg=True)
    wait(editor.page, r"^step \d+ of 100000$")
    editor.page.wait_for_function(f"() => ({COLOURS})() > 3")
    editor.page.locator(".atelier-samples button").nth(1).wait_for()


def its_twin_shows_none(editor, workflow: dict) -> None:
    """Of two Train LoRA of one workflow each shows its own run."""
    twin = copy.deepcopy(next(node for node in workflow["nodes"] if node["id"] == TRAIN))
    twin |= {"id": 90, "pos": [0, 3000], "outputs": [{**each, "links": []} for each in twin["outputs"]]}
    twin["inputs"] = [{**each, "link": None} for each in twin["inputs"]]
    editor.load({**workflow, "nodes": [*workflow["nodes"], twin]})
    editor.page.wait_for_function(ANY, arg="^step")
    statuses = editor.page.locator(".atelier-status").all_text_contents()
    assert sorted(text.split()[0] for text in statuses) == ["No", "step"]


def another_waits(editor, server) -> None:
    """A node whose turn is to come waits beside a run that finished; in both renderers, until it leaves the queue."""
    page, workflow = editor.page, training("behind")
    finished(server, "behind", workflow["id"], str(TRAIN), steps=4)
    editor.load(workflow)
    wait(page, "^Finished after 4 steps")
    editor.run(QUEUE)
    wait(page, r"^Waiting in ComfyUI's queue\. Below is the run before\.$")
    editor.render(vue=True)
    editor.load(workflow)
    wait(page, r"^Waiting in ComfyUI's queue\. Below is the run before\.$")
    editor.run("async () => await window.app.api.clearItems('queue')")
    wait(page, "^Finished after 4 steps")
    editor.render(vue=False)


# Events of a run that ended, of one that begins before the page has looked at the first, and of another that ended.
QUICK = f"""async workflow => {{
    const tell = (state) => window.app.api.dispatchEvent(new CustomEvent("atelier.run", {{
        detail: {{ workflow, node: "{TRAIN}", changed: true, text: "", step: 1, steps: 2, details: [], ...state }},
    }}));
    tell({{ run: "first", alive: false }});
    tell({{ run: null, alive: true }});
    await new Promise(done => setTimeout(done, 1500)); // longer than the page waits before it looks
    tell({{ run: "second", alive: false }});
}}"""


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_a_run_that_begins_at_once_after_another_leaves_the_node_at_work(editor) -> None:
    workflow = training("quick", "00000000-1111-4222-8333-777777777777")
    editor.load(workflow)
    editor.run(QUICK, workflow["id"])
    wait(editor.page, "^There is no such run")


OFFERED = """() => [...document.querySelectorAll(".atelier-train button")]
    .filter((each) => each.offsetParent && !each.closest(".atelier-graph, .atelier-samples, summary"))
    .map((each) => each.textContent)"""
OFFERS = f"names => JSON.stringify(({OFFERED})()) === JSON.stringify(names)"
CHOSEN = "() => [...window.app.canvas.selectedItems ?? []].map((node) => [node.comfyClass, node.id])"
# What is linked to the inputs of the newest node of a class.
LINKED = """kind => {
    const { graph } = window.app, node = graph.nodes.findLast(({ comfyClass }) => comfyClass === kind);
    return Object.fromEntries(node.inputs.filter(({ link }) => link != null).map(({ name }, slot) =>
        [name, node.getInputNode(node.inputs.findIndex((input) => input.name === name)).comfyClass]));
}"""
REMOVE = """kind => {
    const { graph } = window.app;
    for (const node of graph.nodes.filter(({ comfyClass }) => comfyClass === kind)) graph.remove(node);
}"""
OVERLAP = """id => {
    const { graph } = window.app, [x, y, w, h] = graph.getNodeById(id).boundingRect;
    return graph.nodes.some(({ id: other, boundingRect: [left, top, width, height] }) => other !== id &&
        left < x + w && left + width > x && top < y + h && top + height > y);
}"""
ALWAYS = ["Preset…", "Guess settings"]
AT_END = ["Draw with it", "Compare saves", "Open in LoRA runs", "Download", *ALWAYS, "…"]


# A run that is at work, or has ended, as an event tells of it.
TELL = """([workflow, node, run, alive]) => window.app.api.dispatchEvent(new CustomEvent("atelier.run", { detail: {
    workflow, node, run, alive, changed: true, text: "", step: 1, steps: 6, details: [],
} }))"""


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_train_lora_offers_what_can_be_done_and_what_comes_next(editor, server) -> None:
    page, workflow = editor.page, {**json.loads(QUICKSTART.read_text(encoding="utf-8")), "id": str(uuid.uuid4())}
    train = next(node["id"] for node in workflow["nodes"] if node["type"] == "AtelierTrain")
    editor.load(workflow)
    for renderer in ("litegraph", "vue"):
        editor.render(vue=renderer == "vue")
        editor.alone(train)
        page.wait_for_function(OFFERS, arg=[*ALWAYS, "…"])
        assert page.locator(".atelier-graph canvas:visible").count() == 0
        # The menu by the keyboard alone.
        page.get_by_role("button", name="More", exact=True).press("Enter")
        page.wait_for_function("() => document.activeElement?.textContent === 'Copy command'")
        page.keyboard.press("Escape")
        page.locator(".atelier-menu").wait_for(state="hidden")
        editor.settle()
        editor.screenshot(f"idle-{renderer}-{editor.version}")
        assert faint(page, ".atelier-train, .atelier-train *") == []  # at the scale at which templates open

    # At work: what cannot be done yet, or never in this run, says why.
    run = finished(server, "offered", workflow["id"], str(train), steps=6).path.name
    editor.run(TELL, [workflow["id"], str(train), run, True])
    sample = page.locator('.atelier-train [data-ask="sample"]')
    sample.and_(page.locator("[title*='set sample_prompts of Saves & Samples']")).wait_for()
    assert faint(page, ".atelier-train, .atelier-train *") == []
    assert sample.is_disabled() and page.locator('.atelier-train [data-ask="save"]').is_enabled()

    # At the end.
    editor.run(TELL, [workflow["id"], str(train), run, False])
    for renderer in ("vue", "litegraph"):
        editor.render(vue=renderer == "vue")
        editor.alone(train)
        page.wait_for_function(OFFERS, arg=AT_END)
        editor.settle()
        editor.screenshot(f"ended-{renderer}-{editor.version}")
        assert faint(page, ".atelier-train, .atelier-train *") == []
        assert [each * 0.6 >= LEAST_LETTERS for each in editor.run(PEN)] == [True]
        with page.expect_download() as loaded:
            page.get_by_role("button", name="Download").click()
        assert loaded.value.suggested_filename.endswith(".zip")
        page.get_by_role("button", name="Draw with it").click()
        assert [kind for kind, _ in editor.run(CHOSEN)] == ["AtelierSample"]
        editor.alone(train)
        editor.run(REMOVE, "AtelierSample")
        page.get_by_role("button", name="Draw with it").click()
        ((kind, made),) = editor.run(CHOSEN)
        assert kind == "AtelierSample" and not editor.run(OVERLAP, made)
        origins = {"model": "AtelierTrain", "clip": "AtelierTrain", "vae": "AtelierLoadBaseModel"}
        assert editor.run(LINKED, "AtelierSample") == origins
        editor.alone(train)
        for _ in range(2):  # the second finds the first
            page.get_by_role("button", name="Compare saves").click()
            editor.alone(train)
        (found,) = editor.run(
            "() => window.app.graph.nodes.filter(n => n.comfyClass === 'AtelierCompareLoras')"
            ".map(n => n.widgets.find(w => w.name === 'of.run').value)"
        )
        assert found == run
        assert set(editor.run(LINKED, "AtelierCompareLoras").values()) == {"AtelierLoadBaseModel"}
        editor.settle()
        editor.screenshot(f"compare-{renderer}-{editor.version}")
        editor.run(REMOVE, "AtelierCompareLoras")
    page.get_by_role("button", name="Open in LoRA runs").click()
    page.locator(".atelier-runs").get_by_role("heading", name="offered").wait_for()
    page.evaluate("() => window.app.extensionManager.command.execute('Workspace.ToggleSidebarTab.atelier-runs')")


def runs_of(server) -> list[dict]:
    """List the runs of a server."""
    return ComfyClient(server.url).get("/atelier/runs")["runs"]


def blueprint(name: str) -> dict:
    """Return a workflow of nothing but the blueprint, with a run of a name that would end too late for a test."""
    workflow = json.loads((ROOT / "subgraphs" / "Train a LoRA (Atelier).json").read_text(encoding="utf-8"))
    values = {node["type"]: node["widgets_values"] for node in workflow["definitions"]["subgraphs"][0]["nodes"]}
    values["AtelierTrain"][3:5] = [1, 64]  # batch_size, resolution
    workflow["nodes"][0]["widgets_values"][1:] = ["atelier:concept_example", "", name, 100_000]  # as on its outside
    return {**workflow, "id": "00000000-1111-4222-8333-666666666666"}


SOON = f"""([workflow, state]) => window.app.api.dispatchEvent(new CustomEvent("atelier.run", {{
    detail: {{ workflow, node: "{STAND_IN}:14", run: null, step: 0, steps: 0, details: [], ...state }},
}}))"""


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_a_subgraph_tells_of_its_run_from_the_first_word_on(editor) -> None:
    """Before the run has a folder, also where one was shown before."""
    workflow, status = blueprint("soon"), editor.page.locator(".atelier-status:visible")
    editor.load(workflow)
    for state in ({"text": "preparing the run", "alive": True}, {"text": "Cancelled before the first step."}):
        editor.run(SOON, [workflow["id"], state])
        status.get_by_text(state["text"]).wait_for()


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_a_subgraph_shows_its_run_outside_also_after_comfyui_was_killed(editor, server) -> None:
    page = editor.page
    editor.load(blueprint("outside"))
    editor.run("async () => await window.app.queuePrompt(0, 1)")
    for renderer in ("litegraph", "vue"):
        editor.render(vue=renderer == "vue")
        editor.fit()
        wait(page, r"^step \d+ of 100000$")
        page.wait_for_function(IN_ITS_NODE, arg=STAND_IN)
        page.wait_for_function(f"() => ({COLOURS})() > 3")
        editor.fit()
        editor.screenshot(f"train-subgraph-{renderer}-{editor.version}")
    ask(page, "Save now", "The run will be saved after this step.")

    # A server that is killed, and one that is started after it: the page shows what the run's folder tells.
    while True not in [bool(run["saves"]) for run in runs_of(server) if run["name"] == "outside"]:
        wait(page, "^step")
    server.kill()
    server.start()
    wait(page, r"^Stopped after step \d+ of 100000")
    page.locator(".atelier-pending").wait_for()
    page.locator(".atelier-train").get_by_role("button", name="Continue").click()
    page.locator(".atelier-pending").wait_for(state="detached")  # it has been queued again
    wait(page, r"^step \d+ of 100000$")
    ask(page, "Pause", "The run pauses and frees the memory.")
    wait(page, r"^Paused after step \d+ of 100000")

    # Inside of the subgraph Train LoRA shows it as well.
    editor.run(f"""() => {{
        const node = window.app.graph.getNodeById({STAND_IN});
        window.app.canvas.openSubgraph(node.subgraph, node);
    }}""")
    editor.fit()
    page.locator(".atelier-status:visible").filter(has_text="Paused after step").wait_for()
    editor.run("() => window.app.canvas.setGraph(window.app.graph)")
    editor.render(vue=False)
