"""What the page of runs asks the server: the list, one run, and what people do with it; run folders of strangers."""

import io
import json
import shutil
import struct
import time
import urllib.error
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_folders import make_run
from safetensors import safe_open
from train_graph import train_graph

from comfy_client import ComfyClient, ComfyServer, answer_of, send
from lora_atelier.dev import TINY_BASE
from lora_atelier.trainer_core.common.leftovers import unfinished
from lora_atelier.trainer_core.runs import RunFolder, open_run

WORKFLOW = {"nodes": [], "links": [], "version": 0.4, "id": "a-workflow"}


@pytest.fixture
def runs(server: ComfyServer) -> Path:
    """Return the server's folder of runs."""
    return server.base / "output" / "atelier" / "runs"


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Iterator[RunFolder]:
    """Return a finished run with a sample, of a name that no other test has."""
    run = make_run(runs, tmp_path.name, saves=(2, 4), logged=4, finished=4, steps=4)
    (run.path / "samples").mkdir()
    Image.new("RGB", (64, 32), (200, 30, 60)).save(run.path / "samples" / "step-00000004-1.png")
    yield run
    if run.path.is_symlink():
        run.path.unlink()
    shutil.rmtree(run.path, ignore_errors=True)


@pytest.fixture
def ask(comfy: ComfyClient, run: RunFolder) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Give `ask(change, headers, **question)` -> status and answer of a change of the run."""

    def post(change: str, headers: dict[str, str] | None = None, **question: Any) -> tuple[int, dict[str, Any]]:
        usual = {"Origin": comfy.url, "Content-Type": "application/json"}
        try:
            return 200, answer_of(
                comfy.request(
                    f"/atelier/runs/{change}", {"run": run.path.name, **question}, {**usual, **(headers or {})}
                )
            )
        except urllib.error.HTTPError as error:
            body = error.read()
            return error.code, answer_of(body) if body.startswith(b"{") else {}

    return post


def get(comfy: ComfyClient, run: RunFolder, rest: str = "") -> tuple[int, bytes]:
    try:
        return 200, comfy.request(f"/atelier/runs/{urllib.parse.quote(run.path.name)}{rest}")
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def row(comfy: ComfyClient, run: RunFolder) -> dict[str, Any] | None:
    return next((each for each in comfy.get("/atelier/runs")["runs"] if each["run"] == run.path.name), None)


def test_a_run_is_renamed_copied_packed_and_deleted(comfy, server, run, ask) -> None:
    shown = row(comfy, run)
    assert shown and (shown["status"], shown["saves"], shown["thumbnail"]) == ("finished", 2, "step-00000004-1.png")
    assert ask("rename", title="My moss")[0] == 200
    again = row(comfy, run)  # what is remembered of a run gives way to what changed
    assert again and again["title"] == "My moss"

    name = f"own/{run.path.name}"
    status, answer = ask("publish", step=2, name=name)
    assert status == 200 and answer["said"].startswith("Saved in models/loras:")
    lora = server.base / "models" / "loras" / f"{name}.safetensors"
    with safe_open(lora, "pt") as file:
        assert file.metadata()["atelier.run"] == "a" * 64 and float(file.get_tensor(file.keys()[0])[0, 0]) in (1, 2)
    assert (server.base / "models" / "embeddings" / "atelier" / f"{lora.stem}-moss.safetensors").is_file()
    assert f"{name}.safetensors" in answer_of(get(comfy, run)[1])["published"]
    status, answer = ask("publish", step=4, name=name)
    assert status == 409 and "exists already; choose another name." in answer["error"]

    status, packed = get(comfy, run, "/export/2")
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert status == 200 and archive.testzip() is None and "My moss-step-2/settings.json" in archive.namelist()

    status, asked = ask("delete", steps=[2])
    assert status == 200 and f"{name}.safetensors" in asked["kept"]
    assert (asked["newest"], asked["left"], "said" in asked) == (False, None, False)
    assert ask("delete", steps=[2], agreed=asked["bytes"] + 1)[1] == asked  # another size than was told
    assert len(run.saves()) == 2
    assert "are free again" in ask("delete", steps=[2], agreed=asked["bytes"])[1]["said"]
    assert [path.name for path in run.saves()] == ["step-00000004"]
    asked = ask("delete", steps=[4])[1]
    assert asked["newest"] and asked["left"] is None
    asked = ask("delete")[1]
    assert f"{name}.safetensors" in asked["kept"]
    lora.rename(lora.with_suffix(".moved"))
    assert f"{name}.safetensors" not in ask("delete")[1]["kept"]
    lora.with_suffix(".moved").rename(lora)
    assert run.path.exists() and "said" in ask("delete", agreed=asked["bytes"])[1] and not run.path.exists()
    assert row(comfy, run) is None and lora.is_file()
    lora.unlink()


def test_a_run_in_training_is_not_deleted(comfy, run, ask) -> None:
    size = ask("delete")[1]["bytes"]
    with run.locked():
        for steps in (None, [2]):
            status, answer = ask("delete", steps=steps, agreed=size)
            assert status == 409 and answer["error"] == "This run is in training; delete it after that."
        # Another process trains it, and reads what is kept.
        assert send(comfy, "/atelier/kept/clear", {})[1] == {"error": "A LoRA is being trained; clear after it."}
    assert len(run.saves()) == 2


def test_what_a_run_of_another_output_folder_reads_is_not_cleared(comfy, server) -> None:
    """Two servers may share the user folder alone."""
    assert "sizes" in send(comfy, "/atelier/kept/clear", {})[1]
    with unfinished(server.base / "user" / "__atelier" / "in use" / "run") as sign:  # as that server writes it
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()
        assert send(comfy, "/atelier/kept/clear", {})[1] == {"error": "A LoRA is being trained; clear after it."}
    sign.unlink()
    assert "sizes" in send(comfy, "/atelier/kept/clear", {})[1]


@pytest.mark.parametrize("change", ["rename", "publish", "delete"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Content-Type": "text/plain"},  # a page may send it anywhere without asking
    ],
    ids=str,
)
def test_only_pages_of_this_server_change_runs(comfy, run, ask, change: str, headers: dict[str, str]) -> None:
    before = sorted(run.path.rglob("*"))
    size = ask("delete")[1]["bytes"]
    assert ask(change, headers, title="x", step=2, name="elsewhere", agreed=size)[0] == 403
    assert sorted(run.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "question", "status"),
    [
        ("rename", {"title": 5}, 400),
        ("rename", {"title": "two\nlines"}, 409),
        ("rename", {"run": "../runs"}, 404),
        ("rename", {"run": ""}, 404),
        ("rename", {"run": "a\0b"}, 404),
        ("rename", {"run": None}, 400),
        ("rename", {"title": "x" * 2**17}, 413),
        ("publish", {"step": "2", "name": "x"}, 400),
        ("publish", {"step": True, "name": "x"}, 400),
        ("publish", {"step": 3, "name": "x"}, 409),
        ("publish", {"step": 2, "name": "../x"}, 409),
        ("publish", {"step": 2, "name": "/x"}, 409),
        ("publish", {"step": 2, "name": "a\0"}, 409),
        ("publish", {"step": 2, "name": "C:/x"}, 409),
        ("publish", {"step": 2, "name": ""}, 409),
        ("publish", {"step": 2, "name": None}, 400),
        ("delete", {"steps": []}, 400),
        ("delete", {"steps": "all"}, 400),
        ("delete", {"steps": [-1]}, 400),
        ("delete", {"steps": [3]}, 409),
        ("delete", {"steps": [[2]]}, 400),
    ],
    ids=str,
)
def test_odd_questions_get_a_sentence_and_change_nothing(comfy, server, run, ask, change, question, status) -> None:
    def state() -> list[Path]:
        return sorted([*run.path.rglob("*"), *(server.base / "models").rglob("*")])

    before = state()
    got, answer = ask(change, **question)
    assert got == status and answer["error"].endswith("."), answer
    assert state() == before


def test_odd_addresses_are_answered(comfy, run) -> None:
    for rest in ("/export/x", "/export/-1", "/export/" + "9" * 50, "/workflow", "/export/3", "/nothing"):
        status, body = get(comfy, run, rest)
        assert status in (400, 404, 409) and b"Traceback" not in body, rest


def test_nothing_a_run_holds_leads_out_of_it(comfy, server, run, ask, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    Image.new("RGB", (8, 8)).save(secret / "picture.png")
    save = run.path / "checkpoints" / "step-00000004"
    (save / "lora.safetensors").rename(secret / "lora.safetensors")
    (save / "lora.safetensors").symlink_to(secret / "lora.safetensors")
    before = {path.name: path.read_bytes() for path in secret.iterdir()}
    status, answer = ask("publish", step=4, name="leak")
    assert status == 409 and "lora.safetensors is a link to another place" in answer["error"]
    assert get(comfy, run, "/export/4")[0] == 409 and not list((server.base / "models").rglob("leak*"))

    sample = run.path / "samples" / "step-00000004-1.png"
    sample.unlink()
    sample.symlink_to(secret / "picture.png")
    assert get(comfy, run, "/thumbnail")[0] == 404 and answer_of(get(comfy, run)[1])["samples"] == []

    run.path.rename(secret / "run")
    run.path.symlink_to(secret / "run")
    shown = row(comfy, run)
    assert shown and shown["status"] == "unreadable"
    for change, question in (("rename", {"title": "x"}), ("publish", {"step": 2, "name": "leak"}), ("delete", {})):
        status, answer = ask(change, **question)
        assert status == 409 and "link to another folder" in answer["error"]
    for rest in ("/workflow", "/thumbnail", "/export/last"):
        assert get(comfy, run, rest)[0] == 409
    assert {path.name: path.read_bytes() for path in secret.iterdir() if path.is_file()} == before
    assert len(list((secret / "run" / "checkpoints").iterdir())) == 2


def bomb() -> bytes:
    """Return a small PNG that claims 30000 x 30000 pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(10**6)))]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("content", [b"", b"<svg onload=alert(1)>", bomb()], ids=["empty", "page", "bomb"])
def test_a_thumbnail_is_drawn_anew_and_only_from_a_picture(comfy, run, content: bytes) -> None:
    status, picture = get(comfy, run, "/thumbnail")
    with Image.open(io.BytesIO(picture)) as image:
        assert status == 200 and image.format == "WEBP" and image.size == (64, 32)
    (run.path / "samples" / "step-00000004-1.png").write_bytes(content)
    status, body = get(comfy, run, "/thumbnail")
    assert status == 415 and answer_of(body)["error"] == "step-00000004-1.png is no picture that can be shown."


def test_a_stranger_s_numbers_and_texts_stay_small(comfy, run) -> None:
    about = json.loads((run.path / "run.json").read_text(encoding="utf-8"))
    about |= {"name": "x" * 10**6, "begun_with": {"run": "y" * 10**6, "step": 10**11}, "pictures": "z" * 10**6}
    about["config"] = {f"k{i}": "v" * 100 for i in range(50_000)}
    (run.path / "run.json").write_text(json.dumps(about), encoding="utf-8")
    (run.path / "published.json").write_text(json.dumps({"k": [["p" * 10**6, "0"]] * 5}), encoding="utf-8")
    assert len(json.dumps(row(comfy, run))) < 5000 and len(get(comfy, run)[1]) < 10**6


@pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
def test_a_run_keeps_its_workflow_a_picture_and_what_nobody_set(comfy: ComfyClient, runs: Path, pictures: Path) -> None:
    extra = {"extra_pnginfo": {"workflow": WORKFLOW}}
    graph = train_graph(pictures.name, {"name.learning_rate": -1}, name=pictures.name, on_existing="train again")
    queued = answer_of(comfy.request("/prompt", {"prompt": graph, "client_id": comfy.id, "extra_data": extra}))
    while not (ended := comfy.get(f"/history/{queued['prompt_id']}")):
        time.sleep(0.2)
    assert ended[queued["prompt_id"]]["status"]["status_str"] == "success"
    (path,) = runs.glob(f"{pictures.name}-*")
    assert comfy.get(f"/atelier/runs/{path.name}/workflow") == {"workflow": WORKFLOW}
    told = comfy.get(f"/atelier/runs/{path.name}")
    assert (told["rank"], told["thumbnail"]) == (4, "picture.png") and told["seconds"] > 0
    with Image.open(io.BytesIO(get(comfy, open_run(path), "/thumbnail")[1])) as picture:
        assert picture.size == (80, 64)
    changed = {each["input"]: each["changed"] for group in told["nodes"] for each in group["settings"]}
    assert changed["steps"] and changed["rank"] and not changed["name.learning_rate"]
    shutil.rmtree(path)
