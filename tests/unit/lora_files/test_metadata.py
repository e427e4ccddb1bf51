"""What a LoRA file tells of its run, field by field against the metadata of a file that sd-scripts wrote."""

import dataclasses
import hashlib
import json
import re
import time
from pathlib import Path

import pytest
import torch
from clip_tokenizer import TOKENIZER
from safetensors.torch import save_file
from tiny_models import family_tensors

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import BaseModelConfig, RunConfig
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import Index, scan
from lora_atelier.trainer_core.lora_files.metadata import build_metadata
from lora_atelier.trainer_core.memory import recompute
from lora_atelier.trainer_core.models import source_of
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.runs import model_digests

THEIRS = json.loads((Path(__file__).parents[2] / "data" / "sd_scripts_metadata.json").read_text())
# What sd-scripts alone has: its own version, switches that are not here, settings that belong to each concept here, and
# a moment of writing, which would make the file of a resumed run another one.
ONLY_THEIRS = {
    *("modelspec.implementation_version", "ss_sd_scripts_commit_hash", "ss_training_comment", "ss_lowram"),
    *("ss_caption_dropout_rate", "ss_caption_dropout_every_n_epochs", "ss_caption_tag_dropout_rate"),
    *("ss_face_crop_aug_range", "ss_fp8_base", "ss_fp8_base_unet", "ss_full_fp16", "ss_max_token_length"),
    *("ss_ip_noise_gamma_random_strength", "ss_resize_interpolation", "ss_max_validation_steps", "ss_validation_seed"),
    *("ss_validate_every_n_epochs", "ss_validate_every_n_steps", "ss_validation_split"),
    "ss_training_finished_at",
    *("sshs_legacy_hash", "sshs_model_hash"),  # added when the file is written
}
ONLY_IN_SUBSETS = {"keep_tokens_separator", "secondary_separator", "enable_wildcard", "resize_interpolation"}
KEY = "00c0ffee" * 8
MINIMUM = {"ss_epoch", "ss_datasets", "ss_bucket_info", "ss_sd_model_hash", "ss_new_sd_model_hash", "ss_network_args"}


@pytest.fixture(scope="module")
def bases(checkpoint, checkpoint_xl, tmp_path_factory):
    """Give the loaded toys by family."""
    sd2 = tmp_path_factory.mktemp("families") / "sd2.safetensors"
    save_file(family_tensors("sd2"), sd2)
    paths = {"sd1": checkpoint, "sd2": sd2, "sdxl": checkpoint_xl}
    configs = {family: BaseModelConfig(tokenizer=TOKENIZER, path=str(path)) for family, path in paths.items()}
    return {family: (config, load_base_model(config)) for family, config in configs.items()}


@pytest.fixture
def told(bases, pictures):
    """Give a function that returns the metadata of a run with some settings."""

    def tell(family="sd1", steps=3, concepts=({},), clip_skip=1, vae="", **parts):
        model, base = bases[family]
        base = dataclasses.replace(base, clip_skip=clip_skip)
        parts.setdefault("train", {})
        parts["train"] = {"steps": 4, "batch_size": 2, "resolution": 64, "bucket_step": 32, **parts["train"]}
        config = RunConfig.from_dict(
            {
                "base_model": model.replace(clip_skip=clip_skip, vae=vae).to_dict(),
                "dataset": {"concepts": [{"folder": str(pictures), **concept} for concept in concepts]},
                **parts,
            }
        )
        with Index() as index:
            plan = build_plan(scan(config.dataset, index, Callbacks()), config.dataset, config.train)
            models = model_digests(config, source_of(config.base_model), index)
        return build_metadata(config, plan, base, name="x", steps=steps, started=1.5, models=models, run_key=KEY)

    return tell


def form(text):
    """Return what kind of value a text is; of JSON the kinds inside."""
    if text in ("True", "False"):
        return bool
    if re.fullmatch(r"-?\d+", text):
        return int
    if re.fullmatch(r"-?[\d.]+(e-?\d+)?", text):
        return float
    if re.fullmatch(r"[0-9a-f]{8,64}", text):
        return len(text)
    return "JSON" if text[:1] in "[{" else str


def test_every_field_of_sd_scripts_is_there_in_the_same_form(told):
    ours = told(lora={"preset": "full", "conv_rank": 8, "conv_alpha": 8.0}, optimizer={"learning_rate": 1e-4})
    assert set(THEIRS) - set(ours) == ONLY_THEIRS and set(ours) >= MINIMUM
    assert all(isinstance(value, str) for value in ours.values())
    for name in set(THEIRS) & set(ours):
        if "None" not in (THEIRS[name], ours[name]):
            assert form(ours[name]) == form(THEIRS[name]), (name, ours[name], THEIRS[name])
    mine, their = (json.loads(metadata["ss_datasets"])[0] for metadata in (ours, THEIRS))
    assert set(their) - set(mine) == {"resize_interpolation"} and set(mine) <= set(their)
    (subset,), (other,) = mine["subsets"], their["subsets"]
    assert set(other) - set(subset) == ONLY_IN_SUBSETS and set(subset) <= set(other)
    for found, wanted in ((mine, their), (subset, other)):
        for name in found:
            if None not in (found[name], wanted[name]):
                assert type(found[name]) is type(wanted[name]), name
    arguments = json.loads(ours["ss_network_args"])
    assert (arguments["conv_dim"], arguments["conv_alpha"]) == ("8", "8.0")  # as sd-scripts has them, in quotes
    same = ("ss_v2", "ss_base_model_version", "ss_network_module", "ss_gradient_checkpointing", "ss_clip_skip")
    same += ("ss_text_encoder_lr", "ss_prior_loss_weight", "ss_cache_latents", "modelspec.implementation")
    assert {name: ours[name] for name in same} == {name: THEIRS[name] for name in same}


def test_dates_and_session_are_the_runs_own(told, monkeypatch):
    first = told()
    assert (first["ss_session_id"], first["ss_training_started_at"]) == (str(0x00C0FFEE), "1.5")
    assert (first["modelspec.date"], first["atelier.run"]) == ("1970-01-01T00:00:01+00:00", KEY)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    assert told() == first


def test_the_checkpoint_is_named_by_the_hashes_that_other_tools_look_for(told, bases, tmp_path):
    for family, (config, base) in bases.items():
        data = Path(config.path).read_bytes()
        ours = told(family)
        assert ours["ss_new_sd_model_hash"] == hashlib.sha256(data).hexdigest()
        assert ours["ss_sd_model_hash"] == base.short_hash == hashlib.sha256(data[0x100000:0x110000]).hexdigest()[:8]
        assert ours["ss_sd_model_name"] == Path(config.path).name and "ss_new_vae_hash" not in ours
    vae = tmp_path / "secret" / "vae.safetensors"
    vae.parent.mkdir()
    save_file({"x": torch.zeros(1)}, vae)
    ours = told(vae=str(vae))
    digest = hashlib.sha256(vae.read_bytes()).hexdigest()
    assert (ours["ss_vae_name"], ours["ss_new_vae_hash"]) == ("vae.safetensors", digest)
    assert "secret" not in str(ours)


TEXT, TEXT_2 = "text_encoder_learning_rate", "text_encoder_2_learning_rate"
TABLE = {  # settings, and what is told of them
    "no text encoder learns": ({}, {"ss_text_encoder_lr": "None", "modelspec.encoder_layer": "1"}),
    "the one learns": ({"optimizer": {TEXT: 1e-4, TEXT_2: 1e-3}}, {"ss_text_encoder_lr": "0.0001"}),
    "the second learns": (
        {"family": "sdxl", "optimizer": {TEXT_2: 1e-4}},
        {"ss_text_encoder_lr": "[0.0, 0.0001]", "modelspec.encoder_layer": "2", "ss_clip_skip": "None"},
    ),
    "both learn alike": ({"family": "sdxl", "optimizer": {TEXT: 1e-4, TEXT_2: 1e-4}}, {"ss_text_encoder_lr": "0.0001"}),
    "clip skip": ({"clip_skip": 2}, {"modelspec.encoder_layer": "2", "ss_clip_skip": "2"}),
    "the layer of 2": (
        {"family": "sd2"},
        {"modelspec.encoder_layer": "2", "ss_v2": "True", "modelspec.architecture": "stable-diffusion-v2-512/lora"},
    ),
    "XL is in the original names": (
        {"family": "sdxl"},
        {
            "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
            "ss_base_model_version": "sdxl_base_v1-0",
        },
    ),
    "whole epochs": (  # of three steps
        {"steps": 6, "train": {"epochs": 2}},
        {"ss_epoch": "2", "ss_num_epochs": "2", "ss_max_train_steps": "6", "ss_num_batches_per_epoch": "3"},
    ),
    "a save at an epoch's end": ({"steps": 3}, {"ss_epoch": "1", "ss_num_epochs": "2", "ss_steps": "3"}),
    "an epoch that has begun counts": ({"steps": 4}, {"ss_epoch": "2", "ss_num_train_images": "6"}),
    "accumulated": ({"train": {"accumulate": 3}}, {"ss_total_batch_size": "6", "ss_gradient_accumulation_steps": "3"}),
    "repeats": (
        {"concepts": ({"repeats": 3.0}, {"role": "regularisation", "samples": 9, "loss_weight": 0.5})},
        {"ss_num_train_images": "18", "ss_num_reg_images": "9", "ss_prior_loss_weight": "0.5"},
    ),
    "validation": (
        {"concepts": ({}, {"role": "validation"})},
        {"ss_num_train_images": "6", "ss_num_validation_images": "6", "ss_num_reg_images": "0"},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_settings_are_written_as_they_are(told, case):
    settings, wanted = TABLE[case]
    ours = told(**settings)
    assert {name: ours[name] for name in wanted} == wanted


def test_pictures_are_counted_by_folder_and_bucket(told, pictures):
    concepts = ({"repeats": 2, "flip": True, "captions": {"prefix": "moss, ", "shuffle": True, "keep": 1}},)
    ours = told(concepts=concepts)
    assert ours["ss_dataset_dirs"] == json.dumps({pictures.name: {"n_repeats": 2, "img_count": 6}})
    info = json.loads(ours["ss_bucket_info"])
    assert info["buckets"] == {"0": {"resolution": [64, 64], "count": 12}} and ours["ss_num_train_images"] == "12"
    assert info["mean_img_ar_error"] == pytest.approx((1 - 64 / 96) / 2)  # of the three that are 64 x 96
    (dataset,) = json.loads(ours["ss_datasets"])
    (subset,) = dataset["subsets"]
    assert dataset["bucket_info"] == info and dataset["tag_frequency"] == json.loads(ours["ss_tag_frequency"])
    wanted = {"img_count": 6, "num_repeats": 2, "flip_aug": True, "shuffle_caption": True, "keep_tokens": 1}
    assert wanted.items() <= subset.items() and subset["image_dir"] == pictures.name
    assert json.loads(told(concepts=({"repeats": 0.5},))["ss_dataset_dirs"])[pictures.name]["n_repeats"] == 0.5
    assert str(pictures.parent) not in str(ours)


def test_checkpointing_is_what_was_in_use_not_what_was_asked_for(told, bases, monkeypatch):
    config, _ = bases["sd1"]
    base = load_base_model(config)
    monkeypatch.setitem(bases, "sd1", (config, base))
    assert told()["ss_gradient_checkpointing"] == "False"  # auto
    recompute(base.denoiser.units(), "1")
    assert told()["ss_gradient_checkpointing"] == "True"
