"""A person opens a dataset, writes a caption by keyboard, replaces in all, undoes it, and is asked what stays."""

import json

import pytest
from PIL import Image

from lora_atelier.dev import QUICKSTART

pytestmark = pytest.mark.browser

OPEN = """() => [...document.querySelectorAll(".atelier-look button")]
    .find(each => each.textContent === "Open…").click()"""
SHOWN = """() => [...document.querySelectorAll(".atelier-grid [role=option]")].map(each => each.ariaLabel)"""


def test_captions_are_written_in_the_page(editor, server) -> None:
    folder = server.base / "input" / f"written_{editor.version}_{editor.vue}"
    folder.mkdir(parents=True)
    for i in range(40):
        Image.new("RGB", (200 + 8 * i, 260), (6 * i, 90, 200 - 4 * i)).save(folder / f"{i}.png")
        if i:
            (folder / f"{i}.txt").write_text(f"red cat, number {i}", encoding="utf-8")
    workflow = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    data = next(node for node in workflow["nodes"] if node["type"] == "AtelierConceptDataset")
    data["widgets_values"][0] = folder.name
    page = editor.page

    def start() -> None:
        editor.load(workflow)
        page.wait_for_function("() => document.querySelector('.atelier-look [role=status]').textContent.includes('40')")
        editor.run(OPEN)
        page.get_by_text("40 of 40 shown, 1 selected").wait_for()

    def said(words: str) -> None:
        page.locator(".atelier-dataset").get_by_role("status").filter(has_text=words).wait_for()

    start()
    view = page.get_by_role("dialog", name="Pictures and captions")
    assert len(editor.run(SHOWN)) < 40, "tiles out of sight are in the page"
    view.get_by_label("Which pictures are shown").select_option("uncaptioned")
    page.get_by_text("1 of 40 shown").wait_for()
    view.get_by_role("listbox").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.keyboard.type("a red dog, alone")
    page.keyboard.press("Escape")
    said("1 caption is written")
    assert (folder / "0.txt").read_text(encoding="utf-8") == "a red dog, alone"
    view.get_by_text("tokens").wait_for()
    editor.screenshot(f"dataset-one-{'vue' if editor.vue else 'litegraph'}-{editor.version}")

    view.get_by_role("button", name="All", exact=True).click()
    view.get_by_role("listbox").focus()
    page.keyboard.press("Control+a")
    page.get_by_text("40 of 40 shown, 40 selected").wait_for()
    view.get_by_label("What is looked for").fill("red")
    view.get_by_label("New text").fill("green")
    view.get_by_role("button", name="Preview").click()
    change = view.get_by_role("button", name="Change 40 captions")
    change.wait_for()
    page.set_viewport_size({"width": 1280, "height": 720})
    editor.screenshot(f"dataset-many-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    page.set_viewport_size({"width": 1600, "height": 900})
    assert (folder / "7.txt").read_text(encoding="utf-8") == "red cat, number 7"
    change.click()
    said("40 captions are written")
    assert (folder / "7.txt").read_text(encoding="utf-8") == "green cat, number 7"

    view.get_by_role("button", name="Close").click()
    start()  # as on another day: nothing of the first view is left
    view.get_by_role("listbox").focus()
    (folder / "3.txt").write_text("written elsewhere", encoding="utf-8")
    page.keyboard.press("Control+z")
    asked = page.get_by_role("alertdialog")
    asked.get_by_text("written elsewhere").wait_for()
    editor.screenshot(f"dataset-asked-{'vue' if editor.vue else 'litegraph'}-{editor.version}")
    assert (folder / "7.txt").read_text(encoding="utf-8") == "green cat, number 7"
    asked.get_by_role("button", name="Write mine").click()
    said("40 captions are as before")
    for i in (3, 7):
        assert (folder / f"{i}.txt").read_text(encoding="utf-8") == f"red cat, number {i}"
    page.keyboard.press("Control+z")
    said("1 caption is as before")
    assert not (folder / "0.txt").exists()
    page.keyboard.press("Escape")
    view.wait_for(state="detached")
