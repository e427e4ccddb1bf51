"""Train LoRA's buttons in the real editor: alive while it trains, in no file and no prompt."""

import json
import re

import pytest

from lora_atelier.dev import TOUR

pytestmark = pytest.mark.browser

TRAIN = 12  # the node's id in the workflow
SAVED = f"() => window.app.graph.getNodeById({TRAIN}).serialize().widgets_values"
PROMPT = f"async () => Object.keys((await window.app.graphToPrompt()).output[{TRAIN}].inputs)"
ALL = "alive => { const b = [...document.querySelectorAll('.atelier-train button')]; return b.length === 3 && "
ALL += "b.every(button => button.disabled !== alive); }"
SET = f"""values => {{
    const node = window.app.graph.getNodeById({TRAIN});
    for (const [name, value] of Object.entries(values))
        node.widgets.find(widget => widget.name === name).value = value;
}}"""
ALONE = f"""() => {{  // away from the other nodes, all of it in view
    const node = window.app.graph.getNodeById({TRAIN}), canvas = window.app.canvas;
    node.pos = [0, 3000];
    canvas.ds.scale = 0.75;
    canvas.ds.offset = [200, 100 - 3000];
    canvas.setDirty(true, true);
}}"""
QUEUE = f"async () => await window.app.queuePrompt(0, 1, ['{TRAIN}'])"


# Each frontend shows one run in both renderers, one after the other: how long a run takes is no matter of the page, and
# the buttons must live through a change of the renderer anyway.
@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)
def test_a_run_is_asked_by_buttons_that_are_alive_while_it_trains(editor) -> None:
    workflow = json.loads(TOUR.read_text(encoding="utf-8"))
    editor.load(workflow)
    values = next(node["widgets_values"] for node in workflow["nodes"] if node["id"] == TRAIN)
    saved = editor.run(SAVED)
    assert saved[: len(values)] == values and set(saved[len(values) :]) <= {"resume"}
    assert "requests" not in editor.run(PROMPT)
    assert "wishes" not in editor.run(PROMPT)
    editor.run(ALONE)
    editor.settle()
    editor.page.wait_for_function(ALL, arg=False)

    # A run too long to end by itself, of one micro-step that is soon over.
    editor.run(SET, {"name": "buttons", "steps": 100_000, "batch_size": 1, "resolution": 64})
    editor.run(QUEUE)
    editor.page.wait_for_function(ALL, arg=True)

    def ask(name: str, answer: str) -> None:
        editor.page.get_by_role("button", name=name).click()
        editor.page.get_by_text(answer).first.wait_for()  # it may be repeated for screen readers

    for renderer in ("litegraph", "vue"):
        editor.render(vue=renderer == "vue")
        editor.run(ALONE)
        editor.settle()
        editor.page.get_by_text(re.compile(r"^step \d+/")).first.wait_for()
        if renderer == "litegraph":
            ask("Save now", "The run will be saved after this step.")
        else:
            ask("Sample now", "Samples will be drawn after this step.")
        editor.screenshot(f"train-{renderer}-{editor.version}")
    ask("Stop and keep", "The run stops after this step; the next nodes get the LoRA so far.")
    editor.page.wait_for_function(ALL, arg=False)
    editor.render(vue=False)
