"""The pack in real ComfyUI servers: it loads, cleanly, quickly and once, and tells of the runs on the disk."""

import json
import re
import urllib.error
import urllib.parse
from pathlib import Path

import pytest
from run_folders import make_run

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import PACK, ROOT

IMPORT_LINE = re.compile(rf"^(?:\[INFO\])?\s*(\d+\.\d) seconds( \(IMPORT FAILED\))?: .*[\\/]{PACK}\s*$", re.MULTILINE)

PROBE = """
import importlib.util, logging, sys


async def comfy_entrypoint():
    for name in [each for each in sys.modules if each.partition(".")[0] == "diffusers"]:
        del sys.modules[name]  # of the process that the server is forked from
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location("atelier_probe", {root!r} + "/__init__.py")
    sys.modules[spec.name] = pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    own = [name for name in set(sys.modules) - before if name.startswith("atelier_probe.")]
    extension = await pack.comfy_entrypoint()
    brought = {{name.partition(".")[0] for name in set(sys.modules) - before}} - {{spec.name}} - sys.stdlib_module_names
    logging.warning(f"the pack brought: {{own + sorted(brought)}}")
    return extension
"""


def test_a_stock_prompt_runs_and_is_cached_when_queued_again(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    prompt = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 32, "height": 24, "batch_size": 1, "color": 255}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    prompt["1"]["inputs"]["color"] = int(comfy.id[:4], 16)  # unlike any earlier prompt of this server
    first = comfy.queue(prompt)
    assert first.ok and first.did_run("1") and first.did_run("2")
    assert [image.size for image in comfy.images(first, "2")] == [(32, 24)]
    again = comfy.queue(prompt)
    assert again.ok and again.was_cached("1") and again.was_cached("2") and not again.ran


def test_a_refused_prompt_says_why(comfy: ComfyClient) -> None:
    result = comfy.queue({"1": {"class_type": "PreviewImage", "inputs": {}}})
    assert result.status == "rejected"
    assert "Required input is missing: images" in result.error


def test_the_pack_is_imported_without_error(any_server: ComfyServer) -> None:
    log = any_server.log_text()
    found = IMPORT_LINE.search(log)
    assert found, "the log does not name the pack"
    assert not found[2], "\n".join(log[: found.start()].splitlines()[-30:])


@pytest.mark.parametrize("warmed", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["warmed", "cold"])
def test_importing_the_pack_brings_no_library_that_comfyui_has_not_loaded(
    server: ComfyServer, tmp_path: Path, warmed: bool
) -> None:
    """What makes ComfyUI start slowly is a pack that imports diffusers and its kin; ours waits until a node runs."""
    probed = ComfyServer(server.comfyui, tmp_path, warmed=warmed)
    (tmp_path / "custom_nodes" / PACK).unlink()
    (tmp_path / "custom_nodes" / "probe.py").write_text(PROBE.format(root=str(ROOT)), encoding="utf-8")
    with probed:
        found = re.search(r"the pack brought: \[(.*)\]", probed.log_text())
    assert found, probed.log_text()
    assert set(re.findall(r"'([^']+)'", found[1])) <= {"PIL"}  # a C module of Pillow's that ComfyUI does not use


def test_each_script_is_listed_once(any_server: ComfyServer) -> None:
    listed = [path for path in ComfyClient(any_server.url).get("/extensions") if "atelier" in path.lower()]
    expected = [f"/extensions/{PACK}/{path.relative_to(ROOT / 'js').as_posix()}" for path in ROOT.glob("js/**/*.js")]
    assert sorted(listed) == sorted(expected)


def test_runs_are_listed_by_name_and_nothing_beside_them(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    output = any_server.base / "output" / "atelier"
    run = make_run(output / "runs", "été 1", saves=(2, 4), logged=5, finished=4, steps=4)
    lora = any_server.base / "models" / "loras" / "atelier" / "x.safetensors"
    (run.path / "published.json").write_text(json.dumps({"k": [[str(lora), "0"]]}), encoding="utf-8")
    beside = make_run(output, "beside", saves=(2,)).path.name
    told = {each["run"]: each for each in comfy.get("/api/atelier/runs")["runs"]}
    found = told[run.path.name]
    assert (found["status"], found["step"], found["steps"]) == ("finished", 4, 4) and beside not in told
    detail = comfy.get(f"/api/atelier/runs/{urllib.parse.quote(run.path.name)}")
    assert detail["published"] == ["atelier/x.safetensors"] and str(any_server.base) not in json.dumps([told, detail])
    rate = {"lora_unet": [[step, 1e-4] for step in range(1, 5)]}
    loss, validation = [[step, 1 / step] for step in range(1, 5)], [[0, 2.0], [4, 1.5]]
    assert detail["curves"] == {"loss": loss, "validation": validation, "rate": rate, "concepts": {}, "levels": {}}
    assert [save["step"] for save in detail["saves"]] == [2, 4] and found["saves"] == 2
    for name in (f"..%2f{beside}", f"%2e%2e%2f{beside}", f"..%5c{beside}", "..%2f..%2fetc", "..", "nothing", "%00"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            comfy.request(f"/api/atelier/runs/{name}")
        assert refused.value.code == 404, name
