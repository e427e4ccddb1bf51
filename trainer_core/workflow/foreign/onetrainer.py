"""Read the settings of OneTrainer: a preset, a configuration of any version, or a list of concepts.

Source of names, defaults, curves and migrations: its TrainConfig, ConceptConfig and lr_scheduler_util.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.json_files import parse_json
from ...common.wording import say
from ...config import OPTIMIZERS, instead_of
from ...config.optimizer import RATES
from . import sd_scripts
from .clips import frames_of
from .imported import (
    TEXT_ENCODERS,
    Given,
    Imported,
    number,
    on,
    optimizer_named,
    put_number,
    put_prompts,
    real,
    table,
    take,
    whole,
    without_counterpart,
)
from .sd_scripts import put_start, put_warmup
from .texts import beside, placed

PROGRAM = "OneTrainer"
DEFAULTS: dict[str, Any] = {  # what is off or empty there is not listed
    "training_method": "FINE_TUNE",
    "model_type": "STABLE_DIFFUSION_15",
    "base_model_name": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "output_dtype": "FLOAT_32",
    "output_model_destination": "models/model.safetensors",
    "concept_file_name": "training_concepts/concepts.json",
    "aspect_ratio_bucketing": True,
    "learning_rate_scheduler": "CONSTANT",
    "learning_rate": 3e-6,
    "learning_rate_warmup_steps": 200.0,
    "learning_rate_cycles": 1.0,
    "learning_rate_min_factor": 0.0,
    "epochs": 100,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "ema": "OFF",
    "ema_decay": 0.999,
    "ema_update_step_interval": 5,
    "train_dtype": "FLOAT_16",
    "resolution": "512",
    "frames": "25",
    "mse_strength": 1.0,
    "mae_strength": 0.0,
    "log_cosh_strength": 0.0,
    "huber_strength": 0.0,
    "huber_delta": 1.0,
    "vb_loss_strength": 1.0,
    "loss_weight_fn": "CONSTANT",
    "loss_weight_strength": 5.0,
    "dropout_probability": 0.0,
    "loss_scaler": "NONE",
    "learning_rate_scaler": "NONE",
    "clip_grad_norm": 1.0,
    "max_noising_strength": 1.0,
    "min_noising_strength": 0.0,
    "timestep_distribution": "UNIFORM",
    "noising_weight": 0.0,
    "noising_bias": 0.0,
    "timestep_shift": 1.0,
    "text_encoder_sequence_length": 512,
    "text_encoder_2_sequence_length": 77,
    "text_encoder_layer_skip": 0,
    "text_encoder_2_layer_skip": 0,
    "unmasked_probability": 0.1,
    "unmasked_weight": 0.1,
    "masked_prior_preservation_weight": 0.0,
    "layer_filter_preset": "full",
    "peft_type": "LORA",
    "lora_rank": 16,
    "lora_alpha": 1.0,
    "lora_decompose_norm_epsilon": True,
    "lora_weight_dtype": "FLOAT_32",
    "oft_block_size": 32,
    "oft_clipped_norm": 0.95,
    "lokr_dim": 16,
    "lokr_decompose_factor": -1,
    "lokr_dora_on_output": True,
    "lokr_vec_trick": True,
    "lora_layer_preset": "full",
    "embedding_weight_dtype": "FLOAT_32",
    "custom_learning_rate_scheduler": None,
}
PART = {"train": True, "learning_rate": None, "weight_dtype": "FLOAT_32", "dropout_probability": 0.0, "model_name": ""}
STOPS = {"stop_training_after": 30, "stop_training_after_unit": "EPOCH"}  # of text encoders
TYPES = {"FLOAT_32": "float32", "BFLOAT_16": "bfloat16", "FLOAT_16": "float16", "FLOAT_8": "float8", "NFLOAT_4": "nf4"}
TYPES |= {"INT_8": "int8", "TFLOAT_32": "float32"}
V_MODELS = ("STABLE_DIFFUSION_20", "STABLE_DIFFUSION_21")
COMPUTED = ("float32", "bfloat16", "float16")
FAMILIES = {  # model types -> the family; "" for those that Load Base Model loads
    "STABLE_DIFFUSION_15": "", "STABLE_DIFFUSION_15_INPAINTING": "", "STABLE_DIFFUSION_20": "",
    "STABLE_DIFFUSION_20_BASE": "", "STABLE_DIFFUSION_20_INPAINTING": "", "STABLE_DIFFUSION_20_DEPTH": "",
    "STABLE_DIFFUSION_21": "", "STABLE_DIFFUSION_21_BASE": "", "STABLE_DIFFUSION_XL_10_BASE": "",
    "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": "", "STABLE_DIFFUSION_3": "sd3", "STABLE_DIFFUSION_35": "sd3",
    "FLUX_DEV_1": "flux", "FLUX_FILL_DEV_1": "flux", "FLUX_2": "flux2", "FLUX_2_DEV": "flux2",
    "FLUX_2_KLEIN": "flux2", "PIXART_ALPHA": "pixart", "PIXART_SIGMA": "pixart", "HUNYUAN_VIDEO": "hunyuan_video",
    "HI_DREAM_FULL": "hidream", "CHROMA_1": "chroma", "QWEN": "qwen_image", "Z_IMAGE": "z_image",
    "STABLE_CASCADE_1": "stable_cascade",
}  # fmt: skip
CURVES = {  # scheduler -> our name and its settings; t runs from 0 to 1
    "CONSTANT": ("constant", ""),
    "SCHEDULE_FREE": ("constant", ""),  # whatever stands there
    "LINEAR": ("linear", ""),
    "COSINE": ("cosine", ""),
    "COSINE_WITH_RESTARTS": ("expression", "0.5 * (1 + cos({turns} * pi * t))"),
    "COSINE_WITH_HARD_RESTARTS": ("cosine_with_restarts", ""),
    "REX": ("rex", ""),
}
LOSSES = {"mse_strength": "mse", "mae_strength": "l1", "log_cosh_strength": "log_cosh", "huber_strength": "huber_true"}
UNITS = {"EPOCH": ("epochs", 1), "STEP": ("steps", 1), "MINUTE": ("minutes", 1), "HOUR": ("minutes", 60)}
ALGORITHMS = {"LORA": "lora", "LOHA": "loha", "OFT_2": "oft", "LOKR": "lokr"}
OF_LOKR = (
    ("lokr_decompose_both", "decompose_both"),
    ("lokr_use_tucker", "tucker"),
    ("lokr_weight_decompose", "dora"),
    ("lokr_full_matrix", "full_matrix"),
)
DISTRIBUTIONS = {  # -> our name, and the settings of weight and bias there
    "UNIFORM": ("uniform", "", ""),
    "SIGMOID": ("sigmoid", "sigmoid_slope", "sigmoid_center"),
    "LOGIT_NORMAL": ("logit_normal", "logit_scale", "logit_mean"),
    "HEAVY_TAIL": ("mode", "mode_scale", ""),
    "COS_MAP": ("cos_map", "", ""),
    "BETA": ("beta", "beta_a", "beta_b"),
    "INVERTED_PARABOLA": ("inverted_parabola", "parabola_scale", "parabola_center"),
}
STEPS = {  # of the sides of its shapes, where the name of the model type begins so; the first counts
    "STABLE_DIFFUSION_XL": 64, "STABLE_DIFFUSION_3": 64, "STABLE_DIFFUSION": 8, "PIXART": 16, "SANA": 32,
    "WUERSTCHEN": 128, "STABLE_CASCADE": 128,
}  # fmt: skip
SHIFTS = {"sigmoid_center": 0.5, "parabola_center": 0.5, "logit_scale": 1.0}  # ours less theirs
OPTIMIZER_DEFAULTS = sd_scripts.OPTIMIZER_DEFAULTS | {
    "adafactor": {}, "lion8bit": {"weight_decay": 0.0, "beta2": 0.999}, "schedulefree_adamw": {"weight_decay": 0.01},
}  # fmt: skip
ITS_OWN = ("eps", "eps2", "k", "percentile_clipping", "min_8bit_size", "quant_block_size", "__version")  # of optimizers
WITHOUT_EFFECT = frozenset({  # on what is trained: places, speed, what is read elsewhere or belongs to other methods
    "__version", "debug_mode", "debug_dir", "workspace_dir", "cache_dir", "tensorboard", "tensorboard_expose",
    "tensorboard_always_on", "tensorboard_port", "validation", "validate_after", "validate_after_unit",
    "continue_last_backup", "prevent_overwrites", "include_train_config", "multi_gpu", "device_indexes",
    "gradient_reduce_precision", "fused_gradient_reduce", "async_gradient_reduce", "async_gradient_reduce_buffer",
    "align_prop_loss", "align_prop_weight", "align_prop_probability", "align_prop_steps", "align_prop_truncate_steps",
    "align_prop_cfg_scale", "async_offloading", "enable_async_offloading", "enable_activation_offloading",
    "layer_offload_fraction", "compile", "image_caching", "text_caching", "latent_caching",
    "clear_cache_before_training", "scheduler_params", "caching_threads", "dataloader_threads", "prefetch_next_batch",
    "train_device", "temp_device", "fallback_train_dtype", "enable_autocast_cache", "only_cache", "frames",
    "attention_mechanism", "vb_loss_strength", "prior", "unet", "transformer", "unconditional_transformer",
    "text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "vae", "effnet_encoder", "decoder",
    "decoder_text_encoder", "decoder_vqgan", "quantization", "embedding", "embedding_weight_dtype", "cloud",
    "bundle_additional_embeddings", "optimizer_defaults", "sample_skip_first", "sample_image_format",
    "sample_video_format", "sample_audio_format", "samples_to_tensorboard", "non_ema_sampling", "backup_before_save",
    "rolling_backup", "save_skip_first", "save_filename_prefix", "secrets", "weight_dtype", "embeddings",
    "text_encoder_sequence_length", "text_encoder_2_sequence_length", "lora_decompose_norm_epsilon", "lokr_vec_trick",
    "embedding_learning_rate", "preserve_embedding_norm", "sample_definition_file_name", "concept_file_name",
    "text_encoder_3_layer_skip", "text_encoder_4_layer_skip", "save_every", "save_every_unit", "sample_after",
    "sample_after_unit", "gradient_checkpointing", "backup_after", "backup_after_unit", "rolling_backup_count",
})  # fmt: skip


def recognises(values: Any) -> bool:
    """Tell whether a JSON is a configuration or a preset of OneTrainer."""
    return isinstance(values, Mapping) and (
        "training_method" in values
        or "base_model_name" in values
        or len({"model_type", "train_dtype", "learning_rate_scheduler", "concepts"} & values.keys()) > 1
    )


def recognises_concepts(values: Any) -> bool:
    """Tell whether a JSON is OneTrainer's list of concepts."""
    return isinstance(values, list) and bool(values) and all(isinstance(e, Mapping) and "path" in e for e in values)


def read_concepts(values: list[Mapping[str, Any]], folder: Path) -> Imported:
    """Read a list of concepts alone; the rest is open."""
    found = Imported(program=PROGRAM, name="my_lora")
    found.put("base_model.path", "")
    for each in values:
        _concept(found, each, folder, None, 0.0)
    return found


def read_onetrainer(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a configuration; folder: in which relative paths start."""
    given = Given(_migrated(values), DEFAULTS)
    version = values.get("__version")
    found = Imported(program=f"{PROGRAM} (version {version} of its settings)" if version is not None else PROGRAM)
    found.name = Path(str(given.take("output_model_destination")).replace("\\", "/")).stem
    _method(found, given)
    _model(found, given)
    _network(found, given)
    take(found, given, "epochs", "train.epochs", whole)
    take(found, given, "batch_size", "train.batch_size", whole)
    take(found, given, "gradient_accumulation_steps", "train.accumulate", whole)
    take(found, given, "seed", "train.seed", lambda value: max(0, whole(value)))
    take(found, given, "clip_grad_norm", "optimizer.max_grad_norm", real)
    for name, setting, kinds in (
        ("train_dtype", "base_model.precision", COMPUTED),
        ("output_dtype", "train.save_dtype", COMPUTED),
        ("lora_weight_dtype", "lora.dtype", ("float32", "bfloat16")),
    ):
        kind = TYPES.get(str(given.take(name)), "")
        found.put(setting, kind) if kind in kinds else found.leave(name, given.take(name))
    if given.take("train_dtype") == "TFLOAT_32":
        found.put("memory.tf32", "on")
    _sizes(found, given)
    _schedule(found, given)
    _loss(found, given)
    _noise(found, given)
    dropout = _parts(found, given)
    _optimizer(found, given)
    _average(found, given)
    _words(found, given)
    _samples(found, given, folder)
    _concepts(found, given, folder, _masks(given), dropout)
    for name, value in given.unread():
        if name not in WITHOUT_EFFECT:
            found.leave(name, value)
    return found


def _migrated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the names of older versions to those of the newest."""
    found = dict(values)
    if isinstance(found.get("optimizer"), str):  # version 0
        names = [name for name in found if name.startswith("optimizer_")]
        own = {name.removeprefix("optimizer_"): found.pop(name) for name in names}
        found["optimizer"] = {**own, "optimizer": found["optimizer"]}
    for part in ("unet", "prior", "text_encoder", "text_encoder_2"):  # version 1
        names = {"train": f"train_{part}", "learning_rate": f"{part}_learning_rate"}
        names |= {"weight_dtype": f"{part}_weight_dtype", "stop_training_after": f"train_{part}_epochs"}
        old = {new: found.pop(name) for new, name in names.items() if name in found}
        if old:
            unit = {"stop_training_after_unit": "EPOCH"} if "stop_training_after" in old else {}
            found[part] = {**old, **unit, **(found.get(part) or {})}
    if (gamma := found.pop("min_snr_gamma", 0.0)) and "loss_weight_fn" not in found:  # version 2
        found |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": gamma}
    for old, new in (
        ("save_after", "save_every"),
        ("save_after_unit", "save_every_unit"),
        ("lora_layers", "layer_filter"),
        ("lora_layer_preset", "layer_filter_preset"),
        ("lora_layers_regex", "layer_filter_regex"),
    ):
        if old in found:
            found.setdefault(new, found.pop(old) or DEFAULTS.get(new))
    if name := found.pop("vae_model_name", ""):
        found["vae"] = {"model_name": name}
    return found


def _method(found: Imported, given: Given) -> None:
    method = str(given.take("training_method"))
    if method == "FINE_TUNE":
        found.put("lora.algorithm", "full")
    elif method != "LORA":
        raise ValueError(f"its training_method is {method:.60}, and here LoRAs are trained; set it to LORA")
    if on(given.take("align_prop")):  # of its older versions
        raise without_counterpart("align_prop", True, f"set it to false there; {instead_of('align_prop')}")
    if "CKPT" in str(given.take("output_model_format")):
        found.not_pickled("output_model_format", given.take("output_model_format"))


def _model(found: Imported, given: Given) -> None:
    kind, path = str(given.take("model_type")), str(given.take("base_model_name") or "")
    if family := FAMILIES.get(kind, kind.lower()):
        found.family = family
        part = _part(given, "transformer") or _part(given, "prior")
        found.models["diffusion_model"] = str(part.get("model_name") or path)
    else:
        found.put("base_model.path", path)
    if vae := _part(given, "vae").get("model_name"):
        if found.family:
            found.models["vae"] = str(vae)
        else:
            found.put("base_model.vae", str(vae))
    skipped = whole(number(found, given, "text_encoder_layer_skip") or 0)
    if skipped and not found.family and "XL" not in kind:
        found.put("base_model.clip_skip", skipped + 1)
    elif skipped:
        found.leave("text_encoder_layer_skip", skipped)
    if on(given.take("force_v_prediction")):
        found.put("base_model.prediction", "v_prediction")
    if on(given.take("force_epsilon_prediction")):
        found.put("base_model.prediction", "epsilon")
    if on(given.take("rescale_noise_scheduler_to_zero_terminal_snr")):
        found.put("base_model.zero_terminal_snr", "on")


def _network(found: Imported, given: Given) -> None:
    kind = str(given.take("peft_type"))
    if kind not in ALGORITHMS:
        raise without_counterpart("peft_type", kind, instead_of(kind) or f"train it with {PROGRAM}")
    fine_tuned = found.values.get("lora", {}).get("algorithm") == "full"
    if not fine_tuned:
        found.put("lora.algorithm", ALGORITHMS[kind])
    rank = number(found, given, "lokr_dim" if kind == "LOKR" else "lora_rank")
    alpha = number(found, given, "lora_alpha")
    if not fine_tuned and kind != "OFT_2":
        found.put("lora.rank", whole(rank or 16))
        found.put("lora.alpha", alpha or 1.0)
    if kind == "OFT_2" and not fine_tuned:
        found.leave("oft_block_size", given.take("oft_block_size"))
    if kind == "LOKR":
        take(found, given, "lokr_decompose_factor", "lora.factor", whole)
        for name, setting in OF_LOKR:
            if on(given.take(name)):
                found.put(f"lora.{setting}", True)
    given.ignore(name for name in DEFAULTS if name.startswith(("lokr_", "oft_", "lora_")))
    given.ignore(("lokr_decompose_both", "lokr_use_tucker", "lokr_weight_decompose", "lokr_full_matrix"))
    if on(given.take("lora_decompose")) and kind == "LORA":
        found.put("lora.dora", True)
    put_start(found, str(given.take("lora_model_name") or ""))
    if (dropout := number(found, given, "dropout_probability")) and kind == "LORA":
        found.put("lora.dropout", dropout)
    preset, layers = str(given.take("layer_filter_preset") or "full"), str(given.take("layer_filter") or "")
    given.ignore(("layer_filter_regex",))
    if preset in ("attn-mlp", "attn-only"):
        found.put("lora.preset", preset)
    elif preset == "full" or (preset == "custom" and not layers):
        found.put("lora.preset", "auto" if found.family else "full")
    else:
        found.put("lora.preset", "auto" if found.family else "full")
        found.leave("layer_filter", layers or preset)


def _sizes(found: Imported, given: Given) -> None:
    """Read the resolutions: with buckets an area each, without a square."""
    buckets = on(given.take("aspect_ratio_bucketing"))
    sizes = [part.strip() for part in str(given.take("resolution") or "").split(",") if part.strip()]
    if buckets and sizes:
        found.put("train.buckets.shapes", "onetrainer")
        kind = str(given.take("model_type"))
        found.put("train.bucket_step", next((step for begin, step in STEPS.items() if kind.startswith(begin)), 64))
    if buckets and len(sizes) == 1 and sizes[0].isdecimal():
        found.put("train.resolution", whole(sizes[0]))
    elif sizes:
        plain = [size if buckets or "x" in size else f"{size}x{size}" for size in sizes]
        found.put("train.buckets.resolutions", plain)


def _schedule(found: Imported, given: Given) -> None:
    """Read the curve of the learning rate; its warm-up counts batches, and an optimizer that averages has none."""
    name = str(given.take("learning_rate_scheduler"))
    if "SCHEDULE_FREE" in str(table(given.take("optimizer")).get("optimizer") or given.take("optimizer")):
        name = "SCHEDULE_FREE"
    if name not in CURVES:
        raise without_counterpart("learning_rate_scheduler", name)
    ours, formula = CURVES[name]
    found.put("scheduler.name", ours)
    cycles = number(found, given, "learning_rate_cycles") or 1.0
    if formula:
        found.put("scheduler.expression", formula.format(turns=f"{2 * cycles:g}"))
    if ours == "cosine_with_restarts":
        found.put("scheduler.cycles", max(1, round(cycles)))
        if cycles != round(cycles):
            found.leave("learning_rate_cycles", cycles)
    if (least := number(found, given, "learning_rate_min_factor")) and ours != "constant":
        found.put("scheduler.min_lr_ratio", least)
    length = number(found, given, "learning_rate_warmup_steps") or 0.0
    if name == "SCHEDULE_FREE" or length <= 0:
        return
    if length == 1:  # the whole run
        found.leave("learning_rate_warmup_steps", length)
    else:
        batches = max(1, whole(number(found, given, "gradient_accumulation_steps") or 1))
        put_warmup(found, length if length < 1 else whole(length / batches))


def _predicts_v(given: Given) -> bool:
    """Tell whether the model predicts v, of which it takes another root than sd-scripts."""
    return on(given.take("force_v_prediction")) or given.take("model_type") in V_MODELS


def _loss(found: Imported, given: Given) -> None:
    strengths = {name: number(found, given, name) or 0.0 for name in LOSSES}
    chosen = [name for name, strength in strengths.items() if strength]
    delta = number(found, given, "huber_delta") or 1.0
    if len(chosen) == 1 and strengths[chosen[0]] == 1:
        found.put("objective.loss", LOSSES[chosen[0]])
        if chosen[0] == "huber_strength":
            found.put("objective.huber_c", delta)
    else:
        for name in chosen:
            found.leave(name, strengths[name])
    weight, strength = str(given.take("loss_weight_fn")), number(found, given, "loss_weight_strength")
    if weight == "MIN_SNR_GAMMA":
        found.put("objective.min_snr_gamma", strength or 5.0)
    elif weight == "DEBIASED_ESTIMATION" and not _predicts_v(given):
        found.put("objective.weighting", "debiased")
    elif weight == "P2":
        found.put("objective.weighting", "p2")
        found.put("objective.p2_gamma", strength or 1.0)
    elif weight != "CONSTANT":
        found.leave("loss_weight_fn", weight)
    scaled = {"BATCH": "sum_batch", "GRADIENT_ACCUMULATION": "sum_accumulate", "BOTH": "sum"}
    if (kind := str(given.take("loss_scaler")).removeprefix("GLOBAL_")) in scaled:
        found.put("objective.loss_reduction", scaled[kind])
    elif kind != "NONE":
        found.leave("loss_scaler", kind)


def _noise(found: Imported, given: Given) -> None:
    put_number(found, given, "offset_noise_weight", "objective.noise_offset")
    if on(given.take("generalized_offset_noise")):
        found.put("objective.noise_offset_strength", "by_timestep")
    ends = (("min_noising_strength", "min_timestep", 0.0), ("max_noising_strength", "max_timestep", 1.0))
    for name, setting, end in ends:
        share = number(found, given, name)
        if share is not None and share != end:
            found.put(f"objective.{setting}", min(999, max(0, whole(1000 * share) - (setting == "max_timestep"))))
    kind = str(given.take("timestep_distribution"))
    weight, bias = (number(found, given, name) or 0.0 for name in ("noising_weight", "noising_bias"))
    if kind not in DISTRIBUTIONS:
        found.leave("timestep_distribution", kind)
    else:
        name, of_weight, of_bias = DISTRIBUTIONS[kind]
        found.put("objective.timestep_distribution", name)
        for setting, value in ((of_weight, weight), (of_bias, bias)):
            if setting:
                found.put(f"objective.{setting}", value + SHIFTS.get(setting, 0.0))
    shift, dynamic = number(found, given, "timestep_shift"), on(given.take("dynamic_timestep_shifting"))
    if shift and not dynamic and (found.family or shift != 1.0):
        found.put("objective.timestep_shift", shift)


def _part(given: Given, name: str) -> Mapping[str, Any]:
    return table(given.take(name))


def _parts(found: Imported, given: Given) -> float:
    """Read the rates and formats of the denoiser and the text encoders; return the chance of an empty caption."""
    rate, scale = number(found, given, "learning_rate"), _scale(given)
    denoiser = _part(given, "transformer") if found.family else _part(given, "unet")
    denoiser = denoiser or _part(given, "prior")
    parts: list[Mapping[str, Any]] = [{**PART, **denoiser}]
    second = "XL" in str(given.take("model_type"))
    places = (0, *(TEXT_ENCODERS.get(found.family, (0,)) if found.family else (1, 2) if second else (1,)))
    names = ("", *(f"text_encoder{end}" for end in ("", "_2", "_3", "_4")))[: len(places)]
    parts += [{**PART, **STOPS, **_part(given, name)} for name in names[1:]]
    for place, name, part in zip(places, names, parts, strict=True):
        # A preset for a flow model that does not name a text encoder trains none.
        trained = on(part.get("train")) and not (found.family and name and "train" not in _part(given, name))
        if name and not place:
            if trained:
                found.leave(f"{name}.train", True)
            continue
        own = part.get("learning_rate")
        found.put(f"optimizer.{RATES[place]}", real((rate or 0.0) if own is None else own) * scale if trained else 0.0)
        if trained:
            _stop(found, part, RATES[place])
    for part, setting in zip(parts, ("weights", "text_weights"), strict=False):
        kind = TYPES.get(str(part.get("weight_dtype")))
        if kind and not found.family and kind != "float32":
            found.put(f"base_model.{setting}", kind)
    if on(denoiser.get("gradient_checkpointing", True)) and str(given.take("gradient_checkpointing") or "ON") != "OFF":
        found.put("memory.checkpointing", "full")
    return real(parts[1].get("dropout_probability") or 0.0)


def _scale(given: Given) -> float:
    """Compute what the rates are multiplied by: the root of batch, accumulation, or both."""
    kind = str(given.take("learning_rate_scaler")).removeprefix("GLOBAL_")
    batch, accumulated = (real(given.take(name)) for name in ("batch_size", "gradient_accumulation_steps"))
    scales = {"BATCH": batch, "GRADIENT_ACCUMULATION": accumulated, "BOTH": batch * accumulated}
    return math.sqrt(max(0.0, scales.get(kind, 1.0)))


def _stop(found: Imported, part: Mapping[str, Any], setting: str) -> None:
    """Read when a part stops."""
    unit, after = str(part.get("stop_training_after_unit")), part.get("stop_training_after")
    if unit not in ("EPOCH", "STEP") or not after:
        return
    name = "denoiser_stop" if setting == RATES[0] else setting.replace("_learning_rate", "_stop")
    known, ours = found.values.get("optimizer", {}).get("stop_unit"), "epochs" if unit == "EPOCH" else "steps"
    if known and known != ours:  # one unit here, one for each part there
        found.leave("stop_training_after", f"{after} {unit}")
        return
    found.put(f"optimizer.{name}", whole(after))
    found.put("optimizer.stop_unit", ours)


def _optimizer(found: Imported, given: Given) -> None:
    values = given.take("optimizer")
    values = dict(values) if isinstance(values, Mapping) else {"optimizer": values or "ADAMW"}
    kind = str(values.pop("optimizer", None) or "ADAMW")
    plain = kind.replace("_8BIT", "8BIT").replace("SCHEDULE_FREE_ADAMW", "schedulefree_adamw")
    plain = plain.replace("SCHEDULE_FREE_SGD", "?").replace("PRODIGY_PLUS_SCHEDULE_FREE", "prodigy_plus_schedule_free")
    plain, adam = plain.replace("ADAM8BIT", "ADAMW8BIT"), kind in ("ADAM", "ADAM_8BIT")
    name = "adamw" if plain == "ADAM" else optimizer_named(plain)
    if name is None:
        named = {"DADAPT_ADAM": "DAdaptAdam", "DADAPT_ADAN": "DAdaptAdan", "DADAPT_LION": "DAdaptLion"}
        named |= {"DADAPT_SGD": "DAdaptSGD", "DADAPT_ADA_GRAD": "DAdaptAdaGrad", "ADABELIEF": "AdaBelief"}
        named |= {"TIGER": "Tiger", "AIDA": "Aida", "YOGI": "Yogi", "LAMB": "Lamb", "LARS": "LARS"}
        if kind not in named:
            raise without_counterpart("optimizer", kind)
        found.put("optimizer.name", "custom")
        found.put("optimizer.options.optimizer", named[kind])
        values.clear()
    else:
        found.put("optimizer.name", name)
        settings = {each.name for each in OPTIMIZERS[name].settings}
        usual = OPTIMIZER_DEFAULTS.get(name, {}) | ({"weight_decay": 0.0} if adam else {})
        for setting, value in usual.items():
            found.put(f"optimizer.options.{setting}", value)
        if adam and real(values.get("weight_decay") or 0.0):  # which it adds to the gradient
            found.leave("optimizer.weight_decay", values.pop("weight_decay"))
        for key, value in values.items():
            if key in settings and value is not None:
                found.put(f"optimizer.options.{key}", value)
            elif key == "decouple" or value in (None, False, True, "", "auto", "disabled", "full", 0.0, {}):
                continue
            elif key not in ITS_OWN:
                found.leave(f"optimizer.{key}", value)
    given.ignore(("optimizer_defaults",))


def _average(found: Imported, given: Given) -> None:
    kind = str(given.take("ema"))
    if kind in ("GPU", "CPU"):
        take(found, given, "ema_decay", "optimizer.ema_decay", real)
        take(found, given, "ema_update_step_interval", "optimizer.ema_every", whole)
        found.put("optimizer.ema_device", "cpu" if kind == "CPU" else "same")
    given.ignore(("ema_decay", "ema_update_step_interval"))


def _words(found: Imported, given: Given) -> None:
    """Read the words that are trained beside the LoRA."""
    words = given.take("additional_embeddings")
    for each in words if isinstance(words, list) else ():
        if isinstance(each, Mapping) and on(each.get("train", True)):
            found.values.setdefault("lora", {}).setdefault("embeddings", []).append(_word(given, found, each))


def _word(given: Given, found: Imported, each: Mapping[str, Any]) -> dict[str, Any]:
    """Read a word; its vectors take the rate of the run where they have none of their own."""
    token = re.sub(r"\W", "", str(each.get("placeholder") or "embedding")) or "embedding"
    rate = number(found, given, "embedding_learning_rate") or number(found, given, "learning_rate")
    init = re.sub(r"[^\w ]", "", str(each.get("initial_embedding_text") or "")).strip()
    word = {"token": token, "vectors": whole(each.get("token_count") or 1), "init": init, "learning_rate": rate}
    return word | ({"keep_norm": True} if on(given.take("preserve_embedding_norm")) else {})


def _samples(found: Imported, given: Given, folder: Path) -> None:
    """Read how often the run is saved and draws samples, and the prompts."""
    samples = given.take("samples")
    if samples is None and (text := beside(folder, str(given.take("sample_definition_file_name") or "?"))):
        samples = parse_json(text)
    lines = []
    for each in samples if isinstance(samples, list) else ():
        if not isinstance(each, Mapping) or not on(each.get("enabled", True)) or not each.get("prompt"):
            continue
        flags = (("n", "negative_prompt"), ("w", "width"), ("h", "height"), ("d", "seed"), ("l", "cfg_scale"))
        flags += (("s", "diffusion_steps"),)
        prompt = " ".join(str(each["prompt"]).split())
        lines.append(prompt + "".join(f" --{flag} {each[name]}" for flag, name in flags if each.get(name)))
    unit, times = UNITS.get(str(given.take("sample_after_unit") or "MINUTE"), ("", 0))
    if lines:
        put_prompts(found, lines)
        if unit:
            found.put("saves.sample_every", max(1, whole((given.take("sample_after") or 10) * times)))
            found.put("saves.sample_unit", unit)
    unit, times = UNITS.get(str(given.take("save_every_unit") or "NEVER"), ("", 0))
    if unit and (every := number(found, given, "save_every")):
        found.put("saves.save_every", max(1, whole(every * times)))
        found.put("saves.save_unit", unit)
        found.put("saves.keep_every", 1)
        found.put("saves.publish", True)


def _masks(given: Given) -> dict[str, Any] | None:
    names = ("unmasked_weight", "unmasked_probability", "normalize_masked_area_loss")
    names += ("masked_prior_preservation_weight",)
    weight, probability, normalize, prior = (given.take(name) for name in names)
    if not on(given.take("masked_training")):
        return None
    found = {"unmasked_weight": real(weight), "unmasked_probability": real(probability), "missing": "ones"}
    return {**found, "normalize_masked_area": on(normalize), "prior_weight": real(prior or 0.0)}


# --- the pictures ------------------------------------------------------------------------------------------


def _concepts(
    found: Imported, given: Given, folder: Path, masks: dict[str, Any] | None, dropout: float
) -> None:  # fmt: skip
    """Read the concepts, in the configuration or in the file that it names; one is left open without any."""
    concepts, name = given.take("concepts"), str(given.take("concept_file_name") or "")
    if not isinstance(concepts, list) and name:
        text = beside(folder, name)
        concepts = parse_json(text) if text else None
        if text is None and name != DEFAULTS["concept_file_name"]:
            found.open.append(
                say("The pictures are listed in {0}, which does not lie beside the file; put it there.", name)
            )
    for each in concepts if isinstance(concepts, list) else ():
        if isinstance(each, Mapping):
            _concept(found, each, folder, masks, dropout)
    if not found.values.get("dataset", {}).get("concepts"):
        found.concept(folder="")
    frames = frames_of(given.take("frames"))
    if found.family == "hunyuan_video" and frames:
        for concept in found.values["dataset"]["concepts"]:
            concept["clips"] = {"frames": frames}


def _concept(
    found: Imported, each: Mapping[str, Any], folder: Path, masks: dict[str, Any] | None, dropout: float
) -> None:
    """Add a concept; those that are switched off are none."""
    if not on(each.get("enabled", True)):
        return
    given = Given(each, {"balancing": 1.0, "loss_weight": 1.0, "image_variations": 1})
    text, image = (table(each.get(name)) for name in ("text", "image"))
    path = str(each.get("path") or "")
    concept: dict[str, Any] = {"folder": placed(folder, path), "folder_repeats": False}
    concept |= {"recursive": on(each.get("include_subdirectories")), "captions": _captions(found, text or {}, dropout)}
    concept |= {"loss_weight": real(given.take("loss_weight"))} if given.take("loss_weight") != 1 else {}
    kind = str(each.get("type") or ("VALIDATION" if on(each.get("validation_concept")) else "STANDARD"))
    if kind in ("VALIDATION", "PRIOR_PREDICTION"):
        concept["role"] = kind.lower()
    balance = each.get("repeats", given.take("balancing"))
    balance = 1.0 if balance is None else real(balance)
    if balance <= 0:  # of which no picture is taken
        return
    if each.get("balancing_strategy") == "SAMPLES":
        concept["samples"] = max(1, whole(balance))
    elif balance != 1:
        concept["repeats"] = balance
    _image(found, concept, image or {}, whole(given.take("image_variations") or 1))
    if masks is not None:
        concept["masks"] = dict(masks)
    found.concept(**concept)


def _captions(found: Imported, text: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    kinds = {"sample": "text_file", "concept": "one_file", "filename": "file_name"}
    source = kinds.get(str(text.get("prompt_source") or "sample"), "text_file")
    captions: dict[str, Any] = {"source": source, "dropout": dropout}
    if source == "text_file":
        captions["missing"] = "empty"
    if source == "one_file":
        captions["file"] = str(text.get("prompt_path") or "")
    shuffled, dropped = on(text.get("enable_tag_shuffling")), on(text.get("tag_dropout_enable"))
    if shuffled or dropped:
        captions |= {"shuffle": shuffled, "keep": whole(text.get("keep_tags_count", 1) or 0)}
        if (separator := str(text.get("tag_delimiter") or ",")) != ",":
            captions["separator"] = separator
    mode = {"RANDOM": "uniform", "RANDOM WEIGHTED": "weighted"}.get(str(text.get("tag_dropout_mode") or "FULL"))
    chance = real(text.get("tag_dropout_probability") or 0.0)
    if dropped and chance and mode:
        captions |= {"tag_dropout": chance, "tag_dropout_mode": mode}
    elif dropped and chance:
        found.leave("tag_dropout_mode", text.get("tag_dropout_mode") or "FULL")
    if on(text.get("caps_randomize_enable")):
        found.leave("caps_randomize_enable", True)
    tags = str(text.get("tag_dropout_special_tags") or "")
    if dropped and tags and on(text.get("tag_dropout_special_tags_regex")):
        found.leave("tag_dropout_special_tags", tags)
    elif dropped and tags and text.get("tag_dropout_special_tags_mode") == "WHITELIST":
        captions["protected"] = [tag.strip() for tag in tags.split(",") if tag.strip()]
    elif dropped and tags and text.get("tag_dropout_special_tags_mode") == "BLACKLIST":
        found.leave("tag_dropout_special_tags", tags)
    return captions


def _image(found: Imported, concept: dict[str, Any], image: Mapping[str, Any], variations: int) -> None:
    """Read what varies in the pictures; the crop's jitter is on there unless it is switched off."""
    if on(image.get("enable_random_flip")):
        concept["flip"] = True
    augment: dict[str, Any] = {"crop_jitter": 1.0} if on(image.get("enable_crop_jitter", True)) else {}
    for name in ("brightness", "contrast", "saturation", "hue"):
        if on(image.get(f"enable_random_{name}")) and (most := real(image.get(f"random_{name}_max_strength") or 0)):
            augment[name] = min(1.0, most)
    if on(image.get("enable_random_rotate")) and (angle := real(image.get("random_rotate_max_angle") or 0)):
        augment["rotation"] = angle
    if augment:
        concept["augment"] = {**augment, "variants": max(1, variations)}
    for name in ("flip", "rotate", "brightness", "contrast", "saturation", "hue"):
        if on(image.get(f"enable_fixed_{name}")):
            found.leave(f"enable_fixed_{name}", True)
    own = {f"enable_random_{name}" for name in ("flip", "rotate", "brightness", "contrast", "saturation", "hue")}
    for name, value in image.items():
        if name.startswith("enable_random_") and name not in own and on(value):
            found.leave(name, True)
    if on(image.get("enable_resolution_override")):
        concept["resolutions"] = [part.strip() for part in str(image.get("resolution_override") or "512").split(",")]
