"""A real Chromium on the real editor: two versions of it, two renderers; a screenshot of every test is kept.

The versions are the frontend that ComfyUI asks for, and the newest there is, whose version nobody pins. A test that
fails on the newest alone has found a change over there: mend js/ or the schema where people would notice it, else ask
the editor in a way that both understand (its `app` object, roles and labels of what it shows).
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from comfy_client import HANGS, ComfyClient, ComfyServer
from lora_atelier.dev import FRONTEND, PACK, fetched_frontends, find_chromium, newest_frontend

SCREENSHOTS = Path(__file__).with_name("screenshots")
SETTINGS = {"Comfy.TutorialCompleted": True}  # no dialog of a first visit; all else as by default
VUE = "Comfy.VueNodes.Enabled"  # the setting that chooses the renderer
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # The editor asks for news, and whether models can be downloaded: with an answer it would look different.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
# Warnings and errors with the calls that led to them, so that those of the pack can be told from the editor's own.
TRACE = """Error.stackTraceLimit = 50;
for (const kind of ["warn", "error"]) {
    const say = console[kind];
    console[kind] = (...words) => say(...words, new Error().stack);
}"""
# What the editor lets pulse while a prompt runs is drawn sixty times a second: half of what its page takes meanwhile.
CALM = """(() => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(`*, ::before, ::after {
        animation-duration: 0s !important;
        animation-iteration-count: 1 !important;
    }`);
    document.adoptedStyleSheets = [sheet];
})();"""
CLOSE_PANEL = """() => {
    const panels = window.app.extensionManager.sidebarTab;
    if (panels.activeSidebarTabId) panels.toggleSidebarTab(panels.activeSidebarTabId);
}"""
# Forgets what the editor has stored in the browser: open workflows, the view, dialogs that were closed.
FORGET = """async () => {
    localStorage.clear();
    sessionStorage.clear();
    for (const { name } of await indexedDB.databases()) indexedDB.deleteDatabase(name);
}"""
# Resolves when the page has had nothing to do for a while and its view does not move any more.
STILL = """async () => {
    const view = () => JSON.stringify([window.app?.canvas?.ds.scale, ...(window.app?.canvas?.ds.offset ?? [])]);
    let before;
    do {
        before = view();
        for (let round = 0; round < 3; round++) {
            await new Promise(done => requestAnimationFrame(done));
            await new Promise(done => requestIdleCallback(done, { timeout: 2000 }));
        }
    } while (view() !== before);
}"""

ALONE = """id => {
    const node = window.app.graph.getNodeById(id), canvas = window.app.canvas;
    node.pos = [0, 3000];
    canvas.ds.scale = 0.6;
    canvas.ds.offset = [300, 120 - 3000];
    canvas.setDirty(true, true);
}"""


# The renderer that a newcomer of each frontend sees; the other two pairs are for --thorough.
STARTS_WITH = {"comfyui": "litegraph", "newest": "vue"}
# What a frontend does in its own way, which both show in every run: all that opens, each node with its values, what the
# page touches, a sentence on a node and outside of its subgraph, a node that draws, what is dropped on the canvas.
ON_BOTH = (
    "test_first_sight",
    "test_frontend",
    "test_a_failure_in_a_subgraph_stands_on_its_outside_too",
    "test_the_node_draws_the_curve_that_its_widgets_describe",
    "test_a_dropped_file_becomes_a_graph_with_a_report",
)
# Of these, what a frontend does with our files in its own way, yet the newest shows it.
ON_NEWEST = (
    "test_a_node_is_as_tall_as_what_it_shows_and_its_file_says_as_before",
    "test_everything_speaks_the_language_of_the_editor",
    "test_templates_have_names_and_pictures",
    "test_each_copy_of_a_template_is_a_workflow_of_its_own",
)
# Of all others the answer is the server's or our page's: one frontend shows it, which is the newest but for these.
ON_COMFYUIS = (
    "test_a_preset_is_one_step_to_undo",
    "test_what_a_restart_cut_off_is_offered_until_it_is_answered",
)
# Tests of values, and of pages that lie over the graph: the renderer of that is the quicker one, on both frontends.
OF_VALUES = (
    "test_dataset_page",
    "test_one_picture",
    "test_presets",
    "test_runs",
    "test_each_copy_of_a_template_is_a_workflow_of_its_own",
    "test_every_node_and_option_queues_what_it_shows_also_when_opened_again",
)
# Of these, what that renderer alone shows: there the editor measures new nodes only once they are drawn.
IN_VUE = ("test_a_preset_is_one_step_to_undo",)


WORDS = """() => [...new Set(document.body.innerText.split("\\n"))].map(line => line.trim()).filter(Boolean).join("\\n")
"""


def pytest_itemcollected(item: pytest.Function) -> None:
    """Leave to --thorough what another frontend or renderer proves again."""
    chosen, names = item.callspec.params, {item.path.stem, item.originalname}
    once = "comfyui" if item.originalname in ON_COMFYUIS else "newest"
    if (names.isdisjoint(ON_BOTH) or item.originalname in ON_NEWEST) and chosen.get("server", once) != once:
        item.add_marker(pytest.mark.thorough)
    fixed = any(mark.args[0] == "opened" and len(mark.args[1]) == 1 for mark in item.iter_markers("parametrize"))
    if fixed or "opened" not in chosen:
        return
    seen = "litegraph" if not names.isdisjoint(OF_VALUES) else STARTS_WITH[chosen["server"]]
    seen = "vue" if item.originalname in IN_VUE else seen
    if chosen["opened"] != seen:
        item.add_marker(pytest.mark.thorough)


def pytest_report_header() -> str:
    """Name the frontends that the browser tests run on."""
    newest = [folder.name.removeprefix(f"{FRONTEND}-") for folder in fetched_frontends()[-1:]]
    return f"frontends: {version(FRONTEND)} as ComfyUI asks for, {''.join(newest) or 'to be fetched'} as the newest"


_launched: list[Any] = []  # playwright's Browser


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the browser behind its last test: each open page asks anew for all that other tests do on its server."""
    yield
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for browser in _launched:
            browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Say beside a failure what the page says, since another machine keeps no picture of it."""
    report = yield
    if report.failed and call.when == "call" and "editor" in item.funcargs:
        page = item.funcargs["editor"].page
        words = "the page is closed" if page.is_closed() else page.evaluate(WORDS)
        report.sections.append(("what the page says", words))
    return report


@dataclass
class Editor:
    """An open ComfyUI editor and what went wrong in it."""

    page: Any  # playwright's Page
    vue: bool  # Vue nodes, else LiteGraph canvas
    version: str = ""  # of the frontend
    errors: list[str] = field(default_factory=list)  # uncaught ones, and what the console says of calls of the pack

    def run(self, script: str, argument: object = None) -> Any:
        """Run a JavaScript function in the page and return its value."""
        return self.page.evaluate(script, argument)

    def load(self, workflow: dict) -> None:
        """Open a workflow and bring all of it into view."""
        self.run("workflow => window.app.loadGraphData(workflow)", workflow)
        self.page.wait_for_function("count => window.app.graph.nodes.length >= count", arg=len(workflow["nodes"]))
        self.fit()

    def fit(self) -> None:
        """Bring the whole graph into view."""
        self.run("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.settle()

    def alone(self, node: int) -> None:
        """Show a node away from the others, all of it in view."""
        self.run(ALONE, node)

    def render(self, *, vue: bool) -> None:
        """Change the renderer of the open page."""
        self.run("([name, value]) => window.app.extensionManager.setting.set(name, value)", [VUE, vue])
        self.vue = vue
        self.settle()

    def settle(self) -> None:
        """Wait until the editor has drawn what it was told."""
        self.run(STILL)

    def close_tours(self, seen: str) -> None:
        """Wait until what a script looks for is seen, and close what the editor itself lays over it meanwhile."""
        for _ in range(600):  # five minutes, as every wait of a page here
            if self.run(seen):
                return
            self.page.keyboard.press("Escape")
            self.page.wait_for_timeout(500)
        pytest.fail(f"not seen in five minutes: {seen}")

    def screenshot(self, name: str) -> None:
        """Keep a picture of the page."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')}.png")


@pytest.fixture(
    scope="session",  # where two processes share the tests, each has one frontend, one server and one Chromium
    params=["comfyui", "newest"],
)
def server(request: pytest.FixtureRequest, start_comfy: Callable[..., ComfyServer]) -> ComfyServer:
    """Run every test here on ComfyUI with the frontend it asks for, and with the newest."""
    if request.param == "newest":
        return start_comfy("--front-end-root", str(newest_frontend()))
    return request.getfixturevalue("server")  # the one that the other tests share


@pytest.fixture
def unhurried(server: ComfyServer) -> Iterator[None]:
    """Let runs wait at each step, while their pages are looked at."""
    with server.unhurried():
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Return a launched browser, or skip and say what is missing."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("needs Chromium or Chrome: install one, or name it in the CHROMIUM variable")
    from playwright.sync_api import Page, sync_playwright

    # Asked at every frame, as by default, a page spends more on the question than on what it is asked about.
    seldom = functools.partialmethod(Page.wait_for_function, polling=100)
    with mock.patch.object(Page, "wait_for_function", seldom), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=QUIET)
        _launched.append(browser)
        yield browser
        _launched.remove(browser)
        browser.close()


@pytest.fixture(scope="session")
def visitor(chromium: Any, server: ComfyServer) -> Iterator[Any]:
    """Give a browser context for all tests of a frontend: it loads the editor's scripts from the network once."""
    context = chromium.new_context(viewport={"width": 1600, "height": 900})
    context.set_default_timeout(1000 * HANGS)
    context.add_init_script(TRACE)
    context.add_init_script(CALM)
    yield context
    context.close()


@pytest.fixture(scope="session")
def open_editor(visitor: Any, server: ComfyServer) -> Callable[..., Editor]:
    """Give `open_editor(vue=..., fresh=...)` -> the editor in a page of its own; fresh: of somebody who is new here."""

    def start(*, vue: bool, fresh: bool = True) -> Editor:
        page = visitor.new_page()
        if fresh:
            page.goto(f"{server.url}/system_stats")
            page.evaluate(FORGET)
        editor = Editor(page, vue, frontend_version(server))
        page.on("pageerror", lambda error: editor.errors.append(f"uncaught: {error.stack or error}"))
        page.on("console", lambda message: editor.errors.extend(said_of_the_pack(message)))
        ComfyClient(server.url).request("/settings", {**SETTINGS, VUE: vue})
        page.goto(server.url, wait_until="domcontentloaded")
        page.wait_for_function("() => window.app?.extensionManager?.workflow?.activeWorkflow")  # its own first one
        editor.settle()
        editor.run("() => window.app.graph.clear()")
        editor.settle()
        # What the editor stumbles over before it shows a node of the pack is its own, unless it names the pack.
        editor.errors[:] = [error for error in editor.errors if PACK in error]
        return editor

    return start


def frontend_version(server: ComfyServer) -> str:
    """Return the version of the frontend that a server serves."""
    root = [Path(argument) for argument in server.extra if FRONTEND in argument]
    return root[0].name.removeprefix(f"{FRONTEND}-") if root else version(FRONTEND)


def said_of_the_pack(message: Any) -> list[str]:
    """Return a console message if it warns of the pack: of a file, or of a call from one."""
    where = message.location.get("url", "")
    return [f"{where}: {message.text}"] if message.type in ("error", "warning") and PACK in where + message.text else []


@pytest.fixture(scope="session")
def loaded(open_editor: Callable[..., Editor]) -> Iterator[Editor]:
    """Load the editor once for each frontend: that takes longer than most tests, and than to change its renderer."""
    editor = open_editor(vue=False)
    yield editor
    editor.page.close()


@pytest.fixture(scope="session", params=["litegraph", "vue"])
def opened(request: pytest.FixtureRequest, open_editor: Callable[..., Editor]) -> Iterator[Editor]:
    """Give the open editor in each renderer; with --thorough in a page that began with it."""
    vue = request.param == "vue"
    if not request.config.getoption("thorough"):
        editor = request.getfixturevalue("loaded")
        editor.render(vue=vue)
        yield editor
        return
    editor = open_editor(vue=vue)
    yield editor
    editor.page.close()


@pytest.fixture
def editor(request: pytest.FixtureRequest, opened: Editor, server: ComfyServer) -> Iterator[Editor]:
    """Give the editor, empty, without a side panel; what goes wrong in it fails the test, and what is still at work
    behind one ends."""
    opened.run("() => window.app.graph.clear()")
    opened.run(CLOSE_PANEL)
    opened.settle()
    yield opened
    opened.settle()
    opened.screenshot(request.node.name)
    comfy = ComfyClient(server.url)
    comfy.request("/queue", {"clear": True})
    comfy.request("/interrupt", {})
    errors, opened.errors[:] = list(opened.errors), []
    assert errors == []
