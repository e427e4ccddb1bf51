"""Guess settings on Train LoRA fills in the inputs that are there, and says the rest as text, in both renderers."""

import pytest
from in_editor import BASE, CONCEPT, LORA, MASKS, OPTIMIZER, TRAIN, part

pytestmark = pytest.mark.browser

VALUES = """() => {
    const node = kind => window.app.graph.nodes.find(node => node.comfyClass === kind);
    const value = (kind, name) => node(kind)?.widgets.find(widget => widget.name === name)?.value;
    return {
        resolution: value("AtelierTrain", "resolution"), steps: value("AtelierTrain", "steps"),
        epochs: value("AtelierTrain", "epochs"), batch: value("AtelierTrain", "batch_size"),
        rank: value("AtelierLoraConfig", "rank"), rate: value("AtelierOptimizer", "name.learning_rate"),
    };
}"""
SHOWS = "words => [...document.querySelectorAll('.atelier-guesses')].some(box => box.textContent.includes(words))"
REMOVE = """() => {
    const { graph } = window.app;
    graph.remove(graph.nodes.find(node => node.comfyClass === "AtelierOptimizer"));
}"""


def test_a_guess_fills_in_what_is_there(editor) -> None:
    editor.load(part(BASE, CONCEPT, MASKS, OPTIMIZER, LORA, TRAIN))
    editor.alone(TRAIN)
    button = editor.page.get_by_role("button", name="Guess settings")
    button.click()
    editor.page.wait_for_function(SHOWS, arg="learning_rate ")
    wanted = {"resolution": 128, "steps": 1500, "epochs": 0, "batch": 1, "rank": 16, "rate": 0.003}  # of 13 pictures
    assert editor.run(VALUES) == pytest.approx(wanted)

    editor.run(REMOVE)
    button.click()
    editor.page.wait_for_function(SHOWS, arg="Optimizer is not linked")
    editor.settle()
    editor.screenshot(f"guess-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
