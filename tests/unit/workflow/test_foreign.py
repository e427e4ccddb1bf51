"""Settings of sd-scripts and OneTrainer: each lands in its counterpart, and what has none is listed."""

import json

import pytest

from lora_atelier.trainer_core.commands import main
from lora_atelier.trainer_core.config import SchedulerConfig
from lora_atelier.trainer_core.workflow.connecting import connector
from lora_atelier.trainer_core.workflow.foreign import read_foreign
from lora_atelier.trainer_core.workflow.foreign.sd_scripts import read_arguments
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.run_file import read_open, read_run

SCRIPT = r"""#!/bin/bash
# trains a character
accelerate launch --num_cpu_threads_per_process 1 sdxl_train_network.py \
  --pretrained_model_name_or_path="/models/base.safetensors" --output_name=cat --output_dir=out \
  --train_data_dir="/data/cat" --resolution=1024,1024 --enable_bucket --bucket_no_upscale \
  --network_module=networks.lora --network_dim=32 --network_alpha 16 \
  --network_args "conv_dim=8" "conv_alpha=4" "odd=3" \
  --learning_rate=1e-4 --text_encoder_lr=5e-5 --optimizer_type="AdamW8bit" \
  --optimizer_args weight_decay=0.1 betas=0.9,0.99 \
  --lr_scheduler=cosine_with_restarts --lr_scheduler_num_cycles=3 --lr_warmup_steps=0.1 --max_train_epochs=10 \
  --train_batch_size=4 --mixed_precision=bf16 --save_precision=fp16 --min_snr_gamma=5 --max_timestep=900 \
  --shuffle_caption --keep_tokens=1 --caption_extension=".tags" --flip_aug --save_every_n_epochs=2 --seed=42 \
  --v_parameterization --gradient_checkpointing --cache_latents --alpha_mask --clip_skip=2
"""
DATASETS = """
[general]
shuffle_caption = true
caption_extension = '.txt'

[[datasets]]
resolution = [768, 768]
batch_size = 2

  [[datasets.subsets]]
  image_dir = 'cats'
  class_tokens = 'a cat'
  num_repeats = 10

  [[datasets.subsets]]
  image_dir = '/data/reg'
  is_reg = true
  face_crop_aug_range = '2.0,4.0'
"""
FLAT = """
[model]
pretrained_model_name_or_path = "base.safetensors"
[training]
max_train_steps = 500
unet_lr = 0.0002
network_train_unet_only = true
dataset_config = "datasets.toml"
optimizer_type = "Prodigy"
network_dim = 16
network_alpha = 16
sample_prompts = "prompts.txt"
"""
ONE = {
    "training_method": "LORA",
    "base_model_name": "/models/base.safetensors",
    "model_type": "STABLE_DIFFUSION_15",
    "epochs": 20,
    "batch_size": 4,
    "learning_rate": 0.0003,
    "learning_rate_scheduler": "COSINE",
    "learning_rate_warmup_steps": 100.0,
    "resolution": "512,640",
    "lora_rank": 16,
    "lora_alpha": 8.0,
    "train_dtype": "BFLOAT_16",
    "output_dtype": "FLOAT_16",
    "output_model_destination": "models/cat.safetensors",
    "optimizer": {"optimizer": "ADAMW_8BIT", "weight_decay": 0.02, "beta1": 0.9, "fused": True},
    "unet": {"train": True, "learning_rate": None, "weight_dtype": "FLOAT_8"},
    "text_encoder": {"train": True, "learning_rate": 0.0001},
    "loss_weight_fn": "MIN_SNR_GAMMA",
    "loss_weight_strength": 5.0,
    "masked_training": True,
    "unmasked_weight": 0.2,
    "align_prop": True,
    "ema": "OFF",
    "concepts": [
        {"path": "/data/cats", "balancing": 2.0, "text": {"enable_tag_shuffling": True, "keep_tags_count": 1}},
        {"path": "/data/off", "enabled": False},
        {"path": "/data/held", "type": "VALIDATION", "include_subdirectories": True},
    ],
}


def saved(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_what_does_not_act_beside_the_other_settings_is_left_out(tmp_path):
    toml = (
        'pretrained_model_name_or_path = "/m/b.safetensors"\nloss_type = "l2"\nhuber_c = 0.1\nhuber_schedule = "snr"\n'
    )
    toml += 'train_data_dir = "/d"\nlr_scheduler = "cosine"\nlr_scheduler_num_cycles = 1\nlr_scheduler_power = 1\n'
    found = read_foreign(saved(tmp_path, "train.toml", toml))
    assert read_open(found.values).scheduler == SchedulerConfig()
    assert found.left == []
    plain = {"learning_rate_scheduler": "CONSTANT", "learning_rate_cycles": 1.0, "peft_type": "LOHA"}
    plain |= {"training_method": "LORA", "base_model_name": "/m/b.safetensors", "dropout_probability": 0.1}
    plain |= {"concepts": [{"path": "/d/cats"}]}
    found = read_foreign(saved(tmp_path, "plain.json", json.dumps(plain)))
    config = read_open(found.values)
    assert (config.scheduler.name, config.lora.algorithm, config.lora.dropout) == ("constant", "loha", 0)
    assert found.left == []


def test_a_command_line_of_sd_scripts_is_read(tmp_path):
    found = read_foreign(saved(tmp_path, "train.sh", SCRIPT))
    config = read_open(found.values)
    assert found.name == "cat" and found.left == ["network_args odd = '3'", "alpha_mask = True"]
    base, lora, optimizer, train = config.base_model, config.lora, config.optimizer, config.train
    assert (base.path, base.clip_skip, base.precision) == ("/models/base.safetensors", 2, "bfloat16")
    assert base.prediction == "v_prediction" and config.memory.checkpointing == "full"
    assert (lora.rank, lora.alpha, lora.conv_rank, lora.conv_alpha, lora.preset) == (32, 16, 8, 4, "full")
    assert (optimizer.name, optimizer.part_rates) == ("adamw8bit", (1e-4, 5e-5, 5e-5))
    assert (optimizer.options["weight_decay"], optimizer.options["beta2"]) == (0.1, 0.99)
    scheduler = config.scheduler
    assert (scheduler.name, scheduler.cycles) == ("cosine_with_restarts", 3)
    assert (scheduler.warmup_steps, scheduler.warmup_unit) == (10, "percent")
    assert (train.epochs, train.batch_size, train.resolution, train.seed) == (10, 4, 1024, 42)
    assert train.buckets.no_upscale and train.save_dtype == "float16"
    assert (config.objective.min_snr_gamma, config.objective.max_timestep) == (5, 899)
    assert (config.saves.save_every, config.saves.save_unit) == (2, "epochs")
    (concept,) = config.dataset.concepts
    assert concept.folder == "/data/cat" and concept.flip and concept.folder_repeats
    captions = concept.captions
    assert (captions.shuffle, captions.keep, captions.extensions) == (True, 1, (".tags",))


def test_a_toml_of_sd_scripts_is_read_with_its_datasets(tmp_path):
    saved(tmp_path, "datasets.toml", DATASETS)
    saved(tmp_path, "prompts.txt", "# comment\na cat --d 5\n\na dog\n")
    found = read_foreign(saved(tmp_path, "config.toml", FLAT))
    config = read_open(found.values)
    assert found.left == ["dataset face_crop_aug_range = '2.0,4.0'"]
    assert (config.train.steps, config.train.resolution, config.train.batch_size) == (500, 768, 2)
    assert config.optimizer.name == "prodigy" and config.optimizer.part_rates == (0.0002, 0, 0)
    cats, reg = config.dataset.concepts
    assert (cats.folder, cats.repeats, cats.captions.class_prompt) == (str(tmp_path / "cats"), 10, "a cat")
    assert (reg.folder, reg.role) == ("/data/reg", "regularisation")
    assert cats.captions.shuffle and reg.captions.shuffle
    assert config.sample.prompts == ("a cat --d 5", "a dog")


def test_text_encoders_are_trained_there_unless_it_is_switched_off(tmp_path):
    line = "python train_network.py --pretrained_model_name_or_path m --learning_rate 1e-4"
    rates = read_open(read_foreign(saved(tmp_path, "a.txt", line)).values).optimizer.part_rates
    assert rates == (1e-4, 1e-4, 0)
    line += " --network_train_unet_only"
    assert read_open(read_foreign(saved(tmp_path, "b.txt", line)).values).optimizer.part_rates == (1e-4, 0, 0)


def test_a_configuration_of_onetrainer_is_read(tmp_path):
    found = read_foreign(saved(tmp_path, "one.json", json.dumps(ONE)))
    config = read_open(found.values)
    assert found.name == "cat" and found.left == ["align_prop = True"]
    assert (config.train.epochs, config.train.batch_size, config.train.save_dtype) == (20, 4, "float16")
    assert config.train.buckets.resolutions == ("512", "640")
    assert (config.base_model.precision, config.base_model.weights) == ("bfloat16", "float8")
    assert (config.optimizer.name, config.optimizer.part_rates) == ("adamw8bit", (0.0003, 0.0001, 0))
    assert config.optimizer.options["weight_decay"] == 0.02
    assert (config.scheduler.name, config.scheduler.warmup_steps) == ("cosine", 100)
    assert (config.lora.rank, config.lora.alpha, config.objective.min_snr_gamma) == (16, 8, 5)
    cats, held = config.dataset.concepts
    assert (cats.repeats, cats.captions.shuffle, cats.captions.keep, cats.recursive) == (2, True, 1, False)
    assert cats.masks is not None and cats.masks.unmasked_weight == 0.2
    assert (held.role, held.recursive) == ("validation", True)


def test_import_writes_a_toml_and_its_workflow(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, "train.sh", SCRIPT)
    assert main(["import", "train.sh"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Saved as train-atelier.toml and train-atelier.json.") and "- alpha_mask = True" in said
    run = read_run(tmp_path / "train-atelier.toml", Folders())
    again = read_run(tmp_path / "train-atelier.json", Folders(), (), "", connector())
    assert run.name == again.name == "cat" and run.config.lora == again.config.lora
    assert run.config.optimizer == again.config.optimizer and run.config.train == again.config.train
    assert main(["import", "train.sh"]) == 2
    assert capsys.readouterr().err == "train-atelier.toml exists already; choose another name by --to.\n"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.json", "{}", "it is no configuration of OneTrainer"),
        ("x.json", "{", "not JSON"),
        ("x.toml", "a = ", "not TOML"),
        ("x.toml", "a = 1", "it names no base model"),
        ("x.sh", "echo hello", "it names no base model"),
        ("x.sh", 'python train_network.py --a "b', "its command line cannot be split"),
        ("x.toml", 'pretrained_model_name_or_path = "m"\nnetwork_dim = -4', "lora.rank is -4"),
    ],
)
def test_what_cannot_be_imported_is_refused_in_one_sentence(tmp_path, capsys, name, text, sentence):
    assert main(["import", str(saved(tmp_path, name, text)), "--to", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{name} cannot be imported: {sentence}") and said.count("\n") == 1
    assert not (tmp_path / "new.toml").exists()


def test_arguments_are_split_as_a_shell_does():
    found = read_arguments('python train_network.py --a=1 --b "x y" --c --d 1 2 3 # --e\n')
    assert found == {"": "train_network.py", "a": "1", "b": "x y", "c": True, "d": ["1", "2", "3"]}
