"""Use Connected Model in a real ComfyUI: a tiny Flux by ComfyUI's own loaders, trained, drawn with, and refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lora_runs import metadata_in
from PIL import ImageChops
from safetensors.torch import load_file, save_file
from train_graph import changed, draw_pictures, node, train_graph

from comfy_client import ComfyClient, ComfyServer, Result, refused
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")
FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 64,  # and the next: the width of the tiny base's CLIP
    "context_in_dim": 64,
    "hidden_size": 256,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
VARIANTS = {"flux": {}, "wide": {"context_in_dim": 96}, "fast": {"guidance_embed": False}}
CHANNELS = 16


def flux(comfy: ModuleType, **changes: object) -> dict[str, torch.Tensor]:
    """Return random weights of a tiny Flux, near what a trained one computes with."""
    import comfy.ldm.flux.model
    import comfy.ops

    config = {**FLUX, **changes}
    model = comfy.ldm.flux.model.Flux(
        **config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init
    )
    draws = torch.Generator().manual_seed(0)
    weights = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=draws)
        flat = 1 + 0.1 * drawn if "norm" in name else 0.05 * drawn
        weights[name] = drawn / value.shape[1] ** 0.5 if value.ndim > 1 else flat
    return weights


def wide_vae() -> dict[str, torch.Tensor]:
    """Return the tiny base's VAE with each of its four channels four times."""
    prefix = "first_stage_model."
    weights = {k.removeprefix(prefix): v for k, v in load_file(TINY_BASE).items() if k.startswith(prefix)}
    last = max(int(key.split(".")[1]) for key in weights if key.startswith("taesd_encoder."))
    for kind in ("weight", "bias"):
        weights[f"taesd_encoder.{last}.{kind}"] = weights[f"taesd_encoder.{last}.{kind}"].repeat_interleave(
            CHANNELS // 4, 0
        )
    first = "taesd_decoder.1.weight"
    weights[first] = (weights[first] / (CHANNELS // 4)).repeat_interleave(CHANNELS // 4, 1)
    return weights


@pytest.fixture(scope="module")
def put(comfy_modules: ModuleType) -> Callable[[ComfyServer], None]:
    """Give `put(server)`, which puts the models into a server's folders."""
    models = {f"diffusion_models/tiny-{name}": flux(comfy_modules, **config) for name, config in VARIANTS.items()}
    models["vae/wide"] = wide_vae()

    def put(server: ComfyServer) -> None:
        for name, weights in models.items():
            path = server.base / "models" / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                save_file(weights, path)

    return put


@pytest.fixture
def models(put: Callable[[ComfyServer], None], server: ComfyServer) -> None:
    """Put the models into the shared server's folders."""
    put(server)


def connected(folder: Path, model: str = "tiny-flux", lora: str = "", **train: object) -> dict:
    """Return a prompt: ComfyUI's loaders, Use Connected Model, Train LoRA; `lora` is loaded before."""
    graph = train_graph(folder.name, lora={"exclude": ""}, **{"name": folder.name, "steps": 2, **train})
    graph |= loaders(model, *([lora] if lora else []))
    graph["linked"] = node("AtelierConnectModel", model=last(graph), clip=["base", 2], vae=["vae", 0])
    graph["train"]["inputs"]["base_model"] = ["linked", 0]
    return graph


def loaders(model: str, *loras: str) -> dict:
    """Return ComfyUI's loaders of a model with LoRAs on it, and of the VAE."""
    graph = {
        "unet": node("UNETLoader", unet_name=f"{model}.safetensors", weight_dtype="default"),
        "vae": node("VAELoader", vae_name="wide.safetensors"),
    }
    for i, name in enumerate(loras):
        file = f"atelier{os.sep}{name}.safetensors"
        graph[f"lora {i}"] = node("LoraLoaderModelOnly", model=last(graph), lora_name=file, strength_model=1.0)
    return graph


def last(graph: dict) -> list:
    """Return the link to the MODEL behind all LoRAs of `loaders`."""
    loras = [name for name in graph if name.startswith("lora ")]
    return [loras[-1] if loras else "unet", 0]


def drawn(model: list, clip: list) -> dict:
    """Return ComfyUI's own nodes that draw with a MODEL and a CLIP."""
    sampling = {"seed": 3, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return {
        "prompt": node("CLIPTextEncode", clip=clip, text="a red circle"),
        "empty": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "sampler": node(
            "KSampler",
            model=model,
            positive=["prompt", 0],
            negative=["prompt", 0],
            latent_image=["empty", 0],
            **sampling,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "show": node("PreviewImage", images=["decode", 0]),
    }


def picture(comfy: ComfyClient, *loras: str):
    """Draw a picture with LoRA files on the tiny Flux, through ComfyUI's own loaders alone."""
    graph = {"base": train_graph("")["base"], **loaders("tiny-flux", *loras)}
    result = finished(comfy, graph | drawn(last(graph), ["base", 2]))
    return comfy.images(result, "show")[0]


def finished(comfy: ComfyClient, graph: dict) -> Result:
    """Queue a prompt that must succeed."""
    result = comfy.queue(graph)
    assert result.ok, result.error
    return result


def same(one, other) -> bool:
    """Tell whether two pictures are equal."""
    return ImageChops.difference(one, other).getbbox() is None


def test_a_lora_is_trained_on_the_model_and_draws_as_its_file(
    any_server: ComfyServer, put: Callable[[ComfyServer], None], tmp_path: Path
) -> None:
    """The outputs draw what ComfyUI's own loader makes of the file; a second queue trains nothing."""
    put(any_server)
    comfy, began = ComfyClient(any_server.url), len(any_server.log_text())
    folder = draw_pictures(any_server.base / "input" / tmp_path.name)
    graph = connected(folder) | drawn(["train", 0], ["train", 1])
    result = finished(comfy, graph)
    (mine,) = comfy.images(result, "show")
    (said,) = result.outputs["linked"]["text"]
    assert said.startswith("FLUX.1 dev, weights in float32. It predicts the flow") and "Latents have 16" in said
    path = Path(result.outputs["path"]["text"][0])
    assert path.parent == any_server.base / "models" / "loras" / "atelier"
    assert any(tensor.any() for name, tensor in load_file(path).items() if "lora_up" in name)
    config = json.loads(metadata_in(path)["atelier.config"])
    assert config["base_model"]["path"] == "tiny-flux.safetensors" and config["base_model"]["connected"].keys() == {
        "guidance",
        "edit_text",
        "noise_range",
        "boundary",
        "switch_every",
    }

    again = finished(comfy, graph)
    assert again.was_cached("train") and not again.did_run("linked")
    assert same(mine, picture(comfy, path.stem)) and not same(mine, picture(comfy))
    assert "lora key not loaded" not in any_server.log_text()[began:]


@pytest.mark.thorough
def test_a_text_encoder_is_trained_and_comfyuis_loader_puts_it_on_the_clip(
    comfy: ComfyClient, models, pictures: Path
) -> None:
    graph = changed(connected(pictures), "optimizer", **{"name.text_encoder_learning_rate": 0.1})
    result = finished(comfy, graph | drawn(["train", 0], ["train", 1]))
    (mine,) = comfy.images(result, "show")
    path = Path(result.outputs["path"]["text"][0])
    assert any(tensor.any() for name, tensor in load_file(path).items() if "lora_te" in name and "lora_up" in name)
    both = {"base": train_graph("")["base"], **loaders("tiny-flux")}
    strengths = {"strength_model": 1.0, "strength_clip": 1.0}
    file = f"atelier{os.sep}{path.name}"
    both["lora"] = node("LoraLoader", model=["unet", 0], clip=["base", 2], lora_name=file, **strengths)
    drawn_by_both = finished(comfy, both | drawn(["lora", 0], ["lora", 1]))
    assert same(mine, comfy.images(drawn_by_both, "show")[0]) and not same(mine, picture(comfy, path.stem))


@pytest.mark.thorough  # zoo/test_frozen.py has the gradients of weights that are patched
def test_a_lora_before_the_node_is_trained_on_top_of(comfy: ComfyClient, models, pictures: Path) -> None:
    """The new file holds the new LoRA alone; both together draw what the output draws."""
    first, second = f"{pictures.name}-first", f"{pictures.name}-second"
    alone = finished(comfy, connected(pictures, name=first))
    graph = connected(pictures, name=second, lora=first) | drawn(["train", 0], ["train", 1])
    result = finished(comfy, graph)
    (mine,) = comfy.images(result, "show")
    files = [load_file(each.outputs["path"]["text"][0]) for each in (alone, result)]
    assert files[0].keys() == files[1].keys()
    assert not all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert same(mine, picture(comfy, first, second)) and not same(mine, picture(comfy, second))


@pytest.mark.thorough  # test_headless.py finds the run of another process
def test_a_finished_run_is_found_again_after_a_restart(
    comfy: ComfyClient, server: ComfyServer, models, pictures: Path
) -> None:
    """The models' keys in the graph are new then; what they are made of is not."""
    graph = connected(pictures)
    first = finished(comfy, graph)
    server.stop()
    server.start()
    again = finished(comfy, graph)
    assert again.did_run("train") and again.outputs["train"]["text"][0].startswith("Already trained in ")
    assert first.outputs["path"] == again.outputs["path"]
    other = finished(comfy, changed(graph, "linked", guidance=2.0))
    assert "Already trained" not in other.outputs["train"]["text"][0]


def test_an_edit_model_learns_from_pairs_of_folders(comfy: ComfyClient, models, pictures: Path) -> None:
    """What a model sees of them zoo/test_controls.py tests; a missing one is named."""
    before = shutil.copytree(pictures, pictures.with_name(f"{pictures.name}-before"))
    graph = connected(pictures, steps=1)
    graph["pairs"] = node("AtelierControlPictures", dataset=["data", 0], folder=before.name)
    graph = changed(graph, "train", dataset=["pairs", 0])
    paired = finished(comfy, graph)
    assert "controls" in paired.outputs["train"]["text"][0]
    next(before.glob("*.png")).unlink()
    refused(comfy, graph, "error", "1 picture has no control picture of the same name in")
    nowhere = changed(graph, "pairs", folder_2="/somewhere/else")
    refused(comfy, nowhere, "error", "/somewhere/else is outside ComfyUI's folders, and nobody allowed it yet")


def test_what_does_not_fit_gets_one_sentence(comfy: ComfyClient, models, pictures: Path) -> None:
    """Each names what to do, and nothing is trained."""
    graph = connected(pictures)
    vae = changed(graph, "linked", vae=["base", 3])
    refused(comfy, vae, "error", "has 4 channels and the MODEL 16; link the VAE that belongs to the MODEL")
    folder = changed(graph, "data", folder="no_such_folder")
    refused(comfy, folder, "rejected", "There is no folder 'no_such_folder'")  # before anything of the prompt runs
    partner = changed(graph, "linked", sample_model=["base", 1])
    refused(comfy, partner, "error", "has other blocks than its model; link one of the same architecture")
    wrapped = graph | {"compiled": node("TorchCompileModel", model=["unet", 0], backend="inductor")}
    wrapped = changed(wrapped, "linked", model=["compiled", 0])
    refused(
        comfy, wrapped, "error", "is compiled (diffusion_model)", "link the MODEL without the node that compiles it"
    )
    fast = connected(pictures, model="tiny-fast")
    refused(comfy, fast, "error", "train on FLUX.1 dev", "set train_distilled of Use Connected Model to true")
    clip = connected(pictures, model="tiny-wide")
    refused(comfy, clip, "error", "Link the CLIP that belongs to the MODEL")
    step = changed(graph, "buckets", bucket_step=8)
    refused(comfy, step, "error", "FLUX.1 dev takes pictures whose sides are multiples of 16 pixels", "to multiples of")
    text = changed(graph, "optimizer", text_encoder_2_learning_rate=0.1)
    refused(comfy, text, "error", "of the linked CLIP; set text_encoder_2_learning_rate of Optimizer to 0")
    half = graph | {"memory": node("AtelierMemory", **memory(offload_weights="half"))}
    refused(comfy, changed(half, "train", memory=["memory", 0]), "error", "set offload_weights of Memory to auto")
    word = {"token": "circle", "vectors": 1, "init_text": "", "learning_rate": 0.1, "stop": 0.0, "stop_unit": "share"}
    words = graph | {"word": node("AtelierEmbedding", lora_config=["lora", 0], keep_norm=False, **word)}
    refused(
        comfy, changed(words, "train", lora_config=["word", 0]), "error", "with a connected model; remove Embedding"
    )


def test_a_distilled_model_is_trained_if_the_person_wants_it(comfy: ComfyClient, models, pictures: Path) -> None:
    fast = changed(connected(pictures, model="tiny-fast", steps=1), "linked", train_distilled=True)
    fast = changed(fast, "lora", base_model=["linked", 0])
    result = finished(comfy, fast)
    (said,) = result.outputs["linked"]["text"]
    assert "Schnell is distilled to a few steps" in said
    (size,) = result.outputs["lora"]["text"]  # of the network on the linked model
    assert "layers" in size


def memory(**inputs: object) -> dict:
    """Return the inputs of a Memory node."""
    auto = dict.fromkeys(
        ("checkpointing", "offload_weights", "offload_activations", "attention", "channels_last"), "auto"
    )
    return {**auto, "compile": False, **inputs}
