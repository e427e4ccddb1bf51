"""Read the settings of OneTrainer: its configuration, and its list of concepts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.json_files import parse_json
from ...config import MODEL_FILES, OPTIMIZERS
from ...config.optimizer import RATES
from .imported import Convert, Imported, optimizer_named
from .sd_scripts import put_warmup, take

TYPES = {"FLOAT_32": "float32", "BFLOAT_16": "bfloat16", "FLOAT_16": "float16", "FLOAT_8": "float8", "NFLOAT_4": "nf4"}
ONE_PLAIN: dict[str, tuple[str, Convert]] = {
    "base_model_name": ("base_model.path", str),
    "epochs": ("train.epochs", int),
    "batch_size": ("train.batch_size", int),
    "gradient_accumulation_steps": ("train.accumulate", int),
    "seed": ("train.seed", int),
    "lora_rank": ("lora.rank", int),
    "lora_alpha": ("lora.alpha", float),
    "dropout_probability": ("lora.dropout", float),
    "lora_model_name": ("lora.start", str),
    "clip_grad_norm": ("optimizer.max_grad_norm", float),
    "learning_rate_cycles": ("scheduler.cycles", lambda value: int(float(value))),
    "learning_rate_min_factor": ("scheduler.min_lr_ratio", float),
    "offset_noise_weight": ("objective.noise_offset", float),
    "perturbation_noise_weight": ("objective.input_perturbation", float),
    "timestep_shift": ("objective.timestep_shift", float),
}
ONE_CHOICES: dict[str, tuple[str, Mapping[Any, Any]]] = {
    "train_dtype": ("base_model.precision", TYPES),
    "output_dtype": ("train.save_dtype", TYPES),
    "lora_weight_dtype": ("lora.dtype", TYPES),
    "peft_type": ("lora.algorithm", {"LORA": "lora", "LOHA": "loha", "OFT_2": "oft"}),
    "learning_rate_scheduler": (
        "scheduler.name",
        {
            "CONSTANT": "constant",
            "LINEAR": "linear",
            "COSINE": "cosine",
            "COSINE_WITH_RESTARTS": "cosine_soft_restarts",
            "COSINE_WITH_HARD_RESTARTS": "cosine_with_restarts",
            "REX": "rex",
        },
    ),
    "timestep_distribution": (
        "objective.timestep_distribution",
        {"UNIFORM": "uniform", "LOGIT_NORMAL": "logit_normal"},
    ),
    "gradient_checkpointing": ("memory.checkpointing", {"ON": "full", "CPU_OFFLOADED": "full", "OFF": "0"}),
}
ONE_MASKS = (
    "unmasked_weight",
    "unmasked_probability",
    "normalize_masked_area_loss",
    "masked_prior_preservation_weight",
)
ONE_WITHOUT_EFFECT = re.compile(
    "__version|training_method|model_type|debug.*|workspace_dir|cache_dir|tensorboard.*|continue_last_backup|output_model.*"
    "|dataloader_threads|.*_device|latent_caching|only_cache|clear_cache.*|backup.*|rolling_backup.*|samples?_.*"
    "|non_ema_.*|concepts|concept_file_name|optimizer|unet|prior|transformer|text_encoder.*|vae|save_.*|masked_training"
    "|validat.*|aspect_ratio_bucketing|compile|attention_mechanism|cloud|secrets|.*_preset|include_train_config"
)


def read_onetrainer(given: Mapping[str, Any], folder: Path) -> Imported:
    """Read a configuration of OneTrainer; folder: in which relative paths start."""
    found, rest = Imported(), dict(given)
    if output := rest.get("output_model_destination"):
        found.name = Path(str(output).replace("\\", "/")).stem
    for name, (setting, convert) in ONE_PLAIN.items():
        take(found, rest, name, setting, convert)
    for name, (setting, choices) in ONE_CHOICES.items():
        value = rest.pop(name, None)
        if value is not None:
            found.put(setting, choices[value]) if value in choices else found.leave(name, value)
    if (size := rest.pop("resolution", None)) not in (None, ""):
        sizes = [part.strip() for part in str(size).split(",")]
        if len(sizes) == 1 and sizes[0].isdecimal():
            found.put("train.resolution", int(sizes[0]))
        else:
            found.put("train.buckets.resolutions", sizes)
    if (warmup := rest.pop("learning_rate_warmup_steps", None)) is not None:
        put_warmup(found, {"lr_warmup_steps": warmup})
    if rest.pop("loss_weight_fn", "CONSTANT") == "MIN_SNR_GAMMA":
        found.put("objective.min_snr_gamma", float(rest.pop("loss_weight_strength", 5.0)))
    rest.pop("loss_weight_strength", None)
    for name, bound in (("min_noising_strength", "min_timestep"), ("max_noising_strength", "max_timestep")):
        if (share := rest.pop(name, None)) is not None:
            found.put(f"objective.{bound}", min(999, round(1000 * float(share))))
    _one_parts(found, rest)
    _one_optimizer(found, rest)
    masks = _one_masks(rest)
    _one_concepts(found, rest, folder, masks)
    for name, value in rest.items():
        if not ONE_WITHOUT_EFFECT.fullmatch(name) and value not in (False, None, "", 0, "OFF", "NEVER"):
            found.leave(name, value)
    return found


def _one_parts(found: Imported, rest: dict[str, Any]) -> None:
    """Read the learning rates of the denoiser and the text encoders, and their stored formats."""
    rate = rest.pop("learning_rate", None)
    parts = (("unet", "prior", "transformer"), ("text_encoder", "text_encoder_1"), (MODEL_FILES[3],))
    for setting, names in zip(RATES, parts, strict=False):
        part = next((rest[name] for name in names if isinstance(rest.get(name), dict)), {})
        trained = part.get("train", setting == RATES[0])
        own = part.get("learning_rate") or rate
        if trained and own is not None:
            found.put(f"optimizer.{setting}", float(own))
        if (kind := TYPES.get(part.get("weight_dtype", ""))) and setting == RATES[0]:
            found.put("base_model.weights", kind)
    if model := rest.get("vae", {}).get("model_name") if isinstance(rest.get("vae"), dict) else None:
        found.put("base_model.vae", model)


def _one_optimizer(found: Imported, rest: dict[str, Any]) -> None:
    given = rest.get("optimizer")
    given = dict(given) if isinstance(given, dict) else {"optimizer": given or "ADAMW"}
    kind = str(given.pop("optimizer", "ADAMW"))
    name = optimizer_named(kind.replace("_8BIT", "8BIT").replace("SCHEDULE_FREE_ADAMW", "schedulefree_adamw"))
    if name is None:
        found.leave("optimizer", kind)
        return
    found.put("optimizer.name", name)
    settings = {each.name for each in OPTIMIZERS[name].settings}
    for key, value in given.items():
        if key in settings and value is not None:
            found.put(f"optimizer.options.{key}", value)


def _one_masks(rest: dict[str, Any]) -> dict[str, Any] | None:
    weight, probability, normalize, prior = (rest.pop(name, None) for name in ONE_MASKS)
    if not rest.get("masked_training"):
        return None
    values = {"unmasked_weight": weight, "unmasked_probability": probability, "normalize_masked_area": normalize}
    return {name: value for name, value in {**values, "prior_weight": prior}.items() if value is not None}


def _one_concepts(found: Imported, rest: dict[str, Any], folder: Path, masks: dict[str, Any] | None) -> None:
    """Read the concepts, in the configuration or in the file that it names."""
    concepts = rest.get("concepts")
    file = folder / str(rest.get("concept_file_name", ""))
    if not isinstance(concepts, list):
        if not file.is_file():
            found.leave("concept_file_name", rest.get("concept_file_name"))
            return
        concepts = parse_json(file.read_text(encoding="utf-8"))
    for each in concepts:
        if not each.get("enabled", True):
            continue
        text, image = each.get("text") or {}, each.get("image") or {}
        kinds = {"sample": "text_file", "concept": "one_file", "filename": "file_name"}
        captions: dict[str, Any] = {"source": kinds.get(text.get("prompt_source", "sample"), "text_file")}
        if captions["source"] == "one_file":
            captions["file"] = text.get("prompt_path", "")
        captions |= {"shuffle": bool(text.get("enable_tag_shuffling")), "keep": int(text.get("keep_tags_count") or 0)}
        values = {"folder": str(folder / each.get("path", "")), "captions": captions}
        values |= {"recursive": bool(each.get("include_subdirectories")), "folder_repeats": False}
        values |= {"loss_weight": float(each.get("loss_weight", 1.0)), "flip": bool(image.get("enable_random_flip"))}
        if each.get("type") in ("VALIDATION", "PRIOR_PREDICTION"):
            values["role"] = each["type"].lower()
        balance = float(each.get("balancing", 1.0))
        values |= {"samples": int(balance)} if each.get("balancing_strategy") == "SAMPLES" else {"repeats": balance}
        found.concept(**values, **({"masks": masks} if masks is not None else {}))
