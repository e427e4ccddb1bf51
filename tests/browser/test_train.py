"""Train LoRA's buttons in the real editor, in both render modes: alive while it trains, in no file and no prompt."""

import json
import re

import pytest

from lora_atelier.dev import QUICKSTART

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


def test_a_run_is_asked_by_buttons_that_are_alive_while_it_trains(editor) -> None:
    workflow = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    editor.load(workflow)
    values = next(node["widgets_values"] for node in workflow["nodes"] if node["id"] == TRAIN)
    saved = editor.run(SAVED)
    assert saved[: len(values)] == values and set(saved[len(values) :]) <= {"resume"}
    assert "requests" not in editor.run(PROMPT)
    editor.run(ALONE)
    editor.settle()
    editor.page.wait_for_function(ALL, arg=False)

    # A run too long to end by itself, of one micro-step that is soon over.
    mode = "vue" if editor.vue else "litegraph"
    editor.run(SET, {"name": f"buttons-{mode}", "steps": 100_000, "batch_size": 1, "resolution": 64, "sample_steps": 2})
    editor.run(QUEUE)
    editor.page.wait_for_function(ALL, arg=True)
    editor.page.get_by_text(re.compile(r"^step \d+/")).first.wait_for()
    for name, answer in (
        ("Save now", "The run is saved after this step."),
        ("Sample now", "Samples are drawn after this step."),
        ("Stop and keep", "The run ends after this step; what it has learned goes on to the next nodes."),
    ):
        editor.page.get_by_role("button", name=name).click()
        editor.page.get_by_text(answer).wait_for()
        if name == "Sample now":
            editor.page.wait_for_timeout(3000)
            editor.screenshot(f"train-{mode}")
    editor.page.wait_for_function(ALL, arg=False)
    assert editor.errors == []
