"""Runs beyond the page: their command, a run that another process trains, and what a restart cut off."""

import re
import uuid

import pytest
from in_editor import TRAIN, TRAINING, part, values_of
from run_folders import make_run

from comfy_client import ComfyClient

pytestmark = [pytest.mark.browser, pytest.mark.parametrize("opened", ["litegraph"], indirect=True)]

RENDERERS = ("litegraph", "vue")
STATUS = "words => new RegExp(words).test(document.querySelector('.atelier-status')?.textContent)"
CLIPBOARD = """allowed => Object.defineProperty(navigator, "clipboard", { configurable: true, value: {
    writeText: async (text) => { if (!allowed) throw new DOMException("", "NotAllowedError"); window.copied = text; },
} })"""
SET = """([type, name, value]) => {
    const node = window.app.graph.nodes.find((each) => each.comfyClass === type);
    node.widgets.find((widget) => widget.name === name).value = value;
}"""


def training(name: str, identity: str) -> dict:
    """Return a workflow with a long run of a name."""
    workflow = part(*TRAINING)
    values_of(workflow, TRAIN)[:5] = [name, 100_000, 0, 1, 64]  # steps, epochs, batch_size, resolution
    return {**workflow, "id": identity}


def test_a_run_is_handed_to_a_shell_and_followed_there(editor, server, pytestconfig) -> None:
    """In every run the classic renderer copies the command, and Nodes 2.0 follows; with --thorough each does both."""
    copying, following = (RENDERERS, RENDERERS) if pytestconfig.getoption("thorough") else (["litegraph"], ["vue"])
    page, workflow = editor.page, training("handed", "00000000-1111-4222-8333-777777777777")
    editor.load(workflow)
    said, folder = page.locator(".atelier-command:visible"), server.base / "output" / "atelier" / "runs"
    more = page.get_by_role("button", name="More", exact=True)

    def copy_command() -> None:
        more.click()
        page.get_by_role("menuitem", name="Copy command").click()

    for renderer in copying:
        editor.render(vue=renderer == "vue")
        editor.alone(TRAIN)
        editor.run(CLIPBOARD, True)
        copy_command()
        said.get_by_text("Copied. Paste it into a shell on ComfyUI's machine; the run then shows here.").wait_for()
        assert re.search(r"lora-atelier'? train .*handed-[0-9a-f]{8}\.json", editor.run("() => window.copied"))
        editor.run(CLIPBOARD, False)
        copy_command()
        line = said.get_by_role("textbox", name="Command")
        line.wait_for()
        assert line.input_value() == editor.run("() => window.copied")
        editor.settle()
        editor.screenshot(f"command-{renderer}-{editor.version}")
        editor.run(SET, ["AtelierConceptDataset", "folder", "/elsewhere"])
        copy_command()
        said.get_by_text("The folder /elsewhere is outside ComfyUI's folders, and nobody allowed it yet.").wait_for()
        editor.screenshot(f"command-wrong-{renderer}-{editor.version}")
        editor.run(SET, ["AtelierConceptDataset", "folder", "atelier:concept_example"])

    # A process begins a run of this workflow; the server sends the page no event.
    run = make_run(folder, "handed", "f", saves=(2,), steps=100_000)
    run.keep_workflow(workflow)
    with run.locked():
        for step in range(1, 60):
            run.log("step", step=step, loss=1 / step, lr={"unet": 1e-4})
        for step, renderer in enumerate(following, 60):
            editor.render(vue=renderer == "vue")
            editor.alone(TRAIN)
            run.log("step", step=step, loss=0.1, lr={"unet": 1e-4})
            page.wait_for_function(STATUS, arg=f"^step {step} of 100000$")
            page.get_by_text(re.compile(r"left · .* · mean loss .* · process \d+ on ")).wait_for()
            page.wait_for_function("() => document.querySelector('.atelier-graph canvas')?.offsetHeight")
            editor.settle()
            editor.screenshot(f"followed-{renderer}-{editor.version}")
        assert not more.is_visible()
        page.get_by_role("button", name="Stop and keep").click()
        page.get_by_text("The run ends after its next step; its LoRA so far is saved.").first.wait_for()
        assert (run.path / "asked-stop").exists()

        # The tab of runs shows it, too, and asks for the same.
        editor.run("() => window.app.extensionManager.command.execute('Workspace.ToggleSidebarTab.atelier-runs')")
        tab = page.locator(".atelier-runs")
        tab.get_by_role("listitem").filter(has_text="handed").get_by_role("button").click()
        tab.get_by_text(f"Training: step {step} of 100000.").wait_for()
        tab.get_by_role("button", name="Save now").click()
        page.get_by_text("The run will be saved after its next step.").first.wait_for()
        assert (run.path / "asked-save").exists()
        editor.settle()
        editor.screenshot(f"followed-runs-{editor.version}")
    page.wait_for_function(STATUS, arg="^Stopped after step 2 of 100000")
    tab.get_by_role("button", name="All runs").click()
    editor.run("() => window.app.extensionManager.command.execute('Workspace.ToggleSidebarTab.atelier-runs')")
    editor.render(vue=False)


@pytest.mark.usefixtures("unhurried")
def test_what_a_restart_cut_off_is_offered_until_it_is_answered(editor, visitor, server, pytestconfig) -> None:
    page, comfy = editor.page, ComfyClient(server.url)
    kept, thorough = server.base / "user" / "__atelier" / "queue", pytestconfig.getoption("thorough")
    offer = page.locator(".atelier-pending")

    def restart() -> None:
        """End what is in the queue; in every run without a restart, of which test_train.py has one."""
        while len(files := sorted(kept.glob("*.json"))) < 2:
            editor.settle()
        if thorough:
            server.kill()
            server.start()
            return
        left.extend(file.read_text(encoding="utf-8") for file in files)
        comfy.request("/queue", {"clear": True})
        comfy.request("/interrupt", {})
        while list(kept.glob("*.json")):
            editor.settle()
        as_after_a_restart()

    def as_after_a_restart() -> None:
        ended = uuid.uuid4().hex
        (kept / f"{ended}.lock").touch()  # as of a ComfyUI that was killed
        for number, text in enumerate(left):
            (kept / f"{ended}-{number:06}.json").write_text(text, encoding="utf-8")
        editor.run("() => window.app.api.dispatchCustomEvent('reconnected')")

    def queue_both() -> None:
        for name in ("cut off", "queued"):
            editor.load(training(name, "00000000-1111-4222-8333-888888888888"))
            editor.run(f"async () => await window.app.queuePrompt(0, 1, ['{TRAIN}'])")
        page.wait_for_function(STATUS, arg="^step")

    left: list[str] = []
    earlier = [prompt["name"] for prompt in comfy.get("/atelier/pending")["prompts"]]  # of other tests here
    comfy.request("/atelier/pending/drop", {"names": earlier})
    queue_both()
    restart()
    offer.get_by_text("2 runs were not finished: cut off, queued.").wait_for()
    for renderer in RENDERERS:
        editor.render(vue=renderer == "vue")
        editor.screenshot(f"offer-{renderer}-{editor.version}")
    editor.render(vue=False)
    offer.get_by_role("button", name="Dismiss").click()
    offer.wait_for(state="detached")
    assert comfy.get("/atelier/pending")["prompts"] == [] and not list(kept.glob("*.json"))

    if thorough:
        queue_both()
        restart()
    else:
        as_after_a_restart()
    tabs = [editor.page]
    if thorough:
        tabs.append(visitor.new_page())
        tabs[1].goto(server.url, wait_until="domcontentloaded")
        tabs[1].locator(".atelier-pending").get_by_role("button", name="Continue").wait_for()
    offer.get_by_role("button", name="Continue").click()
    for tab in tabs:
        tab.locator(".atelier-pending").wait_for(state="detached")
    for tab in tabs[1:]:
        tab.close()
    while not (queue := comfy.get("/queue"))["queue_running"] or len(queue["queue_pending"]) != 1:
        editor.settle()
    assert queue["queue_pending"][0][4] == [str(TRAIN)]  # what was to be executed, and no more
