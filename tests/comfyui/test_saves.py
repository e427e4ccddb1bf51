"""Saves & Samples, what is asked of a run while it works, and a ComfyUI that is closed meanwhile."""

import io
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warm
import websocket
import windows_rules
from lora_runs import metadata_in
from PIL import Image
from prompts import to_prompt
from toy_workflows import shorten
from train_graph import changed, chosen, draw_pictures, node, sample, train_graph

from comfy_client import HANGS, ComfyClient, ComfyServer, Result, answer_of
from lora_atelier.dev import QUICKSTART, ROOT, TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")

# In a process with ComfyUI's modules that serves nothing: a server that is gone, a Cancel.
SHOWING = """
import asyncio, importlib.util, inspect, json, sys
from unittest.mock import MagicMock
comfyui, root = sys.argv[1:]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfyui)
import comfy.options
comfy.options.enable_args_parsing()
import comfy.model_management, comfy.utils, server
given = inspect.signature(server.PromptServer).parameters  # a newer one is given what keeps its assets, too
prompt_server = server.PromptServer(asyncio.new_event_loop(), *[MagicMock()] * (len(given) - 1))
spec = importlib.util.spec_from_file_location("pack", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
from pack.nodes.comfyui.progress import NodeProgress, NodeAddress
from pack.nodes.comfyui.session import Buttons
from pack.trainer_core.runs.asked import Paused
progress = NodeProgress(NodeAddress("", "", "1"))
buttons = Buttons("1", False)
shown = progress.callbacks(buttons)
prompt_server.loop.close()
shown.samples(3, [])
shown.samples(4, [])
raise_if_cancelled = comfy.model_management.throw_exception_if_processing_interrupted
comfy.utils.set_progress_bar_global_hook(lambda *a, **k: raise_if_cancelled())
comfy.model_management.interrupt_current_processing()
shown.phase("saving", 1, 2)
try:
    shown.check()
    cancelled = False
except comfy.model_management.InterruptProcessingException:
    cancelled = True
shown.note("the end")
comfy.model_management.interrupt_current_processing(False)
shown.check()
buttons.press("pause")  # in the middle of a step: it outlives the look at its end
buttons.press("save")
taken = list(shown.asked())
try:
    shown.check()
    paused = False
except Paused:
    paused = True
print("found", json.dumps([cancelled, progress.notes, taken, paused]))
"""
LONG = 100_000  # steps of a run that does not end by itself


def ask(comfy: ComfyClient, question: object) -> tuple[int, dict]:
    """Ask as the buttons do; return the status and the answer."""
    try:
        return 200, answer_of(comfy.request("/api/atelier/ask", question))
    except urllib.error.HTTPError as refusal:
        return refusal.code, answer_of(refusal.read())


@pytest.mark.parametrize(
    ("question", "status", "sentence"),
    [
        ({"what": "stop"}, 409, "No LoRA is being trained now."),
        ({"what": "stop", "node": "train"}, 409, "No LoRA is being trained now."),
        ({"what": "dance"}, 400, "what must be one of pause, stop, save, sample"),
        ({"what": ["stop"]}, 400, "what must be one of pause, stop, save, sample"),
        ({"what": "stop", "node": 5}, 400, "node a node's id or null"),
        ("stop", 400, "what must be one of pause, stop, save, sample"),
        (b"[" * 8000, 400, "The question is not JSON."),
        (b" " * 9000, 413, "at most 8192 bytes"),
    ],
)
def test_a_request_that_cannot_be_is_refused(comfy: ComfyClient, question, status: int, sentence: str) -> None:
    code, answer = ask(comfy, question)
    assert code == status and sentence in answer["error"]


def test_a_run_does_what_it_is_asked_and_resumes_when_queued_again(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    name = f"asked-{comfy.id[:6]}"
    draw_pictures(any_server.base / "input" / name)
    graph = train_graph(name, name=name, steps=LONG)
    answers: list[tuple[int, dict]] = []

    def stop(kind: str, data: dict, result: Result) -> None:
        if kind == "text" and data["text"].startswith("step ") and not answers:
            answers.append(ask(comfy, {"what": "stop", "node": "other"}))
            answers.append(ask(comfy, {"what": "sample", "node": "train"}))
            answers.append(ask(comfy, {"what": "save"}))
            answers.append(ask(comfy, {"what": "stop", "node": "train"}))

    for _ in range(2):  # "stop and keep" makes the next queue run the node again
        answers.clear()
        with any_server.unhurried(0.3):
            result = comfy.queue(graph, on_event=stop)
        assert result.ok, result.error
        assert result.did_run("train") and Path(result.outputs["path"]["text"][0]).is_file()
        assert [code for code, _ in answers] == [409, 409, 200, 200]
        assert "another Train LoRA" in answers[0][1]["error"] and "sample_prompts" in answers[1][1]["error"]


@windows_rules.on_linux
def test_a_run_ends_where_windows_keeps_the_lora_of_its_stop_that_a_node_has_mapped(server: ComfyServer) -> None:
    """The quickstart: *Stop and keep*, Load LoRA with the file, and Run again."""
    comfy = ComfyClient(server.url)
    prompt = to_prompt(json.loads(QUICKSTART.read_text(encoding="utf-8")), comfy.first_info())
    prompt = {key: each for key, each in prompt.items() if each["class_type"] not in ("AtelierSample", "SaveImage")}
    shorten(
        prompt,
        AtelierTrain={"name": "windows", "steps": 4, "batch_size": 1, "resolution": 64},
        AtelierSaves={"sample_prompts": ""},
    )

    def stop(kind: str, data: dict, result: Result) -> None:
        if kind == "text" and data["text"].startswith("step 2"):
            ask(comfy, {"what": "stop"})

    def turn(on: bool) -> None:
        assert comfy.queue({"rules": node("Rules", file=windows_rules.__file__, on=on)}).ok

    turn(True)
    try:
        with server.unhurried(0.3):
            result = comfy.queue(prompt, on_event=stop)
            assert result.ok, result.error
        (stopped,) = (server.base / "models" / "loras" / "atelier").glob("windows-stopped-at-*.safetensors")
        load = {
            "file": node("CheckpointLoaderSimple", ckpt_name=TINY_BASE.name),
            "lora": node(
                "LoraLoader",
                model=["file", 0],
                clip=["file", 1],
                lora_name=f"atelier/{stopped.name}",
                strength_model=1.0,
                strength_clip=1.0,
            ),
            "drawn": sample(["lora", 0], ["lora", 1], ["file", 2], steps=1),
            "shown": node("PreviewImage", images=["drawn", 0]),
        }
        assert comfy.queue(load).ok
        result = comfy.queue({**prompt, **load})
        assert result.ok and "lora" in result.cached, result.error
        assert stopped.is_file() and stopped.with_name("windows.safetensors").is_file()
        assert any(f"{stopped.name} of an earlier stop is open elsewhere" in text for _, text in result.texts)
    finally:
        turn(False)


def test_a_bad_file_name_is_refused_before_anything_runs(comfy: ComfyClient, pictures: Path) -> None:
    graph = train_graph(pictures.name)
    for name, sentence in (
        ("../{name}", "The folder '..' is not inside the LoRA folder"),
        ("/etc/{name}", "The folder '/etc' is not inside the LoRA folder"),
        ("C:\\loras\\{name}", "is not inside the LoRA folder"),
        ("faces/", "cannot be a file name; use"),
        ("faces/{nam}", "with {name}, {date}, {time}, {step}, {epoch} only"),
    ):
        result = comfy.queue(changed(graph, "saves", file_name=name))
        assert result.status == "rejected" and sentence in result.error, result.error


def test_a_wrong_prompt_is_refused_before_anything_runs(comfy: ComfyClient, pictures: Path) -> None:
    graph = train_graph(pictures.name)
    for prompts, sentence in (
        ("a cat\n\na dog --x 3", "--x in line 3 of sample_prompts of Saves & Samples is none of --n, --w, --h,"),
        (
            "# --x\na cat --w wide",
            "--w is 'wide' in line 2 of sample_prompts of Saves & Samples; set it to a whole number",
        ),
        ("a cat --d 1 --d 2", "--d occurs twice in line 1 of sample_prompts of Saves & Samples"),
    ):
        result = comfy.queue(changed(graph, "saves", sample_prompts=prompts))
        assert result.status == "rejected" and sentence in result.error, result.error
    result = comfy.queue(changed(graph, "saves", sample_prompts="a --x", file_name="../{name}"))
    assert result.status == "rejected" and "--x in line 1" in result.error and "The folder '..'" in result.error
    # A linked text is not known before, and what a model has is known once it is linked: both end before the training.
    linked = changed(graph, "saves", sample_prompts=["text", 0])
    for text, sentence in (
        ("a --x", "--x in line 1 of sample_prompts of Saves & Samples is none of"),
        (
            "a --ss deis",
            "not drawn by the sampler deis of prompt 1; set --ss in sample_prompts of Saves & Samples to one of euler",
        ),
        ("a --g 3", "Prompt 1 sets --g, but atelier-tiny takes"),
    ):
        result = comfy.queue({**linked, "text": node("PrimitiveStringMultiline", value=text)})
        assert result.status == "error" and sentence in result.error, result.error
        assert not any(text.startswith("step ") for _, text in result.texts)


def test_each_line_of_prompts_draws_its_own_picture(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    name = f"drawn-{comfy.id[:6]}"
    draw_pictures(any_server.base / "input" / name)
    prompts = "# two pictures\na red circle --w 96 --h 64 --d 11 --n dull\n\na blue square --s 3 --l 1.5"
    graph = train_graph(
        name, name=name, steps=2, seed=4711, sample_prompts=prompts, sample_at_start=True, sample_every=1
    )
    graph["show"] = node("PreviewImage", images=["train", 4])
    result = comfy.queue(graph)
    assert result.ok, result.error
    assert [picture.size for picture in comfy.images(result, "show")] == [(96, 64)] * 2
    narrow = comfy.images(result, "show")[1].convert("RGB")
    edges = [narrow.crop(box).getextrema() for box in ((0, 0, 16, 64), (80, 0, 96, 64))]
    assert edges == [((0, 0),) * 3] * 2
    runs = any_server.base / "output" / "atelier" / "runs"
    (run,) = runs.glob(f"{name}-*")
    files = sorted((run / "samples").iterdir())
    assert [file.name for file in files] == [f"step-{step:08}-{number}.png" for step in (0, 1, 2) for number in (1, 2)]
    detail = comfy.get(f"/atelier/runs/{run.name}")
    assert detail["prompts"] == ["a red circle", "a blue square"] and len(detail["samples"]) == 6
    for step, (first, second) in enumerate(zip(files[::2], files[1::2], strict=True)):
        with Image.open(first) as wide, Image.open(second) as square:
            assert (wide.size, square.size) == ((96, 64), (64, 64))
            told = [json.loads(picture.info["atelier_sample"]) for picture in (wide, square)]
            assert wide.info["parameters"].startswith("a red circle\nNegative prompt: dull\nSteps: 2, Sampler: euler, ")
        assert [each["step"] for each in told] == [step] * 2 and [each["run"] for each in told] == [name] * 2
        assert [each["seed"] for each in told] == [11, 1] and [each["steps"] for each in told] == [2, 3]
        assert str(any_server.base).encode() not in first.read_bytes() + second.read_bytes()
    # The page's own route shows each in its size.
    asked = f"/view?filename={files[0].name}&subfolder=atelier/runs/{run.name}/samples&type=output"
    assert Image.open(io.BytesIO(comfy.request(asked))).size == (96, 64)


def test_the_lora_goes_into_the_chosen_folder_and_not_out_of_it(any_server: ComfyServer, tmp_path: Path) -> None:
    comfy = ComfyClient(any_server.url)
    name = f"saved-{comfy.id[:6]}"
    draw_pictures(any_server.base / "input" / name)
    graph = train_graph(name, name=name, steps=2, file_name="faces/{name}-{step}")
    result = comfy.queue(graph)
    assert result.ok, result.error
    assert "not show everything" not in "".join([text for _, text in result.texts] + result.outputs["train"]["text"])
    loras = any_server.base / "models" / "loras"
    assert Path(result.outputs["path"]["text"][0]) == loras / "faces" / f"{name}-000002.safetensors"
    (loras / f"out-{name}").symlink_to(tmp_path, target_is_directory=True)
    result = comfy.queue(changed(graph, "saves", file_name=f"out-{name}/{{name}}"))
    assert result.status == "error" and "outside the LoRA folder" in result.error
    for run, sentence in (("", "fork needs a run; set run of Train LoRA"), ("../x", "'../x'")):
        result = comfy.queue(changed(graph, "train", **chosen("on_existing", "fork", run=run, step=0)))
        assert result.status == "error" and sentence in result.error


def test_what_cannot_be_shown_is_noted_once_and_only_a_check_cancels(comfyui: Path, tmp_path: Path) -> None:
    script, log = tmp_path / "showing.py", tmp_path / "said.txt"
    script.write_text(SHOWING, encoding="utf-8")
    processes = warm if warm.POSSIBLE else subprocess  # whose large libraries are imported already
    with log.open("ab") as said:
        command = [sys.executable, str(script), str(comfyui), str(ROOT)]
        ended = processes.run(command, cwd=comfyui, stdout=said, stderr=subprocess.STDOUT)
    printed = log.read_text(encoding="utf-8")
    assert ended.returncode == 0, printed
    cancelled, notes, taken, paused = json.loads(printed.partition("found ")[2].splitlines()[0])
    assert taken == ["save"] and paused
    assert cancelled and len(notes) == 2 and notes[1] == "the end"
    assert notes[0].startswith("The node could not show everything while it trained; ") and "closed" in notes[0]


def close_while_training(server: ComfyServer, number: signal.Signals) -> None:
    """Close ComfyUI by a signal at the first step of a run, which it saves before it ends."""
    comfy = ComfyClient(server.url)
    draw_pictures(server.base / "input" / "closed")

    def close(kind: str, data: dict, result: Result) -> None:
        if kind == "text" and data["text"].startswith("step 1 of "):
            server.process.send_signal(number)

    with pytest.raises((websocket.WebSocketException, OSError)):
        comfy.queue(train_graph("closed", name="closed", steps=LONG, accumulate=4), on_event=close)
    # By the signal, as without us; ComfyUI itself takes Ctrl+C for a wish and ends in good order.
    assert server.process.wait(HANGS) == (0 if number == signal.SIGINT else -number)
    assert list((server.base / "models" / "loras" / "atelier").glob("closed-stopped-at-*.safetensors"))
    assert list((server.base / "output" / "atelier" / "runs").glob("closed-*/checkpoints/step-*/weights.safetensors"))


def same_bytes(calm: ComfyServer, graph: dict, run: Path, file: Path) -> None:
    """Train the same run, as it was created, in another ComfyUI in which nobody disturbs it."""
    draw_pictures(calm.base / "input" / "killed")
    born = calm.base / "output" / "atelier" / "runs" / run.name
    born.mkdir(parents=True)
    shutil.copy(run / "run.json", born)
    result = ComfyClient(calm.url).queue(graph)
    assert result.ok and any(text.startswith("step 1 of 3") for _, text in result.texts), result.error
    (undisturbed,) = (calm.base / "models" / "loras").rglob("killed*.safetensors")
    assert undisturbed.read_bytes() == file.read_bytes()


@pytest.mark.thorough  # test_elsewhere.py closes one so, and looks at what its run has left
@pytest.mark.skipif(sys.platform == "win32", reason="has no signals that ask a process to end")
def test_a_comfyui_that_is_closed_saves_the_run_first(start_comfy, tmp_path: Path) -> None:
    close_while_training(start_comfy(base=tmp_path), signal.SIGTERM)


def test_a_run_outlives_comfyui_and_is_trained_once_whoever_wants_it(
    start_comfy, server: ComfyServer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """ComfyUI is killed, starts again without any cache of its own, two tabs queue the same graph; then Ctrl+C."""
    calm, server = server, start_comfy(base=tmp_path)
    draw_pictures(server.base / "input" / "killed")
    graph = train_graph(
        "killed", name="killed", steps=3, batch_size=1, save_every=1, save_unit="steps", file_name="{name}"
    )

    runs = server.base / "output" / "atelier" / "runs"

    def kill(kind: str, data: dict, result: Result) -> None:
        if kind == "text" and data["text"].startswith("step 1 of "):
            while not list(runs.glob("killed-*/checkpoints/step-*")):
                assert server.process.poll() is None
                time.sleep(0.05)
            server.kill()

    with server.unhurried(2), pytest.raises((websocket.WebSocketException, OSError)):
        ComfyClient(server.url).queue(graph, on_event=kill)

    saved = max(int(path.name.removeprefix("step-")) for path in runs.glob("killed-*/checkpoints/step-*"))
    server = start_comfy("--cache-none", base=tmp_path)
    clients = [ComfyClient(server.url) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda client: client.queue(graph), clients))
    for result in results:
        assert result.ok and result.did_run("train"), result.error
    reports = "".join(result.outputs["train"]["text"][0] for result in results)
    assert "Already trained in" in reports and f"Resumed after step {saved} " in reports
    steps = [text for result in results for _, text in result.texts if text.startswith("step ")]
    assert steps[0].startswith(f"step {saved + 1} of 3")
    (file,) = (server.base / "models" / "loras").rglob("killed*.safetensors")
    assert {result.outputs["path"]["text"][0] for result in results} == {str(file)}
    assert metadata_in(file)["ss_steps"] == "3" and len(metadata_in(file)["atelier.run"]) == 64
    listed = clients[0].get("/atelier/runs")["runs"]
    assert [run["status"] for run in listed] == ["finished"]

    if pytestconfig.getoption("thorough"):  # tests/faults/test_kills.py compares the bytes in every run
        (run,) = runs.glob("killed-*")
        same_bytes(calm, graph, run, file)
    if sys.platform != "win32":
        close_while_training(server, signal.SIGINT)
