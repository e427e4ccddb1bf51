"""Noise & Loss draws how often each timestep is trained, in both render modes, and leaves no trace of it in files."""

import pytest
from looks import faint

pytestmark = pytest.mark.browser

NODE = 3
OBJECTIVE = {
    "nodes": [{"id": NODE, "type": "AtelierObjective", "pos": [100, 100], "size": [320, 400], "inputs": []}],
    "links": [],
    "version": 0.4,
}
SET = """([id, values]) => {
    for (const [name, value] of Object.entries(values))
        window.app.graph.getNodeById(id).widgets.find(widget => widget.name === name).value = value;
}"""
SAVED = "id => window.app.graph.getNodeById(id).serialize().widgets_values"
SHOWS = "words => document.querySelector('.atelier-levels')?.textContent.includes(words)"
BARS = """([part, least, most]) => {
    const bars = document.querySelectorAll('.atelier-levels rect'), height = bars[part]?.getAttribute('height');
    return bars.length === 50 && least <= height && height <= most;
}"""
LINK_CONNECTED = """id => {
    const { app, LiteGraph } = window, add = (kind, x) => {
        const node = LiteGraph.createNode(kind);
        node.pos = [x, 80];
        app.graph.add(node);
        return node;
    };
    const train = add("AtelierTrain", 900), model = add("AtelierConnectModel", 500);
    const slot = name => train.inputs.findIndex(input => input.name === name);
    app.graph.getNodeById(id).connect(0, train, slot("objective"));
    model.connect(model.outputs.findIndex(output => output.type === "ATELIER_BASE_MODEL"), train, slot("base_model"));
}"""


def heights(editor, part: int, height: float) -> list[float]:
    """Wait until a bar is about so high, and return the heights of all, in pixels of the picture."""
    editor.page.wait_for_function(BARS, arg=[part, height - 1, height + 1])
    box = editor.page.locator(".atelier-levels")
    assert box.count() == 1 and box.is_visible()
    return [float(bar.get_attribute("height")) for bar in box.locator("rect").all()]


def test_the_node_draws_what_its_widgets_describe(editor) -> None:
    editor.load(OBJECTIVE)
    editor.page.wait_for_function(SHOWS, arg="as Stable Diffusion is trained")
    full = 104  # pixels
    assert heights(editor, 0, full) == pytest.approx([full] * 50)
    before = editor.run(SAVED, NODE)
    editor.alone(NODE)
    editor.settle()
    assert faint(editor.page, ".atelier-levels, .atelier-levels *") == []

    editor.run(SET, [NODE, {"timestep_distribution": "beta", "timestep_distribution.beta_a": 4}])
    hump = heights(editor, 0, 0)
    assert hump[0] == pytest.approx(0, abs=0.1) and max(hump) == pytest.approx(full)
    saved = editor.run(SAVED, NODE)
    assert [value for value in saved if value not in before] == ["beta", 4, 2]  # nothing of the picture
    editor.screenshot(f"levels-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    prompt = editor.run("async () => (await window.app.graphToPrompt()).output")
    assert prompt[str(NODE)]["inputs"]["timestep_distribution.beta_a"] == 4
    assert not [name for name in prompt[str(NODE)]["inputs"] if "curve" in name]

    editor.run(SET, [NODE, {"timestep_distribution": "uniform", "timestep_shift": 5}])
    shifted = heights(editor, 0, full / 25)
    assert shifted[49] == pytest.approx(full)  # the density of a shift s is s at 1 and 1 / s at 0

    editor.run(SET, [NODE, {"min_timestep": 900, "max_timestep": 100}])
    editor.page.wait_for_function(SHOWS, arg="min_timestep 900 is above max_timestep 100")
    editor.run(SET, [NODE, {"min_timestep": 0, "max_timestep": 999, "timestep_distribution": "auto"}])
    heights(editor, 0, full / 25)
    editor.run(LINK_CONNECTED, NODE)
    editor.page.wait_for_function(SHOWS, arg="depends on the connected model")
