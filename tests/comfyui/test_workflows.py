"""The workflows that come with the pack: they fit the nodes, and those of the toy model lead to pictures."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lora_runs import metadata_in
from prompts import DYNAMIC_COMBO, NOTES, is_widget, take_widgets, to_prompt
from toy_workflows import on_toy_models, shorten

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import FLOW, QUICKSTART, ROOT, START, TINY_BASE, TINY_FLOW, TOUR

FOLDERS = {
    "AtelierLoadBaseModel": "checkpoints",
    "UNETLoader": "diffusion_models",
    "CLIPLoader": "text_encoders",
    "DualCLIPLoader": "text_encoders",
    "VAELoader": "vae",
    "CheckpointLoaderSimple": "checkpoints",
    "LTXAVTextEncoderLoader": "text_encoders checkpoints",  # of its two files
}
SHIPPED = sorted((ROOT / "workflows").glob("*.json"))
WORKFLOWS = [*SHIPPED, TOUR, FLOW]
SHARE = next(path for path in SHIPPED if "share" in path.stem)
ADAPTER = next(path for path in SHIPPED if "adapter" in path.stem)
FAMILIES = [path for path in SHIPPED if path.stem[0] in "345679"]
OF_CLIPS = [path for path in SHIPPED if "AtelierClips" in path.read_text("utf-8")]
WRITING = [path for path in SHIPPED if "AtelierDatasetPictures" in path.read_text("utf-8")]
OF_THE_MACHINE = (
    "checkpoint",
    "ckpt_name",
    "unet_name",
    "clip_name",
    "clip_name1",
    "clip_name2",
    "vae_name",
    "text_encoder",
)  # combos whose options are files


def specs(schema: dict, values: dict, prefix: str = "") -> dict:
    """Return all inputs of a node in the order of their widgets, with those of the options that `values` choose."""
    found = {}
    for group in ("required", "optional"):
        inputs = schema["input"].get(group) or {}
        for name in (schema.get("input_order") or {}).get(group) or inputs:
            spec = found[prefix + name] = inputs[name]
            for option in spec[1]["options"] if spec[0] == DYNAMIC_COMBO else []:
                if option["key"] == values.get(prefix + name):
                    found |= specs({"input": option["inputs"]}, values, f"{prefix}{name}.")
    return found


def allowed(spec: list, value: object) -> bool:
    """Tell whether a value fits a widget."""
    options = spec[1] if len(spec) > 1 else {}
    kind = spec[0]
    if kind == DYNAMIC_COMBO:
        return value in [option["key"] for option in options["options"]]
    if isinstance(kind, list) or kind == "COMBO":
        return value in (kind if isinstance(kind, list) else options["options"])
    if kind in ("INT", "FLOAT"):
        number = isinstance(value, int if kind == "INT" else (int, float)) and not isinstance(value, bool)
        return number and options.get("min", value) <= value <= options.get("max", value)
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}[kind])


def canvases(workflow: dict) -> Iterator[tuple[dict, list]]:
    """Yield the nodes by id and the links as lists, of a workflow and of each of its subgraphs."""
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    for canvas in [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]:
        links = [link if isinstance(link, list) else [link[key] for key in keys] for link in canvas["links"]]
        yield {node["id"]: node for node in canvas["nodes"]}, links


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_workflow_is_small_and_has_its_picture(path: Path) -> None:
    workflow = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".jpg").exists()
    assert len(workflow["nodes"]) <= 10 and "id" not in workflow  # the editor gives each copy an id of its own


def test_the_first_template_is_one_node_and_a_picture() -> None:
    kinds = [node["type"] for node in json.loads(START.read_text(encoding="utf-8"))["nodes"]]
    subgraph, picture, note = kinds
    assert (picture, note) == ("SaveImage", "MarkdownNote") and subgraph not in NOTES


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_fits_the_nodes(any_server: ComfyServer, path: Path) -> None:
    info = ComfyClient(any_server.url).first_info()
    workflow = json.loads(path.read_text(encoding="utf-8"))
    for nodes, links in canvases(workflow):
        check_fit(info, nodes, links)


def check_fit(info: dict, nodes: dict, links: list) -> None:
    """Compare the nodes of a canvas and the links between them with the schemas of a server."""
    inputs = {}  # by node id
    for node in nodes.values():
        if node["type"] in info:
            schema = info[node["type"]]
            taken, left = take_widgets(schema, node.get("widgets_values", []))
            inputs[node["id"]] = specs(schema, taken)
            widgets = {name: spec for name, spec in inputs[node["id"]].items() if is_widget(spec)}
            assert not left and taken.keys() == widgets.keys(), node["type"]
            for name, spec in widgets.items():
                if name not in OF_THE_MACHINE:
                    assert allowed(spec, taken[name]), f"{node['type']}.{name}: {taken[name]!r}"
            needed = schema["input"].get("required", {}).keys() - widgets.keys()
            linked = {each["name"] for each in node["inputs"] if each.get("link") is not None}
            assert needed <= linked, f"nothing leads to {sorted(needed - linked)} of {node['type']}"
        else:  # a note, or what stands for a subgraph
            assert node["type"] in NOTES or "-" in node["type"]
    for link, source, output, target, slot, kind in links:
        if source not in inputs or target not in inputs:
            continue  # from the outside of a subgraph, or to it
        start, end = nodes[source], nodes[target]
        assert info[start["type"]]["output"][output] == kind
        assert link in start["outputs"][output]["links"] and end["inputs"][slot]["link"] == link
        wanted = inputs[target][end["inputs"][slot]["name"]][0]
        assert kind == wanted or wanted == "*"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_nodes_of_a_workflow_do_not_overlap(path: Path) -> None:
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    title = 30  # pixels above a node's position; all that a folded node shows
    boxes = [
        (node["id"], x, y - title, x + width, y if node["flags"].get("collapsed") else y + height)
        for node in nodes
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    ]
    for i, (a, left, top, right, bottom) in enumerate(boxes):
        for b, left_b, top_b, right_b, bottom_b in boxes[i + 1 :]:
            apart = right <= left_b or right_b <= left or bottom <= top_b or bottom_b <= top
            assert apart, f"nodes {a} and {b} overlap"


@pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
@pytest.mark.parametrize(
    ("path", "files"),
    [
        (START, ["my_first_lora"]),
        pytest.param(QUICKSTART, ["mossling"], marks=pytest.mark.thorough),  # test_saves.py runs it, too
        pytest.param(TOUR, ["before_after", "loss"], marks=pytest.mark.thorough),  # its nodes have tests of their own
    ],
)
def test_a_workflow_of_the_toy_model_leads_to_pictures(comfy: ComfyClient, path: Path, files: list[str]) -> None:
    prompt = to_prompt(json.loads(path.read_text(encoding="utf-8")), comfy.first_info())
    shorten(
        prompt,
        AtelierTrain={"steps": 2, "batch_size": 1, "resolution": 64},
        AtelierDatasetPreview={"batch_size": 1, "resolution": 64},
        AtelierSample={"width": 64, "height": 64, "steps": 2, "hires.steps": 2},
        AtelierSaves={"sample_steps": 2},
    )
    result = comfy.queue(prompt)
    assert result.ok, result.error
    for key, node in prompt.items():
        if node["class_type"] in ("SaveImage", "PreviewImage", "AtelierDatasetPreview"):
            for picture in comfy.images(result, key):
                assert len(picture.convert("L").getcolors(256)) > 8, f"{node['_meta']['title']} is blank"
    saved = [image["filename"] for output in result.outputs.values() for image in output.get("images", [])]
    assert all(any(name.startswith(file) for name in saved) for file in files)


@pytest.mark.parametrize(
    "path",
    [
        each if each.stem[0] == "6" else pytest.param(each, marks=pytest.mark.thorough)
        for each in FAMILIES
        if each != ADAPTER
    ],
)
def test_a_workflow_of_a_family_leads_to_a_picture(comfy: ComfyClient, pictures: Path, path: Path) -> None:
    """On the toy models, and with few steps; what is left open is what suits them."""
    prompt = to_prompt(on_toy_models(path), comfy.first_info())
    shorten(
        prompt,
        AtelierConceptDataset={"folder": pictures.name},
        AtelierTrain={"name": pictures.name, "steps": 2, "batch_size": 1, "resolution": 64},
        AtelierSample={"width": 64, "height": 64, "steps": 2, "hires.steps": 2},
    )
    result = comfy.queue(prompt)
    assert result.ok, result.error
    (shown,) = [key for key, node in prompt.items() if node["class_type"] == "SaveImage"]
    (picture, *_) = comfy.images(result, shown)
    assert len(picture.convert("L").getcolors(256)) > 8


@pytest.mark.thorough  # test_drawn.py trains on pictures that a model draws
@pytest.mark.skipif(not TINY_FLOW.exists(), reason="needs the tiny flow model")
def test_a_training_adapter_is_made_of_pictures_that_its_model_draws(comfy: ComfyClient, server: ComfyServer) -> None:
    prompt = to_prompt(on_toy_models(ADAPTER), comfy.first_info())
    shorten(
        prompt,
        AtelierDrawnPictures={"of.prompt": "a red circle", "pictures": 2, "width": 64, "height": 64, "steps": 2},
        AtelierTrain={"name": "adapter_of_two", "steps": 2, "batch_size": 1, "resolution": 64},
    )
    result = comfy.queue(prompt)
    assert result.ok, result.error
    (made,) = (server.base / "models" / "loras").rglob("adapter_of_two*.safetensors")
    assert metadata_in(made)["ss_num_train_images"] == "2"


@pytest.mark.parametrize("path", WRITING, ids=lambda path: path.stem)
def test_a_workflow_writes_beside_each_picture(comfy: ComfyClient, pictures: Path, path: Path) -> None:
    """With a stand-in for the model, as what it says is not ours."""
    prompt = to_prompt(json.loads(path.read_text(encoding="utf-8")), comfy.first_info())
    (model,) = (node for node in prompt.values() if node["class_type"] in ("TextGenerate", "SAM3_Detect"))
    slot, asked = (0, model["inputs"].get("prompt")) if model["class_type"] == "TextGenerate" else (1, "grey")
    model |= {"class_type": "Describe", "inputs": {"image": model["inputs"]["image"], "word": asked}}
    for node in prompt.values():  # the stand-in gives texts and masks
        for name, value in node["inputs"].items():
            if name in ("texts", "masks"):
                node["inputs"][name] = [value[0], slot]
    shorten(prompt, AtelierConceptDataset={"folder": pictures.name})
    for text in pictures.glob("*.txt"):
        text.unlink()
    result = comfy.queue(prompt)
    assert result.ok, result.error
    written = sorted(each.name for each in pictures.iterdir() if each.suffix == ".txt" or "mask" in each.name)
    ending = "-masklabel.png" if slot else ".txt"
    assert written == [f"{number}{ending}" for number in range(3)]
    if not slot:
        assert (pictures / "0.txt").read_text().startswith("Describe this picture in two or three plain sentences")


@pytest.mark.parametrize("path", [*FAMILIES, *OF_CLIPS, *WRITING], ids=lambda path: path.stem)
def test_files_that_a_workflow_names_are_offered_for_their_folders(path: Path) -> None:
    """A page offers files that are missing, where the node names their address and the folder of its loader."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    loaders = [node for node in nodes if node["type"] in FOLDERS]
    assert loaders
    for node in loaders:
        files = node["properties"]["models"]
        assert [file["name"] for file in files] == node["widgets_values"][: len(files)]
        folders = FOLDERS[node["type"]].split()
        for number, file in enumerate(files):
            assert file["url"].rpartition("/")[2] == file["name"]
            assert file["directory"] == folders[number % len(folders)]


@pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
def test_a_file_to_share_is_compared_made_smaller_and_saved(comfy: ComfyClient, server: ComfyServer) -> None:
    prompt = to_prompt(json.loads(SHARE.read_text(encoding="utf-8")), comfy.first_info())
    nodes = {node["class_type"]: (key, node["inputs"]) for key, node in prompt.items()}
    shorten(
        prompt,
        # The seed of no other test on this server, whose run it would continue.
        AtelierTrain={"steps": 2, "batch_size": 1, "resolution": 64, "seed": 112},
        AtelierSaves={"save_every": 1},
        AtelierCompareLoras={"steps": 1, "width": 64, "height": 64},
    )
    result = comfy.queue(prompt)
    assert result.ok, result.error
    compared, smaller, saved = (
        result.outputs[nodes[name][0]]["text"][0]
        for name in ("AtelierCompareLoras", "AtelierResizeLora", "AtelierSaveLoraFile")
    )
    assert "8 pictures" in compared and "4. step 2 at 1" in compared and "ranks add up to" in smaller
    path = server.base / "models" / "loras" / saved.removeprefix("Saved as ").removesuffix(".")
    about = metadata_in(path)
    assert path.parent.name == "shared" and about["modelspec.trigger_phrase"] == "mossling"
    assert [step["tool"] for step in json.loads(about["atelier.history"])] == ["resize"]


@pytest.mark.parametrize("path", [TOUR, FLOW], ids=lambda path: path.stem)
def test_the_preview_of_a_workflow_shows_what_it_trains(any_server: ComfyServer, path: Path) -> None:
    info, plans = ComfyClient(any_server.url).first_info(), {}
    for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
        if node["type"] in ("AtelierTrain", "AtelierDatasetPreview"):
            taken, _ = take_widgets(info[node["type"]], node["widgets_values"])
            plans[node["type"]] = {name: taken[name] for name in ("batch_size", "resolution", "seed", "accumulate")}
    assert all(plan == plans["AtelierTrain"] for plan in plans.values())


def test_the_quickstart_is_six_nodes() -> None:
    nodes = json.loads(QUICKSTART.read_text(encoding="utf-8"))["nodes"]
    assert len([node for node in nodes if node["type"] not in NOTES]) == 6
