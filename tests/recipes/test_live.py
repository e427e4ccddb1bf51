"""Runs that keep nothing of encoded pictures and captions: the bits of a cached run, and neither files nor RAM."""

import weakref
from pathlib import Path

import pytest
import torch
from durable import Cut, cut_at
from prepared import Ready, without_estimates
from recipes.material import uniform
from recipes.recipes import RECIPES, carry_out, configure
from recipes.record import digests_of
from safetensors.torch import load_file, save_file
from tiny_runs import change, run, run_with_notes

from lora_atelier.trainer_core.config import (
    CaptionConfig,
    DatasetConfig,
    EmbeddingConfig,
    ObjectiveConfig,
    SampleConfig,
    SavesConfig,
)
from lora_atelier.trainer_core.data.cache import MicroBatchCache
from lora_atelier.trainer_core.runs import open_run
from lora_atelier.trainer_core.training import live

pytestmark = pytest.mark.usefixtures("no_estimates")

ALIKE = ("xl", "inpainting", "slider of pairs")
AGAIN = (  # encodes as one of the others does, and "sd1" as the runs below
    *("masks with prior", "prior prediction", "embedding"),
    *("sd1", "weights in 8 bits", "text encoders", "accumulated, several resolutions"),
    *("continued", "one beneath", "dropouts, bounded norms", "average", "best by validation"),
)
SHORT = {"train": {"steps": 1}, "sample": {"prompts": ()}}
RESUMED = [name for name in RECIPES if RECIPES[name].undisturbed]


@pytest.mark.parametrize(
    "name", [*ALIKE, *(pytest.param(name, marks=pytest.mark.thorough) for name in (*AGAIN, *RESUMED))]
)
def test_a_run_gives_the_bits_of_a_cached_one(name, run_of, material, tmp_path):
    found = carry_out(name, material, tmp_path, Ready, encodings="none")
    cached = run_of(RECIPES[name].undisturbed or name)
    assert digests_of(found) == digests_of(cached)
    assert open_run(found.run).keys == open_run(cached.run).keys
    assert not list(tmp_path.rglob("shard-*"))


def train(config, folder, encodings="none", **callbacks):
    """Train in a folder of its own; return the result and the notes."""
    return run_with_notes(change(config, memory={"encodings": encodings}), folder / encodings, **callbacks)


def alike(config, folder):
    """Train both ways, compare the bits, and return the result of the run that kept nothing."""
    (live, _), (cached, _) = train(config, folder), train(config, folder, "disk")
    assert digests_of(live) == digests_of(cached)
    assert torch.equal(live.samples, cached.samples)
    return live


@pytest.fixture(scope="module")
def config(material):
    """Give the configuration of the recipe sd1 in two steps, with samples."""
    prompts = SampleConfig(prompts=("thing", "a red thing --n blue"), width=64, height=64, steps=1)
    config = configure(RECIPES["sd1"], material).replace(sample=prompts)
    trained = tuple(concept for concept in config.dataset.concepts if concept.role != "validation")
    config = change(config, dataset={"concepts": trained}, scheduler={"warmup_steps": 0})
    return change(config, lora={"preset": "attn-mlp"}, train={"steps": 2})


@pytest.fixture(scope="module")
def continued(config, tmp_path_factory):
    """Give a run that continues a LoRA with layers of the text encoder, and does not train these."""
    folder = tmp_path_factory.mktemp("continued")
    rates = {"text_encoder_learning_rate": 1e-2}
    with without_estimates():
        first, _ = train(change(config, optimizer=rates, **SHORT), folder, "disk")
    moved = {
        name: uniform(name, tuple(t.shape), 0.3) if name.startswith("lora_te") and "lora_" in name[8:] else t
        for name, t in first.tensors.items()
    }
    save_file(moved, folder / "earlier.safetensors")
    lora = config.lora.replace(start=str(folder / "earlier.safetensors"), dropout=0.3, module_dropout=0.3)
    return config.replace(lora=lora)


def test_layers_of_text_encoders_that_are_not_trained_act_on_captions(continued, config, tmp_path):
    """Also on what the frozen model predicts, and without the dropout of the layers that are trained."""
    concepts = continued.dataset.concepts
    concepts = (concepts[0], concepts[1].replace(role="prior_prediction"))
    every = change(continued, dataset={"concepts": concepts}, train={"steps": 4})  # sees each picture
    result = alike(every, tmp_path)
    assert any(name.startswith("lora_te") for name in result.tensors)
    without = {name: t for name, t in result.tensors.items() if not name.startswith("lora_te")}
    start = tmp_path / "unet.safetensors"
    save_file(without, start)
    other, _ = train(change(continued, lora={"start": str(start)}, **SHORT), tmp_path / "unet")
    assert other.losses[0] != result.losses[0]


def test_captions_without_the_trained_word_are_those_of_the_frozen_text_encoder(continued, tmp_path):
    """Whether a LoRA's layers act on them, or none does."""
    words = (EmbeddingConfig(token="red", vectors=2, learning_rate=3e-2, stop=1),)
    objective = ObjectiveConfig(preservation="blank")
    alike(continued.replace(lora=continued.lora.replace(embeddings=words), objective=objective), tmp_path)


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(  # whose captions are made as those of the prior predictions of a slider
            {"preservation": "class", "preservation_trigger": "thing", "preservation_class": "creature"},
            marks=pytest.mark.thorough,
        ),
        {"latent_sampling": "sample", "preservation": "blank"},
        {"slider": "prompts", "slider_positive": "red", "slider_negative": "blue", "slider_keep": ("cat", "dog")},
    ],
    ids=lambda objective: next(iter(objective)),
)
def test_every_caption_of_a_step_is_there(objective, config, tmp_path):
    alike(config.replace(objective=ObjectiveConfig(**objective)), tmp_path)


def test_new_captions_at_every_visit(config, tmp_path):
    captions = CaptionConfig(shuffle=True, tag_dropout=0.5, variants=0)
    concepts = (config.dataset.concepts[0].replace(captions=captions),)
    alike(config.replace(dataset=DatasetConfig(concepts=concepts)), tmp_path)


def test_a_run_goes_on_with_another_choice(config, tmp_path):
    """From saves of either kind, since neither is part of the run's key."""
    config = change(config, train={"steps": 4})
    whole, _ = train(config, tmp_path / "whole", "disk")
    config = config.replace(saves=SavesConfig(save_every=1, save_unit="steps"))

    def part(encodings, **callbacks):
        return run(change(config, memory={"encodings": encodings}), tmp_path / "parts", **callbacks)

    for encodings, step in (("none", 2), ("disk", 3)):
        with pytest.raises(Cut):
            part(encodings, step=cut_at(step))
    result = part("none")
    assert "Resumed after step 3" in result.origin
    assert digests_of(result) == digests_of(whole)
    assert "Already trained in" in part("RAM").origin


def test_a_micro_batch_at_a_time_is_kept_and_no_file_written(config, tmp_path, monkeypatch):
    caches, sizes, real = [], [], live.encode

    def counted(work, needs):
        assert sum(cache() is not None for cache in caches) <= 2  # that of the last micro-batch, and the new one
        found = real(work, needs)
        caches.append(weakref.ref(work.cache))
        assert type(work.cache) is MicroBatchCache and work.cache.folder == tmp_path / "none" / "cache"
        sizes.append(len(work.cache._pending))
        return found

    monkeypatch.setattr(live, "encode", counted)
    config = config.replace(train=config.train.replace(steps=4, batch_size=1), sample=SampleConfig())
    result, _ = train(config, tmp_path)
    assert len(sizes) > 4 and max(sizes) == 2  # a picture and its caption
    assert len(result.losses) == 4
    left = {path.name for path in (tmp_path / "none" / "cache").rglob("*") if path.is_file()}
    assert not {name for name in left if name.endswith(".safetensors")}


def test_a_picture_that_changes_during_the_run_ends_it_with_a_sentence(config, material, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for path in Path(material.pictures("squares")).glob("[0-9].*"):
        (folder / path.name).write_bytes(path.read_bytes())
    concepts = (config.dataset.concepts[0].replace(folder=str(folder)),)
    config = config.replace(dataset=DatasetConfig(concepts=concepts))

    def touch(report):
        for path in folder.glob("*.png"):
            path.write_bytes(path.read_bytes() + b"\0")

    notes = []
    with pytest.raises(ValueError, match=r"\d\.png has changed since the scan; start again to train it as it is now"):
        run(change(config, memory={"encodings": "none"}), tmp_path, step=touch, note=notes.append)
    assert any("Stopped after step 1" in note for note in notes)


@pytest.mark.thorough  # in every run test_encode.py has one that overflows
def test_a_vae_in_half_precision_is_the_same_and_its_overflow_noted_once(config, tmp_path):
    """On two pictures alone, as some processors take seconds for one."""
    tensors = load_file(config.base_model.path)
    for name, factor in (("0.weight", 2.0**17), ("0.bias", 2.0**17), ("14.weight", 2.0**-17)):
        tensors[f"first_stage_model.taesd_encoder.{name}"] *= factor  # values inside that no float16 holds
    save_file(tensors, tmp_path / "large.safetensors")
    base = config.base_model.replace(vae_precision="float16", path=str(tmp_path / "large.safetensors"))
    dataset = DatasetConfig(concepts=config.dataset.concepts[:1])
    short = config.train.replace(steps=2, batch_size=1)
    config = config.replace(base_model=base, dataset=dataset, train=short, sample=SampleConfig())
    found, notes = train(config, tmp_path)
    assert sum("overflows in float16" in note for note in notes) == 1
    assert digests_of(found) == digests_of(train(config, tmp_path, "disk")[0])
