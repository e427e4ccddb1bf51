"""A workflow that was saved on a machine of another system names files and folders with the other slashes."""

import folder_paths
import pytest
from comfy_api.latest import io
from zoo import comfy_here  # noqa: F401 (ComfyUI in this process)

from lora_atelier.nodes import NODES
from lora_atelier.nodes.comfyui import folders

HERE, THERE = "SDXL/base.safetensors", "SDXL\\base.safetensors"


@pytest.fixture(autouse=True, params=[HERE, THERE])
def listed(request, monkeypatch):
    """Let ComfyUI list one file of each kind, as Linux or as Windows writes it."""
    monkeypatch.setattr(folder_paths, "get_filename_list", lambda _: [request.param])
    return request.param


def lists_of_files(inputs):
    """Yield the inputs whose list has the file."""
    for each in inputs:
        if isinstance(each, io.DynamicCombo.Input):
            for option in each.options:
                yield from lists_of_files(option.inputs)
        elif isinstance(each, io.Combo.Input) and any("base.safetensors" in str(name) for name in each.options or ()):
            yield each


def test_every_input_that_names_a_file_of_a_list_takes_both(listed):
    found = [(node, each) for node in NODES for each in lists_of_files(node.define_schema().inputs)]
    assert {each.id for _, each in found} == folders.LISTS.keys()
    for node, each in found:
        for written in (HERE, THERE, folders.DIFFUSION + HERE, folders.DIFFUSION + THERE):
            if folders.as_listed(written, each.options) not in each.options:
                continue  # files of models/diffusion_models are listed by one node alone
            asked = {"prompt": {"1": {"class_type": node.__name__, "inputs": {f"of.{each.id}": written, "steps": 5}}}}
            given = folders._with_our_slashes(asked)["prompt"]["1"]["inputs"]
            assert given.pop(f"of.{each.id}") in each.options and given == {"steps": 5}


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        {"1": None, "2": {"class_type": 5}},
        {"1": {"class_type": "AtelierTrain", "inputs": [1]}},
        {"1": {"class_type": "CheckpointLoaderSimple", "inputs": {"checkpoint": THERE}}},
        {"1": {"class_type": "AtelierLoadBaseModel", "inputs": {"checkpoint": ["2", 0], "vae": "SDXL\\other"}}},
    ],
)
def test_whatever_else_a_prompt_holds_stays(prompt):
    assert folders._with_our_slashes({"prompt": prompt}) == {"prompt": prompt}


def test_folders_of_pictures_and_masks_are_found(tmp_path, monkeypatch):
    (tmp_path / "cats" / "white").mkdir(parents=True)
    monkeypatch.setattr(folder_paths, "get_input_directory", lambda: str(tmp_path))
    for written in ("cats/white", "cats\\white"):
        assert folders.find_folder(written, "Concept Dataset") == tmp_path / "cats" / "white"
    for leading_out in ("..\\cats", "cats\\..\\..\\x"):
        with pytest.raises(ValueError, match=r"contains '\.\.'"):
            folders.places_of(leading_out, "Concept Dataset")
