"""ComfyUI's check of LoRA files without a server, by a model's file alone."""

import comfy.sd
import pytest
import torch
from safetensors.torch import save_file
from zoo.zoo import build

from lora_atelier.dev import TINY_BASE, TINY_CLIP, TINY_FLOW
from lora_atelier.nodes.comfyui import models
from lora_atelier.nodes.comfyui.offline import loader, outline_models
from lora_atelier.trainer_core.lora_files.lora import layers_of

ASSETS = [path for path in (TINY_BASE, TINY_CLIP, TINY_FLOW) if path.exists()]


def lora(path, names, columns=64):
    draws = {}
    for name, rows in names.items():
        draws |= {f"{name}.lora_down.weight": torch.ones(2, columns), f"{name}.lora_up.weight": torch.ones(rows, 2)}
    save_file(draws, path)
    return path


@pytest.mark.parametrize("file", ASSETS, ids=lambda path: path.stem)
def test_an_outline_has_the_names_of_the_model(file):
    model, clip = outline_models(file)
    loaded = comfy.sd.load_checkpoint_guess_config(str(file), output_vae=False)
    assert models.lora_keys(model, clip) == models.lora_keys(*loaded[:2])
    shapes = {name: tensor.shape for name, tensor in loaded[0].model.diffusion_model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in model.model.diffusion_model.state_dict().items()} == shapes
    assert all(tensor.is_meta for tensor in model.model.diffusion_model.parameters())


@pytest.mark.skipif(TINY_BASE not in ASSETS, reason="needs the tiny base model")
def test_a_file_is_checked_by_the_model_s_names_and_shapes(tmp_path):
    found = loader(TINY_BASE)
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    text = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    found.check(lora(tmp_path / "fits.safetensors", {name: 64, text: 64}))
    assert found.knows(name) and not found.knows("other") and TINY_BASE.name in found.report
    for other, said in (
        ({"lora_unet_double_blocks_0_img_attn_qkv": 64}, "finds no weight"),
        ({name: 65}, "does not fit"),
    ):
        with pytest.raises(ValueError, match=said):
            found.check(lora(tmp_path / "other.safetensors", other))


@pytest.mark.skipif(TINY_BASE not in ASSETS, reason="needs the tiny base model")
def test_each_layer_that_would_not_be_loaded_has_its_reason():
    model, clip = outline_models(TINY_BASE)
    name, text = "lora_unet_middle_block_1_proj_in", "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    pair = {"lora_down.weight": torch.ones(2, 9), "lora_up.weight": torch.ones(9, 2)}
    parts = {each: {f"{each}.{end}": tensor for end, tensor in pair.items()} for each in (name, text, "odd")}
    found = models.misfits(layers_of({k: t for each in parts.values() for k, t in each.items()}, "x"), model, None)
    assert found == {
        name: "its weight in the linked model has another shape",
        text: "no CLIP is linked",
        "odd": "no weight of the linked model has this name",
    }
    assert models.misfits(layers_of(parts[text], "x"), model, clip) == {text: found[name]}


def test_without_a_known_model_endings_are_checked(tmp_path):
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "unknown.safetensors")
    for file in (None, tmp_path / "unknown.safetensors"):
        found = loader(file)
        found.check(lora(tmp_path / "any.safetensors", {"anything": 64}))
        assert "was not checked" in found.report and ("unknown" in found.report) is (file is not None)


def test_a_file_of_a_denoiser_alone_is_enough(tmp_path):
    _, patcher = build("qwen_image")
    tensors = {name: tensor.contiguous() for name, tensor in patcher.model.diffusion_model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    outline = outline_models(tmp_path / "model.safetensors")
    assert outline is not None and outline[1] is None
    assert models.lora_keys(*outline) == models.lora_keys(patcher, None)
