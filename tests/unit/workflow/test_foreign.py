"""Settings of sd-scripts and OneTrainer: each lands in its counterpart, and what has none is listed."""

import copy
import json
import re
from pathlib import Path

import pytest

from lora_atelier.trainer_core.commands import main
from lora_atelier.trainer_core.commands.convert import linked
from lora_atelier.trainer_core.config import ClipConfig, SchedulerConfig
from lora_atelier.trainer_core.workflow.connecting import connector
from lora_atelier.trainer_core.workflow.foreign import (
    OBJECTS,
    TABLES,
    onetrainer,
    read_foreign,
    read_values,
    sd_scripts,
)
from lora_atelier.trainer_core.workflow.foreign.exporting import write_for
from lora_atelier.trainer_core.workflow.foreign.imported import is_secret
from lora_atelier.trainer_core.workflow.foreign.onetrainer import read_onetrainer
from lora_atelier.trainer_core.workflow.foreign.sd_scripts import LISTS, read_sd_scripts
from lora_atelier.trainer_core.workflow.foreign.texts import arguments, read_script, read_yaml
from lora_atelier.trainer_core.workflow.importing import bring
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.read import read_workflow
from lora_atelier.trainer_core.workflow.run_file import RunFile, read_open, read_run, write_run
from lora_atelier.trainer_core.workflow.toml_text import read_toml

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
    for name, skipped in (("xl.safetensors", 1), ("b.safetensors", 3)):  # XL has its own layer
        found = read_foreign(saved(tmp_path, "a.toml", f'pretrained_model_name_or_path = "{name}"\nclip_skip = 3\n'))
        assert read_open(found.values).base_model.clip_skip == skipped
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
    assert found.name == "cat" and found.left == ["network_args odd = '3'"]
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
    assert concept.masks is not None and concept.masks.source == "alpha"
    captions = concept.captions
    assert (captions.shuffle, captions.keep, captions.extensions) == (True, 1, (".tags",))


def test_a_toml_of_sd_scripts_is_read_with_its_datasets(tmp_path):
    saved(tmp_path, "datasets.toml", DATASETS)
    saved(tmp_path, "prompts.txt", "# comment\na cat --d 5\n\na dog\n")
    found = read_foreign(saved(tmp_path, "config.toml", FLAT))
    config = read_open(found.values)
    assert found.left == ["face_crop_aug_range = '2.0,4.0'"]
    assert (config.train.steps, config.train.buckets.resolutions, config.train.batch_size) == (500, ("768x768",), 2)
    assert config.optimizer.name == "prodigy" and config.optimizer.part_rates == (0.0002, 0, 0)
    cats, reg = config.dataset.concepts
    assert (cats.folder, cats.repeats, cats.captions.class_prompt) == (str(tmp_path / "cats"), 10, "a cat")
    assert (reg.folder, reg.role) == ("/data/reg", "regularisation")
    assert cats.captions.shuffle and reg.captions.shuffle
    assert config.sample.prompts == ("a cat --d 5", "a dog")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", '[{"prompt": "a\\ncat", "seed": 5, "scale": 2}, {"prompt": "dog", "width": 64}]'),
        ("p.toml", "[prompt]\nwidth = 64\n[[prompt.subset]]\nprompt = 'a cat'\nseed = 5\nscale = 2\n"
         "[[prompt.subset]]\nprompt = 'dog'\n"),
    ],
)  # fmt: skip
def test_prompts_are_read_in_each_form_and_drawn_by_the_sampler_there(tmp_path, name, text):
    saved(tmp_path, name, text)
    line = f"python train_network.py --pretrained_model_name_or_path m --sample_prompts {name}"
    sample = read_open(read_foreign(saved(tmp_path, "a.txt", line)).values).sample
    first = "a cat --w 64 --l 2 --d 5" if name == "p.toml" else "a cat --l 2 --d 5"
    assert (sample.prompts, sample.sampler) == ((first, "dog --w 64"), "ddim")
    found = read_foreign(saved(tmp_path, "a.txt", f"{line} --sample_sampler K_Euler_A"))
    assert read_open(found.values).sample.sampler == "euler_ancestral" and not found.left
    assert read_foreign(saved(tmp_path, "a.txt", f"{line} --sample_sampler dpmsingle")).left
    saved(tmp_path, name, "{")
    assert any(name in sentence for sentence in read_foreign(tmp_path / "a.txt").open)


def test_text_encoders_are_trained_there_unless_it_is_switched_off(tmp_path):
    line = "python train_network.py --pretrained_model_name_or_path m --learning_rate 1e-4"
    rates = read_open(read_foreign(saved(tmp_path, "a.txt", line)).values).optimizer.part_rates
    assert rates == (1e-4, 1e-4, 0)
    line += " --network_train_unet_only"
    assert read_open(read_foreign(saved(tmp_path, "b.txt", line)).values).optimizer.part_rates == (1e-4, 0, 0)


def test_a_configuration_of_onetrainer_is_read(tmp_path):
    found = read_foreign(saved(tmp_path, "one.json", json.dumps({**ONE, "align_prop": False})))
    config = read_open(found.values)
    assert found.name == "cat" and found.left == []
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


def test_what_others_train_by_is_refused_by_name_with_what_to_take(tmp_path):
    wanted = "choose lora with the highest rank, and lower it with Resize LoRA"
    lycoris = {"lora_type": "lycoris", "model_family": "sdxl", "pretrained_model_name_or_path": "m"}
    saved(tmp_path, "lycoris_config.json", json.dumps({"algo": "dylora", "linear_dim": 8}))
    toolkit = "config: {process: [{type: sd_trainer, train: {lr: 1}, network: {type: DyLoRA}}]}"
    plain = 'pretrained_model_name_or_path = "m"\n'
    for name, text, sentence in (
        ("a.toml", plain + 'network_module = "networks.dylora"', f"network_module networks.dylora has no.*{wanted}"),
        (
            "b.toml",
            plain + 'network_module = "lycoris.kohya"\nnetwork_args = ["algo=dylora"]',
            f"algo dylora.*{wanted}",
        ),
        ("c.json", json.dumps({"LoRA_type": "Kohya DyLoRA", "pretrained_model_name_or_path": "m"}), wanted),
        ("f.json", json.dumps(lycoris), f"algo dylora.*{wanted}"),
        ("g.yaml", toolkit, f"network type dylora.*{wanted}"),
        ("h.json", json.dumps({**ONE, "align_prop": False, "peft_type": "DYLORA"}), f"peft_type DYLORA.*{wanted}"),
        ("d.json", json.dumps(ONE), "align_prop True has no counterpart here; set it to false there; choose lora, and"),
        (
            "e.json",
            json.dumps({"token_string": "x", "LoRA_type": "Standard"}),
            "to its word and learning_rate of Optimizer to 0",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_foreign(saved(tmp_path, name, text))


def test_a_pickle_is_never_written(tmp_path):
    told = ": the file is written as .safetensors, which every program reads"
    plain = 'pretrained_model_name_or_path = "m"\nsave_model_as = "ckpt"'
    assert read_foreign(saved(tmp_path, "a.toml", plain)).left == [f"save_model_as = 'ckpt'{told}"]
    one = {**ONE, "align_prop": False, "output_model_format": "CKPT"}
    assert read_foreign(saved(tmp_path, "b.json", json.dumps(one))).left == [f"output_model_format = 'CKPT'{told}"]


def test_import_writes_a_toml_and_its_workflow(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, "train.sh", SCRIPT)
    assert main(["import", "train.sh"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Saved as train-atelier.toml and train-atelier.json.") and "- network_args odd = '3'" in said
    run = read_run(tmp_path / "train-atelier.toml", Folders())
    again = read_run(tmp_path / "train-atelier.json", Folders(), (), "", connector())
    assert run.name == again.name == "cat" and run.config.lora == again.config.lora
    assert run.config.optimizer == again.config.optimizer and run.config.train == again.config.train
    assert main(["import", "train.sh"]) == 2
    assert capsys.readouterr().err == "train-atelier.toml exists already; choose another name by --to.\n"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.json", "{}", "it is no file of a trainer"),
        ("x.json", "{", "not JSON"),
        ("x.toml", "a = ", "not TOML"),
        ("x.toml", "a = 1", "it is no file of a trainer"),
        ("x.toml", "", "it is empty"),
        (
            "x.toml",
            'pretrained_model_name_or_path = "m"\nlearning_rate = [1, 2]',
            "it holds [1, 2] where a number belongs",
        ),
        ("x.sh", "echo hello", "it holds no command that trains"),
        ("x.sh", "pip install --upgrade torch", "it holds no command that trains"),
        ("x.yaml", "a: [1", "it is no YAML"),
        ("x.yaml", "config:\n  process: []", "it holds 0 jobs that train"),
        (
            "x.toml",
            'pretrained_model_name_or_path = "m"\nnetwork_module = "networks.oft"',
            "its network_module networks.oft",
        ),
        ("x.toml", 'pretrained_model_name_or_path = "m"\nlr_scheduler_type = "x.Odd"', "its lr_scheduler_type x.Odd"),
        ("x.json", '{"training_method": "EMBEDDING"}', "its training_method is EMBEDDING"),
        ("x.toml", 'pretrained_model_name_or_path = "m"\nnetwork_dim = -4', "lora.rank is -4"),
    ],
)
def test_what_cannot_be_imported_is_refused_in_one_sentence(tmp_path, capsys, name, text, sentence):
    assert main(["import", str(saved(tmp_path, name, text)), "--to", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{name} cannot be imported: {sentence}") and said.count("\n") == 1
    assert not (tmp_path / "new.toml").exists()


def test_a_model_with_files_of_its_own_is_imported_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, "a.toml", 'pretrained_model_name_or_path = "m"\nvae = "own/v"\ntrain_data_dir = "/d"\n')
    assert main(["import", "a.toml"]) == 0
    assert 'vae = "own/v"' in (tmp_path / "a-atelier.toml").read_text(encoding="utf-8")


def test_arguments_are_split_as_a_shell_does():
    command = read_script('python train_network.py --a=1 --b "x y" --c --network_args 1 2 3 # --e\n', ".sh")
    assert command.program == "train_network.py"
    found, left = arguments(command.words, LISTS)
    assert found == {"a": "1", "b": "x y", "c": True, "network_args": ["1", "2", "3"]} and left == []


SHELLS = {
    ".sh": r"""
DIM=8
ARGS=(
  --learning_rate 1e-4  # slow
  --seed=3
)
if [[ $DIM == 8 ]]; then
  ARGS+=("--sdpa")
fi
echo train_network.py --network_dim 1
cat > list.toml <<EOF
python train_network.py --network_dim 2
EOF
accelerate launch train_network.py \
  --network_dim $DIM "${ARGS[@]}" --train_data_dir="${DATA:-D:/a b}" "$@" 2>&1 | tee log.txt
""",
    ".bat": r"""@echo off
rem train_network.py
set "DATA=D:/a b"
set DIM=8
if %DIM%==8 (
  set SDPA=--sdpa
) else (set SDPA=--xformers)
if defined DATA set MORE=--learning_rate "1e-4" %SDPA%
if /i not "%DATA%"=="d:/A B" set MORE=--highvram
python train_network.py --network_dim %DIM% ^
 --seed 3 %MORE% --train_data_dir "%DATA%" %* > log.txt 2>&1
""",
    ".ps1": r"""
$dim = 8
$ext = [System.Collections.ArrayList]::new()
if ($dim -eq 8) {
  [void]$ext.Add("--sdpa")
} else {
  [void]$ext.Add("--xformers")
}
accelerate launch "./train_network.py" `
  --network_dim=$dim `
  # a comment
  --learning_rate=1e-4 --seed 3 $ext --train_data_dir="D:/a b"
""",
}


@pytest.mark.parametrize("suffix", SHELLS)
def test_scripts_of_three_shells_say_the_same(suffix):
    command = read_script(SHELLS[suffix], suffix)
    found, left = arguments(command.words, LISTS)
    assert found == {
        "network_dim": "8", "learning_rate": "1e-4", "seed": "3", "sdpa": True, "train_data_dir": "D:/a b",
    }  # fmt: skip
    assert left == [] and command.open == [] and command.unsure == []


BRANCHES = {
    ".ps1": r"""
$mode = "Wan_Lora"
$rank = 32 # usual
$weights = ""# none
$script = "train_net" -replace "net", "network"
$ext = @("--seed=3")
function Add-Seed($seed) {
  [void]$ext.Add("--seed=$seed")
}
if ($mode -ilike "hv*") {
  $script = "hv_" + $script
  if ($rank -eq 4) {
    [void]$ext.Add("--xformers")
  }
}
elseif ($mode -ilike "Wan*" -and -not ($weights)) {
  $script = "wan_" + $script
  if ($rank -gt 16) { [void]$ext.Add("--sdpa") }
  else {
    [void]$ext.Add("--flash_attn")
  }
}
else {
  [void]$ext.Add("--split_attn")
}
if ($weights) {
  [void]$ext.Add("--network_weights=$weights")
}
foreach ($each in $args) {
  [void]$ext.Add("--loop=$each")
}
if (Test-Path "./x") {
  [void]$ext.Add("--found")
}
if ($rank -ne 0) {
  [void]$ext.Add("--network_dim=$rank")
}
python "./musubi-tuner/$script.py" `
  --dit="D:/a b" $ext
""",
    ".sh": r"""
MODE=wan
RANK=32
WEIGHTS=""
if [ "$MODE" = "hv" ]; then
  ARGS="--xformers"
elif [ "$MODE" = "wan" ]; then
  ARGS="--sdpa --seed=3"
elif [ "$MODE" != "flux" ]; then
  ARGS="--flash_attn"
else
  ARGS="--split_attn"
fi
if [ -n "$WEIGHTS" ]; then
  MORE="--network_weights=$WEIGHTS"
else
  MORE="--network_dim=$RANK"
fi
if [ -f x ]; then
  MORE="--loop"
  MORE+=" --found"
fi
python src/wan_train_network.py --dit "D:/a b" $ARGS $MORE
""",
}


@pytest.mark.parametrize("suffix", BRANCHES)
def test_the_branches_of_a_script_are_followed(suffix):
    command = read_script(BRANCHES[suffix], suffix)
    found, left = arguments(command.words, LISTS)
    assert command.program == "wan_train_network.py" and left == []
    assert found == {"dit": "D:/a b", "sdpa": True, "seed": "3", "network_dim": "32"}
    assert [word.partition("=")[0] for word in command.unsure] == ["--loop", "--found"]


@pytest.mark.parametrize(("suffix", "line"), [(".sh", 'A="$A$A"'), (".bat", "set A=%A%%A%"), (".ps1", '$A = "$A$A"')])
def test_variables_that_grow_without_end_are_refused(suffix, line):
    start = {".sh": "A=xx", ".bat": "set A=xx", ".ps1": '$A = "xx"'}[suffix]
    with pytest.raises(ValueError, match="its variables stand for more than 1 MiB of text"):
        read_script("\n".join([start, *[line] * 60]), suffix)


def test_a_script_that_calls_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no command that trains"):
        read_foreign(saved(tmp_path, "a.ps1", "python cache_latents.py `\n --vae=a --seed=1 --network_dim=4\n"))


def test_a_script_that_trains_the_whole_model_does_here(tmp_path):
    line = "python {} --pretrained_model_name_or_path m --learning_rate 1e-5 --max_train_steps 9"
    for script, rates in (("fine_tune.py", (1e-5, 0, 0)), ("train_db.py", (1e-5, 1e-5, 0))):
        config = read_open(read_foreign(saved(tmp_path, "a.sh", line.format(script))).values)
        assert (config.lora.algorithm, config.optimizer.part_rates) == ("full", rates)
    more = " --train_text_encoder --learning_rate_te1 1e-6 --learning_rate_te2 2e-6"
    config = read_open(read_foreign(saved(tmp_path, "b.sh", line.format("sdxl_train.py") + more)).values)
    assert (config.lora.algorithm, config.optimizer.part_rates) == ("full", (1e-5, 1e-6, 2e-6))
    with pytest.raises(ValueError, match=r"train_textual_inversion\.py trains no LoRA"):
        read_foreign(saved(tmp_path, "c.sh", line.format("train_textual_inversion.py")))


def test_the_model_of_a_file_is_told_by_its_network(tmp_path):
    wan = 'dit = "w.safetensors"\nnetwork_module = "networks.lora_wan"\nnetwork_dim = 8\n'
    found = read_foreign(saved(tmp_path, "a.toml", wan))
    assert (found.program, found.family) == ("musubi-tuner", "wan")
    assert read_foreign(saved(tmp_path, "b.sh", "python odd_train_network.py --dit m --seed 1")).family == "odd"


@pytest.mark.parametrize(
    ("arguments", "family", "encoder"),
    (
        ('qwen3 = "q"\nguidance_scale = 1', "anima", "q"),
        ('clip_g = "g"\nt5xxl = "t"\n', "sd3", "t"),
        ('gemma2 = "g"\nae = "a"\n', "lumina2", "g"),
        ('guidance_scale = 1.0\nt5xxl = ""\nlog_with = ""\nepoch = 1\nnoise_offset_type = "Original"', "flux", None),
        ('t5xxl = ""\nguidance_scale = 0', "", None),
        ('t5xxl = "t"\ntraining_shift = 3.0\n', "sd3", "t"),
        ('t5xxl = "t"\nclip_l_dropout_rate = 0.1\n', "sd3", "t"),
        ('t5xxl = "t"\npretrained_model_name_or_path = "/m/sd3.5_medium.safetensors"\n', "sd3", "t"),
        ('t5xxl = "t"\npretrained_model_name_or_path = "/m/flux1-dev.safetensors"\n', "flux", "t"),
        ('t5xxl = "t"\ntimestep_sampling = "shift"\n', "flux", "t"),
    ),
)
def test_the_family_of_a_file_is_told_by_arguments_of_its_own(tmp_path, arguments, family, encoder):
    text = f'network_dim = 4\nnetwork_module = "lycoris.kohya"\n{arguments}\nweighting_scheme = "mode"\n'
    found = read_foreign(saved(tmp_path, "a.toml", text))
    assert (found.family, found.models.get("text_encoder_1")) == (family, encoder)
    assert ("weighting_scheme = 'mode'" in found.left) == (not family)


@pytest.mark.parametrize("named", ("", 'pretrained_model_name_or_path = "/m/model.safetensors"\n'))
@pytest.mark.parametrize("shared", ('t5xxl = "t"', 'clip_l = "c"', "apply_t5_attn_mask = true"))
def test_arguments_of_flux_and_of_stable_diffusion_3_alike_are_asked_for(tmp_path, shared, named):
    text = f"network_dim = 4\nlearning_rate = 1e-4\n{named}{shared}\n"
    with pytest.raises(
        ValueError, match=r"is of Flux as well as of Stable Diffusion 3; set ae in it for Flux, or clip_g for"
    ):
        read_foreign(saved(tmp_path, "a.toml", text))
    assert read_foreign(saved(tmp_path, "b.toml", text + 'network_module = "networks.lora_sd3"\n')).family == "sd3"


def test_a_lokr_of_whole_matrices_has_no_rank_of_convolutions(tmp_path):
    text = 'network_alpha = 1\nnetwork_module = "lycoris.kohya"\nnetwork_args = ["algo=lokr", "full_matrix=True"]\n'
    lora = read_open(read_foreign(saved(tmp_path, "a.toml", text)).values).lora
    assert lora.full_matrix and lora.preset == "full" and lora.conv_rank == 0


def test_a_script_that_hands_over_a_file_says_so(tmp_path):
    with pytest.raises(ValueError, match="takes its settings from a file; choose that file"):
        read_foreign(saved(tmp_path, "a.sh", "deepspeed --num_gpus=1 train.py --deepspeed --config a.toml\n"))
    with pytest.raises(ValueError, match="starts SimpleTuner"):
        read_foreign(saved(tmp_path, "c.sh", "python train_sdxl.py --data_backend_config=$A --seed=1\n"))
    found = read_foreign(saved(tmp_path, "b.sh", "python train_network.py --network_dim 4 --resolution ${SIZE}\n"))
    assert any("${SIZE}" in each and "resolution" in each for each in found.open)


def test_what_a_script_leaves_open_is_told(tmp_path):
    text = "if [ -f x ]; then\n  EXTRA=--sdpa\nfi\npython train_network.py --network_dim=8 $MORE --seed 1\n"
    found = read_foreign(saved(tmp_path, "a.sh", text))
    assert any("$MORE" in each for each in found.open) and any("--sdpa" in each for each in found.open)
    text = 'python train_network.py --network_dim=$DIM --learning_rate $1 --output_name="a$(date +%F)" --seed=`date`\n'
    found = read_foreign(saved(tmp_path, "b.sh", text))
    assert (found.values["lora"]["rank"], found.left) == (4, [])
    told = ("$DIM open, for network_dim", "$(date +%F) open, for output_name", "`date` open, for seed")
    assert all(any(each in line for line in found.open) for each in told)


def test_what_a_file_leaves_out_is_the_programs_default(tmp_path):
    plain = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "/d"\n'
    config = read_open(read_foreign(saved(tmp_path, "a.toml", plain)).values)
    assert (config.lora.rank, config.lora.alpha, config.scheduler.name) == (4, 1, "constant")
    assert config.optimizer.part_rates == (2e-6, 2e-6, 0) and config.train.steps == 1600
    assert config.dataset.concepts[0].captions.dropout == 0
    config = read_open(read_foreign(saved(tmp_path, "b.json", json.dumps({"training_method": "LORA"}))).values)
    assert (config.lora.rank, config.lora.alpha, config.train.epochs) == (16, 1, 100)
    assert (config.optimizer.text_encoder_stop, config.optimizer.stop_unit) == (30, "epochs")
    found = read_foreign(saved(tmp_path, "t.json", json.dumps({"training_method": "LORA", "train_dtype": "TFLOAT_32"})))
    tensor_float = read_open(found.values)
    assert (tensor_float.base_model.precision, tensor_float.memory.tf32) == ("float32", "on")
    unet = {"stop_training_after": 5, "stop_training_after_unit": "STEP"}
    found = read_foreign(saved(tmp_path, "c.json", json.dumps({"training_method": "LORA", "unet": unet})))
    config = read_open(found.values)
    assert (config.optimizer.denoiser_stop, config.optimizer.stop_unit) == (5, "steps")
    assert found.left == ["stop_training_after = '30 EPOCH'"]  # one unit here, one for each part there


def test_a_rate_of_0_is_not_trained_and_an_estimator_stays_one(tmp_path):
    plain = 'pretrained_model_name_or_path = "m"\nlearning_rate = 1.0\ntext_encoder_lr = 0.0\n'
    config = read_open(read_foreign(saved(tmp_path, "a.toml", plain + 'optimizer_type = "DAdaptAdam"')).values)
    assert config.optimizer.part_rates == (1, 0, 0) and config.optimizer.options["optimizer"] == "DAdaptAdam"
    text = plain.replace("text_encoder_lr = 0.0", "unet_lr = 0\ntext_encoder_lr = [0, 1]")
    assert read_open(read_foreign(saved(tmp_path, "c.toml", text)).values).optimizer.part_rates == (0, 0, 1)
    none = {
        "a.yaml": "config: {process: [{type: sd_trainer, train: {lr: 0}, network: {type: lora}}]}",
        "d.toml": "[adapter]\ntype = 'lora'\n[model]\ntype = 'flux'\n[optimizer]\nlr = 0\n",
        "b.json": '{"model_family": "sdxl", "learning_rate": 0}',
    }
    for name, text in none.items():
        assert read_foreign(saved(tmp_path, name, text)).values["optimizer"]["learning_rate"] == 0
    config = read_open(read_foreign(saved(tmp_path, "b.toml", plain + 'optimizer_type = "Prodigy"')).values)
    assert config.optimizer.name == "prodigy" and config.optimizer.options["safeguard_warmup"] is False


def test_soap_and_automagic_keep_what_their_programs_set(tmp_path):
    text = "network_dim = 8\npretrained_model_name_or_path = 'm'\nlearning_rate = 1e-4\noptimizer_type = 'SOAP'\n"
    optimizer = read_open(read_foreign(saved(tmp_path, "soap.toml", text)).values).optimizer
    assert optimizer.name == "soap" and optimizer.options["max_precondition_dim"] == 10_000
    job = "config: {process: [{type: sd_trainer, train: {lr: 1e-5, optimizer: automagic3}, network: {type: lora}}]}"
    found = read_foreign(saved(tmp_path, "auto.yaml", job)).values["optimizer"]
    assert (found["name"], found["options"]["history"], found["learning_rate"]) == ("automagic", 8, 1e-5)
    was = read_open(values_of("optimizer.name=automagic"))
    written = write_for("ai-toolkit", "cat", was, read_open({"base_model": {"path": ""}}), "theirs").files[""]
    step = json.loads(written)["config"]["process"][0]["train"]
    assert step["optimizer"] == "automagic3" and step["optimizer_params"] == {
        "beta2": 0.999,
        "clip_threshold": 1.0,
        "weight_decay": 0.0,
        "polarity_history": 4,
        "fused": False,
    }
    six = job.replace("automagic3", "automagic3, optimizer_params: {polarity_history: 6, fused: true}")
    six = read_foreign(saved(tmp_path, "auto6.yaml", six))
    assert read_open(six.values).optimizer.options["history"] == 6 and six.left == []
    earlier = saved(tmp_path, "auto2.yaml", job.replace("automagic3", "automagic2"))
    with pytest.raises(ValueError, match="automagic2"):
        read_foreign(earlier)


def test_a_dump_of_defaults_leaves_nothing(tmp_path):
    dump = {name: value for name, value in sd_scripts.DEFAULTS.items() if name not in ("num_repeats", "batch_size")}
    dump |= {"pretrained_model_name_or_path": "m", "seed": None, "unet_lr": None, "vae": "", "color_aug": False}
    found = read_sd_scripts({**dump, "train_data_dir": "/d"}, tmp_path)
    assert found.left == [] and read_open(found.values).train.steps == 1600
    found = read_onetrainer({**onetrainer.DEFAULTS, "training_method": "LORA"}, tmp_path)
    assert found.left == []


WORDS = {
    "utf-8-sig": "für", "utf-16": "für", "utf-16-le": "für", "utf-16-be": "für", "cp1252": "für",
    "cp932": "学習データの写真", "cp1251": "обучение", "gbk": "训练图片", "cp949": "학습데이터",
}  # fmt: skip


@pytest.mark.parametrize(("encoding", "word"), WORDS.items())
def test_files_of_other_encodings_are_read(tmp_path, encoding, word):
    path = tmp_path / "a.toml"
    path.write_bytes(f'pretrained_model_name_or_path = "m"\noutput_name = "{word}"\nnetwork_dim = 8\n'.encode(encoding))
    found = read_foreign(path)
    assert found.name == word and found.values["lora"]["rank"] == 8
    assert ("from line 2 on" in "".join(found.open)) == (not encoding.startswith("utf"))


def test_what_cannot_be_read_leaves_the_programs_default_and_is_said(tmp_path):
    text = 'pretrained_model_name_or_path = "m"\nnetwork_dim = "eight"\nnetwork_alpha = true\nseed = "x"\n'
    found = read_foreign(saved(tmp_path, "a.toml", text))
    assert found.left == [] and (found.values["lora"]["rank"], found.values["lora"]["alpha"]) == (4, 1)
    assert [line.partition(" holds ")[0] for line in found.open] == ["seed", "network_dim", "network_alpha"]
    with pytest.raises(ValueError, match="its network is 'lora', where a table belongs"):
        read_foreign(saved(tmp_path, "a.yaml", "config: {process: [{type: sd_trainer, network: lora}]}"))


SECRETS = {
    "a.sh": """
if [ -n "$X" ]; then
  ARGS="--wandb_api_key=SECRET hf_SECRETSECRET a1b2SECRETc3d4e5f6"
fi
python train_network.py g7h8SECRETi9j0k1l2 --network_dim=4 --hub_key sk-SECRETSECRET --network_alpha=hf_SECRETSECRET \\
  --optimizer_args "my_token=SECRET"
""",
    "a.toml": 'network_dim = 4\nnetwork_alpha = 1\naccount = {a = {accessKey = "SECRET"}}\nsend = "https://me:SECRET@host"\n',
    "a.yaml": "config: {process: [{type: sd_trainer, network: {type: lora}, model: {hook: [{password: SECRET}]}}]}",
    "a.json": '{"training_method": "LORA", "optimizer": {"my_secret": "SECRET"}, "own_token": "SECRET"}',
}


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_told_or_kept(tmp_path, name):
    found = bring(saved(tmp_path, name, SECRETS[name]))
    assert "SECRET" not in f"{found}" and len(found.told.parts) > 1
    assert {"hub_key", "send", "model.hook", "own_token"} & {*found.report.replace("- ", "").split("\n")}


@pytest.mark.parametrize(
    "value",
    ("hf_" + "aB" * 17, "sk-" + "a" * 20, "rpa_" + "A1" * 20, "0f" * 16,
     "eyJhbGciOiJI.eyJzdWIi.c2lnbg", "123456789:" + "A" * 35),
)  # fmt: skip
def test_a_key_is_known_by_how_services_write_it(value):
    assert is_secret("any", f"see {value}")


def test_a_name_that_ends_in_key_keeps_its_value_to_itself(tmp_path):
    text = 'network_dim = 4\nnetwork_alpha = 1\nhub_key = "letters"\nkeys_of = "letters"\n'
    found = bring(saved(tmp_path, "a.toml", text))
    assert "- hub_key\n" in found.report and "- keys_of = 'letters'" in found.report


def test_a_note_shows_what_a_file_says_as_it_stands(tmp_path):
    text = 'pretrained_model_name_or_path = "m"\n"![a](http://x) <b>" = "*"\n'
    found = bring(saved(tmp_path, "a.toml", text))
    note = next(node for node in found.workflow["nodes"] if node["type"] == "MarkdownNote")["widgets_values"][0]
    assert r"- ![a\]\(http://x) \<b> = '\*'" in note and "- ![a](http://x) <b> = '*'" in found.report


def test_a_folder_that_is_taken_no_time_is_none(tmp_path):
    text = "[[datasets]]\n" + "".join(f"[[datasets.subsets]]\nimage_dir = '/{n}'\nnum_repeats = {n}\n" for n in (0, 2))
    found = read_foreign(saved(tmp_path, "a.toml", text))
    assert [concept["folder"] for concept in found.values["dataset"]["concepts"]] == ["/2"]
    found = read_foreign(saved(tmp_path, "a.json", '[{"path": "/0", "balancing": 0}, {"path": "/2"}]'))
    assert [concept["folder"] for concept in found.values["dataset"]["concepts"]] == ["/2"]


def test_pictures_without_captions_have_those_that_sd_scripts_gives_them(tmp_path):
    plain = 'pretrained_model_name_or_path = "m"\n'
    lists = {
        "subsets": "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '/d'\n",
        "musubi": "[[datasets]]\nimage_directory = '/d'\n",
    }
    texts = {"folder_name": f'{plain}train_data_dir = "/d"\nreg_data_dir = "/r"\n', "empty": plain + lists["subsets"]}
    texts |= {"class_prompt": f"{texts['empty']}class_tokens = 'cat'\n", "error": plain + lists["musubi"]}
    for missing, text in texts.items():
        concepts = read_open(read_foreign(saved(tmp_path, "a.toml", text)).values).dataset.concepts
        assert {each.captions.missing for each in concepts} == {missing}


def test_a_table_of_all_pictures_is_read_and_ignored_beside_a_list_of_datasets(tmp_path):
    table = tmp_path / "all.json"  # a path that is whole on any system
    plain = f'pretrained_model_name_or_path = "m"\ntrain_data_dir = "/d"\nin_json = "{table.as_posix()}"\n'
    plain += "dataset_repeats = 3\n"
    found = read_foreign(saved(tmp_path, "a.toml", plain))
    (concept,) = read_open(found.values).dataset.concepts
    assert (concept.folder, concept.repeats, concept.folder_repeats, found.left) == ("/d", 3, False, [])
    assert (concept.captions.source, Path(concept.captions.file)) == ("table", table)
    saved(tmp_path, "ds.toml", "[[datasets]]\n[[datasets.subsets]]\nimage_dir = '/e'\n")
    found = read_foreign(saved(tmp_path, "a.toml", plain + 'dataset_config = "ds.toml"\n'))
    assert [each.folder for each in read_open(found.values).dataset.concepts] == ["/e"] and found.left == []


def test_lists_and_videos_of_musubi_tuner_are_read(tmp_path):
    text = "[[datasets]]\nimage_jsonl_file = '/d/list.jsonl'\n[[datasets]]\nvideo_directory = '/v'\nsource_fps = 30.0\n"
    text += "target_frames = [1, 25, 45]\nframe_extraction = 'uniform'\nframe_sample = 4\nframe_stride = 2\n"
    found = read_foreign(saved(tmp_path, "a.toml", text))
    first, second = read_open({**found.values, "base_model": {"path": "m"}}).dataset.concepts
    assert found.program == "musubi-tuner" and (first.folder, second.folder) == ("/d", "/v")
    assert (first.captions.source, first.captions.file) == ("table", "/d/list.jsonl")
    assert first.clips is None and second.clips == ClipConfig(frames=(25, 45), take="uniform", parts=4)
    assert found.left == [] and any("here each clip gets the most of frames of Clips" in line for line in found.open)
    plain = read_foreign(
        saved(tmp_path, "b.toml", "[[datasets]]\nvideo_jsonl_file = '/v/l.jsonl'\ntarget_frames = [17]\n")
    )
    (concept,) = read_open({**plain.values, "base_model": {"path": "m"}}).dataset.concepts
    assert concept.clips == ClipConfig(frames=(17,), rate=0) and plain.open == []


def clips_of(found):
    return [each.clips for each in read_open({**found.values, "base_model": {"path": "m"}}).dataset.concepts]


def test_clips_of_other_programs_are_read(tmp_path):
    datasets = (
        "[{folder_path: /d, num_frames: 41, do_i2v: false}, {folder_path: /e, num_frames: 9, fps: 12, "
        "shrink_video_to_frames: no}"
    )
    datasets += ", {folder_path: /f, auto_frame_count: yes, fps: 16}, {folder_path: /g, num_frames: 1}]"
    job = "config: {name: a, process: [{type: sd_trainer, network: {type: lora, linear: 4}, train: {steps: 9"
    job += ", switch_boundary_every: 10}, model: {name_or_path: w, arch: 'wan22_14b:t2v'}, datasets: " + datasets
    found = read_foreign(saved(tmp_path, "a.yaml", job + ", sample: {prompts: [a cat], num_frames: 41, fps: 16}}]}"))
    assert clips_of(found) == [
        ClipConfig(frames=(41,)),
        ClipConfig(frames=(9,), rate=12, take="chunk", first_frame=1),
        ClipConfig(take="full", rate=16, most_frames=1025, first_frame=1),
        None,
    ]
    assert found.left == [] and found.values["sample"]["frames"] == 41
    assert sum("spreads num_frames over each whole video" in each for each in found.open) == 1

    saved(
        tmp_path,
        "dataset.toml",
        'frame_buckets = [1, 33, 65]\n[[directory]]\npath = "/d"\n[[directory]]\npath = "/e"\nframe_buckets = [1]\n',
    )
    found = read_foreign(saved(tmp_path, "pipe.toml", "video_clip_mode = 'single_middle'\n" + PIPE))
    assert clips_of(found) == [ClipConfig(frames=(33, 65)), None]
    assert "video_clip_mode = 'single_middle'" in found.left
    kept = PIPE.replace("[adapter]", "first_frame_conditioning_p = 0.5\n[adapter]")
    found = read_foreign(saved(tmp_path, "ltx.toml", kept.replace('"wan"', '"ltx-video"')))
    assert clips_of(found) == [ClipConfig(frames=(33, 65), first_frame=0.5), None]
    assert found.left == ["model.odd = 1"]
    found = read_foreign(saved(tmp_path, "wan.toml", kept))  # where it has no effect there, either
    assert clips_of(found) == [ClipConfig(frames=(33, 65)), None]
    assert "model.first_frame_conditioning_p = 0.5" in found.left

    video = [{"id": "v", "dataset_type": "video", "instance_data_dir": "/d", "video": {"num_frames": 49}}]
    saved(tmp_path, "backends.json", json.dumps(video))
    found = read_foreign(saved(tmp_path, "b.json", json.dumps({**TUNER, "--model_family": "ltxvideo"})))
    assert clips_of(found) == [ClipConfig(frames=(49,), rate=0)]

    values = {"model_type": "HUNYUAN_VIDEO", "training_method": "LORA", "frames": "33", "concepts": [{"path": "/d"}]}
    assert clips_of(read_onetrainer(values, tmp_path)) == [ClipConfig(frames=(33,))]
    assert clips_of(read_onetrainer({**values, "model_type": "FLUX_DEV_1"}, tmp_path)) == [None]


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("wan_train_network.py --dit a.safetensors --task i2v-14B --clip /m/seen.pth", "seen.pth"),
        ("wan_train_network.py --dit a.safetensors --task i2v-14B", ""),
        (
            "hv_1_5_train_network.py --dit a.safetensors --task i2v --image_encoder /m/clip_vision/b/s.safetensors",
            "b/s.safetensors",
        ),
        ("wan_train_network.py --dit a.safetensors --task i2v-A14B", None),  # of Wan 2.2, which reads none
        ("wan_train_network.py --dit a.safetensors --task i2v-14B-FC --clip /m/seen.pth", None),
        ("wan_train_network.py --dit a.safetensors --clip /m/seen.pth", None),
    ],
)
def test_the_clip_vision_of_musubi_tuner_is_linked_where_it_trains_by_it(line, file, tmp_path):
    brought = bring(saved(tmp_path, "a.sh", f"python {line} --dataset_config d.toml\n"))
    nodes = {each["id"]: each for each in brought.workflow["nodes"]}
    (connect,) = (each for each in nodes.values() if each["type"] == "AtelierConnectModel")
    ends = {each[0]: nodes[each[1]] for each in brought.workflow["links"]}
    slots = {each["name"]: ends[each["link"]] for each in connect["inputs"] if each["link"]}
    found = slots.get("clip_vision")
    expected = None if file is None else ("CLIPVisionLoader", [file])
    assert (found and (found["type"], found["widgets_values"])) == expected
    assert ("choose its file in the last loader" in brought.report) == (file == "")


def test_two_experts_of_other_programs_are_linked(tmp_path):
    line = "python wan_train_network.py --dit /m/low.safetensors --dit_high_noise /m/high.safetensors"
    both = saved(tmp_path, "a.sh", f"{line} --timestep_boundary 900 --dataset_config d.toml\n")
    assert read_foreign(both).models["diffusion_model_high"] == "/m/high.safetensors"
    workflow = bring(both).workflow
    nodes = {each["id"]: each for each in workflow["nodes"]}
    (connect,) = (each for each in nodes.values() if each["type"] == "AtelierConnectModel")
    ends = {each[0]: nodes[each[1]] for each in workflow["links"]}
    slots = {each["name"]: ends[each["link"]]["widgets_values"][0] for each in connect["inputs"] if each["link"]}
    assert (slots["model"], slots["model_high"]) == ("low.safetensors", "high.safetensors")
    run = read_workflow(workflow, Folders(), "", linked).config
    assert run.base_model.connected.boundary == 0.9

    job = "config: {name: a, process: [{type: sd_trainer, network: {linear: 4}, datasets: [{folder_path: /d}], train: "
    job += (
        "{switch_boundary_every: 10}, model: {name_or_path: w, arch: wan22_14b, model_kwargs: {train_low_noise: %s}}}]}"
    )
    for low, settings in (("true", {"switch_every": 10}), ("false", {"noise_range": "high"})):
        found = read_foreign(saved(tmp_path, "a.yaml", job % low))
        assert found.values["base_model"]["connected"] == settings and found.left == []
        assert ("diffusion_model_high" in found.models) == (low == "true")


GUI = {
    "LoRA_type": "LyCORIS/LoKr", "pretrained_model_name_or_path": "m", "train_data_dir": "D:/cats", "factor": 8,
    "network_dim": 16, "network_alpha": 4, "conv_dim": 8, "conv_alpha": 1, "LyCORIS_preset": "attn-mlp", "epoch": 3,
    "max_train_steps": 0, "lr_warmup": 10, "lr_scheduler": "cosine", "optimizer": "AdamW", "learning_rate": 1e-4,
    "optimizer_args": '"weight_decay=0.1" "betas=.9,.99"', "unet_lr": 2e-4, "text_encoder_lr": 0, "noise_offset": 0.05,
    "noise_offset_type": "Multires", "multires_noise_iterations": 6, "t5xxl": "x", "sdxl": False, "min_snr_gamma": 0,
    "max_resolution": "512,768", "enable_bucket": True, "bucket_reso_steps": 1, "caption_extension": ".txt",
    "wandb_api_key": "SECRET", "some_api_token": "SECRET",
}  # fmt: skip


def test_a_configuration_of_kohya_ss_is_read(tmp_path):
    found = read_foreign(saved(tmp_path, "a.json", json.dumps(GUI)))
    config = read_open(found.values)
    assert (config.lora.algorithm, config.lora.factor, config.lora.rank, config.lora.alpha) == ("lokr", 8, 16, 4)
    assert config.optimizer.part_rates == (2e-4, 0, 0) and config.optimizer.options["beta2"] == 0.99
    assert (config.train.epochs, config.scheduler.warmup_steps, config.scheduler.warmup_unit) == (3, 10, "percent")
    assert config.objective.noise_offset == 0 and config.objective.pyramid_iterations == 6
    assert config.train.bucket_step == 8 and "bucket_reso_steps = 1" in found.left
    assert "some_api_token" in found.left and not any("SECRET" in each for each in found.left)


EASY = """
[[subsets]]
image_dir = "/d/cat"
num_repeats = 5
[general_args.args]
pretrained_model_name_or_path = "m"
max_train_epochs = 2
[general_args.dataset_args]
resolution = 640
batch_size = 2
[network_args.args]
network_dim = 32
[network_args.args.network_args]
algo = "loha"
"""


def test_nested_sections_and_datasets_of_their_own_sizes_are_read(tmp_path):
    config = read_open(read_foreign(saved(tmp_path, "a.toml", EASY)).values)
    assert (config.lora.algorithm, config.lora.rank, config.train.batch_size) == ("loha", 32, 2)
    assert config.dataset.concepts[0].repeats == 5
    two = """
pretrained_model_name_or_path = "m"
[general]
enable_bucket = true
[[datasets]]
resolution = 512
{}
  [[datasets.subsets]]
  image_dir = "/a"
[[datasets]]
resolution = 1024
{}
  [[datasets.subsets]]
  image_dir = "/b"
"""
    config = read_open(read_foreign(saved(tmp_path, "b.toml", two.format("", ""))).values)
    assert [each.resolutions for each in config.dataset.concepts] == [("512",), ("1024",)]
    both = read_open(read_foreign(saved(tmp_path, "c.toml", two.format("batch_size = 2", "batch_size = 4"))).values)
    assert both.train.batch_size == 2 and [each.batch_size for each in both.dataset.concepts] == [2, 4]
    again = write_for("sd-scripts", "cat", both, read_open({"base_model": {"path": ""}})).files
    text = next(text for text in again.values() if "[[datasets]]" in text)
    assert re.findall(r"^batch_size = (\d)", text, re.M) == ["2", "2", "4"]  # of all, and of each


JOB = """
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      trigger_word: mychar
      network: {type: lora, linear: 16, linear_alpha: 8}
      save: {dtype: bf16, save_every: 250}
      datasets:
        - {folder_path: /d/cats, caption_ext: txt, resolution: [512, 768], caption_dropout_rate: 0.05, flip_x: true}
      train: {steps: 2000, batch_size: 2, lr: 1e-4, optimizer: adamw8bit, noise_scheduler: flowmatch, dtype: bf16,
              ema_config: {use_ema: true, ema_decay: 0.99}, odd: 3}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, quantize: true, assistant_lora_path: undo}
      sample: {sample_every: 100, prompts: ["a cat --ctrl_img x.png --odd 3"], width: 640, height: 512}
"""


def test_a_job_of_ai_toolkit_becomes_a_graph_with_comfyuis_loaders(tmp_path):
    path = saved(tmp_path, "a.yaml", JOB)
    found = bring(path)
    kinds = [node["type"] for node in found.workflow["nodes"]]
    assert {"UNETLoader", "DualCLIPLoader", "VAELoader", "AtelierConnectModel", "MarkdownNote"} <= set(kinds)
    assert "The run trains on top of the LoRA undo; add it by Existing LoRA, beneath." in found.report
    assert "train.odd = 3" in found.report and "sample prompt --odd" in found.report and found.text == ""
    read = read_foreign(path)
    assert read.family == "flux" and read.models["diffusion_model"] == "black-forest-labs/FLUX.1-dev"
    run = read_workflow(found.workflow, Folders(), "", linked).config
    assert (run.lora.rank, run.lora.alpha, run.train.steps, run.optimizer.ema_decay) == (16, 8, 2000, 0.99)
    assert run.dataset.concepts[0].resolutions == ("512", "768") and run.sample.prompts == ("a cat --ci x.png",)


def test_differential_guidance_of_ai_toolkit_counts_beside_its_guidance_loss(tmp_path):
    def read(settings):
        found = read_foreign(saved(tmp_path, "a.yaml", JOB.replace("odd: 3", settings)))
        assert found.left == ["sample prompt --odd = '3'"]
        return found.values.get("objective", {}), " ".join(map(str, found.open))

    objective, said = read("do_guidance_loss: true, do_differential_guidance: true")
    assert (objective["guidance_loss"], objective["differential_guidance"]) == (3.0, 3.0) and "guidance" not in said
    objective, said = read("do_differential_guidance: true, differential_guidance_scale: 4")
    assert "differential_guidance" not in objective
    assert "which is off in this job; set differential_guidance of Noise & Loss to 4 to have it here." in said


def test_what_a_file_leaves_open_is_named_at_its_node(tmp_path):
    found = bring(saved(tmp_path, "a.toml", "network_dim = 8\nnetwork_alpha = 4\nmax_train_steps = 10\n"))
    kinds = {str(node["id"]): node["type"] for node in found.workflow["nodes"]}
    assert {kinds[node] for node in found.open} == {"AtelierLoadBaseModel", "AtelierConceptDataset"}
    assert "Choose these before you train" in found.report


def test_files_that_a_file_names_are_read_from_its_own_folder_alone(tmp_path):
    (tmp_path / "outside.toml").write_text("max_train_steps = 7\n", encoding="utf-8")
    folder = tmp_path / "own"
    folder.mkdir()
    text = f"python train_network.py --pretrained_model_name_or_path m --config_file {tmp_path / 'outside.toml'}"
    found = read_foreign(saved(folder, "a.sh", text))
    assert found.values["train"]["steps"] == 1600 and any("outside.toml" in each for each in found.open)
    (folder / "in.toml").symlink_to(tmp_path / "outside.toml")
    found = read_foreign(saved(folder, "b.sh", text.replace(str(tmp_path / "outside.toml"), "in.toml")))
    assert found.values["train"]["steps"] == 1600


FULL = {
    "base_model": {"path": "/m/b.safetensors", "clip_skip": 2, "precision": "bfloat16", "prediction": "v_prediction"},
    "lora": {"rank": 32, "alpha": 16.0, "preset": "full", "conv_rank": 8, "conv_alpha": 4.0, "dora": True},
    "optimizer": {"name": "adamw8bit", "options": {"weight_decay": 0.1, "beta2": 0.99}, "learning_rate": 2e-4}
    | {"text_encoder_learning_rate": 5e-5},
    "scheduler": {"name": "cosine_with_restarts", "cycles": 3, "warmup_steps": 10, "warmup_unit": "percent"},
    "objective": {"min_snr_gamma": 5.0, "noise_offset": 0.05, "max_timestep": 899, "stratified_timesteps": True},
    "train": {"epochs": 4, "batch_size": 3, "accumulate": 2, "seed": 7, "resolution": 768, "bucket_step": 64},
    "dataset": {
        "concepts": [
            {"folder": "/d/cats", "repeats": 3.0, "flip": True, "captions": {"shuffle": True, "keep": 1}},
            {"folder": "/d/reg", "role": "regularisation"},
        ]
    },
}  # fmt: skip


ENDINGS = {"sd-scripts": ".toml", "ai-toolkit": ".yaml", "onetrainer": ".json"}


@pytest.mark.parametrize("program", ENDINGS)
def test_clips_are_not_listed_where_the_model_trains_none(program):
    clips = {"concepts": [{"folder": "a", "clips": {"frames": [49], "take": "chunk"}}]}
    config, usual = read_open({**PLAIN_RUN, "dataset": clips}), read_open({"base_model": {"path": ""}})
    assert not [each for each in write_for(program, "cat", config, usual).left if "Clips" in each]


@pytest.mark.parametrize("program", ["sd-scripts", "ai-toolkit"])
def test_sub_folders_are_written_for_programs_that_read_none(tmp_path, program):
    def written(*concepts):
        config = read_open({**PLAIN_RUN, "dataset": {"concepts": concepts}})
        text = "".join(write_for(program, "cat", config, read_open({"base_model": {"path": ""}})).files.values())
        places = re.findall(r'(?:image_dir|folder_path)"?\s*[=:]\s*"([^"]+)"', text)
        repeats = re.findall(r'num_repeats"?\s*[=:]\s*(\d+)', text)
        return {
            Path(place).relative_to(tmp_path).as_posix(): int(number)
            for place, number in zip(places, repeats, strict=True)
        }

    for name in ("cats/a.png", "cats/10_deep/inner/b.JPG", "cats/empty/notes.txt", "dogs/10_x/c.webp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    cats = {**CATS, "folder": str(tmp_path / "cats"), "repeats": 2.0}
    dogs = {**CATS, "folder": str(tmp_path / "dogs"), "folder_repeats": False}
    assert written(cats, dogs) == {"cats": 2, "cats/10_deep/inner": 20, "dogs/10_x": 1}
    assert written({**dogs, "recursive": False}) == {"dogs": 1}


@pytest.mark.parametrize("program", [*ENDINGS])
def test_what_is_exported_is_read_back_as_it_was(tmp_path, capsys, program):
    (tmp_path / "run.toml").write_text(write_run(RunFile(name="cat", config=read_open(FULL))), encoding="utf-8")
    to = tmp_path / f"theirs{ENDINGS[program]}"
    assert main(["export", str(tmp_path / "run.toml"), str(to), "--for", program]) == 0
    said = capsys.readouterr().out
    assert f"{program} cannot say:" in said and "stratified_timesteps = True" in said
    if program == "sd-scripts":
        text = to.read_text(encoding="utf-8") + 'dataset_config = "theirs-dataset.toml"\n'
        to.write_text(text, encoding="utf-8")
    found = read_foreign(to)
    was, config = read_open(FULL), read_open(found.values)
    assert found.name == "cat" and config.base_model.path == was.base_model.path
    assert (config.lora.rank, config.lora.alpha) == (32, 16) and config.optimizer.name == "adamw8bit"
    if program == "ai-toolkit":  # which has one rate for all
        assert "text_encoder_learning_rate of Optimizer = 5e-05" in said or "text_encoder_learning_rate = 5e-05" in said
    else:
        assert config.optimizer.part_rates == was.optimizer.part_rates
    gamma = 0 if program == "ai-toolkit" else 5  # which weighs the loss of a v prediction like noise
    assert config.optimizer.options["weight_decay"] == 0.1 and config.objective.min_snr_gamma == gamma
    assert (config.train.batch_size, config.train.accumulate) == (3, 2)
    assert config.dataset.concepts[0].role == "train" and config.dataset.concepts[0].flip
    assert config.dataset.concepts[0].repeats == 3 and config.dataset.concepts[0].captions.shuffle
    if program == "sd-scripts":
        assert config.lora == was.lora and config.scheduler == was.scheduler and config.train.seed == 7
        assert (config.train.epochs, config.train.resolution) == (4, 768)
        assert config.objective.replace(stratified_timesteps=True) == was.objective
        assert (config.base_model.clip_skip, config.base_model.prediction) == (2, "v_prediction")
    assert main(["export", str(tmp_path / "run.toml"), str(to), "--for", program]) == 2
    assert "exists already" in capsys.readouterr().err


PLAIN_RUN = {
    "base_model": {"path": "/m/xl.safetensors", "precision": "bfloat16"},
    "train": {"epochs": 5, "resolution": 768, "batch_size": 2, "save_dtype": "float16"},
    "optimizer": {"learning_rate": 1e-4, "text_encoder_learning_rate": 1e-4, "text_encoder_2_learning_rate": 1e-4},
    "lora": {"rank": 16, "alpha": 8.0, "preset": "attn-mlp"},
}
CATS = {"folder": "/d/cats", "captions": {"dropout": 0.1, "missing": "empty"}}
MASKED = {"unmasked_weight": 0.2, "unmasked_probability": 0.0, "missing": "ones"}
KINDS = {  # section.name = value, of one concept concepts.name -> the programs that can say it
    "lora.algorithm=lokr lora.factor=8": "sd-scripts ai-toolkit onetrainer",
    "lora.algorithm=loha": "sd-scripts onetrainer",
    "lora.dora=true": "sd-scripts ai-toolkit onetrainer",
    "lora.algorithm=oft": "sd-scripts onetrainer",
    "lora.dropout=0.1": "sd-scripts ai-toolkit onetrainer",
    'concepts.masks={"source":"alpha","unmasked_weight":0.0,"unmasked_probability":0.0}': "sd-scripts ai-toolkit",
    f"concepts.masks={json.dumps(MASKED, separators=(',', ':'))}": "onetrainer",
    f"concepts.masks={json.dumps({**MASKED, 'folder': '/m'}, separators=(',', ':'))}": "ai-toolkit",
    "optimizer.ema_decay=0.99": "ai-toolkit onetrainer",
    'sample.prompts=["cat","dog"] saves.sample_every=50 sample.steps=9': "sd-scripts ai-toolkit onetrainer",
    'sample.prompts=["cat","dog"] saves.sample_every=50 sample.sampler=dpmpp_2m': "sd-scripts",
    'sample.prompts=["cat","dog"] saves.sample_every=50 sample.sampler=lcm': "",
    "scheduler.name=cosine_with_restarts scheduler.cycles=3": "sd-scripts onetrainer",
    "scheduler.min_lr_ratio=0.1": "sd-scripts ai-toolkit onetrainer",
    "objective.loss=l1 objective.noise_offset=0.05": "sd-scripts ai-toolkit onetrainer",
    "objective.guidance_loss=3.5 objective.differential_guidance=2.0": "ai-toolkit",
    "objective.differential_guidance=2.0": "",
    "objective.nearest_noise=16": "ai-toolkit",
    'optimizer.name=automagic optimizer.options={"beta2":0.99,"weight_decay":0.01}': "ai-toolkit",
    "objective.weighting=debiased": "sd-scripts onetrainer",
    "objective.weighting=p2": "onetrainer",
    "objective.min_timestep=100 objective.max_timestep=899": "sd-scripts onetrainer",
    "base_model.prediction=v_prediction": "sd-scripts ai-toolkit onetrainer",
    "base_model.vae=/v.safetensors": "sd-scripts ai-toolkit onetrainer",
    "train.validation_share=0.1": "sd-scripts",
    'concepts.augment={"brightness":0.2,"rotation":5.0}': "onetrainer",
    "concepts.loss_weight=0.5": "ai-toolkit onetrainer",
}


def values_of(text):
    found = copy.deepcopy({**PLAIN_RUN, "dataset": {"concepts": [CATS, {**CATS, "folder": "/d/two", "repeats": 2.0}]}})
    for part in text.split():
        name, _, value = part.partition("=")
        section, _, field = name.partition(".")
        value = json.loads(value) if value[0] in "[{0123456789t" else value
        target = found["dataset"]["concepts"] if section == "concepts" else [found.setdefault(section, {})]
        for each in target:  # masks are of all concepts in OneTrainer
            each[field] = value
    return found


@pytest.mark.parametrize("program", [*ENDINGS])
@pytest.mark.parametrize("text", KINDS)
def test_each_kind_of_setting_comes_back_or_is_listed(tmp_path, program, text):
    was = read_open(values_of(text))
    written = write_for(program, "cat", was, read_open({"base_model": {"path": ""}}), "theirs")
    for ending, content in written.files.items():
        saved(tmp_path, f"theirs{ending or ENDINGS[program]}", content)
    found = read_foreign(tmp_path / f"theirs{ENDINGS[program]}")
    now = read_open(found.values)
    assert found.left in ([], ["oft_block_size = 32"])
    assert [(each.folder, each.repeats) for each in now.dataset.concepts] == [("/d/cats", 1), ("/d/two", 2)]
    lost = []
    for name in (part.partition("=")[0] for part in text.split()):
        section, field = name.split(".")
        one, other = (
            [getattr(each, field) for each in run.dataset.concepts] if section == "concepts" else
            [getattr(getattr(run, section), field)]
            for run in (was, now)
        )  # fmt: skip
        in_lines = section == "sample" and f"{now.sample.prompts}".count("--s 9") == 2  # of each sample, not of all
        if field == "augment":
            other = [each and each.replace(variants=4) for each in other]
        lost += [name] if one != other and not in_lines else []
    assert (lost == []) == (program in KINDS[text].split())
    told = "\n".join(written.left)
    parts = {"masks": "masks.|Mask Loader", "augment": "augment.|Augmentation", "algorithm": "algorithm|rank"}
    parts["options"] = "name of Optimizer"
    fields = [name.split(".")[1] for name in lost]
    assert all(re.search(parts.get(field, field), told) for field in fields), (lost, told)


@pytest.mark.parametrize("program", [*ENDINGS])
def test_an_optimizer_that_a_program_has_not_is_listed(tmp_path, capsys, program):
    rates = {"learning_rate": 1e-4, "text_encoder_learning_rate": 1e-5}
    values = {**FULL, "optimizer": {**rates, "name": "muon"}}
    (tmp_path / "run.toml").write_text(write_run(RunFile(name="cat", config=read_open(values))), encoding="utf-8")
    assert (
        main(["export", str(tmp_path / "run.toml"), str(tmp_path / f"theirs{ENDINGS[program]}"), "--for", program]) == 0
    )
    assert "optimizer.name = 'muon'" in capsys.readouterr().out


def test_paths_are_compared_as_paths(tmp_path):
    for path in ("./models/b.safetensors", "D:/m/b.safetensors", "D:\\m\\b.safetensors", "b"):
        found = bring(saved(tmp_path, "a.toml", f"network_dim = 8\npretrained_model_name_or_path = '{path}'\n"))
        assert found.workflow["nodes"][0]["widgets_values"][0] == path.replace("\\", "/").rpartition("/")[2]


def test_an_open_rate_is_not_guessed(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('name = "a"\n[base_model]\npath = "m"\n', encoding="utf-8")
    assert main(["export", str(tmp_path / "run.toml"), str(tmp_path / "a.toml"), "--for", "sd-scripts"]) == 2
    assert "is open; export a run's folder" in capsys.readouterr().err


PIPE = """
output_dir = "/out/cat"
dataset = "dataset.toml"
epochs = 20
micro_batch_size_per_gpu = 2
gradient_clipping = 1.0
warmup_steps = 10
[model]
type = "wan"
ckpt_path = "/m/wan.safetensors"
dtype = "bfloat16"
timestep_sample_method = "logit_normal"
odd = 1
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "adamw_optimi"
lr = 2e-5
betas = [0.9, 0.99]
"""
TUNER = {
    "--model_type": "lora", "--model_family": "sdxl", "--pretrained_model_name_or_path": "/m/xl.safetensors",
    "--lora_rank": 8, "--max_train_steps": 300, "--train_batch_size": 2, "--learning_rate": "2e-4", "--odd": "x",
    "--data_backend_config": "backends.json", "--output_dir": "out/my+cat", "--lr_warmup_steps": 5,
}  # fmt: skip
BACKENDS = [
    {"id": "a", "type": "local", "instance_data_dir": "/d/a", "caption_strategy": "textfile", "repeats": 4,
     "resolution": 1, "resolution_type": "area"},
    {"id": "t", "dataset_type": "text_embeds"},
]  # fmt: skip


def test_a_list_of_backends_alone_is_read(tmp_path):
    square = {"id": "b", "type": "local", "instance_data_dir": "/d/b", "crop": True, "crop_aspect": "square"}
    found = read_foreign(saved(tmp_path, "all.json", json.dumps([*BACKENDS, square, {**square, "disabled": True}])))
    concepts = found.values["dataset"]["concepts"]
    assert [(each["folder"], each["resolutions"]) for each in concepts] == [("/d/a", ["1000"]), ("/d/b", ["1024x1024"])]
    assert found.program == "SimpleTuner" and found.left == []
    pixel = [{**BACKENDS[0], "resolution_type": "pixel", "resolution": 768}]
    assert read_foreign(saved(tmp_path, "pixel.json", json.dumps(pixel))).left == ["resolution_type = 'pixel'"]


def test_a_preset_of_kohya_without_a_model_is_read(tmp_path):
    preset = {"max_resolution": "768,768", "train_batch_size": 4, "batch_size": 8, "learning_rate": 1e-5}
    found = read_foreign(saved(tmp_path, "preset.json", json.dumps(preset)))
    assert found.values["base_model"]["path"] == "" and found.values["train"]["batch_size"] == 4


def test_the_common_part_of_diffusion_pipe_and_simpletuner_is_read(tmp_path):
    saved(tmp_path, "dataset.toml", 'resolutions = [512]\n[[directory]]\npath = "/d/a"\nnum_repeats = 3\n')
    found = read_foreign(saved(tmp_path, "a.toml", PIPE))
    assert found.name == "cat" and found.family == "wan" and found.left == ["model.odd = 1"]
    config = read_open(found.values | {"base_model": {"path": "m", "precision": "bfloat16"}})
    assert (config.lora.rank, config.lora.alpha, config.train.epochs, config.train.batch_size) == (32, 32, 20, 2)
    assert config.optimizer.learning_rate == 2e-5 and config.optimizer.options["beta2"] == 0.99
    assert config.dataset.concepts[0].repeats == 3 and config.dataset.concepts[0].resolutions == ("512x512",)
    files = 'diffusion_model = "/m/z.safetensors"\nvae = "/m/v.safetensors"\nmerge_adapters = ["/m/undo.safetensors"]\n'
    files += 'text_encoders = [{paths = ["/m/a.safetensors", "/m/b.safetensors"], type = "flux"}]\n'
    found = read_foreign(saved(tmp_path, "files.toml", PIPE.replace('ckpt_path = "/m/wan.safetensors"\n', files)))
    assert [Path(each).stem for each in found.models.values()] == ["z", "v", "a", "b"]
    assert found.left == ["model.odd = 1"] and any("undo" in f"{each}" for each in found.open)
    shapes = "resolutions = [512]\nenable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2.0\nnum_ar_buckets = 7\n"
    found = read_foreign(saved(tmp_path, "shapes.toml", f'{shapes}frame_buckets = [1]\n[[directory]]\npath = "/d/a"\n'))
    assert found.left == ["min_ar = 0.5", "max_ar = 2.0", "num_ar_buckets = 7"]
    assert found.values["dataset"]["concepts"][0]["resolutions"] == ["512"]
    saved(tmp_path, "backends.json", json.dumps(BACKENDS))
    path = saved(tmp_path, "b.json", json.dumps(TUNER))
    found = read_foreign(path)
    config = read_open(found.values)
    assert found.left == ["odd = 'x'"] and bring(path).name == "my_cat"
    assert (config.lora.rank, config.lora.alpha, config.train.steps) == (8, 8, 300)
    assert config.optimizer.part_rates == (2e-4, 0, 0) and config.scheduler.name == "constant"
    (concept,) = config.dataset.concepts
    assert (concept.repeats, concept.resolutions) == (5, ("1000",))
    flow = {**TUNER, "--model_family": "flux", "--mixflow_enabled": True, "--flow_schedule_shift": 2}
    read = read_open(read_foreign(saved(tmp_path, "flow.json", json.dumps(flow))).values).objective
    assert (read.mixflow, read.timestep_distribution, read.beta_a, read.beta_b) == (0.8, "beta", 1, 2)
    assert read.timestep_shift == 2


ODD = (None, [], {}, "", "abc", True, -1, 0.5, 10**30, float("inf"), float("nan"), "1e999", [None], "\0", "é" * 3000)
IN_PYTHONS_WORDS = re.compile(r"invalid literal|could not convert|object|NoneType|subscript|unpack|null byte")


def places(value, path=()):
    """Yield where each value in a nested one is."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def with_odd(value, path, odd):
    """Return the nested value with another in one place."""
    changed = inner = copy.deepcopy(value)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return changed


@pytest.mark.parametrize(
    ("readers", "values"),
    [
        (OBJECTS, read_yaml(JOB)),
        (OBJECTS, GUI),
        (OBJECTS, ONE),
        (OBJECTS, TUNER),
        (TABLES, read_toml(FLAT)),
        (TABLES, read_toml(PIPE)),
        (TABLES, read_toml('pretrained_model_name_or_path = "m"\n' + DATASETS)),
        (TABLES, read_toml(EASY)),
    ],
    ids=["ai-toolkit", "kohya_ss", "OneTrainer", "SimpleTuner", "sd-scripts", "diffusion-pipe", "datasets", "easy"],
)
def test_an_odd_value_anywhere_ends_in_settings_or_in_one_sentence(tmp_path, readers, values, pytestconfig):
    saved(tmp_path, "dataset.toml", '[[directory]]\npath = "/d/a"\n')
    tried = told = 0
    share = 1 if pytestconfig.getoption("thorough") else 3  # else each place gets every third of them
    for number, path in enumerate(places(values)):
        for odd in ODD[number % share :: share]:
            tried += 1
            try:
                found = read_values(readers, with_odd(values, path, odd), tmp_path)
                found.drop_without_effect()
                read_open(found.values)
            except ValueError as problem:
                told += 1
                sentence = str(problem)
                assert "\n" not in sentence and len(sentence) < 400, (path, odd)
                assert not IN_PYTHONS_WORDS.search(sentence), (path, odd, sentence)
    assert 0 < told < tried
