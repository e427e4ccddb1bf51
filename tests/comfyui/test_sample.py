"""Sample draws what ComfyUI's own nodes draw: both passes, every way to enlarge, several prompts, other models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from train_graph import LATENT_HIRES, SECOND_PASS, changed, draw_pictures, node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")

OWN = {
    "hires.steps": 3,
    "hires.cfg": 5.0,
    "hires.sampler_name": "dpmpp_2m",
    "hires.scheduler": "karras",
    "hires.seed": 9,
}


def base() -> dict:
    return {"base": node("CheckpointLoaderSimple", ckpt_name=TINY_BASE.name)}


def shown(graph: dict, *names: str) -> dict:
    """Return a graph that shows the pictures of some nodes."""
    return graph | {f"show {name}": node("PreviewImage", images=[name, 0]) for name in names}


def ours(**inputs: object) -> dict:
    return sample(["base", 0], ["base", 1], ["base", 2], **inputs)


def ksampler(latents: list, seed: int, steps: int, cfg: float, sampler: str, scheduler: str, denoise: float) -> dict:
    return node(
        "KSampler",
        model=["base", 0],
        positive=["positive", 0],
        negative=["negative", 0],
        latent_image=latents,
        seed=seed,
        steps=steps,
        cfg=cfg,
        sampler_name=sampler,
        scheduler=scheduler,
        denoise=denoise,
    )


def stock() -> dict:
    """Return the first pass by ComfyUI's own nodes, up to its latents and its picture."""
    return {
        **base(),
        "positive": node("CLIPTextEncode", clip=["base", 1], text="a red circle"),
        "negative": node("CLIPTextEncode", clip=["base", 1], text=""),
        "empty": node("EmptyLatentImage", width=64, height=64, batch_size=2),
        "first": ksampler(["empty", 0], 5, 3, 3.0, "euler", "normal", 1.0),
        "pixels": node("VAEDecode", samples=["first", 0], vae=["base", 2]),
    }


def upscaler(folder: Path) -> str:
    """Write a small upscale model of random weights; return its name."""
    torch.manual_seed(0)
    shapes = {"body.0": (16, 3, 3, 3), "body.2": (12, 16, 3, 3)}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}
    tensors["body.1.weight"] = torch.full((16,), 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "sample-2x.safetensors")
    return "sample-2x.safetensors"


def test_every_second_pass_is_that_of_comfyui_s_own_nodes(comfy: ComfyClient, server: ComfyServer) -> None:
    name = upscaler(server.base / "models" / "upscale_models")
    second = (9, 3, 5.0, "dpmpp_2m", "karras", 0.6)
    graph = stock()
    graph["larger latents"] = node("LatentUpscaleBy", samples=["first", 0], upscale_method="bislerp", scale_by=1.5)
    graph["larger"] = node(
        "ImageScale", image=["pixels", 0], upscale_method="lanczos", width=96, height=96, crop="disabled"
    )
    graph["upscaler"] = node("UpscaleModelLoader", model_name=name)
    graph["upscaled"] = node("ImageUpscaleWithModel", upscale_model=["upscaler", 0], image=["pixels", 0])
    graph["wide"] = node(
        "ImageScale", image=["upscaled", 0], upscale_method="bicubic", width=112, height=112, crop="disabled"
    )
    latents = {"latent": "larger latents", "pixels": "larger", "upscale model": "wide"}
    for way, source in latents.items():
        if way != "latent":
            graph[f"encode {way}"] = node("VAEEncode", pixels=[source, 0], vae=["base", 2])
        place = [source if way == "latent" else f"encode {way}", 0]
        graph[f"second {way}"] = ksampler(place, *second)
        graph[f"stock {way}"] = node("VAEDecode", samples=[f"second {way}", 0], vae=["base", 2])
    settings = {
        "latent": {"hires.scale": 1.5, "hires.method": "bislerp"},
        "pixels": {"hires.scale": 1.5, "hires.method": "lanczos"},
        "upscale model": {"hires.scale": 1.75, "hires.method": "bicubic", "upscale_model": ["upscaler", 0]},
    }
    for way, own in settings.items():
        graph[f"ours {way}"] = ours(batch_size=2, hires=way, **{**SECOND_PASS, **OWN}, **own)
    graph["ours"] = ours(batch_size=2)
    names = [f"{whose} {way}" for way in latents for whose in ("stock", "ours")]
    result = comfy.queue(shown(graph, "ours", "pixels", *names))
    assert result.ok, result.error
    for one, other in (("ours", "pixels"), *zip(names[1::2], names[::2], strict=True)):
        drawn, wanted = (comfy.images(result, f"show {each}") for each in (one, other))
        assert len(drawn) == len(wanted) == 2
        for a, b in zip(drawn, wanted, strict=True):
            assert a.size == b.size and np.array_equal(np.asarray(a), np.asarray(b)), (one, a.size, b.size)
    assert comfy.images(result, "show ours upscale model")[0].size == (112, 112)


def test_each_line_draws_its_own_picture(comfy: ComfyClient) -> None:
    lines = "# two prompts\na red circle\n\na blue square --w 96 --h 64 --s 2 --d 7 --l 2 --n red --ss k_heun"
    graph = base() | {"both": ours(prompt=lines), "red": ours(), "tiled": ours(tiled_vae=True)}
    graph["blue"] = ours(
        prompt="a blue square", width=96, steps=2, seed=7, cfg=2.0, negative="red", sampler_name="heun"
    )
    graph["auto"] = ours(steps=0, cfg=0.0, sampler_name="auto", scheduler="auto")
    graph["usual"] = ours(steps=20, cfg=3.0, sampler_name="euler", scheduler="normal")
    result = comfy.queue(shown(graph, *(name for name in graph if name != "base")))
    assert result.ok, result.error
    found = {name: comfy.images(result, f"show {name}") for name in graph if name != "base"}
    first, second = found["both"]
    assert (first.size, second.size) == ((64, 64), (96, 64))
    for one, other in ((first, found["red"][0]), (second, found["blue"][0]), (found["auto"][0], found["usual"][0])):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert np.abs(np.asarray(found["tiled"][0], dtype=float) - np.asarray(found["red"][0], dtype=float)).max() < 8


def test_what_is_left_open_is_what_was_trained(any_server: ComfyServer) -> None:
    """Size and prompt, also behind another node that clones the MODEL; a size that no model draws is refused."""
    comfy = ComfyClient(any_server.url)
    folder = draw_pictures(any_server.base / "input" / "left open", 1)
    graph = changed(train_graph(folder.name, name="left open", steps=1), "data", trigger_word="zorby,")
    graph["cloned"] = node("ModelSamplingDiscrete", model=["train", 0], sampling="eps", zsnr=False)
    inputs = {"clip": ["train", 1], "vae": ["base", 3]}
    graph["open"] = sample(["cloned", 0], **inputs, prompt=" # nothing", width=0, height=0)
    caption = f"zorby, {(folder / '0.txt').read_text(encoding='utf-8')}"
    graph["same"] = sample(["cloned", 0], **inputs, prompt=caption, width=64, height=64)
    result = comfy.queue(shown(graph, "open", "same"))
    assert result.ok, result.error
    opened, same = (comfy.images(result, f"show {name}")[0] for name in ("open", "same"))
    assert opened.size == (64, 64) and np.array_equal(opened, same)
    wrong = comfy.queue(
        shown({**graph, "open": {**graph["open"], "inputs": {**graph["open"]["inputs"], "width": 8}}}, "open")
    )
    assert wrong.error and "width of Sample is 8; set it to 64 or more, or to 0." in wrong.error


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"prompt": "a --q 3"}, "--q in line 1 of prompt of Sample is none of --n, --w"),
        ({"prompt": "a --w 8192 --h 8192\n" * 1000}, "The pictures of Sample take 805.3 GB of RAM, and "),
        ({"prompt": "a --ss nothing"}, "is nothing, which is no sampler of this ComfyUI"),
        (
            {**LATENT_HIRES, "hires": "upscale model", "hires.method": "area"},
            "hires of Sample is upscale model, and none is linked",
        ),
    ],
)
def test_wrong_input_gets_one_sentence(comfy: ComfyClient, inputs: dict, said: str) -> None:
    result = comfy.queue(shown(base() | {"x": ours(**inputs)}, "x"))
    assert not result.ok and said in str(result.error)


def test_pictures_are_drawn_on_the_oldest_comfyui(comfy_oldest: ComfyClient) -> None:
    ways = {
        "latent": LATENT_HIRES,
        "pixels": {**LATENT_HIRES, "hires": "pixels", "hires.method": "lanczos"},
    }
    graph = base() | {way: ours(**inputs) for way, inputs in ways.items()}
    result = comfy_oldest.queue(shown(graph, *ways))
    assert result.ok, result.error
    assert [image.size for way in ways for image in comfy_oldest.images(result, f"show {way}")] == [(96, 96), (96, 96)]
    assert all(isinstance(image, Image.Image) for image in comfy_oldest.images(result, "show latent"))
