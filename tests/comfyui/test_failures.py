"""The server remembers the failure of a node for its workflow, and tells every page."""

import json
import threading
import urllib.error

import pytest
import websocket
from run_folders import make_run
from train_graph import changed, draw_pictures, node, train_graph

from comfy_client import HANGS, ComfyClient, ComfyServer, answer_of
from lora_atelier.dev import QUICKSTART, TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
WORKFLOW = "00000000-1111-4222-8333-fa11ed000000"


def failed(comfy: ComfyClient) -> dict[str, str]:
    return answer_of(comfy.request("/atelier/failed", {"workflow": WORKFLOW}))["failed"]


def test_a_failure_is_known_until_its_workflow_is_queued_again(any_server: ComfyServer) -> None:
    comfy, other = ComfyClient(any_server.url), ComfyClient(any_server.url)
    folder = draw_pictures(any_server.base / "input" / "without captions", captions=False)
    graph = train_graph(folder.name, name="failing")
    tab = websocket.create_connection(f"{other.url.replace('http', 'ws', 1)}/ws?clientId={other.id}", timeout=HANGS)
    try:
        result = comfy.queue(graph, workflow=WORKFLOW)
        assert result.status == "error" and "caption" in result.error
        assert failed(comfy) == {"train": result.error}
        told: dict = {}
        while told.get("type") != "atelier.failed":
            message = tab.recv()
            told = json.loads(message) if isinstance(message, str) else {}
        assert told["data"] == {"workflow": WORKFLOW, "failed": {"train": result.error}, "early": ["train"]}
    finally:
        tab.close()
    assert comfy.queue(changed(graph, "train", steps=2)).status == "error"  # of no workflow: no page shows it
    for picture in folder.glob("*.png"):
        picture.with_suffix(".txt").write_text("a circle", encoding="utf-8")
    assert comfy.queue(changed(graph, "train", steps=1), workflow=WORKFLOW).ok
    assert failed(comfy) == {}


def test_what_fails_before_a_run_shows_the_run_before_and_what_fails_after_it_does_not(
    comfy: ComfyClient, server: ComfyServer
) -> None:
    place = server.base / "models" / "checkpoints" / "words.safetensors"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("no model", encoding="utf-8")
    graph = train_graph(draw_pictures(server.base / "input" / "before a run").name, name="before a run", steps=1)
    question = {"workflow": WORKFLOW}
    assert comfy.queue(changed(graph, "base", checkpoint=place.name), workflow=WORKFLOW).status == "error"
    assert answer_of(comfy.request("/atelier/failed", question))["early"] == ["base"]
    place.unlink()
    texts = {"title": "", "trigger_words": "", "description": "", "author": ""}
    after = node("AtelierSaveLoraFile", lora=["train", 2], file_name=["text", 0], dtype="as it is", **texts)
    more = {"text": node("PrimitiveString", value="../out"), "after": after}  # linked, so that it is read while it runs
    result = comfy.queue({**graph, **more}, workflow=WORKFLOW)
    assert result.status == "error", result.error
    told = answer_of(comfy.request("/atelier/failed", question))
    assert (list(told["failed"]), told["early"]) == (["after"], [])


def test_a_failure_is_forgotten_once_its_run_goes_on_in_a_shell(comfy: ComfyClient, server: ComfyServer) -> None:
    workflow = {**json.loads(QUICKSTART.read_text(encoding="utf-8")), "id": WORKFLOW}
    (node,) = (str(each["id"]) for each in workflow["nodes"] if each["type"] == "AtelierTrain")
    graph = train_graph(draw_pictures(server.base / "input" / "in a shell", captions=False).name, name="in a shell")
    graph[node] = graph.pop("train")
    assert comfy.queue(graph, workflow=WORKFLOW).status == "error"
    run = make_run(server.base / "output" / "atelier" / "runs", "in a shell", "f", saves=(2,), steps=1000)
    run.keep_workflow(workflow)
    question = {"workflow": WORKFLOW, "nodes": [node]}
    assert answer_of(comfy.request("/atelier/shown", question))["shown"]
    assert failed(comfy).keys() == {node}  # nobody trains it
    with run.locked():
        comfy.request("/atelier/shown", question)
    assert failed(comfy) == {}


def test_a_cancel_is_no_failure(comfy: ComfyClient, server: ComfyServer) -> None:
    folder = draw_pictures(server.base / "input" / "cancelled")
    stopped = threading.Event()

    def cancel(kind: str, data: dict, result) -> None:
        if kind == "text" and "step" in data["text"] and not stopped.is_set():
            stopped.set()
            comfy.interrupt(result.prompt_id)

    with server.unhurried(0.1):
        result = comfy.queue(train_graph(folder.name, name="cancelled", steps=1000), cancel, workflow=WORKFLOW)
    assert result.status == "interrupted"
    assert failed(comfy) == {}


@pytest.mark.parametrize(
    "question", [{"workflow": None}, {"workflow": 5}, {"workflow": "x" * 101}, {"workflow": ""}, []]
)
def test_a_question_without_a_workflow_is_refused(comfy: ComfyClient, question: object) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        comfy.request("/atelier/failed", question)
    assert refusal.value.code == 400 and answer_of(refusal.value.read())["error"] == "workflow must be an id."
