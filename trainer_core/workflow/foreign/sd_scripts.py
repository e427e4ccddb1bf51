"""Read the settings of sd-scripts' train_network and its siblings, which several programs build: by its argument names.

Source of names and defaults: the argument parsers and the dataset schema of sd-scripts 0.9 and 0.10.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...common.json_files import parse_json
from ...common.wording import say
from ...config import ALGORITHMS, OPTIMIZERS, instead_of, node
from ...config.optimizer import RATES
from ...config.prompt_lines import SAMPLERS
from ...config.sample import OWN_SAMPLERS
from ...data.captions import FIXED_SEPARATOR, SECONDARY_SEPARATOR
from ..toml_text import read_toml
from .clips import MUSUBI, musubi_clips, put_boundary, put_experts, put_vision
from .imported import (
    TEXT_ENCODERS,
    Convert,
    Given,
    Imported,
    number,
    on,
    optimizer_named,
    put_prompts,
    real,
    table,
    tables,
    take,
    told_word,
    whole,
    without_counterpart,
)
from .prompt_files import read_prompts
from .texts import Command, arguments, beside, placed, read_script

PROGRAM = "sd-scripts"
DATASETS = "-dataset.toml"  # follows the name of a file, of the list of datasets beside it
LISTS = frozenset({"network_args", "optimizer_args", "lr_scheduler_args", "text_encoder_lr", "base_weights"}) | {
    "base_weights_multiplier"
}
DEFAULTS: dict[str, Any] = {  # of what is read or listed; all else is off, or empty
    "caption_extension": ".caption",
    "caption_separator": ",",
    "keep_tokens": 0,
    "caption_dropout_rate": 0.0,
    "caption_dropout_every_n_epochs": 0,
    "caption_tag_dropout_rate": 0.0,
    "token_warmup_min": 1,
    "token_warmup_step": 0,
    "num_repeats": 1,
    "dataset_repeats": 1,
    "batch_size": 1,
    "min_bucket_reso": 256,
    "max_bucket_reso": 1024,
    "bucket_reso_steps": 64,
    "train_batch_size": 1,
    "max_train_steps": 1600,
    "gradient_accumulation_steps": 1,
    "mixed_precision": "no",
    "learning_rate": 2e-6,
    "max_grad_norm": 1.0,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_decay_steps": 0,
    "lr_scheduler_num_cycles": 1,
    "lr_scheduler_power": 1,
    "network_module": "networks.lora",
    "network_dim": 4,
    "network_alpha": 1,
    "loss_type": "l2",
    "huber_schedule": "snr",
    "huber_c": 0.1,
    "huber_scale": 1.0,
    "multires_noise_discount": 0.3,
    "prior_loss_weight": 1.0,
    "optimizer_type": "AdamW",
    "output_name": "last",
    "max_timestep": 1000,
    "min_timestep": 0,
    "save_model_as": "safetensors",
}
PRECISIONS = {"no": "float32", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}
LOSSES = {"l2": "mse", "l1": "l1", "huber": "huber", "smooth_l1": "smooth_l1"}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "cosine_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {  # where those of the library differ from ours
    "adafactor": {"relative_step": True, "scale_parameter": True},
    "came": {"weight_decay": 0.0},
    "lion": {"weight_decay": 0.0},
    "lion8bit": {"weight_decay": 0.0},
    "paged_lion8bit": {"weight_decay": 0.0},
    "prodigy": {"weight_decay": 0.0, "use_bias_correction": False, "safeguard_warmup": False, "slice_p": 1},
    "prodigy_plus_schedule_free": {"weight_decay": 0.0},
    "radam": {"weight_decay": 0.0},
    "schedulefree_adamw": {"weight_decay": 0.0},
    "soap": {"max_precondition_dim": 10_000},
}
PLAIN: dict[str, tuple[str, Convert]] = {  # of sd-scripts -> our setting, and how its value is read
    "vae": ("base_model.vae", str),
    "train_batch_size": ("train.batch_size", whole),
    "gradient_accumulation_steps": ("train.accumulate", whole),
    "seed": ("train.seed", whole),
    "validation_split": ("train.validation_share", real),
    "validate_every_n_steps": ("train.validate_every", whole),
    "max_grad_norm": ("optimizer.max_grad_norm", real),
    "scale_weight_norms": ("lora.scale_weight_norms", real),
    "noise_offset": ("objective.noise_offset", real),
    "ip_noise_gamma": ("objective.input_perturbation", real),
}
FLAGS: dict[str, tuple[str, Any]] = {  # switched on -> our setting and its value
    "v_parameterization": ("base_model.prediction", "v_prediction"),
    "zero_terminal_snr": ("base_model.zero_terminal_snr", "on"),
    "fp8_base": ("base_model.weights", "float8"),
    "full_bf16": ("lora.dtype", "bfloat16"),
    "weighted_captions": ("base_model.prompt_weights", True),
    "gradient_checkpointing": ("memory.checkpointing", "full"),
    "torch_compile": ("memory.compile", True),
    "compile": ("memory.compile", True),
    "noise_offset_random_strength": ("objective.noise_offset_strength", "random"),
    "sample_at_first": ("saves.sample_at_start", True),
}
TELLING = {  # arguments that the scripts of one family alone have, of a file that names no script
    "qwen3": "anima", "gemma2": "lumina2", "byt5": "hunyuan_image", "clip_g": "sd3", "ae": "flux",
    "apply_lg_attn_mask": "sd3", "clip_l_dropout_rate": "sd3", "clip_g_dropout_rate": "sd3", "t5_dropout_rate": "sd3",
    "pos_emb_random_crop_rate": "sd3", "enable_scaled_pos_embed": "sd3", "training_shift": "sd3",
    "guidance_scale": "flux",
}  # fmt: skip
WITH_T5 = ("flux", "sd3")  # whose scripts share these arguments; names of models tell the two apart
OF_BOTH = ("t5xxl", "clip_l", "apply_t5_attn_mask", "t5xxl_max_token_length")
OF_FLUX = ("timestep_sampling", "discrete_flow_shift", "model_prediction_type", "sigmoid_scale")  # of the two
MODEL_NAMES = {r"flux": "flux", r"sd[-_. ]?3|stable[-_. ]?diffusion[-_. ]?3": "sd3"}
FAMILIES = {  # words in the name of a script -> the family that it trains
    "flux_2": "flux2",
    "flux": "flux",
    "sd3": "sd3",
    "lumina": "lumina2",
    "hunyuan_image": "hunyuan_image",
    "chroma": "chroma",
    "anima": "anima",
    "hv_1_5": "hunyuan_video_15",
    "hv_": "hunyuan_video",
    "fpack": "framepack",
    "wan": "wan",
    "qwen_image": "qwen_image",
    "zimage": "z_image",
    "kandinsky": "kandinsky5",
    "hidream": "hidream",
    "ideogram4": "ideogram4",
    "krea2": "krea2",
}  # those below chroma are scripts of musubi-tuner
MODELS = {  # of a family -> the role of the file
    "pretrained_model_name_or_path": "diffusion_model",
    "ae": "vae",
    "vae": "vae",
    "clip_l": "text_encoder_2",
    "t5xxl": "text_encoder_1",
    "clip_g": "text_encoder_3",
    "gemma2": "text_encoder_1",
    "qwen3": "text_encoder_1",
    "text_encoder": "text_encoder_1",
    "byt5": "text_encoder_2",
    "dit": "diffusion_model",
    "text_encoder1": "text_encoder_1",
    "text_encoder2": "text_encoder_2",
    "t5": "text_encoder_1",
}


class Flow(NamedTuple):
    """What a script for flow models takes where its arguments say nothing."""

    sampling: str = "sigma"
    shift: float = 1.0
    prediction: str = "raw"
    guidance: float | None = None
    weighs: bool = True  # the loss by weighting_scheme; else only with sigma_scaled


FLOW = Flow()  # of musubi-tuner
FLOWS = {  # of the families of sd-scripts
    "flux": Flow(shift=3.0, prediction="sigma_scaled", guidance=3.5, weighs=False),
    "chroma": Flow(shift=3.0, prediction="sigma_scaled", weighs=False),
    "lumina2": Flow("shift", 6.0, weighs=False),
    "hunyuan_image": Flow(shift=5.0, weighs=False),
    "anima": Flow("sigmoid"),
}
TRAINED_TEXTS = {"flux": 1, "sd3": 2, "lumina2": 1, "anima": 1}  # how many of a family, unless it is switched off
OF_SNR = ("min_snr_gamma", "v_pred_like_loss", "debiased_estimation_loss", "scale_v_pred_loss_like_noise_pred")
WEIGHED = {"sigma_sqrt": "sigma_sqrt", "cosmap": "cos_map"}
CAPTIONS: dict[str, tuple[str, Convert]] = {  # of a folder -> field of its captions
    "shuffle_caption": ("shuffle", bool),
    "keep_tokens": ("keep", whole),
    "caption_dropout_rate": ("dropout", real),
    "caption_dropout_every_n_epochs": ("dropout_every_n_epochs", whole),
    "caption_tag_dropout_rate": ("tag_dropout", real),
    "caption_prefix": ("prefix", str),
    "caption_suffix": ("suffix", str),
    "caption_separator": ("separator", str),
    "enable_wildcard": ("wildcards", bool),
    "class_tokens": ("class_prompt", str),
    "token_warmup_min": ("tag_warmup_min", whole),
    "token_warmup_step": ("tag_warmup_steps", whole),
}
OF_A_FOLDER = frozenset(CAPTIONS) | {
    "caption_extension", "flip_aug", "random_crop", "color_aug", "alpha_mask", "num_repeats", "resolution",
    "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale", "batch_size",
    "validation_split", "face_crop_aug_range", "keep_tokens_separator", "secondary_separator",
}  # fmt: skip
NETWORK: dict[str, tuple[str, Convert]] = {  # of network_args
    "rank_dropout": ("lora.rank_dropout", real),
    "module_dropout": ("lora.module_dropout", real),
    "dropout": ("lora.dropout", real),
    "factor": ("lora.factor", whole),
    "constraint": ("lora.constraint", real),
    "loraplus_lr_ratio": ("optimizer.lora_plus_ratio", real),
}
SWITCHES = {  # of network_args, switched on
    "use_tucker": "lora.tucker",
    "use_cp": "lora.tucker",
    "use_scalar": "lora.use_scalar",
    "train_norm": "lora.train_norm",
    "rs_lora": "lora.rs_lora",
    "dora_wd": "lora.dora",
    "weight_decompose": "lora.dora",
    "full_matrix": "lora.full_matrix",
    "decompose_both": "lora.decompose_both",
    "rank_dropout_scale": "lora.rank_dropout_scale",
}
BLOCKS = {  # of network_args: a number for each block
    "block_dims": ("lora.block_ranks", whole),
    "block_alphas": ("lora.block_alphas", real),
    "conv_block_dims": ("lora.conv_block_ranks", whole),
    "conv_block_alphas": ("lora.conv_block_alphas", real),
}
SEPARATORS = {"keep_tokens_separator": FIXED_SEPARATOR, "secondary_separator": SECONDARY_SEPARATOR}
COLOURS = (0.02, 0.1)  # by how much color_aug turns hue and changes saturation
LARGEST_RANK = 4097
POLYNOMIAL_END = 1e-7  # the rate at which a polynomial ends there
WITHOUT_EFFECT = re.compile(  # on what is trained: places, speed, what is always done here, and what is read elsewhere
    "output_dir|logging_dir|log_prefix|log_tracker_.*|log_config|wandb_.*|config_file|cache_.*|vae_batch_size"
    "|xformers|sdpa|mem_eff_attn|max_data_loader_n_workers|persistent_data_loader_workers|save_model_as|no_half_vae|v2"
    "|max_token_length|lowram|highvram|save_state.*|no_metadata|metadata_.*|training_comment|skip_cache_check|resume.*"
    "|huggingface_.*|async_upload|dynamo_backend|ddp_.*|tokenizer_cache_dir|disable_mmap.*|debug_dataset|num_cpu_threads.*"
    "|console_log_.*|noise_offset_type|epoch|save_last_n_.*_state|output_config|sdxl|train_mode|split_mode|blocks_to_swap|fused_backward_pass"
    "|image_directory|video_directory|cache_directory|dit_dtype|task|fp8_.*|vae_.*|split_attn|text_encoder_cpu|caption_extention|deepspeed|zero_stage|offload_.*|dataset_class|is_reg|custom_attributes|train_text_encoder"
    "|compile_.*|cuda_.*|flash_attn|flash3|attn_mode|use_pinned_memory.*|.*_offloading|block_swap_.*|img_in_txt_in.*"
)
KNOWN = frozenset(DEFAULTS) | PLAIN.keys() | FLAGS.keys() | {"pretrained_model_name_or_path", "network_args"}


NUMBERS = {name for name, value in DEFAULTS.items() if not isinstance(value, str)} | {
    *(name for name, (_, convert) in PLAIN.items() if convert is not str),
    *("unet_lr", "text_encoder_lr", "max_train_epochs", "clip_skip", "min_snr_gamma", "save_every_n_epochs"),
    "resolution",
}  # what a script's open variable leaves to the program's default


def recognises(values: Mapping[str, Any]) -> bool:
    """Tell whether a file's values, sections brought together, are arguments of sd-scripts."""
    return len(KNOWN & flat(values).keys()) > 1 or "pretrained_model_name_or_path" in values or "datasets" in values


def read_file(text: str, suffix: str, folder: Path) -> Imported:
    """Read a script, or a line with its arguments; folder: in which relative paths start."""
    command = read_script(text, suffix)
    given, left = arguments(command.words, LISTS)
    if not command.program and len(KNOWN & given.keys()) < 2 and "config_file" not in given:
        raise ValueError("it holds no command that trains; choose the script that calls train_network.py")
    if command.program == "train.py" and len(KNOWN & given.keys()) < 2:  # of programs that read a file instead
        raise ValueError("it calls train.py, which takes its settings from a file; choose that file")
    if "data_backend_config" in given:
        raise ValueError("it starts SimpleTuner by arguments; choose its config.json")
    return read_command(command, given, left, folder)


def read_command(command: Command, given: dict[str, Any], left: list[str], folder: Path) -> Imported:
    """Read the arguments of a command, over those of the file that it names by --config_file."""
    opened: list[str] = []
    if file := given.get("config_file"):
        named = str(file) if Path(str(file)).suffix else f"{file}.toml"
        values = beside(folder, named)
        if values is None:
            opened.append(say("The script takes settings from {0}, which does not lie beside it; put it there.", named))
        else:
            given = {**flat(read_toml(values)), **given}
    wanted = {each: [name for name, value in given.items() if each in str(value)] for each in command.open}
    numbers = {name for names in wanted.values() for name in names if name in NUMBERS}
    found = read_sd_scripts({k: v for k, v in given.items() if k not in numbers}, folder, script=command.program)
    found.open += opened
    for each, names in wanted.items():
        told = say("The script leaves {0} open; set what it stands for.", each)
        if names:
            told = say("The script leaves {0} open, for {1}; set what it stands for.", each, ", ".join(names[:5]))
        found.open.append(told)
    if command.unsure:
        added = ", ".join(map(told_word, command.unsure[:20]))
        found.open.append(say("The script adds these under a condition; check them: {0}.", added))
    for word in left:
        if word not in command.open:
            found.leave("argument", told_word(word))
    if command.others:
        found.leave("other commands of the script that train", command.others)
    return found


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the sections of a configuration together, as sd-scripts does; a list of datasets stays."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= value if isinstance(value, Mapping) and name != "general" else {name: value}
    return found


def read_sd_scripts(values: Mapping[str, Any], folder: Path, script: str = "", program: str = PROGRAM) -> Imported:
    """Read the arguments of a training script, by name; folder: in which relative paths start."""
    given = Given(_whole_model(values, script) if script.endswith(".py") else values, DEFAULTS)
    found = Imported(program=program, name=str(given.take("output_name")))
    named = script or str(given.take("network_module") or "").rpartition(".")[2]  # which tells it, too
    family = next((each for word, each in FAMILIES.items() if word in named), "")
    if given.take("dit"):
        found.program = found.program.replace(PROGRAM, "musubi-tuner")
        family = family or re.sub(r"_?train.*", "", script) or "hunyuan_video"  # its first, whose modules tell nothing
    elif not script:
        family = family or _told_family(values)
    family = "chroma" if family == "flux" and given.take("model_type") == "chroma" else family
    second = _second(given, script, program)
    _model(found, given, family, second=second)
    _length(found, given)
    for name, (setting, convert) in PLAIN.items():
        take(found, given, name, setting, convert)
    for name, (setting, value) in FLAGS.items():
        if on(given.take(name)) and (name != "noise_offset_random_strength" or given.take("noise_offset")):
            found.put(setting, value)
    if not given.take("ip_noise_gamma"):
        given.ignore(("ip_noise_gamma_random_strength",))
    _precision(found, given)
    _noise(found, given)
    put_schedule(found, given)
    _optimizer(found, given, second=second, family=family)
    put_network(found, given, family)
    if given.take("save_model_as") in ("ckpt", "pt"):
        found.not_pickled("save_model_as", given.take("save_model_as"))
    _intervals(found, given, folder)
    _folders(found, given, folder)
    if kind := given.take("log_with"):
        found.put("train.log", "tensorboard") if kind == "tensorboard" else found.leave("log_with", kind)
    for name, value in given.unread():
        if not WITHOUT_EFFECT.fullmatch(name):
            found.leave(name, value)
    return found


def _told_family(values: Mapping[str, Any]) -> str:
    """Tell the family of arguments that name no script; refuse those of Flux as well as of Stable Diffusion 3."""
    family = next((each for name, each in TELLING.items() if values.get(name)), "")
    shared = next((name for name in OF_BOTH if values.get(name)), "")
    if family or not shared:
        return family
    if any(values.get(name) for name in OF_FLUX):
        return "flux"
    model = re.split(r"[\\/]", str(values.get("pretrained_model_name_or_path") or ""))[-1]
    named = [each for pattern, each in MODEL_NAMES.items() if re.search(pattern, model, re.IGNORECASE)]
    if len(named) != 1:
        raise ValueError(
            f"its {shared} is of Flux as well as of Stable Diffusion 3; set ae in it for Flux, or clip_g for Stable "
            "Diffusion 3, or choose the script that reads it"
        )
    return named[0]


def _whole_model(values: Mapping[str, Any], script: str) -> Mapping[str, Any]:
    """Write the arguments of a script that trains the whole model as those of a network; refuse what trains another."""
    if "network" in script:
        return values
    if re.search("textual_inversion|control", script):
        raise ValueError(f"its {script:.60} trains no LoRA; choose the script that calls train_network.py")
    trains_text = on(values.get("train_text_encoder")) or script == "train_db.py"
    text = [values[name] for name in ("learning_rate_te", "learning_rate_te1", "learning_rate_te2") if name in values]
    rates = {"text_encoder_lr": text} if text else {}
    own = {
        "network_module": "lycoris.kohya",
        "network_args": {"algo": "full"},
        "network_train_unet_only": not trains_text,
    }
    kept = {name: value for name, value in values.items() if not name.startswith("learning_rate_te")}
    return {**kept, **rates, **own}


def _second(given: Given, script: str, program: str) -> bool:
    """Tell whether the model has two text encoders: by the script, else by two rates or by the model's name."""
    if script or program != PROGRAM:
        return "sdxl" in script or on(given.take("sdxl"))
    rates, path = given.take("text_encoder_lr"), str(given.take("pretrained_model_name_or_path") or "")
    return (isinstance(rates, list) and len(rates) > 1) or "xl" in re.split(r"[\\/]", path)[-1].lower()


def _model(found: Imported, given: Given, family: str, *, second: bool) -> None:
    """Read the base model, or the files of a family that ComfyUI's own nodes load."""
    path = str(given.take("pretrained_model_name_or_path") or "")
    if family:
        found.family = family
        for name, role in MODELS.items():
            if (value := given.take(name)) and role not in found.models:
                found.models[role] = str(value)
        _levels(found, given)
        if high := given.take("dit_high_noise"):
            put_experts(found, high=True, low=True, path=str(high))
        put_vision(found, given, family)
        if boundary := given.take("timestep_boundary"):
            put_boundary(found, boundary)
        given.ignore(
            (
                "vae",
                "clip_skip",
                "apply_t5_attn_mask",
                "t5xxl_max_token_length",
                "t5_max_token_length",
                "qwen3_max_token_length",
                "gemma2_max_token_length",
                "t5xxl_dtype",
                "text_encoder_batch_size",
            )
        )
        guidance = number(found, given, "guidance_scale")
        guidance = FLOWS.get(family, FLOW).guidance if guidance is None else guidance
        if guidance is not None:
            found.put("base_model.connected.guidance", guidance)
        return
    found.put("base_model.path", path)
    layer = number(found, given, "clip_skip")
    if layer and not on(given.take("sdxl")) and (layer <= 2 or not second):  # XL has the second one there
        found.put("base_model.clip_skip", max(1, whole(layer)))


def _levels(found: Imported, given: Given) -> None:
    """Read how a flow model's noise levels are drawn and weighed.

    sigma draws a place in the list of levels, which is shifted and falls; so a mean counts the other way round.
    """
    usual = FLOWS.get(found.family, FLOW)
    kind = str(given.take("timestep_sampling") or usual.sampling)
    scheme = str(given.take("weighting_scheme") or "uniform")
    shift, scale = number(found, given, "discrete_flow_shift"), number(found, given, "sigmoid_scale")
    shift = usual.shift if shift is None else shift
    falls = found.family != "sd3"
    if not falls:  # it draws the level itself, and knows no other way
        kind, shift = "sigma", number(found, given, "training_shift") or 1.0
    name, settings = "uniform", dict[str, float]()
    if kind in ("sigmoid", "shift", "flux_shift", "flux2_shift", "qwen_shift", "krea2_shift"):
        name, settings = "logit_normal", {"logit_scale": 1.0 if scale is None else scale}
    elif kind == "sigma" and scheme == "logit_normal":
        mean, width = (number(found, given, each) for each in ("logit_mean", "logit_std"))
        name, settings = "logit_normal", {"logit_mean": (mean or 0.0) * (-1 if falls else 1)}
        settings["logit_scale"] = 1.0 if width is None else width
    elif kind == "sigma" and scheme == "mode":
        size = number(found, given, "mode_scale")
        name, settings = "mode", {"mode_scale": 1.29 if size is None else size}
    elif kind not in ("sigma", "uniform"):
        found.leave("timestep_sampling", kind)
    found.put("objective.timestep_distribution", name)
    for setting, value in settings.items():
        found.put(f"objective.{setting}", value)
    if kind in ("sigma", "uniform", "sigmoid", "shift"):  # else as the family is sampled
        found.put("objective.timestep_shift", shift if kind in ("sigma", "shift") else 1.0)
    made = str(given.take("model_prediction_type") or usual.prediction)
    if found.family == "sd3":  # its loss is that of the clean picture, which sigma_sqrt undoes
        if scheme != "sigma_sqrt":
            found.put("objective.loss_on", "x0")
        if scheme == "cosmap":
            found.leave("weighting_scheme", scheme)
    elif scheme in WEIGHED and (usual.weighs or made == "sigma_scaled"):
        found.put("objective.weighting", WEIGHED[scheme])
    if made == "additive" or (made == "sigma_scaled" and found.family != "sd3"):  # it compares a picture with a flow
        found.leave("model_prediction_type", made)
    given.ignore(("weighting_scheme", "mode_scale", "logit_mean", "logit_std", "sigmoid_scale", "discrete_flow_shift"))


def _length(found: Imported, given: Given) -> None:
    """Read how long the run is: epochs count where they are set."""
    epochs, steps = number(found, given, "max_train_epochs"), number(found, given, "max_train_steps")
    if epochs:
        found.put("train.epochs", whole(epochs))
    elif steps:
        found.put("train.steps", whole(steps))


def _precision(found: Imported, given: Given) -> None:
    for name, setting in (("mixed_precision", "base_model.precision"), ("save_precision", "train.save_dtype")):
        value = given.take(name)
        if str(value) in PRECISIONS:
            found.put(setting, PRECISIONS[str(value)])
        elif value not in (None, ""):
            found.leave(name, value)
    if given.take("save_precision") in (None, ""):  # as it is trained
        found.put("train.save_dtype", "bfloat16" if on(given.take("full_bf16")) else "float32")
    if on(given.take("full_fp16")):
        found.leave("full_fp16", True)


def _noise(found: Imported, given: Given) -> None:
    """Read loss, its weights, noise and timesteps."""
    loss = str(given.take("loss_type"))
    if loss in LOSSES:
        found.put("objective.loss", LOSSES[loss])
    else:
        found.leave("loss_type", loss)
    if loss in ("huber", "smooth_l1"):
        for name, convert in (("huber_c", real), ("huber_schedule", str), ("huber_scale", real)):
            take(found, given, name, f"objective.{name}", convert)
    else:
        given.ignore(("huber_c", "huber_schedule", "huber_scale"))
    _weighting(found, given)
    if adaptive := number(found, given, "adaptive_noise_scale"):
        found.put("objective.noise_offset_strength", "adaptive")
        found.put("objective.offset_adaptation", adaptive)
    if sizes := number(found, given, "multires_noise_iterations"):
        found.put("objective.pyramid_iterations", whole(sizes))
        take(found, given, "multires_noise_discount", "objective.pyramid_discount", real)
    given.ignore(("multires_noise_discount",))
    least, most = number(found, given, "min_timestep"), number(found, given, "max_timestep")
    if least:
        found.put("objective.min_timestep", whole(least))
    if most and most < 1000:  # theirs is not trained itself
        found.put("objective.max_timestep", whole(most) - 1)


def _weighting(found: Imported, given: Given) -> None:
    """Read the weights of the loss: theirs are multiplied, ours is one; a second one is listed.

    The scripts of flow models have none of them.
    """
    if found.family:
        given.ignore(OF_SNR)
        return
    chosen: list[tuple[str, Any, dict[str, Any]]] = []
    gamma, v_like = number(found, given, "min_snr_gamma"), number(found, given, "v_pred_like_loss")
    if gamma:
        chosen.append(("min_snr_gamma", gamma, {"min_snr_gamma": gamma}))
    if on(given.take("debiased_estimation_loss")):
        chosen.append(("debiased_estimation_loss", True, {"weighting": "debiased"}))
    if on(given.take("scale_v_pred_loss_like_noise_pred")):
        chosen.append(("scale_v_pred_loss_like_noise_pred", True, {"weighting": "v_scaled"}))
    if v_like:
        chosen.append(("v_pred_like_loss", v_like, {"weighting": "v_like", "v_like_weight": v_like}))
    for setting, ours in chosen[0][2].items() if chosen else ():
        found.put(f"objective.{setting}", ours)
    for name, value, _ in chosen[1:]:
        found.leave(name, value)


def put_schedule(found: Imported, given: Given) -> None:
    """Read the curve of the learning rate; what the chosen one does not look at is skipped.

    An optimizer that averages, or whose steps follow from their number, has none there.
    """
    beside_it = {"lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_min_lr_ratio", "lr_decay_steps"}
    beside_it |= {"lr_scheduler_timescale", "lr_warmup_steps"}
    name = str(given.take("lr_scheduler") or "constant")
    if _has_no_schedule(given):
        found.put("scheduler.name", "constant")
        given.ignore((*beside_it, "lr_scheduler_type", "lr_scheduler_args"))
        return
    if kind := str(given.take("lr_scheduler_type") or ""):
        _own_schedule(found, given, kind)
        given.ignore(beside_it)
        return
    if name not in SCHEDULES:
        found.leave("lr_scheduler", name)
        name = "constant"
    found.put("scheduler.name", SCHEDULES[name])
    steps = _steps(found)
    if name != "constant":  # which has no warm-up there
        put_warmup(found, given.take("lr_warmup_steps"), steps)
    waves = max(1, whole(number(found, given, "lr_scheduler_num_cycles") or 1))
    if name == "cosine_with_restarts":
        found.put("scheduler.cycles", waves)
    if name == "cosine_with_min_lr" and waves > 1:
        found.put("scheduler.name", "expression")
        found.put("scheduler.expression", f"0.5 * (1 + cos({waves} * pi * t))")
    if name == "polynomial":
        take(found, given, "lr_scheduler_power", "scheduler.power", real)
        if rate := number(found, given, "learning_rate"):
            found.put("scheduler.min_lr_ratio", min(1.0, POLYNOMIAL_END / rate))
    if name in ("cosine_with_min_lr", "warmup_stable_decay"):
        take(found, given, "lr_scheduler_min_lr_ratio", "scheduler.min_lr_ratio", real)
    if name == "inverse_sqrt":
        own = number(found, given, "lr_scheduler_timescale") or _warmup(found, steps) or 10_000
        found.put("scheduler.timescale", max(1, whole(own)))
    if name == "warmup_stable_decay":
        _decay(found, given, steps)
    given.ignore(beside_it)


def _has_no_schedule(given: Given) -> bool:
    kind = str(given.take("optimizer_type") or "").lower()
    relative = dict(pairs(given.take("optimizer_args"))).get("relative_step", "True")
    return kind.endswith("schedulefree") or (kind == "adafactor" and on(relative))


def _steps(found: Imported) -> int:
    """Return the steps of the run; 0 where the file gives epochs."""
    return whole(found.values.get("train", {}).get("steps") or 0)


def _warmup(found: Imported, steps: int) -> int:
    """Return the steps of the warm-up that was read; 0 for a share of a run of unknown length."""
    values = found.values["scheduler"]
    percent = _percent(values)
    return percent * steps // 100 if percent else values.get("warmup_steps", 0)


def _percent(schedule: Mapping[str, Any]) -> int:
    """Return the warm-up in percent; 0 for one in steps."""
    return schedule.get("warmup_steps", 0) if schedule.get("warmup_unit") == "percent" else 0


def _own_schedule(found: Imported, given: Given, kind: str) -> None:
    """Read a scheduler that is named by its class: the cosines and Rex that people use have counterparts."""
    args = dict(pairs(given.take("lr_scheduler_args")))
    cycles, rate = whole(number(found, given, "lr_scheduler_num_cycles") or 1), number(found, given, "learning_rate")
    plain, steps = kind.rpartition(".")[2].lower(), _steps(found)
    if length := args.pop("T_0", ""):  # torch's own, whose cycles have a length
        cycles = round(steps / real(length)) if real(length) > 0 and args.pop("T_mult", "1") == "1" else 0
        if not cycles:
            raise without_counterpart("lr_scheduler_type", kind, "write lr_scheduler instead")
    usual = {"eta_min": 0.0} if length or plain == "cosineannealinglr" else {"min_lr": 1e-6}
    if args.get("T_max") == str(steps):
        args.pop("T_max")
    if "rex" in plain:
        found.put("scheduler.name", "rex_restarts" if cycles > 1 else "rex")
        for name in ("d", "gamma") if cycles > 1 else ("d",):
            if name in args:
                found.put(f"scheduler.{name}", real(args[name]))
        args = {name: value for name, value in args.items() if name not in ("d", "gamma")}
    elif plain == "cosineannealinglr" and "T_max" in args:  # a wave up and down, as often as the run is long
        found.put("scheduler.name", "expression")
        found.put("scheduler.expression", f"0.5 * (1 + cos(pi * step / {max(1, whole(args.pop('T_max')))}))")
    elif "cosineannealing" in plain:
        found.put("scheduler.name", "cosine_with_restarts" if cycles > 1 else "cosine")
        args = {name: value for name, value in args.items() if (name, cycles) != ("gamma", 1)}
    else:
        raise without_counterpart("lr_scheduler_type", kind, "write lr_scheduler instead")
    if cycles > 1:
        found.put("scheduler.cycles", cycles)
    for name, end in usual.items():
        if (least := real(args.pop(name, end))) and rate and least < rate:
            found.put("scheduler.min_lr_ratio", least / rate)
    put_warmup(found, args.pop("warmup_steps", None) or given.take("lr_warmup_steps"), steps)
    for name, value in args.items():
        if (name, value) not in (
            ("cycle_multiplier", "1"),
            ("cycle_multiplier", "1.0"),
            ("gamma", "1"),
            ("gamma", "1.0"),
        ):
            found.leave(f"lr_scheduler_args {name}", value)


def put_warmup(found: Imported, value: Any, steps: int = 0) -> None:
    """Read the length of the warm-up: a number below 1 is a share of the run; steps: its length, 0 if unknown."""
    try:
        length = real(str(value).removesuffix("%")) / 100 if str(value).endswith("%") else real(value or 0)
    except (TypeError, ValueError):
        found.leave("lr_warmup_steps", value)
        return
    percent = round(100 * length)
    if not 0 < length < 1:
        if length:
            found.put("scheduler.warmup_steps", whole(length))
    elif steps:
        found.put("scheduler.warmup_steps", whole(length * steps))
    elif percent:
        found.put("scheduler.warmup_steps", percent)
        found.put("scheduler.warmup_unit", "percent")
    if 0 < length < 1 and not steps and not math.isclose(percent, 100 * length):
        told = say("The warm-up is {0} percent there; here it is a whole number of them.", f"{100 * length:g}")
        found.open.append(told)


def _decay(found: Imported, given: Given, steps: int) -> None:
    """Read the falling end: a share of what follows the warm-up here, of the whole run there."""
    length, values = number(found, given, "lr_decay_steps"), found.values["scheduler"]
    args = dict(pairs(given.take("lr_scheduler_args")))
    found.put("scheduler.decay_shape", args.pop("decay_type", "cosine"))
    for name, value in args.items():
        found.leave(f"lr_scheduler_args {name}", value)
    if not length:  # it never falls there
        found.put("scheduler.name", "constant")
    elif length >= 1 and not steps:
        found.leave("lr_decay_steps", length)
    else:
        share = whole(length * steps) / steps if steps and length < 1 else length / (steps or 1)
        rises = _warmup(found, steps) / steps if steps else _percent(values) / 100
        found.put("scheduler.decay_share", min(1.0, max(0.001, share / max(1e-9, 1 - rises))))


def _optimizer(found: Imported, given: Given, *, second: bool, family: str) -> None:
    """Read optimizer and learning rates; text encoders are trained there unless it is switched off."""
    kind = "AdamW8bit" if on(given.take("use_8bit_adam")) else str(given.take("optimizer_type") or "AdamW")
    kind = "Lion" if on(given.take("use_lion_optimizer")) else kind
    name = put_optimizer(found, kind)
    _rates(found, given, second=second, family=family)
    settings = {each.name for each in OPTIMIZERS[name].settings}
    own: list[str] = []
    for key, value in pairs(given.take("optimizer_args")):
        if name == "custom":
            own.append(f"{key}={value}")
        elif key == "betas" and {"beta1", "beta2"} <= settings:
            numbers = re.findall(r"[\d.eE+-]+", value)
            for setting, each in zip(("beta1", "beta2", "beta3"), numbers, strict=False):
                if setting in settings:
                    found.put(f"optimizer.options.{setting}", real(each))
        elif key in settings:
            found.put(f"optimizer.options.{key}", plain(value))
        elif (key, value) not in (("decouple", "True"), ("weight_decouple", "True")):  # as it is here
            found.leave(f"optimizer_args {key}", value)
    if own:
        found.put("optimizer.options.arguments", ", ".join(own))


def put_optimizer(found: Imported, kind: str) -> str:
    """Set the optimizer of a name of theirs, with the defaults of its library; return our name of it."""
    name = optimizer_named(kind)
    if name is None:
        library, _, plain_name = kind.rpartition(".")
        named = plain_name if not library or "dadapt" not in library.lower() else f"dadaptation.{plain_name}"
        plain_name = "DAdaptAdam" if plain_name in ("DAdaptation", "DAdaptAdamPreprint") else named
        found.put("optimizer.name", "custom")
        found.put("optimizer.options.optimizer", plain_name)
        return "custom"
    found.put("optimizer.name", name)
    for setting, value in OPTIMIZER_DEFAULTS.get(name, {}).items():
        if setting in {each.name for each in OPTIMIZERS[name].settings}:
            found.put(f"optimizer.options.{setting}", value)
    return name


def _rates(found: Imported, given: Given, *, second: bool, family: str) -> None:
    value = given.take("learning_rate")
    rate = None if value in (None, "") else real(value)  # a run without its rate would be another one
    own = number(found, given, "unet_lr")
    denoiser = rate if own is None else own
    if on(given.take("network_train_text_encoder_only")):
        denoiser = 0.0
    found.put(f"optimizer.{RATES[0]}", denoiser or 0.0)
    places = _trained_texts(found, given, family) if family else (1, 2) if second else (1,)
    alone = on(given.take("network_train_unet_only"))
    if alone or (family not in WITH_T5 and on(given.take("cache_text_encoder_outputs"))):  # of which those keep T5's
        places = ()
    value = given.take("text_encoder_lr")
    texts: list[Any] = value if isinstance(value, list) and value else [rate or 0.0 if value in (None, "") else value]
    try:
        rates = [real(each) for each in texts]
    except (TypeError, ValueError):
        found.leave("text_encoder_lr", value)
        return
    for place, each in zip(places, [*rates, *rates[-1:] * len(places)], strict=False):
        found.put(f"optimizer.{RATES[place]}", each)


def _trained_texts(found: Imported, given: Given, family: str) -> tuple[int, ...]:
    """List the places of the rates of a flow model's text encoders that are trained, in their order."""
    places = TEXT_ENCODERS.get(family, ())[: TRAINED_TEXTS.get(family, 0)]
    if family in WITH_T5 and dict(pairs(given.take("network_args"))).get("train_t5xxl") == "True":
        if not TEXT_ENCODERS[family][len(places)]:
            found.leave("network_args train_t5xxl", "True")
            return places
        places = TEXT_ENCODERS[family][: len(places) + 1]
    return places


def plain(text: Any) -> Any:
    """Read True, False, a number, or a text."""
    if not isinstance(text, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, real):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of a list of name=value, of a text with several, or of a table."""
    if isinstance(value, Mapping):
        yield from ((str(name), str(each)) for name, each in value.items())
        return
    parts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    for each in parts:
        inner = re.split(r"[\s,]+(?=[A-Za-z_]\w*=)", str(each).replace('"', "").replace("'", "").strip())
        for part in inner:
            name, equals, text = part.partition("=")
            if name.strip():
                yield name.strip(), text.strip().strip("\"'") if equals else "True"


def put_network(found: Imported, given: Given, family: str) -> None:
    """Read the network: its kind, ranks, and network_args; convolutions are trained where they have a rank."""
    module = str(given.take("network_module") or "networks.lora")
    args = dict(pairs(given.take("network_args")))
    if family in WITH_T5:
        args.pop("train_t5xxl", None)  # its rate is read with the others
    lycoris = "lycoris" in module
    own = re.fullmatch(r"(lora|loha|lokr)(_\w+)?", module.rpartition(".")[2])
    if not lycoris and not own:
        instead = instead_of(module.rpartition(".")[2]) or f"train it with {PROGRAM}"
        raise without_counterpart("network_module", module, instead)
    algorithm = args.pop("algo", "lora").lower() if lycoris else own.group(1) if own else ""
    known = {each.lycoris: name for name, each in ALGORITHMS.items() if each.lycoris}
    known |= {"locon": "lora", "diag-oft": "oft"}
    algorithm = known.get(algorithm, algorithm)
    if algorithm not in ALGORITHMS:
        raise without_counterpart("network algo", algorithm, instead_of(algorithm) or f"train it with {PROGRAM}")
    found.put("lora.algorithm", algorithm)
    rank, alpha = number(found, given, "network_dim") or 4, number(found, given, "network_alpha")
    alpha = 1.0 if alpha is None else alpha
    kind = ALGORITHMS[algorithm]
    full = algorithm == "lokr" and rank >= LARGEST_RANK  # what LyCORIS' users write for it
    if full:
        found.put("lora.full_matrix", True)
    elif kind.rank:
        found.put("lora.rank", whole(rank))
    if kind.alpha and not full:
        found.put("lora.alpha", alpha or rank)  # theirs takes 0 as the rank, too
    elif alpha != 1.0 and not kind.alpha:
        found.leave("network_alpha", alpha)
    _layers(found, args, lycoris=lycoris, rank=rank, alpha=alpha, family=family)
    dropout = number(found, given, "network_dropout")
    if dropout:
        found.put("lora.dropout", dropout)
    _options(found, args)
    put_start(found, str(given.take("network_weights") or ""))
    weights = given.take("base_weights")
    given.ignore(("base_weights_multiplier", "dim_from_weights"))
    for each in weights if isinstance(weights, list) else filter(None, [weights]):
        put_beneath(found, str(each))


def put_beneath(found: Imported, path: str) -> None:
    """Say which LoRA stays as it is beneath the one that is trained."""
    if path:
        told = say("The run trains on top of the LoRA {0}; add it by {1}, beneath.", path, node("existing_lora"))
        found.open.append(told)


def put_start(found: Imported, path: str) -> None:
    """Say which LoRA is continued: its layers are needed at once, so it is chosen where it lies."""
    if path:
        found.open.append(say("The run continues the LoRA {0}; add it by {1}.", path, node("existing_lora")))


def _layers(found: Imported, args: dict[str, str], *, lycoris: bool, rank: float, alpha: float, family: str) -> None:
    """Read which layers are trained, and the ranks of convolutions."""
    conv, conv_alpha = args.pop("conv_dim", ""), args.pop("conv_alpha", "")
    own = real(conv) if conv not in ("", "None") else (rank if lycoris else 0.0)
    preset = args.pop("preset", "full" if lycoris else "attn-mlp")
    presets = ("full", "attn-mlp", "attn-only", "full-lin", "unet-transformer-only", "unet-convblock-only")
    if preset not in presets:
        found.leave("network_args preset", preset)
        preset = "attn-mlp"
    blocks = any(args.get(name) for name in ("conv_block_dims",))
    spatial = (own > 0 or blocks) and not family and preset in ("full", "unet-convblock-only", "attn-mlp")
    if not lycoris and spatial:
        preset = "full"
    if not ALGORITHMS[found.values["lora"]["algorithm"]].layers:
        found.put("lora.preset", "auto" if family else preset)
    kind = ALGORITHMS[found.values["lora"]["algorithm"]]
    full = found.values["lora"].get("full_matrix")
    if spatial and own > 0 and preset in ("full", "unet-convblock-only") and not full:
        given_alpha = real(conv_alpha) if conv_alpha not in ("", "None") else (alpha if lycoris else 1.0)
        if kind.rank and own < LARGEST_RANK:
            found.put("lora.conv_rank", whole(own))
        if kind.alpha and kind.rank:
            found.put("lora.conv_alpha", given_alpha or own)


def _options(found: Imported, args: dict[str, str]) -> None:
    """Read the other network_args."""
    for name, (setting, convert) in NETWORK.items():
        value = args.pop(name, "")
        try:
            if value not in ("", "None") and real(value) != 0:
                found.put(setting, convert(real(value)))
        except ValueError:
            found.leave(f"network_args {name}", value)
    for name, setting in SWITCHES.items():
        if (value := args.pop(name, "")) != "" and (on(value) or setting.endswith("_scale")):
            found.put(setting, on(value))
    if found.values["lora"].get("full_matrix"):  # whole factors have no rank to split or to drop
        for name in ("decompose_both", "tucker", "rank_dropout", "conv_rank", "conv_alpha"):
            found.values["lora"].pop(name, None)
    for name, (setting, convert) in BLOCKS.items():
        if (value := args.pop(name, "")) not in ("", "None"):
            try:
                found.put(setting, [convert(real(each)) for each in value.split(",")])
            except ValueError:
                found.leave(f"network_args {name}", value)
    _block_weights(found, args)
    for name, value in args.items():
        if value not in ("", "0", "0.0", "False", "false", "None"):
            found.leave(f"network_args {name}", value)


def _block_weights(found: Imported, args: dict[str, str]) -> None:
    """Read the rates of the blocks: down, middle and up, in the order of the model."""
    parts = [args.get(name, "") for name in ("down_lr_weight", "mid_lr_weight", "up_lr_weight")]
    if not any(parts):
        return
    try:
        numbers = [[real(each) for each in part.split(",")] if part else [] for part in parts]
    except ValueError:
        return  # a named curve, such as cosine; it stays listed
    down, middle, up = numbers
    sides = len(down) or len(up)
    if sides != (len(up) or sides) or sides not in (9, 12):
        return
    weights = [*(down or [1.0] * sides), *(middle[:1] or [1.0]), *(up or [1.0] * sides)]
    ends = ([1.0, 1.0], [1.0, 1.0]) if sides == 9 else ([], [])  # XL has embeddings before, and an output behind
    found.put("lora.block_weights", [*ends[0], *weights, *ends[1]])
    for name in ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold"):
        args.pop(name, None)


def _intervals(found: Imported, given: Given, folder: Path) -> None:
    """Read how often the run is saved and draws samples, and the prompts."""
    for unit in ("steps", "epochs"):
        if every := number(found, given, f"save_every_n_{unit}"):
            found.put("saves.save_every", whole(every))
            found.put("saves.save_unit", unit)
            last = number(found, given, f"save_last_n_{unit}")
            if last:
                found.put("saves.keep_last", max(1, whole(last if unit == "epochs" else last // every + 1)))
            else:  # all stay, each as a file
                found.put("saves.keep_every", 1)
                found.put("saves.publish", True)
        if every := number(found, given, f"sample_every_n_{unit}"):
            found.put("saves.sample_every", whole(every))
            found.put("saves.sample_unit", unit)
    given.ignore(("save_last_n_steps", "save_last_n_epochs"))
    prompts, sampler = given.take("sample_prompts"), str(given.take("sample_sampler") or "ddim").lower()
    if not prompts:
        return
    if (sampler := SAMPLERS.get(sampler, sampler)) in OWN_SAMPLERS:  # dpmsolver and dpmsingle have no equal
        found.put("sample.sampler", sampler)
    else:
        found.leave("sample_sampler", sampler)
    if "\n" in str(prompts) or (
        " " in str(prompts) and not re.search(r"\.\w{3,4}$", str(prompts))
    ):  # of kohya_ss' page
        put_prompts(found, read_prompts("", str(prompts)))
        return
    text = beside(folder, str(prompts)) if str(prompts).lower().endswith((".txt", ".toml", ".json")) else None
    with contextlib.suppress(ValueError):  # of a file that is not what its name says
        if text is not None:
            put_prompts(found, read_prompts(str(prompts), text))
            return
    found.open.append(
        say("The samples' prompts are in {0}, which is not read; write them into sample_prompts.", prompts)
    )


# --- the pictures ------------------------------------------------------------------------------------------


def _folders(found: Imported, given: Given, folder: Path) -> None:
    """Read the folders of pictures: of the arguments, or of a file of datasets; without any, one is left open."""
    shared = {name: given.take(name) for name in OF_A_FOLDER if given.take(name) is not None}
    datasets = given.take("datasets") or []
    shared |= table(given.take("general"))
    if file := given.take("dataset_config"):
        text = beside(folder, str(file))
        if text is None:
            found.open.append(
                say("The pictures are listed in {0}, which does not lie beside the file; put it there.", file)
            )
        else:
            values = _datasets(text)
            shared |= values.get("general") or {}
            datasets = values.get("datasets") or []
    weight = number(found, given, "prior_loss_weight")
    table_of_all, repeats = given.take("in_json"), given.take("dataset_repeats")
    own = {"metadata_file": table_of_all, "num_repeats": repeats} if table_of_all else {"tree": True}
    listed = [
        ({**shared, "image_dir": image_dir, **own}, role)
        for name, role in (("train_data_dir", "train"), ("reg_data_dir", "regularisation"))
        if (image_dir := given.take(name)) and not given.take("dataset_config")  # beside which they are ignored
        if role == "train" or not table_of_all  # which has no other folder
    ]
    sizes: list[dict[str, Any]] = [shared] if listed or not datasets else []
    for dataset in () if listed else tables(datasets):
        own = {**shared, **{name: value for name, value in dataset.items() if name != "subsets"}}
        sizes.append(own)
        directory = directory_of(dataset)
        own.setdefault("resolution", [960, 544]) if directory else None
        if directory:
            found.program = found.program.replace(PROGRAM, "musubi-tuner")
        for subset in tables(dataset.get("subsets")) or ([{"image_dir": directory}] if directory else []):
            values = {**own, **subset}
            listed.append((values, "regularisation" if on(values.pop("is_reg", False)) else "train"))
    same, batches = put_sizes(found, sizes), batches_of(sizes)
    for values, role in listed:
        own = {"own_size": not same, "own_batch": whole(values.get("batch_size") or 0) if len(batches) > 1 else 0}
        put_concept(found, values, role, folder, **own, weight=1.0 if weight is None else weight)
    if not listed and not given.take("dataset_config"):  # which says all of them
        put_concept(found, {**shared, "tree": True}, "train", folder, own_size=False, weight=1.0)
    if not found.values.get("dataset"):
        found.concept(folder="")


def _datasets(text: str) -> Mapping[str, Any]:
    """Read a list of datasets, as TOML or JSON."""
    values = parse_json(text) if text.lstrip().startswith("{") else read_toml(text)
    return table(values)


def batches_of(datasets: list[dict[str, Any]]) -> list[int]:
    """List the batches that datasets name, each once."""
    return list(dict.fromkeys(whole(each["batch_size"]) for each in datasets if each.get("batch_size")))


def put_sizes(found: Imported, datasets: list[dict[str, Any]]) -> bool:
    """Set resolution, buckets and batch of a run, that of its first dataset; tell whether all have one size."""
    batches = batches_of(datasets)
    if batches and (datasets[0].get("batch_size") != DEFAULTS["batch_size"] or len(datasets) > 1):
        found.put("train.batch_size", batches[0])
    first = datasets[0] if datasets else {}
    same = len({str(each.get("resolution")) for each in datasets}) < 2
    if same and first.get("resolution"):
        put_resolution(found, first)
    musubi = bool(directory_of(first))
    if on(first.get("enable_bucket")):
        step = 16 if musubi else whole(first.get("bucket_reso_steps") or 64)
        found.put("train.bucket_step", min(512, max(8, round(step / 8) * 8)))
        found.put("train.buckets.shapes", "musubi" if musubi else "sd_scripts")
        if step % 8:
            found.leave("bucket_reso_steps", step)
        if on(first.get("bucket_no_upscale")):
            found.put("train.buckets.no_upscale", True)
        elif not musubi:
            found.put("train.buckets.min_side", whole(first.get("min_bucket_reso") or 256))
            found.put("train.buckets.max_side", whole(first.get("max_bucket_reso") or 1024))
    return same


def directory_of(dataset: Mapping[str, Any]) -> str:
    """Return the folder of a dataset of musubi-tuner, or of its list; "" for one of sd-scripts, which has subsets."""
    named = (dataset.get(f"{kind}_{place}") for place in ("directory", "jsonl_file") for kind in ("image", "video"))
    return next((str(each) for each in named if each), "")


def put_resolution(found: Imported, values: Mapping[str, Any]) -> None:
    """Set the size of a run: an area with buckets, exactly that one without."""
    width, height = sides(values["resolution"])
    if on(values.get("enable_bucket")):
        side = round(math.sqrt(width * height) / 8) * 8
        found.put("train.resolution", side)
        if side * side != width * height:
            said = say(
                "Pictures have about the area of {0} there, and of {1} here.",
                f"{width} x {height}",
                f"{side} x {side}",
            )
            found.open.append(said)
    else:
        found.put("train.buckets.resolutions", [exactly(width, height)])


def exactly(width: int, height: int) -> str:
    """Write one size, whose sides are multiples of 8, as latents need them."""
    return "x".join(str(max(64, side // 8 * 8)) for side in (width, height))


def sides(value: Any) -> tuple[int, int]:
    """Read "512", "640,384" or [640, 384] as (width, height)."""
    parts = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    try:
        numbers = [whole(part) for part in parts]
        return numbers[0], numbers[-1]
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"its resolution {value!r:.60} is no size; write one such as 512,768") from error


def put_concept(
    found: Imported,
    values: dict[str, Any],
    role: str,
    folder: Path,
    *,
    own_size: bool,
    weight: float,
    own_batch: int = 0,
) -> None:
    """Add the concept of a folder; train_data_dir and reg_data_dir hold sub-folders, whose names tell the repeats."""
    given = Given(values, DEFAULTS)
    tree, repeats = on(given.take("tree")), real(given.take("num_repeats"))
    if repeats < 1 and not tree:  # it is skipped there
        return
    concept: dict[str, Any] = {"role": role, "recursive": tree, "folder_repeats": tree}
    captions: dict[str, Any] = {"dropout": 0.0, "lines": "draw" if on(given.take("enable_wildcard")) else "first"}
    for name, (setting, convert) in CAPTIONS.items():
        value = given.take(name)
        if value not in (None, "", False, 0) and not (name in DEFAULTS and value == DEFAULTS[name]):
            captions[setting] = convert(value)
    _around(found, captions, real(given.take("token_warmup_step") or 0))
    ending = str(given.take("caption_extension") or ".caption")
    captions["extensions"] = [ending if ending.startswith(".") else f".{ending}"]
    if captions.get("class_prompt"):
        captions["missing"] = "class_prompt"
    elif found.program == "musubi-tuner" or given.take("metadata_file"):
        captions["missing"] = "error"
    else:  # the folders below have their captions as their names
        captions["missing"] = "folder_name" if tree else "empty"
    if table := given.take("metadata_file"):
        captions |= {"source": "table", "file": str(folder / str(table))}
    if role == "regularisation" and weight != 1.0:
        concept["loss_weight"] = weight
    if not tree and repeats != 1:
        concept["repeats"] = repeats
    if own_batch:
        concept["batch_size"] = own_batch
    if on(given.take("flip_aug")):
        concept["flip"] = True
    augment = {"crop_jitter": 1.0} if on(given.take("random_crop")) else {}
    augment |= dict(zip(("hue", "saturation"), COLOURS, strict=True)) if on(given.take("color_aug")) else {}
    if augment:
        concept["augment"] = augment
    if on(given.take("alpha_mask")):
        concept["masks"] = {"source": "alpha", "unmasked_weight": 0.0, "unmasked_probability": 0.0}
    if own_size and given.take("resolution"):
        width, height = sides(given.take("resolution"))
        side = round(math.sqrt(width * height) / 8) * 8
        concept["resolutions"] = [str(side) if on(given.take("enable_bucket")) else exactly(width, height)]
    if controls := str(given.take("control_directory") or ""):
        concept["controls"] = {"folders": [placed(folder, controls)]}
    place = str(given.take("image_dir") or "")
    if given.take("video_directory") or given.take("video_jsonl_file"):
        concept["clips"] = musubi_clips(found, values)
        given.ignore(("source_fps", *MUSUBI))
    if place in (given.take("image_jsonl_file"), given.take("video_jsonl_file")):  # a table of the captions
        captions |= {"source": "table", "file": placed(folder, place)}
        place = re.sub(r"[^\\/]*$", "", place).rstrip("\\/") or "."
    given.ignore(OF_A_FOLDER - {"face_crop_aug_range", *SEPARATORS})
    for name, ours in (("face_crop_aug_range", ""), *SEPARATORS.items()):
        if (value := given.take(name)) and value != ours:
            found.leave(name, value)
    for name, value in given.unread():
        if not WITHOUT_EFFECT.fullmatch(name):
            found.leave(f"dataset {name}", value)
    found.concept(folder=placed(folder, place), **concept, captions=captions)


def _around(found: Imported, captions: dict[str, Any], warmup: float) -> None:
    """Read how tags move: prefix and suffix are tags like others there, and here they stay around them."""
    if 0 < warmup < 1:
        captions["tag_warmup_steps"] = whole(warmup * _steps(found))
        if not captions["tag_warmup_steps"]:
            found.leave("token_warmup_step", warmup)
    if not (captions.get("shuffle") or captions.get("tag_dropout") or captions.get("tag_warmup_steps")):
        return
    separator = captions.get("separator", ",")
    before = str(captions.get("prefix", ""))
    inside = before.count(separator)
    if before and captions.get("keep", 0) < inside + (0 if before.rstrip().endswith(separator) else 1):
        found.open.append(say("caption_prefix moves with the tags of a caption there; here it stays in front."))
    captions["keep"] = max(0, captions.get("keep", 0) - inside)
    if captions.get("suffix"):
        found.open.append(say("caption_suffix moves with the tags of a caption there; here it stays at the end."))
    if separator != ",":
        said = say(
            "sd-scripts joins the tags of a caption by a comma; here {0} stands between them.",
            separator,
        )
        found.open.append(said)
