"""Embedding in a real ComfyUI: trained, found by a prompt's `embedding:`, and the sentences that refuse."""

from pathlib import Path

import pytest
from PIL import ImageChops
from safetensors import safe_open
from train_graph import changed, node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def test_a_word_is_trained_and_a_prompt_finds_it(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    name = pictures.name
    graph = train_graph(name, name=name, steps=2, sample_prompts="a circle")
    values = {"token": "circle", "vectors": 2, "init_text": "", "learning_rate": 0.1, "stop": 0.0, "stop_unit": "share"}
    graph["word"] = node("AtelierEmbedding", lora_config=["lora", 0], **values, keep_norm=False)
    graph["second"] = node("AtelierEmbedding", lora_config=["word", 0], **{**values, "token": "flat"}, keep_norm=True)
    graph["train"]["inputs"]["lora_config"] = ["second", 0]
    prompts = {"with": f"a embedding:atelier/{name}-circle, on blue", "without": "a circle, on blue"}
    for key, prompt in prompts.items():
        graph[key] = sample(["train", 0], ["train", 1], ["base", 3], prompt=prompt)
        graph[f"show {key}"] = node("PreviewImage", images=[key, 0])
    result = comfy.queue(graph)
    assert result.ok, result.error
    (mine,), (plain,) = comfy.images(result, "show with"), comfy.images(result, "show without")
    assert ImageChops.difference(mine, plain).getbbox() is not None
    assert "does not exist" not in server.log_text() and "shape mismatch" not in server.log_text()
    folder = server.base / "models" / "embeddings" / "atelier"
    with safe_open(folder / f"{name}-circle.safetensors", "pt") as file:
        assert file.get_tensor("emb_params").shape[0] == 2
    (text,) = result.outputs["train"]["text"]
    for token in ("circle", "flat"):
        assert f"In prompts write {token} as embedding:atelier/{name}-{token}" in text

    words = changed(changed(graph, "optimizer", **{"name.learning_rate": 0.0}), "train", name=f"{name}-words")
    words["with"]["inputs"]["prompt"] = f"a embedding:atelier/{name}-words-circle, on blue"
    alone = comfy.queue(words)
    assert alone.ok, alone.error
    (text,) = alone.outputs["train"]["text"]
    (mine,), (plain,) = comfy.images(alone, "show with"), comfy.images(alone, "show without")
    assert ImageChops.difference(mine, plain).getbbox() is not None
    assert f"Saved as {folder / f'{name}-words-circle.safetensors'}" in text and "Only words are trained" in text
    assert not (server.base / "models" / "loras" / "atelier" / f"{name}-words.safetensors").exists()

    other = comfy.queue(changed(graph, "second", token="circle"))
    assert other.status == "error" and other.error.count("Two embeddings have the token circle") == 1
    other = comfy.queue(changed(graph, "second", token="two words"))
    assert "'two words' is not one plain word" in other.error
    other = comfy.queue(changed(graph, "second", token="nowhere"))
    assert "No caption that is trained contains the word nowhere" in other.error
