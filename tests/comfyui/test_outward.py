"""The settings of services outside: a token goes in and never comes out; only the machine's own page changes them."""

import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from run_folders import make_run

from comfy_client import ComfyClient, ComfyServer, send

TOKEN = "tok_5e3cr3t-of-the-hook"
ADDRESS = f"discord://4711471147/{TOKEN}"
FOREIGN = {"X-Forwarded-For": "10.0.0.9"}


def test_a_token_goes_in_and_never_comes_out(comfy: ComfyClient, server: ComfyServer) -> None:
    file = server.base / "user" / "__atelier" / "outward" / "settings.json"
    change = {"service": "apprise", "on": False, "secret": ADDRESS}
    try:
        assert send(comfy, "/atelier/outward/change", change, **FOREIGN)[0] == 403 and not file.exists()
        status, answer = send(comfy, "/atelier/outward/change", change)
        assert status == 200 and file.stat().st_mode & 0o077 == 0
        assert json.loads(file.read_text())["services"]["apprise"]["secret"] == ADDRESS
        for asked in (answer, send(comfy, "/atelier/outward")[1], send(comfy, "/atelier/outward", **FOREIGN)[1]):
            assert [each["name"] for each in asked["services"] if each["kept"]] == ["apprise"]
            assert TOKEN not in json.dumps(asked)
        assert answer["may_change"] and not send(comfy, "/atelier/outward", **FOREIGN)[1]["may_change"]
        for odd in ({"service": "curl"}, {"service": "apprise", "command": 1}, {}, {"events": []} | change, 5):
            assert send(comfy, "/atelier/outward/change", odd)[0] == 400
        for odd in ({"service": "apprise", "secret": 5}, {"service": "wandb", "project": "../x"}, {"events": ["x"]}):
            assert send(comfy, "/atelier/outward/change", odd)[0] == 409
        assert send(comfy, "/atelier/outward/try", {}, **FOREIGN)[0] == 403
        assert send(comfy, "/atelier/runs/hub", {}, **FOREIGN)[0] == 403
        logged = [path for path in server.base.rglob("*") if path.is_file() and path != file]
        assert not [path for path in logged if TOKEN.encode() in path.read_bytes()]
        assert send(comfy, "/atelier/outward/change", {"service": "apprise", "secret": ""})[0] == 200
        assert TOKEN not in file.read_text()
    finally:
        file.unlink(missing_ok=True)


@pytest.fixture
def settings(comfy_modules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the settings, in a folder of the test."""
    from lora_atelier.nodes.comfyui import folders, outward

    monkeypatch.setattr(outward, "settings_file", lambda: tmp_path / "outward" / "settings.json")
    monkeypatch.setattr(outward, "_publishing", {})
    monkeypatch.setattr(folders, "runs_folder", lambda: tmp_path / "runs")
    return outward.settings_file()


def asked(answer: Any, question: Any) -> Any:
    from lora_atelier.nodes.comfyui import server

    return json.loads(server.answered(lambda: answer(None, question)).body)


def test_a_message_is_tried_and_a_run_is_told_of(settings: Path, library: Any) -> None:
    from lora_atelier.nodes import outward_routes as routes
    from lora_atelier.nodes.comfyui import outward
    from lora_atelier.trainer_core.common.callbacks import Callbacks

    apprise = library("apprise")
    asked(routes.answer_change, {"service": "apprise", "on": True, "secret": ADDRESS})
    asked(routes.answer_change, {"events": ["error"]})
    assert asked(routes.answer_try, {})["said"]["text"] == "A message went out."
    apprise.behaviour = "raise"
    refused = asked(routes.answer_try, {})["error"]["text"]
    assert refused.startswith("No message went out: ") and TOKEN not in refused and "***" in refused
    notes: list[str] = []
    with pytest.raises(ValueError), outward.telling(Callbacks(note=notes.append), "moss"):
        raise ValueError("no pictures")
    assert len(notes) == 1 and TOKEN not in notes[0]
    assert asked(lambda *_: routes.answer_settings(_at_the_machine()), {})["services"][0]["problem"] == notes[0]
    settings.write_text("{")
    with outward.telling(Callbacks(note=notes.append), "moss"):
        pass  # a run goes on all the same
    assert "cannot be read" in notes[1]


def _at_the_machine() -> Any:
    from aiohttp.test_utils import make_mocked_request

    return make_mocked_request("GET", "/", headers={"Host": "127.0.0.1"})


def test_a_page_publishes_behind_the_scenes_and_reads_the_end_later(
    settings: Path, library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_atelier.nodes import outward_routes as routes
    from lora_atelier.nodes.comfyui import outward

    hub, told = library("huggingface_hub"), []
    monkeypatch.setattr(outward, "PromptServer", type("P", (), {"instance": type("I", (), {"send_sync": told.append})}))
    monkeypatch.setattr(outward.PromptServer.instance, "send_sync", lambda kind, data: told.append((kind, data)))
    run = make_run(tmp_path / "runs", "moss", saves=(2, 4), finished=4)
    question = {"run": run.path.name, "step": 2, "repository": "me/moss", "licence": "mit", "public": False}
    assert "true or false" in asked(routes.answer_hub, question)["error"]
    question["samples"] = False
    assert "no licence" in asked(routes.answer_hub, question | {"licence": "MY OWN"})["error"]

    def published() -> dict[str, Any]:
        until = time.monotonic() + 60
        while (known := outward.published(run.path.name)).get("busy") or not told:
            assert time.monotonic() < until
            time.sleep(0.01)
        return known

    assert "is being published" in asked(routes.answer_hub, question)["said"]["text"]
    assert published()["said"] == "Published at https://hub.example/me/moss."
    assert told[0][0] == "atelier.published" and told[0][1]["run"] == run.path.name
    assert hub.repositories["me/moss"].private and "moss.safetensors" in hub.repositories["me/moss"].files
    told.clear()
    asked(routes.answer_change, {"service": "huggingface_hub", "secret": TOKEN})
    hub.problem = OSError(f"refused {TOKEN}")
    asked(routes.answer_hub, question | {"repository": "me/other"})
    assert published()["error"] == "huggingface_hub could not publish the LoRA: refused ***."
    outward._publishing[run.path.name] |= {"busy": True}
    assert "already" in asked(routes.answer_hub, question)["error"]["text"]
