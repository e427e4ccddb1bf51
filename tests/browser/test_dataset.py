"""Concept Dataset shows what its folder holds before a run, and lists the folders there are, in both renderers."""

import json

import pytest

from lora_atelier.dev import QUICKSTART

pytestmark = pytest.mark.browser

DATA = 2  # its id there
SET = """([name, value]) => {
    const node = window.app.graph.nodes.find(node => node.comfyClass === "AtelierConceptDataset");
    const widget = node.widgets.find(widget => widget.name === name);
    widget.value = value;
    widget.callback?.(value);
}"""
SAVED = "() => window.app.graph.serialize().nodes.find(node => node.type === 'AtelierConceptDataset').widgets_values"
FOLDER = """() => window.app.graph.nodes.find(node => node.comfyClass === "AtelierConceptDataset")
    .widgets.find(widget => widget.name === "folder").value"""


def shown(editor, words: str) -> None:
    editor.page.wait_for_function(
        "words => document.querySelector('.atelier-look [role=status]')?.textContent.includes(words)", arg=words
    )


def test_the_folder_tells_what_it_holds(editor, server) -> None:
    folder = server.base / "input" / "looked_at"
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        (folder / f"{i}.png").write_bytes(b"never decoded")
        (folder / f"{i}.txt").write_text("a cat")
    (folder / "2.txt").unlink()
    (folder / "film.mp4").write_bytes(b"never decoded")
    workflow = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    editor.load(workflow)
    editor.alone(DATA)
    shown(editor, "13 pictures")
    assert editor.run(SAVED) == next(n for n in workflow["nodes"] if n["id"] == DATA)["widgets_values"]
    editor.page.get_by_role("button", name="Choose…").click()
    editor.page.get_by_role("dialog", name="Folders of pictures").get_by_role("button", name="looked_at").click()
    shown(editor, "3 pictures, 1 without caption. Left out: 1 film, as the model takes pictures alone.")
    assert editor.run(FOLDER) == "looked_at"
    editor.run(SET, ["captions_from", "file_name"])
    editor.page.wait_for_function(
        "() => document.querySelector('.atelier-look [role=status]').textContent .startsWith('3 pictures. Left')"
    )
    editor.run(SET, ["folder", "gone"])
    shown(editor, "There is no folder 'gone'")
    editor.run(SET, ["folder", "/etc"])
    shown(editor, "nobody allowed it yet")
    editor.settle()
    editor.screenshot(f"folder-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
