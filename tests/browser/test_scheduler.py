"""The Scheduler draws its curve on itself, in both render modes, and leaves no trace of it in files and prompts."""

import pytest
from looks import faint

pytestmark = pytest.mark.browser

ADD_TRAIN = """scheduler => {
    const node = window.LiteGraph.createNode("AtelierTrain"), graph = window.app.graph;
    node.pos = [700, 80];
    graph.add(node);
    graph.getNodeById(scheduler).connect(0, node, node.inputs.findIndex(input => input.name === "scheduler"));
    return node.id;
}"""
SET = """([id, values]) => {
    for (const [name, value] of Object.entries(values))
        window.app.graph.getNodeById(id).widgets.find(widget => widget.name === name).value = value;
}"""
CAPTURED = "() => { window.app.canvas.emitBeforeChange(); window.app.canvas.emitAfterChange(); }"
SAVED = "id => window.app.graph.getNodeById(id).serialize().widgets_values"
SHOWS = "words => document.querySelector('.atelier-schedule')?.textContent.includes(words)"
OLD = {  # as the editor saved it when the node had three widgets and drew nothing
    "nodes": [
        {
            "id": 5,
            "type": "AtelierScheduler",
            "pos": [100, 100],
            "size": [320, 112],
            "mode": 0,
            "flags": {},
            "inputs": [],
            "outputs": [{"name": "SCHEDULER", "type": "ATELIER_SCHEDULER", "links": []}],
            "properties": {},
            "widgets_values": ["linear", 500, 0.1],
        }
    ],
    "links": [],
    "groups": [],
    "config": {},
    "extra": {},
    "version": 0.4,
}
NODE = 5


def curve(editor, words: str) -> list[tuple[float, float]]:
    """Wait until the one picture says `words` and return its curve, in pixels of the picture."""
    editor.page.wait_for_function(SHOWS, arg=words)
    box = editor.page.locator(".atelier-schedule")
    assert box.count() == 1 and box.is_visible()
    lines = box.locator("polyline")
    return [tuple(map(float, p.split(","))) for p in lines.get_attribute("points").split()] if lines.count() else []


def test_the_node_draws_the_curve_that_its_widgets_describe(editor) -> None:
    editor.load(OLD)
    points = curve(editor, "warm-up 500")
    left, right, top, bottom = 50, 308, 14, 140  # of the picture's frame
    assert points[0][0] == left and points[-1][0] == right
    assert points[0][1] == pytest.approx(bottom, abs=0.5)
    assert min(y for _, y in points) == pytest.approx(top, abs=0.5)
    highest = min(points, key=lambda point: point[1])
    assert highest[0] == pytest.approx((left + right) / 2, abs=2)  # 500 of 1000 steps
    assert points[-1][1] == pytest.approx(bottom - 0.1 * (bottom - top), abs=0.5)
    assert editor.run(SAVED, NODE) == ["linear", 500, 0.1, "steps", 0]
    editor.alone(NODE)
    editor.settle()
    assert faint(editor.page, ".atelier-schedule, .atelier-schedule *") == []
    prompt = editor.run("async () => (await window.app.graphToPrompt()).output")
    assert prompt[str(NODE)]["inputs"] == {
        "name": "linear",
        "warmup_steps": 500,
        "min_lr_ratio": 0.1,
        "warmup_unit": "steps",
        "planned_steps": 0,
    }

    # An undo makes the node anew, and the new one's picture is shown.
    editor.run(
        f"([id, values]) => {{ ({CAPTURED})(); ({SET})([id, values]); ({CAPTURED})(); }}", [NODE, {"warmup_steps": 300}]
    )
    curve(editor, "warm-up 300")
    editor.run("() => window.app.extensionManager.command.execute('Comfy.Undo')")
    curve(editor, "warm-up 500")

    train = editor.run(ADD_TRAIN, NODE)
    curve(editor, "1000")  # of the run it belongs to
    editor.run(SET, [train, {"steps": 400}])
    assert (
        curve(editor, "warmup_steps is 500, and the run has 400 steps; set warmup_steps of Scheduler below that.") == []
    )
    editor.run(SET, [NODE, {"warmup_steps": 0, "name": "rex_restarts", "name.gamma": 0.5}])
    points = curve(editor, "200")  # the middle of the run
    assert min(y for x, y in points if x > 180) == pytest.approx(bottom - 0.5 * (bottom - top), abs=2)
    assert editor.run(SAVED, NODE) == ["rex_restarts", 2, 0.5, 0.9, 1, 0, 0.1, "steps", 0]
    editor.screenshot(f"scheduler-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    editor.run(SET, [NODE, {"name": "expression", "name.expression": "1 / (t - 0.5"}])
    assert curve(editor, "cannot be read: '(' was never closed.") == []
