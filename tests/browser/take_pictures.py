"""Take docs/images/quickstart.jpg and before_after.jpg anew: run the quickstart in Chromium, on a real server.

The report of a run names the LoRA's full path, so give a base folder whose path names no person and no machine:

    PYTHONPATH=tests .venv/bin/python tests/browser/take_pictures.py --base /ComfyUI
"""

import argparse
import json
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import QUICKSTART, ROOT, comfyui_folder, find_chromium

IMAGES = ROOT / "docs" / "images"
WIDTH, MARGIN, SCALE = 1800, 12, 2  # pixels of the picture; scale: of the page, so that texts stay sharp
SHOWN = 2400  # pixels of the quickstart's width as it is kept
SETTINGS = {
    "Comfy.Minimap.Visible": False,
    "Comfy.VueNodes.Enabled": True,
    "Comfy.Graph.CanvasMenu": False,
    "Comfy.Graph.CanvasInfo": False,
}
FIT = """([width, margin]) => {
    const boxes = window.app.graph.nodes.map(({ boundingRect }) => [...boundingRect]);
    const left = Math.min(...boxes.map(box => box[0])), right = Math.max(...boxes.map(box => box[0] + box[2]));
    const top = Math.min(...boxes.map(box => box[1])), bottom = Math.max(...boxes.map(box => box[1] + box[3]));
    const scale = (width - 2 * margin) / (right - left), canvas = window.app.canvas;
    canvas.ds.scale = scale;
    canvas.ds.offset = [margin / scale - left, margin / scale - top];
    canvas.setDirty(true, true);
    return Math.round((bottom - top) * scale + 2 * margin);
}"""


def main() -> None:
    """Serve, run, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a folder for ComfyUI's files, made anew")
    base = parser.parse_args().base
    with ComfyServer(comfyui_folder(), base) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000}, device_scale_factor=SCALE)
        open_quickstart(page, server.url)
        run(page, ComfyClient(server.url))
        shrunk(take(page)).save(IMAGES / "quickstart.jpg", quality=80, optimize=True, progressive=True)
        browser.close()
        pair = min((base / "output" / "atelier").glob("mossling*.png"))
        with Image.open(pair) as picture:
            large = picture.convert("RGB").resize((3 * picture.width, 3 * picture.height), Image.Resampling.LANCZOS)
        large.save(IMAGES / "before_after.jpg", quality=90, optimize=True)


def open_quickstart(page: Page, url: str) -> None:
    """Open the quickstart in Vue nodes, without panels around it."""
    page.set_default_timeout(400_000)
    page.goto(url, wait_until="domcontentloaded")
    page.wait_for_function("() => window.app?.extensionManager && window.app.graph")
    for name, value in SETTINGS.items():
        page.evaluate("([name, value]) => window.app.extensionManager.setting.set(name, value)", [name, value])
    page.wait_for_timeout(2000)
    page.keyboard.press("Escape")  # the templates dialog of a first visit
    page.evaluate("workflow => window.app.loadGraphData(workflow)", json.loads(QUICKSTART.read_text(encoding="utf-8")))
    page.wait_for_timeout(1000)
    page.evaluate("() => window.app.extensionManager.command.execute('Workspace.ToggleFocusMode')")
    page.wait_for_timeout(2000)


def run(page: Page, comfy: ComfyClient) -> None:
    """Press Run and wait until the queue is empty."""
    page.evaluate("() => window.app.queuePrompt(0, 1)")
    page.wait_for_timeout(2000)
    while any(comfy.get("/queue")[kind] for kind in ("queue_running", "queue_pending")):
        page.wait_for_timeout(1000)
    (ended,) = comfy.get("/history").values()
    assert ended["status"]["status_str"] == "success", ended["status"]
    page.wait_for_timeout(5000)


def shrunk(picture: Image.Image) -> Image.Image:
    """Give a picture the width at which a page shows it on a screen of fine pixels."""
    return picture.resize((SHOWN, round(picture.height * SHOWN / picture.width)), Image.Resampling.LANCZOS)


def take(page: Page) -> Image.Image:
    """Take all nodes of the graph, nothing around them."""
    height = page.evaluate(FIT, [WIDTH, MARGIN])
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.wait_for_timeout(1000)
    page.evaluate(FIT, [WIDTH, MARGIN])
    page.add_style_tag(content="i.pi-bars, button:has(i.pi-bars) { display: none !important }")  # the menu's button
    page.wait_for_timeout(5000)
    with Image.open(BytesIO(page.screenshot())) as picture:
        return picture.convert("RGB")


if __name__ == "__main__":
    main()
