"""Runs without a page and runs of the page are the same: their configurations, their keys, their folders."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from prompts import to_prompt
from safetensors.torch import save_file
from toy_workflows import on_toy_models

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import FLOW, QUICKSTART, ROOT, TINY_BASE, TINY_FLOW, TOUR
from lora_atelier.trainer_core.commands import main
from lora_atelier.trainer_core.commands.plan import build_parser as of_plan
from lora_atelier.trainer_core.commands.train import build_parser as of_train
from lora_atelier.trainer_core.config import RunConfig
from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.models import Chosen
from lora_atelier.trainer_core.runs import find_runs
from lora_atelier.trainer_core.workflow.canvas import prompt_of
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.read import read_workflow

TRAINING = [path for path in sorted((ROOT / "workflows").glob("*.json")) if "AtelierTrain" in path.read_text("utf-8")]
WORKFLOWS = [*TRAINING, TOUR, FLOW]
ADAPTER = next(path for path in WORKFLOWS if "adapter" in path.stem)  # its model draws its pictures
# What the node Rules of the tests' servers runs: meanwhile Train LoRA writes its configuration instead of training.
PROBE = """
import json, sys
from contextlib import contextmanager
from pathlib import Path

@contextmanager
def rules():
    train = next(m for name, m in list(sys.modules.items()) if name.endswith("lora-atelier.nodes.train"))
    read = train.read_train
    def write(*given, **inputs):
        config = json.dumps(read(*given, **inputs).to_dict())
        Path(__file__).with_name("config.json").write_text(config, encoding="utf-8")
        raise ValueError("The configuration is written.")
    train.read_train = write
    yield
    train.read_train = read
"""


@pytest.fixture
def written(server: ComfyServer, tmp_path: Path) -> Iterator[Path]:
    """Give the file into which Train LoRA of the shared server writes its configuration, and then ends."""
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    for on in (True, False):
        turn = {"class_type": "Rules", "inputs": {"file": str(tmp_path / "probe.py"), "on": on}}
        assert ComfyClient(server.url).queue({"1": turn}).ok
        if on:
            yield tmp_path / "config.json"


@pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
@pytest.mark.parametrize("path", [each for each in WORKFLOWS if each != ADAPTER], ids=lambda path: path.stem)
def test_a_workflow_gives_the_servers_configuration(
    server: ComfyServer, written: Path, comfyui: Path, path: Path
) -> None:
    client, workflow = ComfyClient(server.url), on_toy_models(path)
    for node in workflow["nodes"]:
        if node["type"] == "AtelierConceptDataset" and not (folder := node["widgets_values"][0]).startswith("atelier:"):
            (server.base / "input" / folder).mkdir(exist_ok=True)
    prompt = to_prompt(workflow, client.first_info())
    # ComfyUI runs outputs in no fixed order, and Dataset Preview would refuse the empty folder first.
    others = ("AtelierDatasetPreview", "AtelierSample", "PreviewAny", "PreviewImage", "SaveImage")
    result = client.queue({key: node for key, node in prompt.items() if node["class_type"] not in others})
    assert "The configuration is written." in result.error, result.error
    wanted = RunConfig.from_dict(json.loads(written.read_text(encoding="utf-8")))
    places = Folders(server.base, comfyui / "comfy" / "sd1_tokenizer")
    for document in (workflow, prompt):  # as the editor saves it, and as the API takes it
        name, found, _ = read_workflow(document, places, "", lambda *_: Chosen(wanted.base_model))
        assert found == wanted
        assert name == next(n for n in prompt.values() if n["class_type"] == "AtelierTrain")["inputs"]["name"]


def test_pictures_that_a_model_draws_need_comfyui(tmp_path: Path, comfyui: Path) -> None:
    places = Folders(tmp_path, comfyui / "comfy" / "sd1_tokenizer")
    sentence = "dataset of Train LoRA comes from the node AtelierDrawnPictures, which runs only in ComfyUI"
    with pytest.raises(ValueError, match=sentence):
        read_workflow(on_toy_models(ADAPTER), places, "", lambda *_: Chosen(TINY_FLOW.name))


@pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
def test_a_run_of_the_shell_is_reused_by_the_page(
    server: ComfyServer, comfyui: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The workflow trains here, and then on the page; its TOML trains elsewhere, and its run's folder comes home."""
    workflow = on_toy_models(QUICKSTART)
    train = next(node for node in workflow["nodes"] if node["type"] == "AtelierTrain")
    train["widgets_values"][:5] = ["headless", 3, 0, 1, 64]  # steps, epochs, batch_size, resolution
    tokenizer = ["--tokenizer", str(comfyui / "comfy" / "sd1_tokenizer")]
    comfy = [*tokenizer, "--comfyui", str(server.base)]
    saved = tmp_path / "headless.json"
    saved.write_text(json.dumps(workflow), encoding="utf-8")
    assert main(["export", str(saved), str(tmp_path / "headless.toml"), *comfy]) == 0
    device = ["--device", "cpu"] if server.cpu else []
    away = tmp_path / "away"
    assert main(["train", str(tmp_path / "headless.toml"), "--output", str(away), *tokenizer, *device]) == 0
    (run,) = find_runs(away / "atelier" / "runs")
    home = server.base / "output" / "atelier" / "runs"
    home.mkdir(parents=True, exist_ok=True)
    run.path.rename(home / run.path.name)

    capsys.readouterr()
    assert main(["train", str(saved), *comfy, *device]) == 0  # at home it is reused
    assert f"Already trained in {run.path.name}" in capsys.readouterr().out

    client = ComfyClient(server.url)
    prompt = to_prompt(workflow, client.first_info())
    key = next(key for key, node in prompt.items() if node["class_type"] == "AtelierTrain")
    others = ("AtelierSample", "SaveImage", "PreviewImage")
    result = client.queue({number: node for number, node in prompt.items() if node["class_type"] not in others})
    assert result.ok, result.error
    (text,) = result.outputs[key]["text"]
    assert f"Already trained in {run.path.name}" in text
    assert not any(event.get("kind") == "step" for _, event in result.custom())
    shown = client.get(f"/atelier/runs/{run.path.name}")
    assert shown["status"] == "finished" and shown["steps"] == 3
    assert client.get(f"/atelier/runs/{run.path.name}/workflow")["workflow"]["nodes"]


ALL = """
import glob, os, runpy, shlex, sys

for command in sys.argv[2:]:
    named = os.path.basename(min(glob.glob("out/atelier/runs/two-*"), default=""))
    parts = shlex.split(command.replace("@two", named).replace("runs/two", "runs/two-*"))
    sys.argv = ["lora-atelier", *((glob.glob(part) or [part])[0] for part in parts)]
    try:
        runpy.run_path(sys.argv_0, run_name="__main__")
    except SystemExit as end:
        print(f"\\n<{end.code}>", flush=True)
""".replace("sys.argv_0", repr(str(ROOT / "__main__.py")))


def shells(folder: Path, *commands: str) -> list[tuple[int, str]]:
    """Run the pack's command in a folder for each line, all in one process; return statuses and what was printed."""
    starting: Any = warm if warm.POSSIBLE else subprocess
    log, file = folder / "said.txt", folder / "all.py"
    file.write_text(ALL, encoding="utf-8")
    with log.open("wb") as opened:
        command = [sys.executable, str(file), "--", *commands]
        starting.run(command, cwd=folder, stdout=opened, stderr=subprocess.STDOUT)
    parts = re.split(r"\n<(\d)>\n", log.read_text(encoding="utf-8"))
    assert len(parts) == 2 * len(commands) + 1, parts
    return [(int(ended), said) for said, ended in zip(parts[::2], parts[1::2], strict=False)]


@pytest.mark.skipif(not TINY_FLOW.exists(), reason="needs the tiny flow model")
def test_a_connected_model_trains_where_comfyui_is(server: ComfyServer, comfyui: Path, tmp_path: Path) -> None:
    """ComfyUI's own nodes load the models here; the page, on the same workflow, reuses the run."""
    workflow = json.loads(FLOW.read_text(encoding="utf-8"))
    train = next(node for node in workflow["nodes"] if node["type"] == "AtelierTrain")
    train["widgets_values"][:5] = ["linked", 2, 0, 1, 64]  # steps, epochs, batch_size, resolution
    saves = next(node for node in workflow["nodes"] if node["type"] == "AtelierSaves")
    saves["widgets_values"][5] = ""  # no samples
    next(node for node in workflow["nodes"] if node["type"] == "AtelierLoraConfig")["widgets_values"][0] = 4  # rank
    saved, output = tmp_path / "linked.json", server.base / "output"
    saved.write_text(json.dumps(workflow), encoding="utf-8")
    command = f"train {saved} --output {output}{' --device cpu' if server.cpu else ''}"
    without, trained = shells(tmp_path, command, f"{command} --comfyui {comfyui}")
    assert without[0] == 2 and "and none is around the pack; name ComfyUI's folder by --comfyui" in without[1]
    assert trained[0] == 0, trained
    (run,) = (run for run in find_runs(output / "atelier" / "runs") if run.path.name.startswith("linked-"))
    assert (run.result() or {})["step"] == 2

    client = ComfyClient(server.url)
    prompt = to_prompt(workflow, client.first_info())
    others = ("AtelierSample", "SaveImage", "PreviewImage", "ImageStitch")
    result = client.queue({number: node for number, node in prompt.items() if node["class_type"] not in others})
    assert result.ok, result.error
    key = next(key for key, node in prompt.items() if node["class_type"] == "AtelierTrain")
    assert f"Already trained in {run.path.name}" in result.outputs[key]["text"][0]


COMMANDS = (  # on a linked workflow: a command, its status, and what it says
    ("plan flow.json --guess --crops crops.csv --json --set train.steps=3", 0, '"event": "time"'),
    ("train flow.json --set train.steps=2 --set name=two --set base_model.connected.edit_text=single", 0, "2 steps, "),
    ("train out/atelier/runs/two --json --notify --services services.json", 0, "Already trained in two-"),
    ("train out/atelier/runs/two/run.json --node 12 --set lora.rank=2", 0, "2 steps, "),
    ("plan out/atelier/runs/two --no-time --set train.steps=5", 0, "Resumed after step 2 of the run two-"),
    ("plan flow.json --no-time --node 99", 2, "node 99 is no Train LoRA; set --node to 12"),
    ("plan flow.json --no-time --set train.stepz=2", 2, "no setting train.stepz"),
    ("plan flow.json --no-time --base-model other.safetensors", 2, "choose the file there, without --base-model"),
    ("plan out/atelier/runs/two --no-time --set base_model.vae=other", 2, "or --set base_model.vae"),
    ("plan flow.json --no-time --tokenizer nowhere", 0, "diffusion model"),
    ("export flow.json same.json", 0, "Saved as same.json"),
    ("export flow.json other.json --set train.steps=2", 0, "Saved as other.json"),
    ("export out/atelier/runs/two run.toml", 2, "which a TOML cannot name"),
    ("export flow.json other.toml --for sd-scripts", 2, "on a model of other nodes"),
    ("export flow.json other.yaml --for ai-toolkit", 2, "on a model of other nodes"),
    ("export flow.json onetrainer.json --for onetrainer", 2, "on a model of other nodes"),
    ("runs list --folder out/atelier/runs", 0, "2 runs"),
    ("runs show @two --folder out/atelier/runs", 0, "  published "),
    ("runs verify --folder out/atelier/runs", 0, "All sound."),
    ("runs export @two --step 2 --to two.safetensors --folder out/atelier/runs", 0, "two.safetensors"),
    ("runs average @two --width 1 --to mean.safetensors --folder out/atelier/runs", 2, "An average needs two saves"),
    ("runs clean @two --states --folder out/atelier/runs", 0, "add --yes to delete it"),
)


@pytest.mark.thorough
@pytest.mark.skipif(not TINY_FLOW.exists(), reason="needs the tiny flow model")
def test_every_command_takes_a_linked_workflow(comfyui: Path, tmp_path: Path) -> None:
    (tmp_path / "flow.json").write_bytes(FLOW.read_bytes())
    (tmp_path / "services.json").write_text("{}", encoding="utf-8")
    options = {"train": " --output out --device cpu", "plan": " --output out --device cpu", "export": "", "runs": None}
    commands = []
    for command, _, _ in COMMANDS:
        more = options[command.split()[0]]
        commands.append(command if more is None else f"{command}{more} --comfyui {comfyui}")
    given = " ".join(commands)
    for parser in (of_train(), of_plan()):
        assert all(f" {each}" in given for each in parser._option_string_actions if each not in ("-h", "--help"))
    for (command, status, sentence), (ended, told) in zip(COMMANDS, shells(tmp_path, *commands), strict=True):
        assert ended == status and sentence in told, f"{command}: {told}"
    assert (tmp_path / "same.json").read_bytes() and json.loads((tmp_path / "same.json").read_text())["nodes"]
    for kept in (tmp_path / "out" / "atelier" / "runs").glob("two-*/workflow.json"):
        nodes = prompt_of(json.loads(kept.read_text(encoding="utf-8")), FORMS).values()
        (train,) = (node["inputs"] for node in nodes if node["class_type"] == "AtelierTrain")
        assert (train["name"], train["steps"]) == ("two", 2)


@pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
def test_files_of_a_shell_go_through_comfyuis_loader(comfyui: Path, tmp_path: Path) -> None:
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {f"{name}.lora_down.weight": torch.eye(64)[:2], f"{name}.lora_up.weight": torch.eye(64)[:, :2] * 2}
    save_file(tensors, tmp_path / "own.safetensors")
    save_file({key.replace("attn1", "attn9"): each for key, each in tensors.items()}, tmp_path / "other.safetensors")
    options = f"--rank 1 --comfyui {comfyui} --model {TINY_BASE}"
    commands = [f"lora resize {file}.safetensors --to new-{file} {options}" for file in ("own", "other")]
    own, other = shells(tmp_path, *commands)
    assert own[0] == 0 and f"every layer in {TINY_BASE.name}." in own[1], own
    assert other[0] == 2 and "finds no weight for 1" in other[1], other
    assert [(tmp_path / f"new-{file}.safetensors").exists() for file in ("own", "other")] == [True, False]
