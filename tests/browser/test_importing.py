"""Settings of another trainer, dropped on the canvas: a graph, a note of what became of them, and what is open."""

import pytest
from looks import BEHIND, DROP, EMPTY, MOST_EMPTY, NOTE, UNCOVERED

pytestmark = pytest.mark.browser

KINDS = "() => window.app.graph.nodes.map(node => node.comfyClass ?? node.type).sort()"
VIEW = """() => {
    const { canvas, graph } = window.app, note = graph.nodes.find(node => node.type === 'MarkdownNote');
    return [canvas.ds.scale, ...[0, 1].map(axis => (note.pos[axis] + canvas.ds.offset[axis]) * canvas.ds.scale)];
}"""
TOML = """
[training]
network_dim = 16
network_alpha = 8
learning_rate = 1e-4
max_train_steps = 500
odd_setting = 3
train_data_dir = "cats"
pretrained_model_name_or_path = "D:\\\\models\\\\checkpoints\\\\atelier-tiny.safetensors"
"""


def test_a_dropped_file_becomes_a_graph_with_a_report(editor) -> None:
    page = editor.page
    editor.run(DROP, ["cats.toml", TOML])
    page.wait_for_function("() => window.app.graph.nodes.some(node => node.comfyClass === 'AtelierTrain')")
    page.wait_for_function(UNCOVERED)
    editor.settle()
    kinds = editor.run(KINDS)
    assert {"AtelierLoadBaseModel", "AtelierConceptDataset", "AtelierLoraConfig", "MarkdownNote"} <= set(kinds)
    note = editor.run(NOTE)
    assert "odd_setting = 3" in note and "steps of Train LoRA: 500" in note
    assert [each for each in page.evaluate(EMPTY, editor.vue) if each[1] > MOST_EMPTY] == editor.run(BEHIND) == []
    editor.screenshot(f"imported-{'vue' if editor.vue else 'litegraph'}-{editor.version}")


def test_a_large_graph_opens_readable_and_stays_so(editor) -> None:
    page = editor.page
    many = "\n".join(f"odd_setting_{number} = {number}" for number in range(60))
    editor.run(
        DROP, ["many.toml", f"{TOML}{many}\nmin_snr_gamma = 5\nsample_prompts = 'a.txt'\nsave_every_n_steps = 50\n"]
    )
    page.wait_for_function("() => window.app.graph.nodes.some(node => node.comfyClass === 'AtelierTrain')")
    page.wait_for_function(UNCOVERED)
    editor.settle()
    page.wait_for_timeout(1500)  # the editor moves its view by and by, where it does
    scale, left, top = editor.run(VIEW)
    assert 0.85 <= scale <= 1 and 0 < left < 400 and 0 < top < 400


def test_a_file_that_cannot_be_read_is_named_in_a_sentence(editor) -> None:
    """A workflow goes to the editor, as before."""
    page = editor.page
    editor.run(DROP, ["broken.toml", "steps = = 3"])
    page.get_by_text("broken.toml cannot be imported").first.wait_for()
    page.wait_for_function(UNCOVERED)
    editor.run(
        DROP,
        [
            "own.json",
            '{"nodes": [{"id": 1, "type": "Note", "pos": [0, 0], "size": [200, 100], "flags": {}, '
            '"order": 0, "mode": 0, "properties": {}, "widgets_values": ["mine"]}], "links": [], "version": 0.4}',
        ],
    )
    page.wait_for_function("() => window.app.graph.nodes.length === 1 && window.app.graph.nodes[0].type === 'Note'")
    page.wait_for_function(UNCOVERED)
