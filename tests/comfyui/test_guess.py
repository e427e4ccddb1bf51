"""A first guess of settings in a real ComfyUI, for what the editor sends of the graph."""

import urllib.error

import pytest
from train_graph import changed, train_graph

from comfy_client import ComfyClient, answer_of


def ask(comfy: ComfyClient, prompt: object, node: object = "train") -> dict:
    """Ask for a guess as the editor does; an error is an answer, too."""
    try:
        return answer_of(comfy.request("/api/atelier/guess", {"prompt": prompt, "node": node}))
    except urllib.error.HTTPError as problem:
        return answer_of(problem.read())


def test_a_guess_names_the_widgets_that_take_it(comfy: ComfyClient, pictures) -> None:
    graph = changed(train_graph(pictures), "train", epochs=3)
    found = {each["widget"]: each for each in ask(comfy, graph)["settings"]}
    assert {name: each["value"] for name, each in found.items()} == {
        "resolution": 96,  # the pictures are small, and the model was made for 128
        "batch_size": 1,
        "steps": 1500,
        "epochs": 0,
        "rank": 16,
        "name.learning_rate": 3e-3,
    }
    nodes = {name: each["node"] for name, each in found.items()}
    assert nodes == dict.fromkeys(("resolution", "batch_size", "steps", "epochs"), "train") | {
        "rank": "lora",
        "name.learning_rate": "optimizer",
    }
    assert not any(each["taken"] for each in found.values())
    assert found["rank"]["reason"] == "it suits atelier-tiny and few pictures."
    alone = changed(graph, "train")
    del alone["train"]["inputs"]["optimizer"], alone["train"]["inputs"]["lora_config"]
    found = {each["widget"]: each for each in ask(comfy, alone)["settings"]}
    assert found["rank"]["node"] is None and found["rank"]["where"] == "LoRA Config" and found["rank"]["taken"]


@pytest.mark.parametrize(
    ("node", "name", "value", "sentence"),
    [
        ("train", "dataset", None, "Nothing is linked to dataset of Train LoRA; link Concept Dataset there"),
        ("train", "base_model", None, "Nothing is linked to base_model of Train LoRA"),
        ("data", "folder", "", "folder of Concept Dataset is empty"),
        ("base", "checkpoint", "gone.safetensors", "There is no checkpoint 'gone.safetensors'"),
        ("train", "steps", "many", "steps of Train LoRA is 'many'"),
        ("data", "dataset", ["data", 0], "form a circle"),
    ],
)
def test_what_is_missing_is_a_sentence(comfy: ComfyClient, pictures, node, name, value, sentence) -> None:
    graph = changed(train_graph(pictures), node, **{name: value})
    if value is None:
        del graph[node]["inputs"][name]
    answer = ask(comfy, graph)["error"]
    assert sentence in answer and answer.endswith(".")


def test_a_linked_model_is_known_by_its_file(comfy: ComfyClient, pictures) -> None:
    graph = train_graph(pictures)
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "atelier-tiny.safetensors"}}
    links = {"model": ["loader", 0], "clip": ["loader", 1], "vae": ["loader", 2]}
    graph |= {"loader": loader, "base": {"class_type": "AtelierConnectModel", "inputs": links}}
    found = {each["widget"]: each for each in ask(comfy, graph)["settings"]}
    assert "linked model is measured" in found["batch_size"]["reason"]
    assert found["name.learning_rate"]["value"] == 3e-3 and found["resolution"]["value"] == 96
    assert found["name.learning_rate"]["reason"] == "0.003 suits atelier-tiny and this optimizer."
    loader["class_type"], loader["inputs"] = "SomebodysLoader", {"file": "x"}
    assert "unknown before it is loaded" in ask(comfy, graph)["error"]


@pytest.mark.parametrize("question", [([], "1"), ({}, None), ({"1": 2}, "1"), ({}, "1")])
def test_odd_questions_are_refused(comfy: ComfyClient, question) -> None:
    assert ask(comfy, *question)["error"]
