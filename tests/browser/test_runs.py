"""The tab of runs in the real editor: the list, one run, several over each other, and what people do there."""

import io
import json
import shutil
import zipfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from looks import faint
from PIL import Image
from run_folders import make_run

from comfy_client import ComfyServer
from lora_atelier.dev import QUICKSTART
from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.data.images import draw_small
from lora_atelier.trainer_core.runs import RunFolder
from lora_atelier.trainer_core.training.sample_files import PARAMETERS, TOLD, save_clip

pytestmark = [pytest.mark.browser, pytest.mark.parametrize("opened", ["litegraph", "vue"], indirect=True)]

OPEN = """async () => {
    if (!document.querySelector('.atelier-runs'))
        await window.app.extensionManager.command.execute('Workspace.ToggleSidebarTab.atelier-runs');
}"""
TRAIN = """() => Object.fromEntries(window.app.graph.nodes.find(node => node.comfyClass === "AtelierTrain").widgets
    .filter(widget => widget.name.startsWith("on_existing")).map(widget => [widget.name, widget.value]))"""


def fits(page) -> bool:
    """Tell whether nothing of the tab is cut at its side."""
    width = "() => { const { scrollWidth, clientWidth } = document.querySelector('.atelier-runs'); "
    return page.evaluate(width + "return scrollWidth <= clientWidth; }")


def draw(run: RunFolder, *steps: int, prompts: int = 1) -> None:
    """Draw samples of a run, each in a colour of its own."""
    (run.path / "samples").mkdir(exist_ok=True)
    for step in steps:
        for prompt in range(1, prompts + 1):
            file = run.path / "samples" / f"step-{step:08}-{prompt}.png"
            Image.new("RGB", (64, 64), (200, 20 * step, 90 * prompt)).save(file)


def prompted(run: RunFolder, *prompts: str) -> None:
    """Give a run prompts of its samples."""
    write_json(run.path / "run.json", {**run.about, "config": {**run.about["config"], "sample": {"prompts": prompts}}})


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
    draw(found[0], 2, 4)
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
    tab.get_by_text("What differs").wait_for()
    values = tab.locator("dt").filter(has_text="seed").locator("xpath=following-sibling::dd[position() <= 2]")
    assert sorted(values.all_text_contents()) == ["fern7", "moss–"]
    assert tab.locator("dt").filter(has_text="steps").count() == 1 and fits(page)
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

    tab.get_by_role("button", name="Use this LoRA").last.click()
    answer(f"tested/{name}")
    page.get_by_text(f"Saved in models/loras: {name}.safetensors").first.wait_for()
    assert (server.base / "models" / "loras" / "tested" / f"{name}.safetensors").is_file()
    tab.get_by_role("button", name="Use this LoRA").last.click()
    answer(f"tested/{name}")
    page.get_by_text(f"{name}.safetensors exists already; choose another name.").first.wait_for()

    tab.get_by_role("button", name="Delete", exact=True).click()
    asked = page.get_by_role("dialog").get_by_text("Delete the run My best moss, begun ")
    asked.wait_for()
    told = asked.inner_text()
    assert "Its copies in ComfyUI's models folder are kept: " in told
    assert f"tested/{name}.safetensors" in told and "aaaa" not in told
    page.get_by_role("dialog").get_by_role("button").filter(has_text="Cancel").click()
    asked.wait_for(state="hidden")

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
    page.get_by_text("Its LoRA is in no other folder, and is lost.").first.wait_for()
    page.get_by_role("dialog").get_by_role("button").filter(has_text="Delete").click()
    page.wait_for_function("() => document.querySelectorAll('.atelier-runs .run').length === 2")
    assert not fern.path.exists() and moss.path.exists() and odd.path.exists()


def opened_tab(editor):
    """Open the tab at its list, and read the runs."""
    editor.run(OPEN)
    tab = editor.page.locator(".atelier-runs")
    back = tab.get_by_role("button", name="All runs")
    if back.count():
        back.click()
    tab.get_by_role("button", name="Read the runs again").click()
    return tab


def test_a_row_says_what_a_run_is_and_shows_a_picture(editor, runs: list[RunFolder]) -> None:
    """A training picture without a sample; a name with markup stays text; how the run ended is told."""
    page, (moss, fern, _) = editor.page, runs
    folder = moss.path.parent
    Image.new("RGB", (40, 20), "blue").save(folder / "photo.png")
    fern.keep_picture(lambda path: draw_small(folder / "photo.png", path))
    fern.log("failed", text="The disk is full; free some of it.")
    paused = make_run(folder, "rest", "d", saves=(2,), logged=2, steps=8)
    paused.log("paused")
    paused.rename("<img src=x onerror='window.broken = 1'><b>rest</b>")
    config = {**moss.about["config"], "lora": {"rank": 24}}
    write_json(moss.path / "run.json", {**moss.about, "config": config, "created": 86400 * 365})
    tab = opened_tab(editor)

    def row(name: str):
        return tab.get_by_role("listitem").filter(has_text=name)

    row("paused").wait_for()
    told = row("moss").inner_text()
    hour = page.evaluate(
        "() => new Date(31536000000).toLocaleString('en-US', {dateStyle: 'medium', timeStyle: 'short'})"
    )
    for words in ("finished · step 4 of 4", "mean loss 0.5208 (last 4 steps)", "base.safetensors · rank 24", hour):
        assert words in told, told
    page.wait_for_function(
        "() => [...document.querySelectorAll('.atelier-runs .run img')].filter(each => each.naturalWidth).length === 2"
    )
    assert row("fern").locator("img").evaluate("image => image.naturalWidth / image.naturalHeight") == 2
    assert "failed · step 2 of 8" in row("fern").inner_text() and "paused · step 2 of 8" in row("paused").inner_text()
    assert row("paused").locator("b").inner_text() == paused.title() and row("paused").locator("img").count() == 0
    assert not page.evaluate("() => window.broken")
    row("paused").locator("button").click()
    tab.get_by_role("heading", name="<img src=x").wait_for()
    assert not page.evaluate("() => window.broken") and fits(page)


def test_settings_stand_by_node_and_those_with_their_default_on_request(editor, runs: list[RunFolder]) -> None:
    moss, tab = runs[0], opened_tab(editor)
    settings = {"train": {"steps": 4, "batch_size": 3}, "lora": {"rank": 24, "dropout": 0.0}}
    write_json(moss.path / "run.json", {**moss.about, "config": {**moss.about["config"], **settings}})
    tab.get_by_role("listitem").filter(has_text="moss").get_by_role("button").click()
    tab.get_by_text("Settings", exact=True).click()
    assert tab.locator("h4").all_inner_texts() == ["Load Base Model", "LoRA Config", "Train LoRA"]
    rows = tab.locator("details[open] tr").all_inner_texts()
    shown = [[cell.replace("\u200b", "") for cell in row.split("\t")] for row in rows]
    assert shown == [["checkpoint", "base.safetensors"], ["rank", "24"], ["steps", "4"], ["batch_size", "3"]]
    assert "Pictures per batch" in tab.get_by_text("batch_").get_attribute("title")
    tab.get_by_role("checkbox", name="also those with their default").check()
    assert tab.locator("details[open] tr").filter(has_text="dropout").count() == 1
    editor.screenshot(f"runs-settings-{editor.version}-{'vue' if editor.vue else 'litegraph'}")


def test_samples_of_compared_runs_stand_side_by_side(editor, runs: list[RunFolder]) -> None:
    """The last ones of each prompt, then those of the same step; each curve tells its own step."""
    page, (moss, fern, _) = editor.page, runs
    prompted(moss, "a cat", "moss, a tree")
    prompted(fern, "fern, a tree", "a cat")
    draw(moss, 2, 4, prompts=2)
    draw(fern, 2, prompts=2)
    tab = opened_tab(editor)
    for name in ("moss", "fern"):
        tab.get_by_role("listitem").filter(has_text=name).get_by_role("checkbox").check()
    assert tab.get_by_text("Choose another run").count() == 0
    tab.get_by_role("button", name="Compare 2").click()
    tab.locator(".cell").first.wait_for()
    rows = [[part for part in row.inner_text().split("\n") if part] for row in tab.locator(".samples").all()]
    order = [words.split(" · ")[0] for words in rows[0][1:]]  # newest first, as in the list
    assert sorted(order) == ["fern", "moss"]
    steps = {"fern": "step 2", "moss": "step 4"}
    cat = [["last samples · a cat", *(f"{name} · {steps[name]}" for name in order)]]
    cat += [["step 2 · a cat", *(f"{name} · step 2" for name in order)]]
    assert [row for row in rows if row[0].endswith("a cat")] == cat
    trees = " / ".join(f"{name}, a tree" for name in order)
    other = [["last samples · " + trees, *cat[0][1:]], ["step 2 · " + trees, *cat[1][1:]]]
    assert [row for row in rows if not row[0].endswith("a cat")] == other

    tab.locator(".atelier-graph > div:last-child > div").first.wait_for()
    said = tab.locator(".atelier-graph > div:last-child > div").all_inner_texts()
    assert sorted(line.split(" · ")[:2] for line in said) == [["fern", "step 2"], ["moss", "step 4"]]
    box = tab.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 60)
    page.wait_for_timeout(200)
    said = tab.locator(".atelier-graph > div:last-child > div").all_inner_texts()
    assert next(line for line in said if line.startswith("fern")).split(" · ")[1] == "step 2"
    assert {"loss of the step 0.500", "learning_rate 1.0e-4"} <= {
        part for line in said if line.startswith("fern") for part in line.split(" · ")
    }
    assert fits(page) and faint(page, ".atelier-runs *") == []

    tab.locator(".samples").filter(has_text="last samples · a cat").get_by_role("button").first.click()
    large = page.locator(".atelier-large")
    assert large.locator("figure").count() == 2
    large.get_by_role("button", name="Use this LoRA").nth(1).wait_for()
    editor.settle()
    editor.screenshot(f"runs-side-by-side-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
    page.keyboard.press("ArrowDown")
    large.get_by_text("moss · step 2 · a cat").wait_for()
    page.keyboard.press("Escape")
    large.wait_for(state="detached")
    assert tab.get_by_text("What differs").count() == 1
    tab.get_by_role("button", name="All runs").click()
    for name in ("moss", "fern"):
        tab.get_by_role("listitem").filter(has_text=name).get_by_role("checkbox").uncheck()


def colour_of(place) -> str:
    """Tell which of two colours the middle of an element has now."""
    image = Image.open(io.BytesIO(place.screenshot())).convert("RGB")
    red, _, blue = np.asarray(image)[image.height // 2, image.width // 2]
    return "red" if red > blue else "blue"


def test_clips_play_in_the_strip_the_large_view_and_beside_others(editor, runs: list[RunFolder]) -> None:
    """Who asked for less motion sees the first frame; each tells its frames."""
    page, (moss, fern, _) = editor.page, runs
    for run in (moss, fern):
        prompted(run, "a cat")
        (run.path / "samples").mkdir(exist_ok=True)
        clip = torch.zeros(17, 64, 64, 3)
        clip[:9, ..., 0] = clip[9:, ..., 2] = 1
        save_clip(run.path / "samples" / "step-00000004-1-17f.webp", clip, 16, {PARAMETERS: "a cat", TOLD: "{}"})
    (moss.path / "samples" / "step-00000004-1.png").unlink()
    tab, row = opened_tab(editor), page.locator(".atelier-runs").get_by_role("listitem").filter(has_text="moss")
    page.wait_for_function("() => document.querySelector('.atelier-runs .run img')?.naturalWidth > 0")
    row.get_by_role("button").click()
    strip, large = tab.locator(".atelier-samples button"), page.locator(".atelier-large")
    clip = strip.nth(1)
    clip.wait_for()
    assert [part.inner_text().split() for part in strip.all()] == [["2"], ["4", "17", "frames"]]
    assert clip.get_attribute("title") == "step 4 · a cat · 17 frames"
    clip.locator("img").evaluate("image => image.decode()")
    both(clip)
    editor.settle()
    editor.screenshot(f"runs-clip-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
    clip.click()
    large.get_by_text("step 4 · a cat · 17 frames").wait_for()
    both(large.locator("img"))
    page.emulate_media(reduced_motion="reduce")
    try:
        for image in (large.locator("img"), clip.locator("img")):
            page.wait_for_function("image => image.currentSrc.includes('preview=')", arg=image.element_handle())
            image.evaluate("image => image.decode()")
        assert {colour_of(large.locator("img")) for _ in range(4) if page.wait_for_timeout(150) is None} == {"red"}
    finally:
        page.emulate_media(reduced_motion="no-preference")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    for name in ("moss", "fern"):
        tab.get_by_role("listitem").filter(has_text=name).get_by_role("checkbox").check()
    tab.get_by_role("button", name="Compare 2").click()
    cells = tab.locator(".cell").filter(has_text="step 4 · 17 frames")
    cells.nth(1).wait_for()
    both(cells.first.locator("img"))
    tab.get_by_role("button", name="All runs").click()
    for name in ("moss", "fern"):
        tab.get_by_role("listitem").filter(has_text=name).get_by_role("checkbox").uncheck()


def both(place) -> None:
    """Look at a clip until it has shown both of its colours, which a still never does."""
    seen = {colour_of(place)}
    for _ in range(100):
        if len(seen) == 2:
            return
        place.page.wait_for_timeout(100)
        seen.add(colour_of(place))
    raise AssertionError(f"only {seen} was seen")


def test_the_lora_that_drew_a_sample_is_taken_forked_and_compared(editor, runs: list[RunFolder], server) -> None:
    """That of the nearest save where the step keeps none."""
    page, moss, tab = editor.page, runs[0], opened_tab(editor)
    draw(moss, 3)
    name = f"taken in {'vue' if editor.vue else 'litegraph'} {editor.version}"
    tab.get_by_role("listitem").filter(has_text="moss").get_by_role("button").click()
    pictures, large = tab.locator(".atelier-samples button"), page.locator(".atelier-large")
    pictures.nth(2).click()  # step 4
    large.get_by_role("button", name="Fork", exact=True).wait_for()
    page.keyboard.press("ArrowLeft")  # step 3
    large.get_by_text("No LoRA of step 3 is left; the nearest one is of step 2.").wait_for()
    editor.screenshot(f"runs-large-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
    large.get_by_role("button", name="Use the LoRA of step 2").click()
    field = page.get_by_role("dialog").get_by_role("textbox")
    field.fill(f"tested/{name}")
    field.press("Enter")
    page.get_by_text(f"Saved in models/loras: {name}.safetensors").first.wait_for()
    assert (server.base / "models" / "loras" / "tested" / f"{name}.safetensors").is_file()

    pictures.nth(1).click()
    large.get_by_role("button", name="Fork from step 2").click()
    page.get_by_text("Train LoRA now forks from step 2.").first.wait_for()
    assert editor.run(TRAIN)["on_existing.step"] == 2

    pictures.nth(0).click()
    large.get_by_role("button", name="Compare").click()
    tab.get_by_text("Choose another run to compare with moss.").wait_for()
    assert tab.get_by_role("checkbox", name="Choose moss to compare").is_checked()
    tab.get_by_role("checkbox", name="Choose moss to compare").uncheck()

    for path in moss.saves():
        shutil.rmtree(path)
    tab.get_by_role("listitem").filter(has_text="moss").get_by_role("button").click()
    pictures.nth(0).click()
    large.get_by_text("No LoRA of this run is left.").wait_for()
    assert large.get_by_role("button", name="Use").count() == 0
    page.keyboard.press("Escape")
    tab.get_by_role("button", name="All runs").click()


# A browser whose person allows notices when asked, and notes what it was asked and told.
BROWSER = """() => {
    localStorage.removeItem("Atelier.Notice");
    window.asked = 0;
    window.notices = [];
    window.Notification = class {
        static permission = "default";
        static async requestPermission() {
            window.asked++;
            return (window.Notification.permission = "granted");
        }
        constructor(title, { body, icon }) { window.notices.push([title, body, Boolean(icon), this]); }
        close() {}
    };
}"""


def test_the_end_of_a_run_is_told_to_who_asked_for_it(editor, runs: list[RunFolder]) -> None:
    page, fern = editor.page, runs[1]
    editor.run(BROWSER)
    with fern.locked():
        tab = opened_tab(editor)
        row = tab.get_by_role("listitem").filter(has_text="running")
        row.get_by_role("button").click()
        tell = tab.get_by_role("button", name="Tell me when it ends")
        tell.wait_for()
        assert editor.run("() => window.asked") == 0 and tell.get_attribute("aria-pressed") == "false"
        tell.click()
        tab.get_by_role("button", name="Tell me when it ends", pressed=True).wait_for()
        editor.screenshot(f"runs-notice-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
        tab.get_by_role("button", name="All runs").click()
    page.wait_for_function("() => window.notices.length > 0")
    title, body, pictured = editor.run("() => window.notices[0].slice(0, 3)")
    assert (title, pictured) == ("fern", False) and body.startswith("Stopped after step 2 of 8")
    editor.run("() => window.notices[0][3].onclick()")
    tab.get_by_role("heading", name="fern").wait_for()
    assert editor.run("() => window.asked") == 1


@pytest.mark.parametrize("count", [0, 1, 60])
def test_the_list_is_read_at_every_size(editor, runs: list[RunFolder], count: int) -> None:
    page, folder = editor.page, runs[0].path.parent
    if count == 60:
        for number in range(57):
            run = make_run(folder, f"a run with a long name {number}", f"{number:03}", saves=(2,), logged=4, finished=4)
            if number % 2:
                draw(run, 4)
    for run in runs[count:]:
        shutil.rmtree(run.path)
    tab = opened_tab(editor)
    for size in ((1600, 900), (1280, 720)):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.wait_for_function("count => document.querySelectorAll('.atelier-runs .run').length === count", arg=count)
        editor.settle()
        editor.screenshot(f"runs-{count}-{size[0]}-{editor.version}-{'vue' if editor.vue else 'litegraph'}")
        assert faint(page, ".atelier-runs *") == [] and fits(page)
    page.set_viewport_size({"width": 1600, "height": 900})
    if not count:
        assert "There is no run yet." in tab.inner_text()
