"""Read the settings of sd-scripts: its arguments or its TOML."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...config import ALGORITHMS, OPTIMIZERS
from ...config.optimizer import RATES
from ..toml_text import read_toml
from .imported import Convert, Imported, optimizer_named

PRECISIONS = {"no": "float32", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}
LOSSES = {"l2": "mse", "l1": "l1", "huber": "huber", "smooth_l1": "smooth_l1"}
SCHEDULES = {"constant_with_warmup": "constant", "warmup_stable_decay": "warmup_stable_decay"}
SCHEDULES |= {name: name for name in ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial")}
PLAIN: dict[str, tuple[str, Convert]] = {  # of sd-scripts -> our setting, and how its value is read
    "pretrained_model_name_or_path": ("base_model.path", str),
    "vae": ("base_model.vae", str),
    "clip_skip": ("base_model.clip_skip", int),
    "max_train_steps": ("train.steps", int),
    "max_train_epochs": ("train.epochs", int),
    "train_batch_size": ("train.batch_size", int),
    "gradient_accumulation_steps": ("train.accumulate", int),
    "seed": ("train.seed", int),
    "bucket_reso_steps": ("train.bucket_step", int),
    "min_bucket_reso": ("train.buckets.min_side", int),
    "max_bucket_reso": ("train.buckets.max_side", int),
    "max_grad_norm": ("optimizer.max_grad_norm", float),
    "lr_scheduler_num_cycles": ("scheduler.cycles", int),
    "lr_scheduler_power": ("scheduler.power", float),
    "lr_scheduler_min_lr_ratio": ("scheduler.min_lr_ratio", float),
    "network_dim": ("lora.rank", int),
    "network_alpha": ("lora.alpha", float),
    "network_dropout": ("lora.dropout", float),
    "network_weights": ("lora.start", str),
    "scale_weight_norms": ("lora.scale_weight_norms", float),
    "min_snr_gamma": ("objective.min_snr_gamma", float),
    "noise_offset": ("objective.noise_offset", float),
    "multires_noise_iterations": ("objective.pyramid_iterations", int),
    "multires_noise_discount": ("objective.pyramid_discount", float),
    "ip_noise_gamma": ("objective.input_perturbation", float),
    "min_timestep": ("objective.min_timestep", int),
    "huber_c": ("objective.huber_c", float),
    "huber_schedule": ("objective.huber_schedule", str),
}
CHOICES: dict[str, tuple[str, Mapping[Any, Any]]] = {
    "mixed_precision": ("base_model.precision", PRECISIONS),
    "save_precision": ("train.save_dtype", PRECISIONS),
    "loss_type": ("objective.loss", LOSSES),
    "lr_scheduler": ("scheduler.name", SCHEDULES),
}
FLAGS: dict[str, tuple[str, Any]] = {  # switched on -> our setting and its value
    "v_parameterization": ("base_model.prediction", "v_prediction"),
    "zero_terminal_snr": ("base_model.zero_terminal_snr", "on"),
    "fp8_base": ("base_model.weights", "float8"),
    "bucket_no_upscale": ("train.buckets.no_upscale", True),
    "gradient_checkpointing": ("memory.checkpointing", "full"),
    "torch_compile": ("memory.compile", True),
    "debiased_estimation_loss": ("objective.weighting", "debiased"),
    "scale_v_pred_loss_like_noise_pred": ("objective.weighting", "v_scaled"),
    "noise_offset_random_strength": ("objective.noise_offset_strength", "random"),
}
SUBSET: dict[str, tuple[str, Convert]] = {  # of a folder -> field of its concept, "captions." before those of captions
    "num_repeats": ("repeats", float),
    "flip_aug": ("flip", bool),
    "caption_extension": ("captions.extensions", lambda text: [text if text.startswith(".") else f".{text}"]),
    "shuffle_caption": ("captions.shuffle", bool),
    "keep_tokens": ("captions.keep", int),
    "caption_dropout_rate": ("captions.dropout", float),
    "caption_dropout_every_n_epochs": ("captions.dropout_every_n_epochs", int),
    "caption_tag_dropout_rate": ("captions.tag_dropout", float),
    "caption_prefix": ("captions.prefix", str),
    "caption_suffix": ("captions.suffix", str),
    "caption_separator": ("captions.separator", str),
    "enable_wildcard": ("captions.wildcards", bool),
    "class_tokens": ("captions.class_prompt", str),
    "token_warmup_min": ("captions.tag_warmup_min", int),
}
NETWORK: dict[str, tuple[str, Convert]] = {  # of network_args
    "conv_dim": ("lora.conv_rank", int),
    "conv_alpha": ("lora.conv_alpha", float),
    "rank_dropout": ("lora.rank_dropout", float),
    "module_dropout": ("lora.module_dropout", float),
    "factor": ("lora.factor", int),
    "loraplus_lr_ratio": ("optimizer.lora_plus_ratio", float),
}
OF_THE_RUN = {"sample_every_n_steps": "steps", "sample_every_n_epochs": "epochs"}
OF_SAVES = {"save_every_n_steps": "steps", "save_every_n_epochs": "epochs"}
WITHOUT_EFFECT = re.compile(  # on what is trained: places, speed, what is always done here, and what is read elsewhere
    "output_dir|logging_dir|log_prefix|log_tracker_name|config_file|sample_sampler|cache_.*|vae_batch_size|xformers|sdpa"
    "|mem_eff_attn|max_data_loader_n_workers|persistent_data_loader_workers|enable_bucket|save_model_as|no_half_vae"
    "|max_token_length|lowram|highvram|network_module|save_state.*|no_metadata|metadata_.*|training_comment"
    "|lr_scheduler_type|skip_cache_check|resume"
)


def read_arguments(text: str) -> dict[str, Any]:
    """Read a command line, also one in a script: --name value, --name=value, --flag; several values are a list."""
    joined = re.sub(r"[\\^`]\r?\n", " ", text)
    line = next((each for each in joined.splitlines() if re.search(r"train\w*\.py\b", each)), joined)
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"its command line cannot be split: {error}") from error
    start = next((i for i, word in enumerate(words) if re.search(r"train\w*\.py$", word)), -1)
    found: dict[str, Any] = {"": words[start]} if start >= 0 else {}
    name = ""
    for word in words[start + 1 :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
        elif name:
            before = found[name]
            found[name] = word if before is True else [*(before if isinstance(before, list) else [before]), word]
    return found


def read_sd_scripts(given: Mapping[str, Any], folder: Path) -> Imported:
    """Read the arguments of sd-scripts' train_network, by name; folder: in which relative paths start."""
    found, rest = Imported(name=str(given.get("output_name", "my_lora"))), dict(given)
    script, _ = str(rest.pop("", "")), rest.pop("output_name", None)
    for name, (setting, convert) in PLAIN.items():
        take(found, rest, name, setting, convert)
    for name, (setting, choices) in CHOICES.items():
        value = rest.pop(name, None)
        if value is not None:
            found.put(setting, choices[value]) if value in choices else found.leave(name, value)
    for name, (setting, value) in FLAGS.items():
        if _on(rest.pop(name, False)):
            found.put(setting, value)
    if (most := rest.pop("max_timestep", None)) is not None:  # theirs is not trained itself
        found.put("objective.max_timestep", int(most) - 1)
    if (size := rest.pop("resolution", None)) is not None:
        found.put("train.resolution", _resolution(size))
    if (kind := rest.pop("log_with", None)) is not None:
        found.put("train.log", "tensorboard") if kind == "tensorboard" else found.leave("log_with", kind)
    put_warmup(found, rest)
    _optimizer(found, rest, second="sdxl" in script)
    _network(found, rest)
    _intervals(found, rest, folder)
    _folders(found, rest, folder)
    for name, value in rest.items():
        if not WITHOUT_EFFECT.fullmatch(name) and value not in (False, None, "", 0):
            found.leave(name, value)
    return found


def take(found: Imported, rest: dict[str, Any], name: str, setting: str, convert: Convert) -> None:
    """Move one value over; one that cannot be read is listed."""
    value = rest.pop(name, None)
    if value is None or value == "":
        return
    try:
        found.put(setting, convert(value))
    except (TypeError, ValueError):
        found.leave(name, value)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the sections of a configuration together, as sd-scripts does; a list of datasets stays."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1")


def _resolution(value: Any) -> int:
    """Read "512", "640,384" or [640, 384] as the side of a square of that area, a multiple of 8."""
    parts = value if isinstance(value, list) else str(value).split(",")
    sides = [float(part) for part in parts]
    return round(math.sqrt(sides[0] * sides[-1]) / 8) * 8


def put_warmup(found: Imported, rest: dict[str, Any]) -> None:
    value = rest.pop("lr_warmup_steps", None)
    if value is None:
        return
    steps = float(value)
    found.put("scheduler.warmup_steps", round(100 * steps) if 0 < steps < 1 else int(steps))
    if 0 < steps < 1:
        found.put("scheduler.warmup_unit", "percent")


def _optimizer(found: Imported, rest: dict[str, Any], *, second: bool) -> None:
    """Read optimizer and learning rates; text encoders are trained there unless it is switched off."""
    kind = rest.pop("optimizer_type", None) or "AdamW"
    kind = "AdamW8bit" if _on(rest.pop("use_8bit_adam", False)) else str(kind)
    name = optimizer_named(kind)
    if name is None:
        found.leave("optimizer_type", kind)
    else:
        found.put("optimizer.name", name)
    rate = rest.pop("learning_rate", None)
    unet, text = rest.pop("unet_lr", None) or rate, rest.pop("text_encoder_lr", None)
    if unet is not None:
        found.put(f"optimizer.{RATES[0]}", float(unet))
    only = _on(rest.pop("network_train_unet_only", False))
    rates = [] if only else text if isinstance(text, list) else [text or rate]
    rates = [float(each) for each in rates if each is not None]
    for number, each in enumerate((*rates, *(rates[-1:] if second and len(rates) == 1 else ()))[:2], 1):
        found.put(f"optimizer.{RATES[number]}", each)
    settings = {each.name for each in OPTIMIZERS[name].settings} if name else set()
    for key, value in _pairs(rest.pop("optimizer_args", None)):
        if key == "betas" and {"beta1", "beta2"} <= settings:
            beta1, beta2, *_ = re.findall(r"[\d.eE+-]+", value)
            found.put("optimizer.options.beta1", float(beta1))
            found.put("optimizer.options.beta2", float(beta2))
        elif key in settings:
            found.put(f"optimizer.options.{key}", _plain(value))
        else:
            found.leave(f"optimizer_args {key}", value)


def _plain(text: str) -> Any:
    """Read True, False, a number, or a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of a list of name=value."""
    for each in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
        name, _, text = str(each).partition("=")
        yield name.strip(), text.strip().strip("\"'")


def _network(found: Imported, rest: dict[str, Any]) -> None:
    """Read network_args; convolutions are trained where they have a rank."""
    lycoris = "lycoris" in str(rest.get("network_module", ""))
    given = dict(_pairs(rest.pop("network_args", None)))
    algorithm = given.pop("algo", "lora")
    known = {each.lycoris: name for name, each in ALGORITHMS.items() if each.lycoris}
    if algorithm in known or algorithm in ALGORITHMS:
        found.put("lora.algorithm", known.get(algorithm, algorithm))
    else:
        found.leave("network_args algo", algorithm)
    convolutions = float(given.get("conv_dim", 0) or 0) > 0
    preset = given.pop("preset", "full" if lycoris else "attn-mlp")
    if preset not in ("full", "attn-mlp", "attn-only"):
        found.leave("network_args preset", preset)
        preset = "attn-mlp"
    found.put("lora.preset", "full" if convolutions else preset)
    if _on(given.pop("dora_wd", False)):
        found.put("lora.dora", True)
    for name, (setting, convert) in NETWORK.items():
        if convolutions or not name.startswith("conv_"):
            take(found, given, name, setting, convert)
    for name, value in given.items():
        if value not in ("", "0", "False", "false"):
            found.leave(f"network_args {name}", value)


def _intervals(found: Imported, rest: dict[str, Any], folder: Path) -> None:
    """Read how often the run is saved and draws samples, and the prompts."""
    for names, setting in ((OF_SAVES, "save"), (OF_THE_RUN, "sample")):
        for name, unit in names.items():
            if every := rest.pop(name, None):
                found.put(f"saves.{setting}_every", int(every))
                found.put(f"saves.{setting}_unit", unit)
    if prompts := rest.pop("sample_prompts", None):
        path = folder / str(prompts)
        if path.suffix == ".txt" and path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:1000]
            found.put("sample.prompts", [line for line in lines if line.strip() and not line.startswith("#")])
        else:
            found.leave("sample_prompts", prompts)


def _folders(found: Imported, rest: dict[str, Any], folder: Path) -> None:
    """Read the folders of pictures: of the arguments, or of a file of datasets."""
    shared = {
        name: rest.pop(name) for name in (*SUBSET, "color_aug", "random_crop", "token_warmup_step") if name in rest
    }
    datasets = rest.pop("datasets", None) or []
    if file := rest.pop("dataset_config", None):
        path = folder / str(file)
        if not path.is_file():
            found.leave("dataset_config", file)
        else:
            values = read_toml(path.read_text(encoding="utf-8"))
            shared |= values.get("general", {})
            datasets = values.get("datasets", [])
    for name, role in (("train_data_dir", "train"), ("reg_data_dir", "regularisation")):
        if image_dir := rest.pop(name, None):
            _concept(found, {**shared, "image_dir": image_dir}, role, folder)
    for dataset in datasets:
        inherited = {**shared, **{name: value for name, value in dataset.items() if name != "subsets"}}
        for subset in dataset.get("subsets", []):
            values = {**inherited, **subset}
            _concept(found, values, "regularisation" if values.pop("is_reg", False) else "train", folder)


def _concept(found: Imported, values: dict[str, Any], role: str, folder: Path) -> None:
    concept: dict[str, Any] = {"folder": str(folder / str(values.pop("image_dir", ""))), "role": role}
    captions: dict[str, Any] = {}
    for name, (setting, convert) in SUBSET.items():
        if (value := values.pop(name, None)) not in (None, "", False, 0):
            section, key = (captions, setting.partition(".")[2]) if "." in setting else (concept, setting)
            section[key] = convert(value)
    if size := values.pop("resolution", None):
        found.put("train.resolution", _resolution(size))
    if batch := values.pop("batch_size", None):
        found.put("train.batch_size", int(batch))
    for name, (setting, convert) in PLAIN.items():
        if name in values and "bucket" in name:
            found.put(setting, convert(values.pop(name)))
    if _on(values.pop("bucket_no_upscale", False)):
        found.put("train.buckets.no_upscale", True)
    if table := values.pop("metadata_file", None):
        captions |= {"source": "table", "file": str(folder / str(table))}
    if steps := values.pop("token_warmup_step", None):
        captions["tag_warmup_steps"] = int(float(steps))
    if _on(values.pop("random_crop", False)):
        concept["augment"] = {"crop_jitter": 1.0}
    if _on(values.pop("color_aug", False)):
        concept["augment"] = {**concept.get("augment", {}), "hue": 0.02, "saturation": 0.1}
    found.concept(**concept, **({"captions": captions} if captions else {}))
    for name, value in values.items():
        if not WITHOUT_EFFECT.fullmatch(name) and value not in (False, None, "", 0):
            found.leave(f"dataset {name}", value)
