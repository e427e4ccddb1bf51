"""A real Chromium on the real editor, in both render modes; a screenshot of every test is kept."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from comfy_client import ComfyServer
from lora_atelier.dev import PACK, find_chromium

SCREENSHOTS = Path(__file__).with_name("screenshots")
SETTINGS = {
    "Comfy.Minimap.Visible": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,  # draw text at every zoom
}
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Editor:
    """An open ComfyUI editor and what went wrong in it."""

    page: Any  # playwright's Page
    vue: bool  # Vue nodes, else LiteGraph canvas
    errors: list[str] = field(default_factory=list)  # uncaught errors, and console errors that name the pack

    def run(self, script: str, argument: object = None) -> Any:
        """Run a JavaScript function in the page and return its value."""
        return self.page.evaluate(script, argument)

    def load(self, workflow: dict) -> None:
        """Open a workflow and bring all of it into view."""
        self.run("workflow => window.app.loadGraphData(workflow)", workflow)
        self.page.wait_for_function("count => window.app.graph.nodes.length >= count", arg=len(workflow["nodes"]))
        self.run("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.settle()

    def settle(self) -> None:
        """Wait until the editor has drawn what it was told."""
        self.page.wait_for_timeout(1000)

    def screenshot(self, name: str) -> None:
        """Keep a picture of the page."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')}.png")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Return a launched browser, or skip and say what is missing."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("needs Chromium or Chrome: install one, or name it in the CHROMIUM variable")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(params=["litegraph", "vue"])
def editor(request: pytest.FixtureRequest, chromium: Any, server: ComfyServer) -> Iterator[Editor]:
    """Return a fresh editor in each render mode; `settle` and read `errors` before believing it is well."""
    context = chromium.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    opened = Editor(page, vue=request.param == "vue")
    page.on("pageerror", lambda error: opened.errors.append(f"uncaught: {error}"))

    def keep(message: Any) -> None:
        where = message.location.get("url", "")
        if message.type == "error" and (PACK in where or "atelier" in message.text.lower()):
            opened.errors.append(f"{where}: {message.text}")

    page.on("console", keep)
    page.goto(server.url, wait_until="domcontentloaded")
    page.wait_for_function("() => window.app?.extensionManager && window.app.graph")
    for name, value in {**SETTINGS, "Comfy.VueNodes.Enabled": opened.vue}.items():
        opened.run("([name, value]) => window.app.extensionManager.setting.set(name, value)", [name, value])
    opened.settle()
    page.keyboard.press("Escape")  # the templates dialog of a first visit
    opened.run("() => window.app.graph.clear()")  # the editor's own first workflow
    opened.settle()
    yield opened
    opened.screenshot(request.node.name)
    context.close()
