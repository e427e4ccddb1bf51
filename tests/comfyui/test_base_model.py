"""Load Base Model in a real ComfyUI: parts from files of their own give what the whole checkpoint gives."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, UNet2DConditionModel
from PIL import ImageChops
from safetensors.torch import load_file, save_file
from train_graph import changed, draw_pictures, node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
UNET, TEXT = "model.diffusion_model.", "cond_stage_model.transformer."


@pytest.fixture(scope="module")
def parts(server: ComfyServer) -> None:
    """Put the tiny base in pieces into ComfyUI's folders: without text encoder, UNet alone, encoders, a large VAE."""
    whole, models = load_file(TINY_BASE), server.base / "models"
    for name in ("checkpoints", "text_encoders", "vae"):
        (models / name).mkdir(parents=True, exist_ok=True)
    text = {k.removeprefix(TEXT): v for k, v in whole.items() if k.startswith(TEXT)}
    save_file({k: v for k, v in whole.items() if not k.startswith(TEXT)}, models / "checkpoints" / "bare.safetensors")
    unet = {k.removeprefix(UNET): v for k, v in whole.items() if k.startswith(UNET)}
    save_file(unet, models / "checkpoints" / "unet-turbo.safetensors")
    save_file(text, models / "text_encoders" / "own.safetensors")
    plain = {k.removeprefix("text_model."): v for k, v in text.items()}
    plain["embeddings.token_embedding.weight"] = plain["embeddings.token_embedding.weight"].flip(0).contiguous()
    save_file(plain, models / "text_encoders" / "other.safetensors")
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    save_file({k: v.half() for k, v in vae.state_dict().items()}, models / "vae" / "large.safetensors")


def drawn(comfy: ComfyClient, **base):
    """Return the picture that Sample draws with a base model, and what the node shows."""
    graph = {
        "base": node("AtelierLoadBaseModel", prediction="auto", clip_skip=1, precision="auto", **base),
        "draw": sample(["base", 1], ["base", 2], ["base", 3]),
        "show": node("PreviewImage", images=["draw", 0]),
    }
    result = comfy.queue(graph)
    assert result.ok, result.error
    (picture,) = comfy.images(result, "show")
    return picture, result.outputs.get("base", {}).get("text", [])


def test_text_encoders_of_files_come_out_as_clip(any_server: ComfyServer, request: pytest.FixtureRequest) -> None:
    """On both ComfyUIs: baked, the same from a file, none baked, and another one that draws something else."""
    if any_server is request.getfixturevalue("server"):
        request.getfixturevalue("parts")
    else:
        source = request.getfixturevalue("server").base / "models"
        request.getfixturevalue("parts")
        for name in ("checkpoints/bare", "text_encoders/own", "text_encoders/other"):
            target = any_server.base / "models" / f"{name}.safetensors"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / f"{name}.safetensors", target)
    comfy = ComfyClient(any_server.url)
    whole, said = drawn(comfy, checkpoint="atelier-tiny.safetensors")
    assert said == []
    again, _ = drawn(comfy, checkpoint="atelier-tiny.safetensors", text_encoder="own.safetensors")
    bare, _ = drawn(comfy, checkpoint="bare.safetensors", text_encoder="own.safetensors")
    other, _ = drawn(comfy, checkpoint="bare.safetensors", text_encoder="other.safetensors")
    assert ImageChops.difference(whole, again).getbbox() is None
    assert ImageChops.difference(whole, bare).getbbox() is None
    assert ImageChops.difference(whole, other).getbbox() is not None


def test_a_unet_alone_is_a_base_model_with_the_files_of_its_other_parts(comfy: ComfyClient, parts) -> None:
    """The same picture as with the UNet inside a checkpoint; the node says what the file's name gives away."""
    files = {"vae": "large.safetensors", "text_encoder": "own.safetensors"}
    alone, said = drawn(comfy, checkpoint="unet-turbo.safetensors", **files)
    inside, _ = drawn(comfy, checkpoint="bare.safetensors", **files)
    assert ImageChops.difference(alone, inside).getbbox() is None and alone.getcolors(1) is None
    assert said[0].startswith("unet-turbo.safetensors is a Turbo model by its name")


def test_a_model_in_pieces_is_trained_as_the_whole(comfy: ComfyClient, server: ComfyServer, parts) -> None:
    """The LoRA of the pieces, text encoder included, is the LoRA of the whole; parts that lack are missed."""
    folder = draw_pictures(server.base / "input" / "three-files")
    settings = {"name.text_encoder_learning_rate": 0.01, "name.learning_rate": 0.01}
    whole = train_graph(folder.name, settings, name="whole", steps=2)
    files = {"text_encoder": "own.safetensors", "weights": "auto", "text_weights": "auto"}
    pieces = changed(train_graph(folder.name, settings, name="pieces", steps=2), "base", checkpoint="bare.safetensors")
    pieces = changed(pieces, "base", **files)
    tensors = []
    for graph in (whole, pieces):
        result = comfy.queue(graph)
        assert result.ok, result.error
        tensors.append(load_file(Path(result.outputs["path"]["text"][0])))
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    missing = comfy.queue(changed(pieces, "base", text_encoder="baked"))
    assert "bare.safetensors has no text encoder" in missing.error
    refused = comfy.queue(changed(pieces, "base", text_encoder_2="own.safetensors"))
    assert "text_encoder_2 is set, but Stable Diffusion 1 has one text encoder" in refused.error
    shutil.rmtree(folder)


def test_a_diffusers_folder_that_comfyui_cannot_load_is_refused_before_it_is_read(any_server: ComfyServer) -> None:
    """An inpainting model of Stable Diffusion 2, which ComfyUI knows as a single file alone; then one in parts."""
    folder = any_server.base / "models" / "diffusers" / "painter"
    unet = UNet2DConditionModel(
        in_channels=9,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=1024,
        attention_head_dim=(1, 2),
        use_linear_projection=True,
    )
    unet.save_pretrained(folder / "unet")
    AutoencoderTiny().save_pretrained(folder / "vae")
    for name in ("text_encoder", "scheduler"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, folder / "text_encoder" / "model.safetensors")
    (folder / "model_index.json").write_text("{}")
    comfy = ComfyClient(any_server.url)
    named = {"prediction": "auto", "clip_skip": 1, "precision": "auto"}
    graph = {"base": node("AtelierLoadBaseModel", checkpoint="diffusers/painter", **named)}
    graph["draw"] = sample(["base", 1], ["base", 2], ["base", 3])
    graph["show"] = node("PreviewImage", images=["draw", 0])
    try:
        error = comfy.queue(graph).error
        assert "ComfyUI cannot load the diffusers folder painter, whose UNet has 9 input channels" in error
        weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
        weights.rename(weights.with_name("diffusion_pytorch_model-00001-of-00001.safetensors"))
        error = comfy.queue(graph).error
        assert "painter/unet holds no diffusion_pytorch_model.safetensors" in error
    finally:
        shutil.rmtree(folder)
