"""What a preset sets, and what a folder holds, asked of a real ComfyUI as the editor asks."""

import urllib.error

import pytest
from train_graph import changed, chosen, node, train_graph

from comfy_client import ComfyClient, answer_of


def ask(comfy: ComfyClient, address: str, question: object) -> dict:
    try:
        return answer_of(comfy.request(f"/api/atelier/{address}", question))
    except urllib.error.HTTPError as problem:
        return answer_of(problem.read())


def preset(comfy: ComfyClient, prompt: dict, **asked: object) -> dict:
    return ask(comfy, "presets", {"prompt": prompt, "node": "train", **asked})


def test_the_family_is_that_of_the_model(comfy: ComfyClient, pictures) -> None:
    graph = train_graph(pictures)
    offered = preset(comfy, graph)
    assert offered["family"] == "toy" and offered["goals"] == ["character", "style", "thing"]
    assert {"kind": "sdxl", "title": "Stable Diffusion XL", "memory": [8, 12, 16, 24]} in offered["families"]
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "atelier-tiny.safetensors"}}
    links = {"model": ["loader", 0], "clip": ["loader", 1], "vae": ["loader", 2]}
    linked = {**graph, "loader": loader, "base": {"class_type": "AtelierConnectModel", "inputs": links}}
    assert preset(comfy, linked)["family"] == "toy"
    loader["class_type"], loader["inputs"] = "SomebodysLoader", {"file": "x"}
    answer = preset(comfy, linked)
    assert answer["family"] == "" and "unknown before it is loaded" in answer["unknown"]
    alone = changed(graph, "train")
    del alone["train"]["inputs"]["base_model"]
    assert preset(comfy, alone)["unknown"].startswith("The model is unknown: nothing is linked")


def test_a_preset_names_the_input_that_takes_each_value(comfy: ComfyClient, pictures) -> None:
    graph = train_graph(pictures)
    answer = preset(comfy, graph, goal="character", family="sdxl", memory=8)
    found = {each["widget"]: each for each in answer["settings"]}
    assert (found["rank"]["node"], found["rank"]["value"]) == ("lora", 8)
    assert (found["name.learning_rate"]["node"], found["name.learning_rate"]["value"]) == ("optimizer", 1e-4)
    assert (found["weights"]["node"], found["weights"]["value"]) == ("base", "float8")
    memory = found["checkpointing"]
    assert memory["node"] is None and memory["into"] == ["train", "memory"] and not memory["taken"]
    alone = changed(graph, "train")
    del alone["train"]["inputs"]["lora_config"], alone["train"]["inputs"]["optimizer"]
    toy = {each["widget"]: each for each in preset(comfy, alone, goal="character", family="toy", memory=1)["settings"]}
    assert all(toy[name]["taken"] for name in ("rank", "alpha", "preset", "name", "name.learning_rate"))
    other = preset(comfy, alone, goal="character", family="sd1", memory=8)["settings"]
    assert not any(each["taken"] for each in other if each["where"] in ("LoRA Config", "Optimizer"))


def test_a_new_config_goes_behind_an_existing_lora(comfy: ComfyClient, pictures) -> None:
    graph = changed(train_graph(pictures), "train", lora_config=["old", 0])
    graph["old"] = node("AtelierExistingLora", lora_name="none", use="continue", strength=1.0)
    settings = preset(comfy, graph, goal="style", family="toy", memory=1)["settings"]
    assert next(each for each in settings if each["setting"] == "rank")["into"] == ["old", "lora_config"]


def test_the_rank_of_another_algorithm_stays(comfy: ComfyClient, pictures) -> None:
    graph = train_graph(pictures, lora=chosen("algorithm", "lokr", factor=-1))
    answer = preset(comfy, graph, goal="style", family="sdxl", memory=8)
    assert not any(each["where"] == "LoRA Config" for each in answer["settings"])
    assert "lokr has other ranks" in answer["notes"][0]


def test_a_whole_lokr_sets_algorithm_and_factor(comfy: ComfyClient, pictures) -> None:
    graph = train_graph(pictures)
    assert preset(comfy, graph)["networks"]["lokr-8"] == "LoKr, whole, factor 8"
    answer = preset(comfy, graph, goal="thing", family="sdxl", memory=24, network="lokr-8")
    values = {each["widget"]: each["value"] for each in answer["settings"] if each["where"] == "LoRA Config"}
    assert values == {"algorithm": "lokr", "algorithm.full_matrix": True, "algorithm.factor": 8, "preset": "attn-mlp"}
    assert not any("other ranks" in note for note in answer["notes"])


@pytest.mark.parametrize(
    "asked",
    [
        {"goal": "pose", "family": "sdxl", "memory": 8},
        {"goal": []},
        {"goal": "style"},
        {"goal": "style", "family": "sdxl", "memory": 24, "network": []},
    ],
)
def test_odd_presets_are_refused(comfy: ComfyClient, pictures, asked) -> None:
    assert preset(comfy, train_graph(pictures), **asked)["error"]


def look(comfy: ComfyClient, graph: dict) -> dict:
    return ask(comfy, "folders/look", {"prompt": {"data": graph["data"]}, "node": "data"})


def test_a_folder_tells_what_it_holds(comfy: ComfyClient, pictures) -> None:
    graph = train_graph(pictures)
    del graph["data"]["inputs"]["caption_settings"], graph["data"]["inputs"]["picture_settings"]
    assert look(comfy, graph)["uncaptioned"] == 0 < look(comfy, graph)["pictures"]
    for folder, words in (("gone", "There is no folder 'gone'"), ("/etc", "nobody allowed it"), ("", "is empty")):
        answer = look(comfy, changed(graph, "data", folder=folder))
        assert words in answer["error"] and len(answer) == 1
    many = pictures / "many"
    many.mkdir()
    for i in range(20_001):
        (many / f"{i}.png").touch()
    assert look(comfy, changed(graph, "data", folder=str(many))) == {"more": 20_000}
    listed = answer_of(comfy.request("/api/atelier/folders/datasets"))
    assert listed["example"] == "atelier:concept_example" and isinstance(listed["folders"], list)
