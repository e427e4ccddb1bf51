"""Train LoRA in a real ComfyUI: the file, the outputs, the cache, Cancel, and every sentence that refuses."""

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from lora_runs import metadata_in
from PIL import Image, ImageChops
from safetensors import safe_open
from train_graph import LATENT_HIRES, changed, chosen, concept, draw_pictures, masks, node, sample, train_graph

from comfy_client import ComfyClient, ComfyServer, Result, refused
from lora_atelier.dev import TINY_BASE

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def lora_path(result: Result) -> Path:
    """Return the file that a prompt of train_graph has saved."""
    assert result.ok, result.error
    return Path(result.outputs["path"]["text"][0])


def same(comfy: ComfyClient, result: Result, first: str, second: str) -> bool:
    """Tell whether the pictures that two nodes show are equal, pixel for pixel."""
    (one,), (other,) = comfy.images(result, first), comfy.images(result, second)
    return ImageChops.difference(one, other).getbbox() is None


def stopped_at(folder: Path, name: str) -> int:
    """Return the step in the name of the file that a cancelled run has left."""
    (file,) = folder.glob(f"{name}-stopped-at-*.safetensors")
    return int(re.search(r"stopped-at-(\d+)", file.name)[1])


def test_a_slider_is_trained_from_pairs_of_folders(comfy: ComfyClient, pictures: Path) -> None:
    """Both ends of each pair; KSampler's model moves both ways; what makes no slider is refused in a sentence."""
    name, less = pictures.name, shutil.copytree(pictures, pictures.with_name(f"{pictures.name}-less"))
    for path in less.glob("*.png"):
        ImageChops.invert(Image.open(path).convert("RGB")).save(path)
    graph = train_graph(name, name=name, steps=2)
    graph["pairs"] = node("AtelierControlPictures", dataset=["data", 0], folder=less.name, use="slider")
    graph = changed(graph, "train", dataset=["pairs", 0])
    for shown, strength in (("more", 1.0), ("less", -1.0)):
        given = {"model": ["base", 1], "lora": ["train", 2], "strength_model": strength, "bypass": False}
        graph[f"{shown} lora"] = node("LoraModelLoader", **given)
        graph[f"{shown} drawn"] = sample([f"{shown} lora", 0], ["base", 2], ["base", 3])
        graph[shown] = node("PreviewImage", images=[f"{shown} drawn", 0])
    plan = {"resolution": 64, "batch_size": 2, "seed": 1, "epoch": 0, "columns": 3, "limit": 9}
    graph["sheet"] = node("AtelierDatasetPreview", dataset=["pairs", 0], buckets=["buckets", 0], **plan)
    result = comfy.queue(graph)
    lora_path(result)
    assert "other end" in result.outputs["train"]["text"][0]
    assert not same(comfy, result, "more", "less")
    refused(comfy, changed(graph, "pairs", folder_2=less.name), "error", "leave folder_2 and folder_3 of Control Pict")
    refused(comfy, changed(graph, "pairs", fit="whole"), "error", "set fit of Control Pictures to as_picture")
    prompts = {"slider_positive": "old", "slider_negative": "", "slider_keep": "", "slider_strength": 1.0}
    given = {f"slider.{name}": value for name, value in prompts.items()}
    given |= {"min_snr_gamma": 5.0, "noise_offset": 0.0, "min_timestep": 0, "max_timestep": 999}
    graph["objective"] = node("AtelierObjective", slider="prompts", **given)
    both = changed(graph, "train", objective=["objective", 0])
    refused(comfy, both, "error", "set slider of Noise & Loss to off, or use of Control Pictures to edit")
    edit = changed(graph, "pairs", use="edit")
    refused(
        comfy, edit, "error", "takes no control pictures; remove folder of Control Pictures, or train on an edit model"
    )
    next(less.glob("*.png")).unlink()
    refused(comfy, graph, "error", "1 picture has no control picture of the same name in")


def test_a_run_and_all_that_its_outputs_feed(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    """One run with UNet and text encoder; ComfyUI's own nodes take every output."""
    name, before = pictures.name, len(server.log_text())
    graph = train_graph(
        name, {"name.text_encoder_learning_rate": 0.01}, name=name, sample_prompts="one\n\ntwo", strength=0.8
    )
    graph["with"] = sample(["train", 0], ["train", 1], ["base", 3], **LATENT_HIRES)
    graph["without"] = sample(["base", 1], ["base", 2], ["base", 3], **LATENT_HIRES)
    graph["show with"] = node("PreviewImage", images=["with", 0])
    graph["show without"] = node("PreviewImage", images=["without", 0])
    graph["show samples"] = node("PreviewImage", images=["train", 4])
    graph["show plot"] = node("PreviewImage", images=["train", 6])
    graph["stock plot"] = node("LossGraphNode", loss=["train", 3], filename_prefix="loss")
    graph["stock save"] = node("SaveLoRA", lora=["train", 2], prefix=f"loras/{name}")
    graph["smaller"] = node(
        "AtelierResizeLora", lora=["train", 2], **{"mode": "rank", "mode.rank": 2, "mode.conv_rank": 0}
    )
    graph["stock save 2"] = node("SaveLoRA", lora=["smaller", 0], prefix=f"loras/{name}-small")
    graph["sheet"] = node(
        "AtelierDatasetPreview",
        dataset=["data", 0],
        resolution=64,
        batch_size=2,
        seed=1,
        epoch=0,
        columns=3,
        limit=9,
        buckets=["buckets", 0],
    )
    first = comfy.queue(graph)
    path = lora_path(first)
    assert path == server.base / "models" / "loras" / "atelier" / f"{name}.safetensors"
    assert [p.size for p in comfy.images(first, "show with")] == [(96, 96)]
    assert [p.size for p in comfy.images(first, "show samples")] == [(64, 64)] * 2
    assert not same(comfy, first, "show with", "show without")
    assert any(
        re.match(r"step 4 of 4 · 0:00 left · .*it.* · mean loss \d\.\d{4} \(last 4 steps\)", text)
        for _, text in first.texts
    )
    assert first.custom("atelier.lora") == [("atelier.lora_saved", {})]
    assert "3 pictures" in first.outputs["sheet"]["text"][0]

    # The file: no key that ComfyUI does not know, and listed at once.
    log = server.log_text()[before:]
    assert "lora key not loaded" not in log and "NOT LOADED" not in log
    listed = comfy.get("/object_info/LoraLoader")["LoraLoader"]["input"]["required"]["lora_name"]
    options = listed[0] if isinstance(listed[0], list) else listed[1]["options"]
    assert f"atelier{os.sep}{name}.safetensors" in options
    with safe_open(path, "pt") as file:
        keys = set(file.keys())
        assert json.loads(file.metadata()["atelier.config"])["train"]["steps"] == 4
    assert any(key.startswith("lora_te_") for key in keys) and any(key.startswith("lora_unet_") for key in keys)
    (saved,) = (server.base / "output" / "loras").glob(f"{name}_*.safetensors")
    with safe_open(saved, "pt") as file:
        assert set(file.keys()) == keys

    # Downstream changes do not train again, and our MODEL and CLIP are what LoraLoader makes of the file.
    more = changed(graph, "with", prompt="a blue square")
    more["loader"] = node(
        "LoraLoader",
        model=["base", 1],
        clip=["base", 2],
        lora_name=f"atelier{os.sep}{name}.safetensors",
        strength_model=0.8,
        strength_clip=0.8,
    )
    more["loaded"] = sample(["loader", 0], ["loader", 1], ["base", 3], **LATENT_HIRES, prompt="a blue square")
    more["show loaded"] = node("PreviewImage", images=["loaded", 0])
    more["model loader"] = node(
        "LoraModelLoader", model=["base", 1], lora=["train", 2], strength_model=0.8, bypass=False
    )
    more["by model"] = sample(["model loader", 0], ["train", 1], ["base", 3], **LATENT_HIRES, prompt="a blue square")
    more["show by model"] = node("PreviewImage", images=["by model", 0])
    second = comfy.queue(more)
    assert second.ok, second.error
    assert second.was_cached("train") and second.did_run("with")
    assert same(comfy, second, "show with", "show loaded")
    assert same(comfy, second, "show with", "show by model")


def test_edited_masks_train_again(comfy: ComfyClient, pictures: Path) -> None:
    """As edited pictures (test_dataset.py) and captions (in the oldest ComfyUI) do; without prompts none is drawn."""
    second, apart = (pictures.parent / f"{pictures.name}-{part}" for part in ("second", "masks"))
    draw_pictures(second)
    apart.mkdir()
    for picture in sorted(pictures.glob("*.png")):
        mask = Image.new("L", Image.open(picture).size, 0)
        mask.paste(255, (10, 10, 50, 50))
        mask.save(apart / f"{picture.stem}.png")
        if picture.stem != "0":
            mask.save(pictures / f"{picture.stem}-masklabel.png")
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    graph["second"] = concept(second.name, dataset=["beside", 0])
    graph["beside"] = masks(["data", 0], missing="ones")
    graph["apart"] = masks(["second", 0], suffix=".png", folder=apart.name)
    graph["show"] = node("PreviewImage", images=["train", 4])
    graph = changed(graph, "train", dataset=["apart", 0])
    try:
        first = comfy.queue(graph)
        assert lora_path(first).is_file() and "show" not in first.outputs
        again = comfy.queue(graph)
        assert again.ok and again.was_cached("train")
        for mask in (pictures / "0-masklabel.png", apart / "0.png"):
            Image.new("L", (80, 64), 255).save(mask)
            result = comfy.queue(graph)
            assert result.ok, result.error
            assert result.did_run("train")
        assert any(text.count("3 of 3") == 2 for _, text in result.texts)  # masks, in the table of concepts
    finally:
        shutil.rmtree(second)
        shutil.rmtree(apart)


def test_cancel_stops_the_run_and_keeps_the_lora_so_far(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    graph = train_graph(pictures.name, name=pictures.name, steps=500)

    def cancel(kind: str, data: dict, result: Result) -> None:
        if kind == "text" and data["text"].startswith("step 1 of 500"):
            assert comfy.cancel(result.prompt_id)

    with server.unhurried():
        cancelled = comfy.queue(graph, on_event=cancel)
    assert cancelled.status == "interrupted"
    # Which step it is depends on how quick the machine is; that none is begun after a Cancel is tested in the core.
    stopped = stopped_at(server.base / "models" / "loras" / "atelier", pictures.name)
    assert stopped < 500 and cancelled.texts[-1][1].startswith(f"Stopped after step {stopped} of 500")


def test_the_oldest_comfyui_trains_and_remembers(comfy_oldest: ComfyClient, server_oldest: ComfyServer) -> None:
    draw_pictures(server_oldest.base / "input" / "oldest")
    graph = train_graph("oldest", {"name.text_encoder_learning_rate": 0.01}, name="oldest", sample_prompts="one")
    graph["with"] = sample(["train", 0], ["train", 1], ["base", 3], **LATENT_HIRES)
    graph["show"] = node("PreviewImage", images=["with", 0])
    first = comfy_oldest.queue(graph)
    assert lora_path(first).is_file()
    again = comfy_oldest.queue(changed(graph, "with", seed=6))
    assert again.ok and again.was_cached("train") and again.did_run("with")
    assert "lora key not loaded" not in server_oldest.log_text()
    (server_oldest.base / "input" / "oldest" / "1.txt").write_text("another caption", encoding="utf-8")
    third = comfy_oldest.queue(graph)
    assert third.did_run("train") and lora_path(third).name == "oldest-2.safetensors"


@pytest.mark.parametrize(
    "name", ["", "../escape", "folder/name", "/absolute", "a\\b", "con", ".hidden", "what?", "x" * 250, "日" * 60]
)
def test_a_name_that_is_no_plain_file_name_is_refused(comfy: ComfyClient, pictures: Path, name: str) -> None:
    sentence = "use at most 100 (160 bytes)" if len(name) > 50 else "cannot be a file name; use"
    sentence = "begins or ends with a dot; write hidden." if name == ".hidden" else sentence
    refused(comfy, train_graph(pictures.name, name=name), "rejected", sentence)


@pytest.mark.parametrize(
    ("where", "values", "sentence"),
    [
        ("data", {"folder": "no such folder"}, "There is no folder 'no such folder'"),
        ("data", {"folder": "../models"}, "contains '..'"),
        ("data", {"folder": " "}, "folder of Concept Dataset is empty"),
        ("train", {"batch_size": 0}, "smaller than min"),
        ("base", {"checkpoint": "missing.safetensors"}, "Value not in list"),
    ],
)
def test_a_wrong_constant_is_refused_before_anything_runs(
    comfy: ComfyClient, pictures: Path, where: str, values: dict[str, Any], sentence: str
) -> None:
    refused(comfy, changed(train_graph(pictures.name), where, **values), "rejected", sentence)


@pytest.mark.parametrize(
    ("where", "values", "sentence"),
    [
        ("captions", {"caption_extension": "a/b"}, "must start with a dot"),
        ("captions", {"caption_encoding": "klingon"}, "caption_encoding is 'klingon'"),
        ("pictures", {"resolutions": "huge"}, "The resolution 'huge' is invalid"),
        ("pictures", {"background": "ultrawhite"}, "background is 'ultrawhite'"),
        ("data", {**chosen("captions_from", "table", caption_file="")}, "There is no caption table"),
        ("data", {"role": "validation"}, "No concept has the role train"),
        ("buckets", {"bucket_step": 36}, "to a multiple of 8"),
        ("buckets", {"bucket_step": 128}, "at most the resolution"),
        ("validation", {"early_stop_patience": 2}, "early_stop_patience 2 needs validation losses during the run"),
        ("validation", {"keep_best": True, "validate_every": 2}, "keep_best needs pictures that are not trained"),
        ("optimizer", {"name.learning_rate": 0.0}, "nothing is trained"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_training(
    comfy: ComfyClient, pictures: Path, where: str, values: dict[str, Any], sentence: str
) -> None:
    refused(comfy, changed(train_graph(pictures.name), where, **values), "error", sentence)


def test_an_empty_range_of_timesteps_is_refused(comfy: ComfyClient, pictures: Path) -> None:
    graph = changed(train_graph(pictures.name), "train", objective=["objective", 0])
    graph["objective"] = node(
        "AtelierObjective", min_snr_gamma=5.0, noise_offset=0.0, min_timestep=500, max_timestep=100
    )
    refused(comfy, graph, "error", "min_timestep 500 is above max_timestep 100")


CHOICES = {
    "loss": "huber",
    "loss.huber_c": 0.2,
    "loss.huber_schedule": "snr",
    "loss.huber_scale": 1.0,
    "weighting": "p2",
    "weighting.p2_gamma": 0.5,
    "snr_weight_floor": 0.01,
    "timestep_distribution": "beta",
    "timestep_distribution.beta_a": 2.0,
    "timestep_distribution.beta_b": 3.0,
    "stratified_timesteps": True,
    "noise_offset_strength": "adaptive",
    "noise_offset_strength.offset_adaptation": 0.2,
    "pyramid_noise": "on",
    "pyramid_noise.pyramid_iterations": 3,
    "pyramid_noise.pyramid_discount": 0.2,
    "input_perturbation": 0.1,
    "loss_on": "prediction",
}


@pytest.mark.parametrize("given", [CHOICES, pytest.param({}, marks=pytest.mark.thorough)], ids=["all", "none"])
def test_choices_of_the_objective_and_their_fields_reach_the_run(
    comfy: ComfyClient, pictures: Path, given: dict
) -> None:
    """Fields of a choice as the editor sends them; a workflow that knows none of them learns as ever."""
    graph = changed(train_graph(pictures.name, steps=1), "train", objective=["objective", 0], dataset=["held", 0])
    graph["held"] = concept(pictures.name, dataset=["data", 0], role="prior_prediction", trigger_word="a picture,")
    old = {"min_snr_gamma": 5.0, "noise_offset": 0.1, "min_timestep": 0, "max_timestep": 999}
    graph["objective"] = node("AtelierObjective", **old, **given)
    found = json.loads(metadata_in(lora_path(comfy.queue(graph)))["atelier.config"])["objective"]
    wanted = {**old, **{key.split(".")[-1]: value for key, value in given.items() if key != "pyramid_noise"}}
    wanted["min_snr_gamma"] = 0.0 if given else 5.0  # p2 has no use for it
    assert {key: found[key] for key in wanted} == wanted


def test_problems_of_the_dataset_are_named_before_training(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    graph = train_graph(pictures.name, name=pictures.name)
    (pictures / "2.txt").unlink()
    refused(comfy, graph, "error", "2.png", "caption")
    loaded, log = "model weight dtype", server.log_text()  # ComfyUI's words for a model being built
    refused(comfy, graph, "error", "2.png", "caption")  # Load Base Model comes from the cache this time
    assert loaded in log and loaded not in server.log_text()[len(log) :]
    (pictures / "2.txt").write_text("back again", encoding="utf-8")
    picture = (pictures / "1.png").read_bytes()
    (pictures / "1.png").write_bytes(picture[: len(picture) // 2])
    refused(comfy, graph, "error", "1.png", "cannot be read")
    (pictures / "1.png").write_bytes(picture)
    graph["masks"] = masks(["data", 0])
    refused(
        comfy,
        changed(graph, "train", dataset=["masks", 0]),
        "error",
        "have no mask",
        "set missing of Mask Loader to ones",
    )
    for file in pictures.iterdir():
        file.unlink()
    refused(comfy, graph, "error", "is empty; put pictures")


def test_a_file_that_is_no_checkpoint_is_named_for_what_it_is(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    folder = server.base / "models" / "checkpoints"
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(4, 4)}, folder / "really-a-lora.safetensors")
    buffer = io.BytesIO()
    torch.save({"state_dict": {}}, buffer)
    (folder / "really-a-pickle.ckpt").write_bytes(buffer.getvalue())
    (folder / "cut-short.safetensors").write_bytes(TINY_BASE.read_bytes()[:100_000])
    graph = train_graph(pictures.name)
    for name, sentence in (
        ("really-a-lora.safetensors", "is a LoRA"),
        ("really-a-pickle.ckpt", "is a pickle"),
        ("cut-short.safetensors", "cut short or damaged"),
    ):
        refused(comfy, changed(graph, "base", checkpoint=name), "error", sentence, name)
        (folder / name).unlink()


ALGORITHMS = [
    chosen("algorithm", "lora", dora=True, tucker=True, rs_lora=True, use_scalar=True),
    chosen("algorithm", "loha", tucker=True),
    chosen("algorithm", "lokr", factor=4),
    chosen("algorithm", "glora"),
    chosen("algorithm", "oft"),
    {**chosen("algorithm", "boft"), "rank": 10, "preset": "attn-mlp"},
    {**chosen("algorithm", "ia3"), "preset": "attn-mlp"},
    {**chosen("algorithm", "full"), "train_norm": True},
]


# What differs in the graph. test_a_run_and_all_that_its_outputs_feed tries a LoRA in every run, and
# test_network_files.py compares ComfyUI's weights of all kinds.
TELLING = ("full",)


@pytest.mark.parametrize(
    "lora",
    [pytest.param(each, marks=() if each["algorithm"] in TELLING else pytest.mark.thorough) for each in ALGORITHMS],
    ids=lambda lora: lora["algorithm"],
)
def test_every_algorithm_trains_in_the_graph_and_acts_as_its_file_does(
    comfy: ComfyClient, pictures: Path, lora: dict
) -> None:
    """The file passes ComfyUI's own loader before it gets its name, and MODEL is what the stock loader makes of it."""
    name = f"{pictures.name}-{lora['algorithm']}"
    rates = {"name.learning_rate": 0.05, "name.text_encoder_learning_rate": 0.0 if "train_norm" in lora else 0.05}
    graph = train_graph(pictures.name, rates, lora, name=name, steps=2, save_dtype="float32")
    file = f"atelier/{lora_path(comfy.queue(graph)).name}"
    stock = {"lora_name": file, "strength_model": 1.0, "strength_clip": 1.0}
    graph |= {
        "plain": sample(["base", 1], ["base", 2], ["base", 3]),
        "made": sample(["train", 0], ["train", 1], ["base", 3]),
        "stock": node("LoraLoader", model=["base", 1], clip=["base", 2], **stock),
        "loaded": sample(["stock", 0], ["stock", 1], ["base", 3]),
        **{f"show {name}": node("PreviewImage", images=[name, 0]) for name in ("plain", "made", "loaded")},
    }
    result = comfy.queue(graph)
    assert result.ok, result.error
    assert same(comfy, result, "show made", "show loaded") and not same(comfy, result, "show made", "show plain")
