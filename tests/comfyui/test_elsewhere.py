"""Runs beyond one page: the command of a run, a run that a shell trains, and what a restart cut off."""

import json
import math
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from train_graph import draw_pictures, train_graph

from comfy_client import ComfyClient, ComfyServer, answer_of
from lora_atelier.dev import FLOW, QUICKSTART, TINY_BASE
from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig, RunConfig

LONG = 100_000  # steps


def post(comfy: ComfyClient, path: str, question: object, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    usual = {"Content-Type": "application/json", **(headers or {})}
    try:
        return 200, answer_of(comfy.request(path, question, usual))
    except urllib.error.HTTPError as error:
        body = error.read()
        return error.code, answer_of(body) if body else {}


def quickstart(name: str) -> tuple[dict, str]:
    """Return the quickstart on the tiny model, with a long run of a name, and the id of its Train LoRA."""
    workflow = {
        **json.loads(QUICKSTART.read_text(encoding="utf-8")),
        "id": str(uuid.uuid4()),
    }  # as the editor gives one
    nodes = {node["type"]: node for node in workflow["nodes"]}
    nodes["AtelierLoadBaseModel"]["widgets_values"][0] = TINY_BASE.name
    nodes["AtelierTrain"]["widgets_values"][:5] = [name, LONG, 0, 1, 64]  # epochs, batch_size, resolution
    return workflow, str(nodes["AtelierTrain"]["id"])


def test_a_copy_of_a_workflow_shows_the_run_that_comfyui_knows(comfy: ComfyClient, pictures: Path) -> None:
    """ComfyUI does not train again what a node of other numbers, in another workflow, has trained."""
    graph = train_graph(pictures.name, name="copied", steps=1)
    assert "train" in comfy.queue(graph, workflow="the first").ran
    (first,) = post(comfy, "/atelier/shown", {"workflow": "the first", "nodes": ["train"]})[1]["shown"].values()
    copy = {
        f"9:{key}": {
            **node,
            "inputs": {
                name: [f"9:{value[0]}", *value[1:]] if isinstance(value, list) else value
                for name, value in node["inputs"].items()
            },
        }
        for key, node in graph.items()
    }
    assert "9:train" not in comfy.queue(copy, workflow="a copy").ran
    assert post(comfy, "/atelier/shown", {"workflow": "a copy", "nodes": ["9:train"]})[1]["shown"] == {"9:train": first}
    copy["9:train"]["inputs"]["seed"] += 1
    assert "9:train" in comfy.queue(copy, workflow="another").ran
    (other,) = post(comfy, "/atelier/shown", {"workflow": "another", "nodes": ["9:train"]})[1]["shown"].values()
    assert other["run"] != first["run"]
    circle = {"a": {"class_type": "AtelierTrain", "inputs": {"base_model": ["a", 0]}}}
    assert post(comfy, "/prompt", {"prompt": circle, "extra_data": {"extra_pnginfo": []}})[0] == 400


def test_a_node_waits_until_its_turn_beside_the_run_before(comfy: ComfyClient, server: ComfyServer) -> None:
    folder = draw_pictures(server.base / "input" / "waited for")
    graph = train_graph(folder.name, name="waiting", steps=1)
    graph["slow"] = {"class_type": "Describe", "inputs": {"image": ["picture", 0], "word": "first"}}
    sizes = {"width": 8, "height": 8, "batch_size": 1, "color": 0}
    graph["picture"] = {"class_type": "EmptyImage", "inputs": sizes}
    graph["train"]["inputs"]["name"] = ["slow", 0]
    asked: list[dict] = []

    def ask() -> dict:
        answer = post(comfy, "/atelier/shown", {"workflow": "waited for", "nodes": ["train"]})[1]["shown"]
        return answer.get("train", {})

    def look(kind: str, data: dict, _: object) -> None:
        if kind == "executing" and data["node"] == "slow":
            asked.append(ask())
        elif kind == "text" and "step" in data["text"]:
            asked.append({"waiting at work": ask().get("waiting")})

    with server.unhurried(0.6):
        assert comfy.queue(graph, look, workflow="waited for").ok
        first = ask()
        assert comfy.queue(graph, look, workflow="waited for").ok
        graph["slow"]["inputs"]["word"] = "second"
        graph["train"]["inputs"]["seed"] += 1
        assert comfy.queue(graph, look, workflow="waited for").ok
    reason = {"waiting": "Waiting for the nodes before this one."}
    assert first.keys() == {"run"}
    assert [each for each in asked if "waiting" in each] == [reason, {**first, **reason}]
    assert {"waiting at work": None} in asked and ask().keys() == {"run"} and ask() != first


@pytest.mark.skipif(sys.platform == "win32", reason="the line is read as a POSIX shell does")
def test_a_run_of_a_shell_is_followed_and_stopped_through_its_folder(server: ComfyServer, tmp_path: Path) -> None:
    comfy, processes = ComfyClient(server.url), warm if warm.POSSIBLE else subprocess
    workflow, node = quickstart("elsewhere")
    status, answer = post(comfy, "/atelier/command", {"workflow": workflow, "node": node})
    assert status == 200, answer
    command = shlex.split(answer["command"])
    assert command[:2] == [sys.executable, str(server.base / "custom_nodes" / "lora-atelier")]
    assert command[2] == "train" and Path(command[3]).parent == server.base / "user" / "__atelier" / "commands"
    assert post(comfy, "/atelier/command", {"workflow": workflow, "node": node})[1] == answer  # the same file
    log = tmp_path / "said.txt"
    with log.open("wb") as said:
        shell = processes.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    question = {"workflow": workflow["id"], "nodes": [node, "5000"]}
    while not (state := post(comfy, "/atelier/shown", question)[1]["shown"].get(node, {})).get("step"):
        assert shell.poll() is None
        time.sleep(0.2)
    assert state["followed"] and state["alive"] and state["steps"] == LONG and state["name"] == "elsewhere"
    run = state["run"]
    while not (later := comfy.get(f"/atelier/runs/{run}/live?seen={state['seen']}"))["points"]:
        time.sleep(0.2)
    assert later["points"][0]["step"] > state["step"]
    assert comfy.get(f"/atelier/runs/{run}")["status"] == "running"
    status, answer = post(comfy, "/atelier/runs/ask", {"run": run, "what": "sample"})
    assert status == 409 and answer["error"].startswith("There are no prompts to draw; set sample_prompts")
    assert post(comfy, "/atelier/runs/ask", {"run": run, "what": "dance"})[0] == 400
    status, answer = post(comfy, "/atelier/runs/ask", {"run": run, "what": "stop"})
    assert status == 200 and answer["said"] == "The run ends after its next step; its LoRA so far is saved."
    assert shell.wait() == 3 and "Stopped and kept after step" in log.read_text(encoding="utf-8")
    assert post(comfy, "/atelier/shown", question)[1]["shown"] == {node: {"run": run}}  # and its newest run stays
    status, answer = post(comfy, "/atelier/runs/ask", {"run": run, "what": "stop"})
    assert status == 409 and answer["error"] == "No process trains elsewhere now; it may have just ended."
    assert comfy.get(f"/atelier/runs/{run}")["status"] == "stopped"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("AtelierTrain", 1, "many"), "This run has no command: steps of Train LoRA is 'many' and must be a whole num"),
        (("AtelierLoadBaseModel", 0, "no.safetensors"), "There is no checkpoint 'no.safetensors'; set checkpoint of"),
        (("AtelierConceptDataset", 0, "/elsewhere"), "The folder /elsewhere is outside ComfyUI's folders, and nobody"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_train_has_no_command_but_a_sentence(comfy: ComfyClient, change, sentence: str) -> None:
    workflow, node = quickstart("wrong")
    kind, place, value = change
    next(node for node in workflow["nodes"] if node["type"] == kind)["widgets_values"][place] = value
    status, answer = post(comfy, "/atelier/command", {"workflow": workflow, "node": node})
    assert status == 409 and answer["error"].startswith(sentence), answer


def test_a_command_names_its_node_and_refuses_what_no_shell_can_load(comfy: ComfyClient) -> None:
    workflow, node = quickstart("first")
    train = next(each for each in workflow["nodes"] if str(each["id"]) == node)
    workflow["nodes"].append({**train, "id": 900, "widgets_values": ["second", *train["widgets_values"][1:]]})
    command = shlex.split(post(comfy, "/atelier/command", {"workflow": workflow, "node": "900"})[1]["command"])
    assert command[command.index("--node") + 1] == "900" and Path(command[3]).name.startswith("second-")
    linked = json.loads(FLOW.read_text(encoding="utf-8"))
    node = next(str(each["id"]) for each in linked["nodes"] if each["type"] == "AtelierTrain")
    status, answer = post(comfy, "/atelier/command", {"workflow": linked, "node": node})
    assert status == 409 and "was started with --base-directory." in answer["error"]
    for question in ({}, {"workflow": [], "node": "1"}, {"workflow": workflow, "node": 5}, 5):
        assert post(comfy, "/atelier/command", question)[0] == 400


@pytest.mark.skipif(sys.platform == "win32", reason="has no signals that ask a process to end")
def test_runs_that_a_restart_cut_off_are_offered_to_their_user_once(
    start_comfy: Callable[..., ComfyServer], tmp_path: Path
) -> None:
    server = start_comfy("--multi-user", base=tmp_path)
    comfy = ComfyClient(server.url)
    users = [{"comfy-user": post(comfy, "/users", {"username": name})[1]} for name in ("one", "two")]
    draw_pictures(server.base / "input" / "pictures")

    def queue(name: str, user: dict[str, str], **more: Any) -> str:
        graph = train_graph("pictures", name=name, steps=LONG)
        status, answer = post(comfy, "/prompt", {"prompt": graph, **more}, user)
        assert status == 200, answer
        return answer["prompt_id"]

    def offered(user: dict[str, str]) -> list[dict[str, Any]]:
        return answer_of(comfy.request("/atelier/pending", headers=user))["prompts"]

    kept = tmp_path / "user" / "__atelier" / "queue"

    def remembered(count: int) -> None:
        while len(list(kept.glob("*.json"))) != count:
            time.sleep(0.1)

    workflow = {"id": "a-workflow", "nodes": [], "links": []}
    queue("first", users[0], extra_data={"extra_pnginfo": {"workflow": workflow}, "api_key_comfy_org": "secret"})
    queue("second", users[0])
    queue("strange", users[1])
    gone = queue("cancelled", users[0])
    remembered(4)
    comfy.request("/queue", {"delete": [gone]})
    remembered(3)
    assert "secret" not in "".join(path.read_text() for path in kept.glob("*.json"))
    assert offered(users[0]) == []  # they are in the queue of a ComfyUI that runs
    while not any(run["step"] for run in comfy.get("/atelier/runs")["runs"]):
        time.sleep(0.1)
    server.process.send_signal(signal.SIGTERM)  # the run is saved, and its prompt ends; nobody has cancelled it
    server.process.wait()
    assert list((tmp_path / "models" / "loras" / "atelier").glob("first-stopped-at-*.safetensors"))
    assert list((tmp_path / "output" / "atelier" / "runs").glob("first-*/checkpoints/step-*/weights.safetensors"))

    strange = next(path for path in kept.glob("*.json") if "strange" in path.read_text())
    strange.write_text(strange.read_text().replace('"AtelierConceptDataset"', '"NoSuchNode"'))
    server.start()
    assert [prompt["runs"] for prompt in offered(users[0])] == [["first"], ["second"]]
    assert [(prompt["runs"], prompt["missing"]) for prompt in offered(users[1])] == [(["strange"], ["NoSuchNode"])]
    assert post(comfy, "/atelier/pending/take", {}, {**users[0], "Origin": "http://elsewhere.example"})[0] == 403
    assert post(comfy, "/atelier/pending/take", {}, users[1])[1]["prompts"] == []
    post(comfy, "/atelier/pending/drop", {"names": [each["name"] for each in offered(users[0])]}, users[1])
    first, second = post(comfy, "/atelier/pending/take", {}, users[0])[1]["prompts"]
    assert first["workflow"] == workflow and second["workflow"] is None
    assert first["prompt"]["train"]["inputs"]["name"] == "first" and "train" in first["outputs"]
    assert post(comfy, "/atelier/pending/take", {}, users[0])[1]["prompts"] == [] == offered(users[0])
    post(comfy, "/atelier/pending/drop", {"names": [first["name"], "../shown"]}, users[0])

    # The page has queued the first one alone: the next ComfyUI offers what lies there, until it is dismissed.
    assert {path.stem for path in kept.glob("*.json")} == {second["name"], strange.stem}
    post(comfy, "/atelier/pending/drop", {"names": [second["name"]]}, users[0])
    post(comfy, "/atelier/pending/drop", {"names": [each["name"] for each in offered(users[1])]}, users[1])
    assert offered(users[1]) == [] and not list(kept.glob("*.json"))


def test_questions_at_the_same_moment_find_the_same(comfy_modules: Any, monkeypatch, tmp_path: Path) -> None:
    from lora_atelier.nodes.comfyui import pending

    class Slow(pending.FileLock):  # held while the other one asks
        def __exit__(self, *of: Any) -> None:
            time.sleep(0.05)
            super().__exit__(*of)

    monkeypatch.setattr(pending, "folder", lambda: tmp_path)
    monkeypatch.setattr(pending, "FileLock", Slow)
    for name in ("ended.lock", "ended-000001.json"):
        (tmp_path / name).touch()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: pending._left(), range(8))) == [[tmp_path / "ended-000001.json"]] * 8


def test_what_comfyui_notes_in_a_prompt_that_runs_is_none_of_it(comfy_modules: Any, monkeypatch, tmp_path) -> None:
    """A run may begin before it is looked at: it is remembered as it was queued, and known again by that."""
    from lora_atelier.nodes.comfyui import pending

    told: list[int] = []
    monkeypatch.setattr(pending, "folder", lambda: tmp_path)
    monkeypatch.setattr(pending, "_lock", None)
    monkeypatch.setattr(pending, "tell_pages", lambda: told.append(1))
    prompt = {"train": {"class_type": pending.TRAIN, "inputs": {"name": "moss"}, "_meta": {"title": "Train"}}}
    before = {"user": "me", "number": 1, "prompt": prompt, "workflow": None, "outputs": ["train"]}
    (tmp_path / "ended.lock").touch()
    (tmp_path / "ended-000001.json").write_text(json.dumps(before), encoding="utf-8")
    running = {"train": {**prompt["train"], "is_changed": [math.nan]}}
    assert pending._Watch()._write((1, "its id", running, {}, ["train"]), "me")
    (kept,) = tmp_path.glob("*.json")
    assert kept.stem.startswith(pending.SESSION) and json.loads(kept.read_text(encoding="utf-8")) == before
    assert told == [1]
    pending._lock.release()


def test_the_line_of_several_gpus_and_of_files_elsewhere(comfy_modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_atelier.nodes.comfyui import shell

    config = RunConfig(
        base_model=BaseModelConfig(path="/models/base.safetensors"),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder="/pictures"), ConceptConfig(folder="/more"))),
    )
    other = config.replace(
        base_model=BaseModelConfig(path="/other/base.safetensors"),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder="/pictures"), ConceptConfig(folder="/../more"))),
    )
    assert list(shell._differing(config, config)) == []
    assert list(shell._differing(config, other)) == ["base_model.path=/models/base.safetensors"]
    isolated = ["-s"] if sys.flags.no_user_site else []
    assert shell._program() == [sys.executable, *isolated]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("comfy.model_management.get_torch_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(shell.dist, "is_backend_available", lambda _: False)  # as on Windows
    assert shell._program() == [sys.executable, *isolated]
    monkeypatch.setattr(shell.dist, "is_backend_available", lambda _: True)
    script, *rest = shell._program()
    assert Path(script).stem == "torchrun" and rest == ["--nproc-per-node", "2"]
    monkeypatch.setattr(shell.shutil, "which", lambda *_, **__: None)
    assert shell._program() == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def test_no_shell_runs_what_a_workflow_says(comfy_modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_atelier.nodes.comfyui import shell

    strange = ["python", "a b", "x;y&z", "$(touch x)", "`touch x`", "it's", '"', "%PATH%", "two\nlines"]
    assert shlex.split(shell.line(strange)) == strange
    monkeypatch.setattr(shell, "os", SimpleNamespace(name="nt"))
    given = [
        "D:\\a\\python.exe",
        "-s",
        "a b",
        "x;y&z",
        "it's",
        "\u732b.json",
        "a\u2019b",
        "D:\\my dir\\",
        "D:\\",
        "x=1,2",
    ]
    quoted = ['"a b"', '"x;y&z"', '"it\'s"', "\u732b.json", '"a\u2019b"', '"D:\\my dir\\\\"', "D:\\", '"x=1,2"']
    assert shell.line(given) == " ".join([*given[:2], *quoted])
    spaced = shell.line([r"D:\my dir\python.exe", "train"])
    assert spaced == 'pushd "D:\\my dir"\n.\\python.exe train'
    for part in (*strange[3:5], *strange[6:], "\u201cquoted\u201d"):
        with pytest.raises(ValueError, match="a shell of Windows would not take"):
            shell.line(["python", part])
