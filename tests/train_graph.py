"""A small training graph as a prompt of the HTTP API, and pictures to train on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.config.rows import Row

CHECKPOINT = "atelier-tiny.safetensors"

TRAIN = {
    "name": "test",
    "steps": 4,
    "epochs": 0,
    "batch_size": 2,
    "resolution": 64,
    "seed": 1,
}
BUCKETS = {
    "resolutions": "",
    "resolution_mode": "draw",
    "min_side": 0,
    "max_side": 0,
    "no_upscale": False,
    "small_buckets": "keep",
    "mix_concepts": True,
    "bucket_step": 32,
}
SAVES = {
    "save_every": 5,
    "save_unit": "minutes",
    "keep_last": 2,
    "keep_every": 0,
    "publish": False,
    "sample_prompts": "",
    "sample_every": 0,
    "sample_unit": "steps",
    "sample_negative": "",
    "sample_width": 0,
    "sample_height": 0,
    "sample_steps": 2,
    "sample_cfg": 3.0,
    "sample_seed": 0,
    "file_name": "atelier/{name}",
    "overwrite": False,
    "save_dtype": "float16",
    "log": "csv",
    "sample_at_start": False,
}
VALIDATION = {"validate_every": 0, "early_stop_patience": 0, "early_stop_min_improvement": 0.0, "keep_best": False}
SECOND_PASS = {
    "hires.denoise": 0.6,
    "hires.steps": 2,
    "hires.cfg": 0.0,
    "hires.sampler_name": "as the first pass",
    "hires.scheduler": "as the first pass",
    "hires.seed": -1,
}
LATENT_HIRES = {"hires": "latent", "hires.scale": 1.5, "hires.method": "bislerp", **SECOND_PASS}
# A run takes longer for each layer that it builds, saves and hands to ComfyUI: of the UNet its middle alone is trained.
FEW_LAYERS = "*down_blocks*, *up_blocks*"
SAMPLE = {
    "prompt": "a red circle",
    "negative": "",
    "width": 64,
    "height": 64,
    "batch_size": 1,
    "seed": 5,
    "steps": 3,
    "cfg": 3.0,
    "sampler_name": "euler",
    "scheduler": "normal",
    "hires": "off",
    "tiled_vae": False,
    "guidance": -1.0,
}


def draw_pictures(folder: Path, count: int = 3, captions: bool = True) -> Path:
    """Fill a folder with small pictures and captions, all different; return it."""
    folder.mkdir(parents=True)
    for i in range(count):
        picture = Image.new("RGB", (80, 64 + 16 * (i % 2)), (200, 220 - 30 * i, 90 + 40 * i))
        ImageDraw.Draw(picture).ellipse((10 + 5 * i, 10, 50 + 5 * i, 50), fill=(255 - 50 * i, 30, 60 * i))
        picture.save(folder / f"{i}.png")
        if captions:
            (folder / f"{i}.txt").write_text(f"circle number {i}, flat background", encoding="utf-8")
    return folder


def train_graph(
    folder: str | Path,
    optimizer: dict | None = None,
    lora: dict | None = None,
    scheduler: dict | None = None,
    **train: Any,
) -> dict:
    """Return a prompt: nodes base, data with captions and pictures, and all that lead into train, and a preview.

    optimizer, lora, scheduler: inputs of these nodes that are not as below; `chosen` writes those of a dynamic combo.
    train: inputs of Train LoRA, and of the three nodes before it in that list.
    """
    own = [{name: train.pop(name, value) for name, value in usual.items()} for usual in (BUCKETS, SAVES, VALIDATION)]
    return {
        "base": node("AtelierLoadBaseModel", checkpoint=CHECKPOINT, prediction="auto", clip_skip=1, precision="auto"),
        "captions": untouched("AtelierCaptions", caption_dropout=0.0),
        "pictures": untouched("AtelierPictures"),
        "data": concept(folder, caption_settings=["captions", 0], picture_settings=["pictures", 0]),
        "optimizer": node(
            "AtelierOptimizer",
            **{
                "name": "adamw",
                "name.learning_rate": 0.01,
                "name.text_encoder_learning_rate": 0.0,
                "name.weight_decay": 0.01,
                "name.beta1": 0.9,
                "name.beta2": 0.999,
                "name.eps": 1e-8,
                "max_grad_norm": 1.0,
                **(optimizer or {}),
            },
        ),
        "scheduler": node(
            "AtelierScheduler", **{"name": "constant", "warmup_steps": 0, "min_lr_ratio": 0.0, **(scheduler or {})}
        ),
        "lora": node(
            "AtelierLoraConfig",
            **{"rank": 4, "alpha": 4.0, "preset": "full", "conv_rank": 0, "conv_alpha": 0.0},
            **{"exclude": FEW_LAYERS, **(lora or {})},
        ),
        "buckets": node("AtelierBuckets", **own[0]),
        "saves": node("AtelierSaves", **own[1]),
        "validation": node("AtelierValidation", **own[2]),
        "train": node(
            "AtelierTrain",
            base_model=["base", 0],
            dataset=["data", 0],
            optimizer=["optimizer", 0],
            scheduler=["scheduler", 0],
            lora_config=["lora", 0],
            buckets=["buckets", 0],
            saves=["saves", 0],
            validation=["validation", 0],
            **{**TRAIN, **train},
        ),
        "path": node("PreviewAny", source=["train", 5]),
    }


def node(class_type: str, **inputs: Any) -> dict:
    """Return one node of a prompt."""
    return {"class_type": class_type, "inputs": inputs}


def untouched(class_type: str, **inputs: Any) -> dict:
    """Return a node of a run as a person puts it into a graph, but for some inputs."""
    values = {}

    def fill(rows: tuple[Row, ...], prefix: str = "") -> None:
        for each in rows:
            if each.widget:
                name = prefix + each.input
                values[name] = inputs.get(name, each.shown)
                fill(each.options.get(values[name], ()), f"{name}.")

    fill(FORMS[class_type].inputs)
    return node(class_type, **{**values, **inputs})


def chosen(combo: str, option: str, **fields: Any) -> dict:
    """Return the inputs of a dynamic combo: its option, and the option's own fields under their full names."""
    return {combo: option, **{f"{combo}.{field}": value for field, value in fields.items()}}


def concept(folder: str | Path, **inputs: Any) -> dict:
    """Return a Concept Dataset."""
    return untouched("AtelierConceptDataset", **{"folder": str(folder), **inputs})


def masks(dataset: list, **inputs: Any) -> dict:
    """Return a Mask Loader."""
    values = {
        "source": "file",
        "suffix": "-masklabel.png",
        "folder": "",
        "invert": False,
        "missing": "error",
        "unmasked_weight": 0.1,
        "unmasked_probability": 0.0,
        "normalize_masked_area": False,
    }
    return node("AtelierMaskLoader", dataset=dataset, **{**values, **inputs})


def sample(model: list, clip: list, vae: list, **inputs: Any) -> dict:
    """Return a Sample node."""
    return node("AtelierSample", model=model, clip=clip, vae=vae, **{**SAMPLE, **inputs})


def changed(graph: dict, name: str, /, **inputs: Any) -> dict:
    """Return a copy of a prompt with some inputs of one node changed."""
    graph = copy.deepcopy(graph)
    graph[name]["inputs"].update(inputs)
    return graph
