"""A workflow names a folder outside ComfyUI's: the page asks once, and the server refuses until somebody agrees."""

import json
from pathlib import Path

import pytest
from train_graph import draw_pictures

from comfy_client import ComfyServer
from lora_atelier.dev import QUICKSTART

pytestmark = pytest.mark.browser

DATA = "AtelierConceptDataset"
SET = """([kind, folder]) => {
    const node = window.app.graph.nodes.find(node => node.comfyClass === kind);
    node.widgets.find(widget => widget.name === "folder").value = folder;
}"""
# Queues the workflow, and resolves with the server's refusal, or with "" once it is in the queue.
QUEUE = """async () => {
    const kept = window.app.api.queuePrompt;
    let answer = "";
    window.app.api.queuePrompt = async (...prompt) => {
        try { return await kept.apply(window.app.api, prompt); }
        catch (problem) { answer = JSON.stringify(problem.response ?? String(problem)); throw problem; }
        finally { window.app.api.queuePrompt = kept; }
    };
    await window.app.queuePrompt(0, 1);
    return answer;
}"""


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)  # the dialog is the same in both renderers
def test_the_page_asks_once_for_a_foreign_folder(editor, server: ComfyServer, tmp_path: Path) -> None:
    allowed = server.base / "user" / "__atelier" / "allowed_folders.txt"
    folder = draw_pictures(tmp_path / "private")
    editor.load(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    editor.run(SET, [DATA, str(folder)])
    page = editor.page

    def answer(name: str) -> str:
        queued = page.evaluate_handle(f"() => ({{ done: ({QUEUE})() }})")
        page.get_by_text("Allow this folder?").first.wait_for()
        editor.settle()
        editor.screenshot(f"folder-{name}-{editor.version}")
        page.get_by_role("dialog").get_by_role("button").filter(has_text=name).click()
        return queued.evaluate("async ({ done }) => await done")

    assert "nobody allowed it yet" in answer("Cancel") and not allowed.exists()
    page.keyboard.press("Escape")  # the refusal
    assert answer("Confirm") == "" and allowed.read_text(encoding="utf-8") == f"{folder}\n"
    assert editor.run(QUEUE) == ""  # the second time nothing is asked
    editor.run("async () => { await window.app.api.clearItems('queue'); await window.app.api.interrupt(); }")
    editor.run("() => window.app.graph.clear()")  # nothing of it lies above the settings

    editor.run("() => window.app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    page.get_by_role("dialog").get_by_text("LoRA Atelier", exact=True).first.click()
    page.locator(".atelier-folders").get_by_text(str(folder)).wait_for()
    editor.settle()
    editor.screenshot(f"settings-folders-{editor.version}")
    page.locator(".atelier-folders").get_by_role("button", name="Forget").click()
    page.locator(".atelier-folders").get_by_text("none").wait_for()
    assert allowed.read_text(encoding="utf-8") == ""
    allowed.unlink()
    page.keyboard.press("Escape")
