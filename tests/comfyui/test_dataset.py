"""The dataset nodes in a real ComfyUI: pictures from the graph, several resolutions, previews, what is noticed."""

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from train_graph import changed, concept, draw_pictures, masks, node, train_graph, untouched

from comfy_client import ComfyClient, ComfyServer, Result
from lora_atelier.dev import TINY_BASE
from lora_atelier.trainer_core.config import (
    ClipConfig,
    ConceptConfig,
    DatasetConfig,
    Defaults,
    MaskConfig,
    fill_dataset,
)
from lora_atelier.trainer_core.data.films import examine_film, read_frames
from lora_atelier.trainer_core.data.scan import scan

CURVES = [(255, 176, 66), (96, 180, 255), (126, 211, 120), (240, 120, 150)]  # colours in the plot of the losses

pytestmark = pytest.mark.skipif(not TINY_BASE.exists(), reason="needs the tiny base model")


def preview(dataset: list, **inputs: object) -> dict:
    """Return a prompt part: a Dataset Preview, and text previews of what it says."""
    values = {"resolution": 64, "batch_size": 2, "seed": 1, "epoch": 0, "columns": 3, "limit": 9, **inputs}
    return {
        "sheet": node("AtelierDatasetPreview", dataset=dataset, **values),
        "manifest": node("PreviewAny", source=["sheet", 2]),
    }


def table(result: Result) -> list[dict[str, str]]:
    """Return the rows of a previewed manifest."""
    return list(csv.DictReader(io.StringIO(result.outputs["manifest"]["text"][0])))


def from_images(**inputs: object) -> dict:
    """Return a Concept from Images."""
    values = {
        "captions": "",
        "trigger_word": "",
        "repeats": 1.0,
        "role": "train",
        "unmasked_weight": 0.1,
        "unmasked_probability": 0.0,
    }
    return node("AtelierImageConcept", **{**values, **inputs})


def test_pictures_captions_and_masks_of_the_graph_are_trained(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    graph["red"] = node("EmptyImage", width=64, height=80, batch_size=2, color=0xFF0000)
    graph["cover"] = node("SolidMask", value=0.5, width=64, height=80)
    graph["suffix"] = untouched("AtelierCaptions", caption_suffix="on paper")
    graph["weight"] = untouched("AtelierPictures", loss_weight=0.5)
    linked = {"caption_settings": ["suffix", 0], "picture_settings": ["weight", 0], "dataset": ["data", 0]}
    graph["made"] = from_images(images=["red", 0], captions="one\ntwo", masks=["cover", 0], **linked)
    graph = changed(graph, "train", dataset=["made", 0])
    graph |= preview(["made", 0])
    result = comfy.queue(graph)
    assert result.ok, result.error
    rows = [row for row in table(result) if row["outcome"] == "picture"]
    assert [row["caption"] for row in rows[-2:]] == ["one on paper", "two on paper"] and len(rows) == 5
    assert [row["mask"] for row in rows] == ["False"] * 3 + ["True"] * 2
    (run,) = (server.base / "output" / "atelier" / "runs").glob(f"{pictures.name}-*")
    concept = json.loads((run / "run.json").read_text(encoding="utf-8"))["config"]["dataset"]["concepts"][-1]
    assert concept["captions"]["suffix"] == "on paper" and concept["loss_weight"] == 0.5
    kept = Path(rows[-1]["concept"])
    assert kept.is_relative_to(server.base / "user") and Image.open(kept / "1.png").getpixel((5, 5)) == (255, 0, 0)

    again = comfy.queue(changed(graph, "sheet", seed=9))
    assert again.ok and again.was_cached("made") and again.did_run("sheet")
    other = comfy.queue(changed(graph, "made", captions="one\nthree"))
    assert other.ok and other.did_run("train")
    for captions, sentence in (("a\nb\nc", "2 pictures and 3 captions"),):
        wrong = comfy.queue(changed(graph, "made", captions=captions))
        assert wrong.status == "error" and sentence in wrong.error
    wrong = comfy.queue(changed(graph, "cover", width=32))
    assert wrong.status == "error" and "Mask 1 of Concept from Images is 32x80 and its picture 64x80" in wrong.error


def test_lists_of_pictures_of_different_sizes_make_one_concept(comfy: ComfyClient, pictures: Path) -> None:
    graph = {
        "small": node("EmptyImage", width=64, height=64, batch_size=1, color=0x00FF00),
        "large": node("EmptyImage", width=96, height=64, batch_size=2, color=0x0000FF),
        "list": node("CreateList", **{"inputs.input0": ["small", 0], "inputs.input1": ["large", 0]}),
        "made": from_images(images=["list", 0], captions="all the same"),
        **preview(["made", 0]),
    }
    result = comfy.queue(graph)
    assert result.ok, result.error
    rows = [row for row in table(result) if row["outcome"] == "picture"]
    assert [(row["width"], row["height"], row["caption"]) for row in rows] == [
        ("64", "64", "all the same"),
        ("96", "64", "all the same"),
        ("96", "64", "all the same"),
    ]


def test_videos_and_batches_are_clips_with_captions_and_masks(comfy: ComfyClient, pictures: Path) -> None:
    graph = {
        "red": node("EmptyImage", width=64, height=48, batch_size=5, color=0xFF0000),
        "one": node("EmptyImage", width=64, height=64, batch_size=1, color=0x00FF00),
        "list": node("CreateList", **{"inputs.input0": ["red", 0], "inputs.input1": ["one", 0]}),
        "blue": node("EmptyImage", width=64, height=48, batch_size=7, color=0x0000FF),
        "video": node("CreateVideo", images=["blue", 0], fps=24.0),
        "moving": node("ImageToMask", image=["red", 0], channel="red"),
        "whole": node("SolidMask", value=1.0, width=64, height=64),
        "half": node("SolidMask", value=0.5, width=64, height=48),
        "covers": node(
            "CreateList", **{f"inputs.input{n}": [name, 0] for n, name in enumerate(("moving", "whole", "half"))}
        ),
    }
    linked = {"images": ["list", 0], "videos": ["video", 0], "masks": ["covers", 0], "clip_settings": ["clips", 0]}
    graph["clips"] = untouched("AtelierClips", frames="5", rate=0)
    graph["made"] = from_images(captions="red\ngreen\nblue", as_clips=True, clip_rate=12.0, **linked)
    result = comfy.queue({**graph, **preview(["made", 0])})
    assert result.ok, result.error
    rows = table(result)
    assert [row["file"] for row in rows if row["outcome"] == "picture"] == ["2.png"]
    settings = ClipConfig(frames=(5,), rate=0.0)
    kept = ConceptConfig(folder=rows[-1]["concept"], masks=MaskConfig(), clips=settings)
    manifest = scan(fill_dataset(DatasetConfig(concepts=(kept,)), Defaults(clip_step=4, clip_rate=16.0)))
    assert [(each.name, each.lines, each.mask_moves) for each in manifest.pictures] == [
        ("1.mkv", ("red",), True),
        ("2.png", ("green",), False),
        ("3.mkv", ("blue",), False),
    ]
    assert [each.clip and len(each.clip.frames) for each in manifest.pictures] == [5, None, 7]
    content = manifest.pictures[2].path.read_bytes()
    assert examine_film(content).rate == 24 and not examine_film(content).times
    assert [frame.getextrema() for _, frame in read_frames(content, (0, 6))] == [((0, 0), (0, 0), (255, 255))] * 2
    assert examine_film(manifest.pictures[0].path.read_bytes()).rate == 12
    alone = comfy.queue({**graph, "made": from_images(videos=["video", 0]), **preview(["made", 0])})
    assert alone.status == "error" and "clips are trained with a base model of clips" in alone.error
    uneven = {"masks": ["moving", 0], "videos": ["video", 0]}
    wrong = comfy.queue({**graph, "made": from_images(**uneven), **preview(["made", 0])})
    assert "Mask 1 of Concept from Images has 5 frames and its clip 7; link a mask for each frame" in wrong.error
    empty = comfy.queue({**graph, "made": from_images(), **preview(["made", 0])})
    assert "Concept from Images has no picture; link images or videos" in empty.error


def test_comfyuis_own_nodes_for_datasets_link_in(comfy: ComfyClient, server: ComfyServer, pictures: Path) -> None:
    graph = {
        "loaded": node("LoadImageTextDataSetFromFolder", folder=pictures.name),
        "mixed": node("ShuffleImageTextDataset", images=["loaded", 0], texts=["loaded", 1], seed=3),
        "made": from_images(images=["mixed", 0], captions=["mixed", 1]),
        **preview(["made", 0]),
    }
    result = comfy.queue(graph)
    assert result.ok, result.error
    rows = [row for row in table(result) if row["outcome"] == "picture"]
    # Pictures of an odd number are higher: each caption went along with its picture.
    assert {(row["height"], row["caption"]) for row in rows} == {
        (str(64 + 16 * (i % 2)), f"circle number {i}, flat background") for i in range(3)
    }
    encoded = node("EmptyLatentImage", width=64, height=64, batch_size=1)
    refused = comfy.queue(graph | {"made": from_images(images=["latents", 0], captions=""), "latents": encoded})
    assert refused.status == "rejected" and "LATENT" in refused.error and "IMAGE" in refused.error

    kept = draw_pictures(server.base / "datasets" / f"{pictures.name}-kept")  # ComfyUI's folder of datasets
    try:
        found = comfy.queue({"made": concept(kept.name), **preview(["made", 0])})
        assert found.ok, found.error
        assert len([row for row in table(found) if row["outcome"] == "picture"]) == 3
    finally:
        shutil.rmtree(kept)


def test_resolutions_augmentation_roles_and_validation_work_together(
    comfy: ComfyClient, server: ComfyServer, pictures: Path
) -> None:
    held, rest = (draw_pictures(pictures.parent / f"{pictures.name}-{part}", 2) for part in ("held", "class"))
    graph = train_graph(pictures.name, name=pictures.name, steps=6, validate_every=4, keep_best=True)
    graph["augment"] = node(
        "AtelierAugment",
        dataset=["data", 0],
        variants=2,
        crop_jitter=1.0,
        zoom=0.1,
        rotation=5.0,
        brightness=0.1,
        contrast=0.1,
        saturation=0.1,
        hue=0.02,
    )
    graph["half"] = untouched("AtelierPictures", loss_weight=0.5)
    graph["class"] = concept(rest.name, dataset=["augment", 0], role="regularisation", picture_settings=["half", 0])
    graph["held"] = concept(held.name, dataset=["class", 0], role="validation")
    graph["buckets"] = node(
        "AtelierBuckets",
        resolutions="64, 96x64",
        resolution_mode="draw",
        min_side=0,
        max_side=0,
        no_upscale=False,
        small_buckets="merge",
        mix_concepts=True,
        bucket_step=32,
    )
    graph = changed(graph, "train", dataset=["held", 0])
    graph |= preview(["held", 0], epoch=1, buckets=["buckets", 0])
    graph["plot"] = node("PreviewImage", images=["train", 6])
    try:
        result = comfy.queue(graph)
        assert result.ok, result.error
        assert [s for _, t in result.texts for s in (0, 4, 6) if t.startswith(f"Validation loss after {s} steps")] == [
            0,
            4,
            6,
        ]
        text = result.outputs["sheet"]["text"][0]
        assert "5 pictures (and 2 for validation), about 6 visits" in text
        assert "regularisation" in text and "96x64" in text
        told = result.outputs["train"]["text"][0]
        logs = server.base / "output" / "atelier" / "logs"
        (log,) = [folder for folder in logs.iterdir() if f"Log in {folder}\n" in told]
        assert "The validation loss was lowest after step" in told and log.name.startswith(pictures.name)
        rows = list(csv.DictReader((log / "log.csv").open(encoding="utf-8", newline="")))
        assert len(rows) == 6 + 3 and {f"loss_{pictures.name}", f"loss_{rest.name}", "lr_lora_unet"} <= set(rows[0])
        assert any(re.match(r"step 6 of 6 · .* · mean loss .* · validation 0\.\d+", text) for _, text in result.texts)
        points = [point for _, data in result.custom("atelier.run") for point in data["points"]]
        assert [point["step"] for point in points] == list(range(1, 7))
        assert {name for point in points for name in point["concepts"]} == {pictures.name, rest.name}
        (plot,) = comfy.images(result, "plot")
        beneath = np.asarray(plot, dtype=int)[80:]  # the legend has the same colours
        drawn = [(abs(beneath - colour) < 3).all(-1).any(0).sum() for colour in CURVES]  # columns with the colour
        assert min(drawn) > 100, "mean, validation and two concepts have a curve each"
        assert len([row for row in table(result) if row["outcome"] == "picture"]) == 7
    finally:
        shutil.rmtree(held)
        shutil.rmtree(rest)


def test_touched_files_are_not_trained_again_and_edited_ones_are(comfy: ComfyClient, pictures: Path) -> None:
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    assert comfy.queue(graph).ok
    for file in pictures.iterdir():
        os.utime(file)
    assert comfy.queue(graph).was_cached("train")
    picture = Image.open(pictures / "0.png")
    picture.putpixel((3, 3), (1, 2, 3))
    picture.save(pictures / "0.png")
    assert comfy.queue(graph).did_run("train")


def test_problems_are_left_out_and_listed_on_request(comfy: ComfyClient, pictures: Path) -> None:
    (pictures / "broken.png").write_bytes((pictures / "0.png").read_bytes()[:60])
    (pictures / "strip.png").write_bytes(b"")
    (pictures / "notes.doc").write_text("not a picture")
    Image.new("RGB", (9, 300)).save(pictures / "thin.png")
    graph = changed(train_graph(pictures.name, name=pictures.name, steps=1), "pictures", on_problem="leave_out")
    graph |= preview(["data", 0])
    result = comfy.queue(graph, only="manifest")
    assert result.ok, result.error
    text = result.outputs["sheet"]["text"][0]
    assert "Left out: 2 pictures" in text and "broken.png" in text and "strip.png (an empty file)" in text
    assert "shorter than 16 pixels" in text and "thin.png (9x300)" in text
    outcomes = {row["file"]: row["outcome"] for row in table(result)}
    assert outcomes.keys() == {file.name for file in pictures.iterdir()}
    assert outcomes["broken.png"] == outcomes["thin.png"] == "left out" and outcomes["notes.doc"] == "not used"
    assert outcomes["0.png"] == "picture" and outcomes["0.txt"] == "caption"


def test_masks_with_prior_preservation_and_several_suffixes(comfy: ComfyClient, pictures: Path) -> None:
    for i, picture in enumerate(sorted(pictures.glob("*.png"))):
        mask = Image.new("L", Image.open(picture).size, 0)
        mask.paste(200, (10, 10, 50, 50))
        mask.save(pictures / f"{picture.stem}{'-mask.png' if i else '-masklabel.png'}")
    graph = train_graph(pictures.name, name=pictures.name, steps=1)
    graph["masks"] = masks(["data", 0], suffix="-masklabel.png, -mask.png", prior_weight=1.0, threshold=0.5)
    result = comfy.queue(changed(graph, "train", dataset=["masks", 0]))
    assert result.ok, result.error
    assert any("3 of 3" in text for _, text in result.texts)
    wrong = comfy.queue(changed(changed(graph, "train", dataset=["masks", 0]), "masks", suffix=".txt"))
    assert wrong.status == "error" and "which is no picture file" in wrong.error


def test_the_preview_plans_as_the_run(comfy: ComfyClient, pictures: Path) -> None:
    """It takes what is left open from the model, and names what Train LoRA of the same dataset has otherwise."""
    graph = train_graph(pictures.name) | preview(["data", 0], resolution=0)
    del graph["train"], graph["path"]
    result = comfy.queue(graph)
    assert result.status == "error"
    assert "Link BASE_MODEL into base_model, or set resolution of Dataset Preview" in result.error
    graph = train_graph(pictures.name, name=pictures.name, steps=1, batch_size=1)
    graph |= preview(["data", 0], resolution=0, base_model=["base", 0], buckets=["buckets", 0])
    result = comfy.queue(graph, only="manifest")
    assert result.ok, result.error
    (text,) = result.outputs["sheet"]["text"]
    assert "Train LoRA has another batch_size and another resolution" in text and "seed" not in text
    buckets = {row["bucket"] for row in table(result)} - {""}
    assert "was made for about" not in text
    assert buckets and all(int(side) >= 96 for bucket in buckets for side in bucket.split("x"))  # 128 is the toy's own
    graph["sheet"]["inputs"] |= {"resolution": 64, "batch_size": 1}
    result = comfy.queue(graph, only="manifest")
    assert result.ok and "Train LoRA has" not in result.outputs["sheet"]["text"][0]
    assert (
        "is 64, and " in result.outputs["sheet"]["text"][0]
        and "was made for about 128" in result.outputs["sheet"]["text"][0]
    )


def test_the_preview_names_what_stands_out_by_its_node_and_marks_what_is_held_out(
    comfy: ComfyClient, pictures: Path
) -> None:
    with Image.open(pictures / "0.png") as picture:
        picture.resize((160, 128)).save(pictures / "z, again.png")
    (pictures / "z, again.txt").write_text("a circle again")
    graph = {"data": concept(pictures.name), "masks": masks(["data", 0])}
    graph["masks"]["inputs"]["missing"] = "ones"
    graph["held"] = node("AtelierValidation", validate_every=0, early_stop_patience=0, early_stop_min_improvement=0.0)
    graph["held"]["inputs"] |= {"keep_best": False, "validation_share": 0.5}
    graph |= preview(["masks", 0], validation=["held", 0])
    result = comfy.queue(graph)
    assert result.ok, result.error
    shown = {each["kind"]: each["nodes"] for each in result.outputs["sheet"]["leave_out"]}
    assert shown["near-duplicates"] == {"data": ["z? again.png"]}
    held = [row["file"] for row in table(result) if row["why"] == "held out for validation"]
    assert len(held) == 2 and "Validation holds out 2 pictures" in result.outputs["sheet"]["text"][0]
    graph = changed(graph, "data", leave_out="z? again.png")
    result = comfy.queue(graph)
    assert result.ok and not result.outputs["sheet"]["leave_out"]
    outcomes = {row["file"]: row["why"] for row in table(result)}
    assert outcomes["z, again.png"] == "by leave_out of Concept Dataset"
    while comfy.queue(graph).did_run("sheet"):  # until nothing new is read
        pass
    assert comfy.queue(train_graph(pictures.name, name=pictures.name, steps=1)).ok
    assert comfy.queue(graph).did_run("sheet")  # the run has compared losses
