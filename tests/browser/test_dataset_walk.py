"""The walk of somebody with pictures: drop 30 photographs and a zip, caption by keyboard, undo, mask one, run."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from lora_atelier.dev import QUICKSTART

pytestmark = pytest.mark.browser

DATA, TRAIN = 2, 3  # their ids there
STEPS = 2
DRAWN = 7  # the place of steps among the values of Sample
# Lets go of files over the middle of a node, wherever the renderer has it.
DROP = """([id, files]) => {
    const node = window.app.graph.getNodeById(id), { ds, canvas } = window.app.canvas;
    const box = canvas.getBoundingClientRect();
    const [x, y] = [0, 1].map(i => (node.pos[i] + (i ? 20 : node.size[0] / 2) + ds.offset[i]) * ds.scale);
    const dataTransfer = new DataTransfer(), at = { clientX: x + box.left, clientY: y + box.top };
    for (const [name, type, bytes] of files) dataTransfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
    for (const kind of ["dragenter", "dragover", "drop"])
        document.elementFromPoint(at.clientX, at.clientY)
            .dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true, ...at }));
}"""
FOLDER = "id => window.app.graph.getNodeById(id).widgets.find(widget => widget.name === 'folder').value"
PAINTED = "() => [...document.querySelectorAll('#maskEditorCanvasContainer canvas')].some(each => each.width === 96)"
LOOK = "words => document.querySelector('.atelier-look [role=status]')?.textContent === words"


def photograph(number: int) -> bytes:
    data = io.BytesIO()
    slope = Image.linear_gradient("L").rotate(12 * number).resize((96, 64)).convert("RGB")
    slope.save(data, "JPEG", comment=str(number).encode())
    return data.getvalue()


def test_photographs_are_dropped_captioned_masked_and_trained(editor, server, pytestconfig) -> None:
    page, how = editor.page, f"{'vue' if editor.vue else 'litegraph'}-{editor.version}"
    workflow = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    train = next(node for node in workflow["nodes"] if node["id"] == TRAIN)
    train["widgets_values"][:5] = [f"photographs {how}", STEPS, 0, 1, 64]  # epochs, batch_size, resolution
    drawn = next(node for node in workflow["nodes"] if node["type"] == "AtelierSample")
    drawn["widgets_values"][DRAWN] = 2
    editor.load(workflow)

    # In: 30 photographs with 28 captions, and a zip with two more.
    more = io.BytesIO()
    with zipfile.ZipFile(more, "w") as archive:
        for i in (30, 31):
            archive.writestr(f"more/{i}.jpg", photograph(i))
            archive.writestr(f"more/{i}.txt", f"a slope, number {i}")
    files = [[f"{i:02}.jpg", "image/jpeg", list(photograph(i))] for i in range(30)]
    files += [[f"{i:02}.txt", "text/plain", list(b"a slope")] for i in range(2, 30)]
    files += [["more.zip", "application/zip", list(more.getvalue())]]
    editor.alone(DATA)
    editor.settle()
    editor.run(DROP, [DATA, files])
    page.get_by_text("62 files are in input/").first.wait_for()
    page.wait_for_function(LOOK, arg="32 pictures, 2 without caption")
    folder = server.base / "input" / editor.run(FOLDER, DATA)
    editor.screenshot(f"photographs-dropped-{how}")

    # Captions by keyboard: those that lack one, one after the other; the last is taken back and written anew.
    page.get_by_role("button", name="Open…").click()
    view = page.get_by_role("dialog", name="Pictures and captions")
    status = view.get_by_role("status")
    view.get_by_text("32 of 32 shown").wait_for()
    view.get_by_label("Which pictures are shown").focus()
    page.keyboard.type("Without")
    view.get_by_text("2 of 32 shown").wait_for()
    view.get_by_role("listbox").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.keyboard.type("a slope that rises")
    page.keyboard.press("Control+Enter")
    status.filter(has_text="1 caption is written").wait_for()
    page.keyboard.type("a slope that fell")
    page.keyboard.press("Escape")
    view.get_by_role("listbox").and_(page.locator(":focus")).wait_for()
    for _ in range(300):
        if (folder / "01.txt").exists():
            break
        page.wait_for_timeout(100)
    page.keyboard.press("Control+z")
    status.filter(has_text="1 caption is as before").wait_for()
    assert (folder / "00.txt").read_text(encoding="utf-8") == "a slope that rises" and not (folder / "01.txt").exists()
    page.keyboard.press("Enter")
    page.keyboard.type("a slope that falls")
    page.keyboard.press("Escape")
    status.filter(has_text="1 caption is written").wait_for()
    assert (folder / "01.txt").read_text(encoding="utf-8") == "a slope that falls"
    editor.screenshot(f"photographs-captioned-{how}")

    if pytestconfig.getoption("thorough"):  # in every run test_one_picture.py does so
        mask_one(editor, view, folder, how)
    view.get_by_role("button", name="Close").click()
    page.wait_for_function(LOOK, arg="32 pictures")

    # And run.
    editor.alone(TRAIN)
    page.get_by_role("button", name="Run", exact=True).first.click()
    page.locator(".atelier-status:visible").get_by_text(f"Finished after {STEPS} steps").first.wait_for()
    editor.screenshot(f"photographs-trained-{how}")


def mask_one(editor, view, folder: Path, how: str) -> None:
    """Paint the mask of the picture that is chosen."""
    page = editor.page
    view.get_by_role("button", name="Focus, mask…").click()
    one = page.get_by_role("dialog", name=f"Pictures of {folder.name}")
    one.get_by_role("button", name="Paint the mask").click()
    canvas = page.locator("#maskEditorCanvasContainer")
    canvas.wait_for()
    page.wait_for_function(PAINTED)
    editor.settle()
    area = canvas.locator("canvas").first.bounding_box()
    page.mouse.move(area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] / 2 + 30, area["y"] + area["height"] / 2, steps=6)
    page.mouse.up()
    page.get_by_role("dialog").filter(has=canvas).get_by_role("button", name="Save").click()
    one.get_by_text("its mask leaves out what is red").wait_for()
    editor.screenshot(f"photographs-masked-{how}")
    assert [path.name for path in folder.glob("*-masklabel.png")] == ["01-masklabel.png"]
    one.get_by_role("button", name="Close").click()
    view.get_by_text("32 of 32 shown").wait_for()
