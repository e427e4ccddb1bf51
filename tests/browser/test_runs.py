"""The tab of runs in the real editor: the list, one run, several over each other, and what people do there."""

import json
import shutil
import zipfile
from collections.abc import Iterator

import pytest
from PIL import Image
from run_folders import make_run

from comfy_client import ComfyServer
from lora_atelier.dev import QUICKSTART
from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.runs import RunFolder

pytestmark = [pytest.mark.browser, pytest.mark.parametrize("opened", ["litegraph", "vue"], indirect=True)]

OPEN = """async () => {
    if (!document.querySelector('.atelier-runs'))
        await window.app.extensionManager.command.execute('Workspace.ToggleSidebarTab.atelier-runs');
}"""
TRAIN = """() => Object.fromEntries(window.app.graph.nodes.find(node => node.comfyClass === "AtelierTrain").widgets
    .filter(widget => widget.name.startsWith("on_existing")).map(widget => [widget.name, widget.value]))"""


@pytest.fixture
def runs(server: ComfyServer) -> Iterator[list[RunFolder]]:
    """Return a finished run with samples and its workflow, a stopped one, and one that cannot be read."""
    folder = server.base / "output" / "atelier" / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    found = [
        make_run(folder, "moss", "a", saves=(2, 4), logged=4, finished=4, steps=4),
        make_run(folder, "fern", "b", saves=(2,), logged=4, steps=8),
        make_run(folder, "odd", "c", saves=(2,)),
    ]
    for step in (2, 4):
        (found[0].path / "samples").mkdir(exist_ok=True)
        Image.new("RGB", (64, 64), (200, 40 * step, 60)).save(found[0].path / "samples" / f"step-{step:08}-1.png")
    found[0].keep_workflow(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    about = {**found[1].about, "config": {"base_model": {"path": "base.safetensors"}, "train": {"seed": 7}}}
    write_json(found[1].path / "run.json", about)
    (found[2].path / "run.json").write_text("{", encoding="utf-8")
    yield found
    shutil.rmtree(folder)


def test_runs_are_searched_opened_by_keys_and_compared(editor, runs: list[RunFolder]) -> None:
    page = editor.page
    editor.run(OPEN)
    tab = page.locator(".atelier-runs")
    rows = tab.get_by_role("listitem")
    page.wait_for_function("() => document.querySelectorAll('.atelier-runs .run').length === 3")
    assert rows.filter(has_text="odd").get_by_role("checkbox").is_disabled()
    tab.get_by_role("combobox", name="Order").select_option("title")
    assert rows.locator("b").all_text_contents()[:2] == ["fern", "moss"]
    tab.get_by_role("searchbox").fill("finished MOSS")
    page.wait_for_function("() => document.querySelectorAll('.atelier-runs .run').length === 1")
    page.wait_for_function("() => document.querySelector('.atelier-runs .run img')?.naturalWidth > 0")
    editor.screenshot(f"runs-list-{editor.version}-{'vue' if editor.vue else 'litegraph'}")

    rows.locator("button").focus()
    page.keyboard.press("Enter")
    tab.get_by_role("heading", name="moss").wait_for()
    tab.get_by_text("Finished after 4 steps.").wait_for()
    assert tab.get_by_role("button", name="Fork").count() == 2 and tab.locator("canvas").count() == 1
    tab.locator(".atelier-samples img").nth(1).wait_for()
    editor.settle()
    editor.screenshot(f"runs-one-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
    page.keyboard.press("Escape")
    tab.get_by_role("searchbox").fill("")
    for name in ("moss", "fern"):
        rows.filter(has_text=name).get_by_role("checkbox").check()
    tab.get_by_role("button", name="Compare 2").click()
    tab.get_by_role("cell", name="7", exact=True).wait_for()
    assert tab.get_by_role("row").filter(has_text="steps").count() == 1
    editor.settle()
    editor.screenshot(f"runs-compared-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
    tab.get_by_role("button", name="All runs").click()
    for name in ("moss", "fern"):
        rows.filter(has_text=name).get_by_role("checkbox").uncheck()


def test_a_save_is_forked_and_deleted_after_a_question(editor, runs: list[RunFolder]) -> None:
    page, (moss, *_) = editor.page, runs
    editor.run(OPEN)
    tab = page.locator(".atelier-runs")
    tab.get_by_role("listitem").filter(has_text="moss").get_by_role("button").click()
    tab.get_by_role("row").filter(has_text="2").get_by_role("button", name="Fork").first.wait_for()
    tab.get_by_role("button", name="Fork").last.click()
    page.get_by_text("Train LoRA now forks from step 2.").first.wait_for()
    forked = {"on_existing": "fork", "on_existing.run": moss.path.name, "on_existing.step": 2}
    assert editor.run(TRAIN) == forked

    def answer(name: str) -> None:
        tab.get_by_role("button", name="Delete 1 of 2").click()
        page.get_by_text("That frees").first.wait_for()
        editor.settle()
        editor.screenshot(f"runs-{name}-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
        page.get_by_role("dialog").get_by_role("button").filter(has_text=name).click()

    tab.get_by_role("checkbox", name="Choose the save of step 2").check()
    answer("Cancel")
    assert len(moss.saves()) == 2
    answer("Delete")
    page.get_by_text("are free again").first.wait_for()
    assert [path.name for path in moss.saves()] == ["step-00000004"]
    tab.get_by_role("button", name="All runs").click()


def test_a_run_is_renamed_exported_published_continued_and_deleted(editor, runs: list[RunFolder], server) -> None:
    page, (moss, fern, odd), name = editor.page, runs, f"moss in {'vue' if editor.vue else 'litegraph'}"
    editor.run(OPEN)
    tab = page.locator(".atelier-runs")

    def open_run(name: str) -> None:
        tab.get_by_role("listitem").filter(has_text=name).get_by_role("button").click()
        tab.get_by_role("button", name="Delete", exact=True).wait_for()

    def answer(text: str) -> None:
        field = page.get_by_role("dialog").get_by_role("textbox")
        field.fill(text)
        field.press("Enter")

    open_run("moss")
    tab.get_by_role("button", name="Rename").click()
    answer("My best moss")
    tab.get_by_role("heading", name="My best moss").wait_for()
    assert moss.title() == "My best moss"

    with page.expect_download() as download:
        tab.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "My best moss-step-4.zip"
    with zipfile.ZipFile(download.value.path()) as archive:
        assert "My best moss-step-4/samples/step-00000004-1.png" in archive.namelist()

    tab.get_by_role("button", name="To LoRAs").last.click()
    answer(f"tested/{name}")
    page.get_by_text(f"Saved in models/loras: {name}.safetensors").first.wait_for()
    assert (server.base / "models" / "loras" / "tested" / f"{name}.safetensors").is_file()
    tab.get_by_role("button", name="To LoRAs").last.click()
    answer(f"tested/{name}")
    page.get_by_text(f"{name}.safetensors exists already; choose another name.").first.wait_for()

    tab.get_by_role("button", name="Workflow").click()
    page.wait_for_function("() => window.app.graph.nodes.some(node => node.comfyClass === 'AtelierTrain')")
    tab.get_by_role("button", name="Continue").click()
    page.get_by_text(
        "My best moss is finished. Raise steps of Train LoRA, then press Run to train on."
    ).first.wait_for()
    assert editor.run(TRAIN)["on_existing"] == "resume"
    page.keyboard.press("Escape")

    open_run("fern")
    tab.get_by_role("button", name="Continue").click()
    page.get_by_text("This run keeps no workflow.").first.wait_for()
    tab.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text("That frees").first.wait_for()
    page.get_by_role("dialog").get_by_role("button").filter(has_text="Delete").click()
    page.wait_for_function("() => document.querySelectorAll('.atelier-runs .run').length === 2")
    assert not fern.path.exists() and moss.path.exists() and odd.path.exists()
