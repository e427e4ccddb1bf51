"""The pack's settings of ComfyUI: read when a run starts, and refused where they are no numbers."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from train_graph import draw_pictures, train_graph

from comfy_client import ComfyClient, ComfyServer, answer_of
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
LIMIT = "/settings/Atelier.KeptLimit"


def cached(server: ComfyServer) -> set[str]:
    """Name the files of encoded pictures and captions."""
    return {path.name for path in (server.base / "user" / "__atelier" / "cache").glob("shard-*")}


@pytest.fixture
def settings(server: ComfyServer) -> Iterator[Path]:
    """Give the file of the settings; what it held is put back afterwards."""
    path = server.base / "user" / "default" / "comfy.settings.json"
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    if before is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(before)


def test_the_limit_of_the_cache_is_the_settings(comfy: ComfyClient, server: ComfyServer, settings: Path) -> None:
    """What a run uses stays, whatever the limit; what runs before it used goes."""

    def run(colour: str) -> set[str]:
        before, folder = cached(server), server.base / "input" / f"settings_{colour}"
        folder.mkdir()
        Image.new("RGB", (64, 64), colour).save(folder / "a.png")
        (folder / "a.txt").write_text(f"all {colour}", encoding="utf-8")
        result = comfy.queue(train_graph(folder.name, name=folder.name, steps=1, batch_size=1))
        shutil.rmtree(folder)
        assert result.ok, result.error
        return cached(server) - before

    comfy.request(LIMIT, 0)
    first = run("red")
    second = run("green")
    assert first and second and first | second <= cached(server)
    comfy.request(LIMIT, 1e-5)  # GB
    third = run("blue")
    assert third <= cached(server) and not (first | second) & cached(server)
    settings.write_text("{", encoding="utf-8")  # ComfyUI begins anew then, and so do we, with 20 GB
    assert run("gold") and third <= cached(server)


@pytest.mark.parametrize("value", [-1, "lots", True, [], float("inf"), 10**400])
def test_a_limit_that_is_no_number_of_gigabytes_is_refused(
    comfy: ComfyClient, server: ComfyServer, pictures: Path, settings: Path, value: object
) -> None:
    comfy.request(LIMIT, value)
    result = comfy.queue(train_graph(pictures.name, name=pictures.name))
    assert result.error == (
        f"The limit is {value!r}; set LoRA Atelier > Kept files > Limit in ComfyUI's settings to a number of "
        "gigabytes, 0 for no limit."
    )
    assert not any((server.base / "output" / "atelier" / "runs").glob(f"{pictures.name}*"))


def test_all_that_is_kept_shares_one_limit(comfy: ComfyClient, server: ComfyServer, settings: Path) -> None:
    """Pictures and LoRAs of the graph count like the cache; what was used today stays, whatever the limit."""
    comfy.request("/atelier/kept/clear", {})  # of what other tests left
    kept = server.base / "user" / "__atelier"
    old, today = kept / "pictures" / "old", kept / "pictures" / "today"
    lora, forgotten = kept / "loras" / "old.safetensors", kept / "pictures" / "forgotten"
    for folder in (old, today, forgotten):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a.png").write_bytes(bytes(1_000_000))
    lora.parent.mkdir(exist_ok=True)
    lora.write_bytes(bytes(1_000_000))
    masks, change = kept / "earlier" / "masks", kept / "captions" / "0000000001.jsonl"
    unused = [masks / "a.png", kept / "earlier" / "settings" / "a.json", kept / "written" / "a.jsonl"]
    for path in (*unused, change, masks / "b.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1_000))
    now = time.time()
    for days, path in ((2, old), (3, lora), (40, forgotten), *((40, each) for each in unused)):
        os.utime(path, (now - days * 86400, now - days * 86400))
    folder = draw_pictures(server.base / "input" / "shares_one_limit")

    def run(limit: float) -> None:
        comfy.request(LIMIT, limit)
        result = comfy.queue(train_graph(folder.name, name=f"limit {limit}", steps=1, batch_size=1))
        assert result.ok, result.error

    run(0.0025)  # GB
    assert today.exists() and old.exists() and not lora.exists() and not forgotten.exists()
    assert comfy.get("/atelier/kept")["limit"] == 2_500_000
    run(0.0015)
    assert today.exists() and not old.exists()
    sizes = comfy.get("/atelier/kept")["sizes"]
    assert sizes["pictures"] == 1_000_000 and sizes["loras"] == 0 and sizes["encoded"] > 0
    assert sizes["undo"] == 2_000 and not any(each.exists() for each in unused)
    cleared = answer_of(comfy.request("/atelier/kept/clear", {}))
    assert cleared["sizes"] == {"encoded": 0, "pictures": 0, "loras": 0, "undo": 0} and not cached(server)
    run(0.002)
    shutil.rmtree(folder)
