"""A person sets one picture of a folder: its focus by a click, leave out, repeats, and its mask in ComfyUI's editor."""

import json

import pytest
from PIL import Image

from lora_atelier.dev import QUICKSTART

pytestmark = pytest.mark.browser

DATA = 2  # its id there
SET = """value => {
    const node = window.app.graph.nodes.find(node => node.comfyClass === "AtelierConceptDataset");
    const widget = node.widgets.find(widget => widget.name === "folder");
    widget.value = value;
    widget.callback?.(value);
}"""


def shown(editor, words: str) -> None:
    editor.page.wait_for_function(
        "words => document.querySelector('.atelier-look [role=status]')?.textContent.includes(words)", arg=words
    )


def test_a_picture_is_focused_left_out_and_masked(editor, server) -> None:
    how = f"{'vue' if editor.vue else 'litegraph'}-{editor.version}"
    folder = server.base / "input" / f"one-{how}"
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "lora_atelier.json"
    for number in range(3):
        Image.radial_gradient("L").resize((320, 160)).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a ring")

    def written(wanted: dict) -> None:
        for _ in range(300):
            if (json.loads(own.read_text())["pictures"] if own.exists() else {}) == wanted:
                return
            editor.page.wait_for_timeout(100)
        pytest.fail(f"{own.read_text() if own.exists() else 'no file'} instead of {wanted}")

    page = editor.page
    editor.load(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    editor.alone(DATA)
    editor.run(SET, folder.name)
    shown(editor, "3 pictures")
    view = page.get_by_role("dialog", name="Pictures and captions")
    page.get_by_role("button", name="Open…").click()
    view.get_by_text("0.png").first.wait_for()
    view.get_by_role("button", name="Focus, mask…").click()
    dialog = page.get_by_role("dialog", name=f"Pictures of {folder.name}")
    field = dialog.get_by_role("group", name="Focus of the crop")
    page.wait_for_function("() => document.querySelector('.atelier-focus img')?.naturalWidth === 320")
    box = field.bounding_box()
    field.click(position={"x": box["width"] * 0.75, "y": box["height"] * 0.25})
    page.wait_for_function("() => document.querySelector('.atelier-focus .focus')")
    x, y = json.loads(own.read_text())["pictures"]["0.png"]["focus"]
    assert abs(x - 0.75) < 0.01 and abs(y - 0.25) < 0.02
    field.focus()
    for _ in range(3):  # quicker than the server answers
        page.keyboard.press("ArrowLeft")
    written({"0.png": {"focus": [round(x - 0.03, 3), y]}})
    editor.screenshot(f"one-picture-{how}")
    dialog.get_by_role("button", name="No focus").click()
    written({})
    dialog.get_by_role("button", name="Undo").click()
    written({"0.png": {"focus": [round(x - 0.03, 3), y]}})

    dialog.get_by_role("button", name="Paint the mask").click()
    canvas = page.locator("#maskEditorCanvasContainer")
    canvas.wait_for()
    page.wait_for_function(
        "() => [...document.querySelectorAll('#maskEditorCanvasContainer canvas')].some(c => c.width === 320)"
    )
    editor.settle()
    area = canvas.locator("canvas").first.bounding_box()
    middle = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(middle[0] + 40, middle[1], steps=8)
    page.mouse.up()
    editor.screenshot(f"one-picture-mask-editor-{how}")
    page.get_by_role("dialog").filter(has=canvas).get_by_role("button", name="Save").click()
    dialog.get_by_text("its mask leaves out what is red").wait_for()
    with Image.open(folder / "0-masklabel.png") as mask:
        assert mask.size == (320, 160) and mask.getextrema() == (0, 255)
    assert not [*(server.base / "input").glob("clipspace*")]  # the editor's layers are in temp
    page.wait_for_function("() => document.querySelector('.atelier-focus img')?.naturalWidth === 320")
    editor.screenshot(f"one-picture-masked-{how}")
    dialog.get_by_role("button", name="Earlier mask").click()
    page.wait_for_function(
        "() => !document.querySelector('.atelier-one-picture [role=status]').textContent.includes('red')"
    )
    assert not (folder / "0-masklabel.png").exists()

    dialog.get_by_role("button", name="Next picture").click()
    dialog.get_by_label("Leave out").check()
    written({"0.png": {"focus": [round(x - 0.03, 3), y]}, "1.png": {"leave_out": True}})
    dialog.get_by_role("button", name="Next picture").click()
    dialog.get_by_label("Repeats").fill("4")
    page.keyboard.press("Tab")
    dialog.get_by_label("Role").select_option("validation")
    written({
        "0.png": {"focus": [round(x - 0.03, 3), y]}, "1.png": {"leave_out": True},
        "2.png": {"role": "validation", "repeats": 4},
    })  # fmt: skip
    page.wait_for_function("() => document.querySelector('.atelier-one-picture').ariaBusy === 'false'")
    own.write_text('{"pictures": {}}')  # by another program
    dialog.get_by_label("Repeats").fill("7")
    page.keyboard.press("Tab")
    dialog.get_by_text("was changed meanwhile").wait_for()
    written({})
    dialog.get_by_label("Leave out").check()
    written({"2.png": {"leave_out": True}})
    dialog.get_by_role("button", name="Close").click()
    view.get_by_text("Left out: 2.png").wait_for()
    view.get_by_role("button", name="Close").click()
    shown(editor, "2 pictures")
    page.get_by_role("button", name="Open…").click()  # as on another day
    view.get_by_text("Left out: 2.png").wait_for()
    view.get_by_role("button", name="Focus, mask…").click()
    dialog.get_by_label("Picture", exact=True).select_option("2.png")
    page.wait_for_function("() => document.querySelector('.atelier-one-picture input').checked")
    dialog.get_by_role("button", name="Undo").click()
    written({})
    dialog.get_by_role("button", name="Close").click()
    view.get_by_text("3 of 3 shown").wait_for()
    view.get_by_role("button", name="Close").click()
    shown(editor, "3 pictures")
