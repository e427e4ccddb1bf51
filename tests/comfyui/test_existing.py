"""Existing LoRA in a real ComfyUI: continued, beneath, of the graph, and the sentences that refuse."""

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import ImageChops
from safetensors import safe_open
from train_graph import changed, node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def existing(config: list, **inputs: object) -> dict:
    """Return an Existing LoRA."""
    return node("AtelierExistingLora", lora_config=config, **{"lora_name": "none", "strength": 1.0, **inputs})


def test_a_lora_is_continued_on_top_of_another(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    name, loras, before_all = pictures.name, server.base / "models" / "loras" / "atelier", len(server.log_text())
    graph = train_graph(name, {"name.text_encoder_learning_rate": 0.01}, name=f"{name}-old", steps=1)
    assert comfy.queue(graph).ok
    old = f"atelier{os.sep}{name}-old.safetensors"

    # One of the graph is continued, the file lies beneath: MODEL and CLIP are what ComfyUI makes of both files.
    elsewhere = old.replace(os.sep, "\\/"[os.sep == "\\"])  # as a workflow of another system names it
    graph["plain"] = changed(graph, "lora", exclude="")["lora"]  # which layers it has the file says
    graph["beneath"] = existing(["plain", 0], use="beneath", lora_name=elsewhere, strength=0.7)
    graph["continued"] = existing(["beneath", 0], use="continue", lora=["train", 2])
    other = {"name": f"{name}-new", "lora_config": ["continued", 0], "seed": 3}
    graph["again"] = node("AtelierTrain", **{**graph["train"]["inputs"], **other})
    graph["with"] = sample(["again", 0], ["again", 1], ["base", 3])
    graph["show with"] = node("PreviewImage", images=["with", 0])
    result = comfy.queue(graph)
    assert result.ok, result.error
    assert result.was_cached("train")
    with (
        safe_open(loras / f"{name}-new.safetensors", "pt") as new,
        safe_open(loras / f"{name}-old.safetensors", "pt") as first,
    ):
        assert set(new.keys()) == set(first.keys())
        metadata = new.metadata()
    start, (beneath,) = json.loads(metadata["atelier.start"]), json.loads(metadata["atelier.config"])["lora"]["beneath"]
    assert beneath == {"path": f"{name}-old.safetensors", "strength": 0.7, "training_only": False}
    assert start["rank"] == 4
    (kept,) = (server.base / "user").rglob(start["file"])
    assert kept.parent.name == "loras" and "__" in str(kept)  # a folder that ComfyUI serves nothing from

    # A file that is replaced under its name trains again; without a change nothing does.
    assert comfy.queue(graph).was_cached("again")
    before = (loras / f"{name}-old.safetensors").read_bytes()
    shutil.copyfile(loras / f"{name}-new.safetensors", loras / f"{name}-old.safetensors")
    assert comfy.queue(graph).did_run("again")
    (loras / f"{name}-old.safetensors").write_bytes(before)

    more = {key: graph[key] for key in ("base", "with", "show with")}
    for i, (file, strength) in enumerate(((old, 0.7), (old.replace("-old", "-new"), 1.0))):
        more[f"loader {i}"] = node(
            "LoraLoader",
            model=["base", 1] if i == 0 else ["loader 0", 0],
            clip=["base", 2] if i == 0 else ["loader 0", 1],
            lora_name=file,
            strength_model=strength,
            strength_clip=strength,
        )
    more["with"] = sample(["loader 1", 0], ["loader 1", 1], ["base", 3])
    loaded = comfy.queue(more)
    (mine,), (theirs,) = comfy.images(result, "show with"), comfy.images(loaded, "show with")
    assert ImageChops.difference(mine, theirs).getbbox() is None
    log = server.log_text()[before_all:]  # other tests load text layers on a MODEL alone
    assert "lora key not loaded" not in log and "NOT LOADED" not in log


def test_what_cannot_be_built_on_is_refused(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    import torch
    from safetensors.torch import save_file

    loras = server.base / "models" / "loras"
    pair = {"lora_up.weight": torch.ones(640, 4), "lora_down.weight": torch.ones(4, 2048)}
    layer = "lora_unet_input_blocks_7_1_transformer_blocks_9_attn2_to_k"
    save_file({f"{layer}.{end}": tensor for end, tensor in pair.items()}, loras / "for-xl.safetensors")
    save_file({"x.weight": torch.ones(1)}, loras / "no-lora.safetensors")
    graph = train_graph(pictures.name, lora={"exclude": ""})
    graph["existing"] = existing(["lora", 0], use="continue")
    graph["train"]["inputs"]["lora_config"] = ["existing", 0]
    for inputs, sentence in (
        ({"lora_name": "no-lora.safetensors"}, "no-lora.safetensors is no LoRA"),
        (
            {"lora_name": "for-xl.safetensors"},
            "it is a LoRA for Stable Diffusion XL, the base model is atelier-tiny",
        ),
        ({"lora_name": "for-xl.safetensors", "use": "beneath"}, "1 of 1 layers of for-xl.safetensors have no place in"),
    ):
        result = comfy.queue(changed(graph, "existing", **inputs))
        assert result.status == "error" and result.error.count(sentence) == 1, result.error
    graph["existing"]["inputs"]["lora_name"] = "for-xl.safetensors"
    graph["second"] = existing(["existing", 0], use="continue", lora_name="for-xl.safetensors")
    result = comfy.queue(changed(graph, "train", lora_config=["second", 0]))
    assert result.error.startswith("Existing LoRA continues for-xl.safetensors already")
