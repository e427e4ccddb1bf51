"""Write a run as the file of another trainer, as far as that can say it, with a list of what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...config import ALGORITHMS, ConceptConfig, RunConfig, setting
from ...config.optimizer import RATES
from ..toml_text import write_toml
from . import ai_toolkit, onetrainer, sd_scripts


class Written(NamedTuple):
    """The files of another trainer, and what they cannot say."""

    files: dict[str, str]  # what follows the file's name, such as "-dataset.toml" -> text; "" for the file itself
    left: list[str]  # our settings, as `name = value`


class Sheet:
    """The settings of a run; remembers which were written."""

    def __init__(self, config: RunConfig, usual: RunConfig) -> None:
        self._values, self._usual = dict(_leaves(config.to_dict())), dict(_leaves(usual.to_dict()))
        self._said: set[str] = set()

    def take(self, name: str) -> Any:
        """Read a setting that is written."""
        self._said.add(name)
        return self._values[name]

    def unsaid(self) -> list[str]:
        """List what nobody wrote, and what differs from a run where nothing is set."""
        return [
            f"{setting('.'.join(name.split('.')[-2:]))} = {value!r:.80}"
            for name, value in self._values.items()
            if name not in self._said and value != self._usual.get(name) and not name.startswith(UNTOLD)
        ]


UNTOLD = (
    "base_model.tokenizer",
    "memory",
    "saves",
    "existing",
    "train.log",
    "sample",
    "train.validat",
    "base_model.vae_",
)


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "options":
            yield from _leaves(value, f"{before}{name}.")
        elif name != "concepts":
            yield f"{before}{name}", value


def write_for(program: str, name: str, config: RunConfig, usual: RunConfig) -> Written:
    """Write a run for a program of PROGRAMS; raises ValueError for one that it cannot train at all."""
    if config.base_model.connected is not None:
        raise ValueError(f"{name} trains on a model of other nodes, which its settings do not name.")
    sheet = Sheet(config, usual)
    files, left = PROGRAMS[program][1](name, config, sheet)
    return Written(files, [*left, *sheet.unsaid()])


def _open(config: RunConfig) -> None:
    """Refuse a run whose rank or rate is still open: a number would be a guess."""
    for name, value in (("lora.rank", config.lora.rank), ("optimizer.learning_rate", config.optimizer.learning_rate)):
        if value <= 0 and not (name == "lora.rank" and not ALGORITHMS[config.lora.algorithm].rank):
            raise ValueError(f"{setting(name)} is open; export a run's folder, where it was chosen, or set it")


# --- sd-scripts --------------------------------------------------------------------------------------------

TO_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"} | {
    "cosine_with_restarts": "cosine_with_restarts", "polynomial": "polynomial", "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}  # fmt: skip
TO_OPTIMIZERS = {
    "adamw": "AdamW", "adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit", "lion": "Lion",
    "lion8bit": "Lion8bit", "paged_lion8bit": "PagedLion8bit", "adafactor": "AdaFactor", "prodigy": "Prodigy",
    "sgd": "SGDNesterov", "sgd8bit": "SGDNesterov8bit", "schedulefree_adamw": "schedulefree.AdamWScheduleFree",
    "came": "pytorch_optimizer.CAME",
}  # fmt: skip
TO_PRECISIONS = {"float32": "no", "float16": "fp16", "bfloat16": "bf16", "auto": "bf16"}
TO_LOSSES = {ours: theirs for theirs, ours in sd_scripts.LOSSES.items()}


def _for_sd_scripts(name: str, config: RunConfig, sheet: Sheet) -> tuple[dict[str, str], list[str]]:
    """Write the TOML of --config_file, and that of --dataset_config beside it."""
    _open(config)
    left: list[str] = []
    given: dict[str, Any] = {
        "pretrained_model_name_or_path": sheet.take("base_model.path"), "output_name": name,
        "save_model_as": "safetensors", "seed": sheet.take("train.seed"),
        "mixed_precision": TO_PRECISIONS[sheet.take("base_model.precision")],
        "save_precision": {"float32": "float"}.get(config.train.save_dtype, TO_PRECISIONS[config.train.save_dtype]),
        "gradient_accumulation_steps": sheet.take("train.accumulate"),
        "max_grad_norm": sheet.take("optimizer.max_grad_norm"),
    }  # fmt: skip
    sheet.take("train.save_dtype")
    if vae := sheet.take("base_model.vae"):
        given["vae"] = vae
    if (skipped := sheet.take("base_model.clip_skip")) > 1:
        given["clip_skip"] = skipped
    epochs, steps = sheet.take("train.epochs"), sheet.take("train.steps")
    given |= {"max_train_epochs": epochs} if epochs else {"max_train_steps": steps}
    given |= _sd_rates(sheet) | _sd_schedule(config, sheet, left) | _sd_optimizer(config, sheet, left)
    given |= _sd_network(config, sheet, left) | _sd_loss(config, sheet)
    for flag, (ours, value) in sd_scripts.FLAGS.items():
        section, _, field = ours.partition(".")
        if getattr(getattr(config, section), field) == value:
            given[flag] = True
            sheet.take(ours)
    return {"": write_toml(given), "-dataset.toml": write_toml(_sd_datasets(config, sheet, left))}, left


def _sd_rates(sheet: Sheet) -> dict[str, Any]:
    rates = [sheet.take(f"optimizer.{rate}") for rate in RATES]
    if not rates[1] and not rates[2]:
        return {"learning_rate": rates[0], "unet_lr": rates[0], "network_train_unet_only": True}
    return {"learning_rate": rates[0], "unet_lr": rates[0], "text_encoder_lr": rates[1:] if rates[2] else rates[1]}


def _sd_schedule(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    name, scheduler = sheet.take("scheduler.name"), config.scheduler
    if name not in TO_SCHEDULES:
        left.append(f"{setting('scheduler.name')} = {name!r}")
        name = "cosine"
    warmup = sheet.take("scheduler.warmup_steps")
    share = sheet.take("scheduler.warmup_unit") == "percent"
    given: dict[str, Any] = {"lr_scheduler": TO_SCHEDULES[name], "lr_warmup_steps": warmup / 100 if share else warmup}
    if name == "cosine_with_restarts":
        given["lr_scheduler_num_cycles"] = sheet.take("scheduler.cycles")
    if name == "polynomial":
        given["lr_scheduler_power"] = sheet.take("scheduler.power")
    if name == "cosine" and scheduler.min_lr_ratio:
        given |= {
            "lr_scheduler": "cosine_with_min_lr",
            "lr_scheduler_min_lr_ratio": sheet.take("scheduler.min_lr_ratio"),
        }
    if name == "warmup_stable_decay":
        rises = warmup / 100 if share else warmup / config.train.steps if config.train.steps else 0.0
        given["lr_decay_steps"] = sheet.take("scheduler.decay_share") * max(0.0, 1 - rises)
        given["lr_scheduler_args"] = [f"decay_type='{sheet.take('scheduler.decay_shape')}'"]
    return given


def _sd_optimizer(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    name, options = sheet.take("optimizer.name"), dict(sheet.take("optimizer.options"))
    if name == "custom":
        args = [part.strip() for part in str(options.get("arguments", "")).split(",") if part.strip()]
        return {"optimizer_type": options["optimizer"], "optimizer_args": args}
    if name not in TO_OPTIMIZERS:
        left.append(f"{setting('optimizer.name')} = {name!r}")
        return {"optimizer_type": "AdamW"}
    betas = [options.pop(beta) for beta in ("beta1", "beta2", "beta3") if beta in options]
    args = [f"{option}={value}" for option, value in options.items()]
    args += [f"betas={','.join(f'{beta:g}' for beta in betas)}"] if len(betas) > 1 else []
    return {"optimizer_type": TO_OPTIMIZERS[name], "optimizer_args": args}


def _sd_network(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    lora, args = config.lora, dict[str, Any]()
    algorithm, preset = sheet.take("lora.algorithm"), sheet.take("lora.preset")
    lycoris = algorithm != "lora" or any((lora.dora, lora.tucker, lora.rs_lora, lora.use_scalar, lora.train_norm))
    lycoris = lycoris or preset not in ("attn-mlp", "full", "auto")
    if lycoris:
        args |= {
            "algo": ALGORITHMS[algorithm].lycoris or algorithm,
            "preset": "attn-mlp" if preset == "auto" else preset,
        }
    alpha = sheet.take("lora.alpha") or lora.rank
    given: dict[str, Any] = {"network_module": "lycoris.kohya" if lycoris else "networks.lora"}
    given |= {"network_dim": sheet.take("lora.rank"), "network_alpha": alpha}
    rank, conv_alpha = sheet.take("lora.conv_rank"), sheet.take("lora.conv_alpha")
    if preset == "full" or rank:
        args |= {"conv_dim": rank or lora.rank, "conv_alpha": conv_alpha or alpha}
    for theirs, (ours, _) in sd_scripts.NETWORK.items():
        usual = {"lora.factor": -1, "optimizer.lora_plus_ratio": 1}.get(ours, 0)
        section, _, field = ours.partition(".")
        if theirs == "dropout" or getattr(getattr(config, section), field) == usual:
            continue
        args[theirs] = sheet.take(ours)
    for theirs, ours in sd_scripts.SWITCHES.items():
        acts = ours != "lora.rank_dropout_scale" or lora.rank_dropout
        if acts and theirs not in ("use_cp", "weight_decompose") and getattr(lora, ours.partition(".")[2]) is True:
            args[theirs] = sheet.take(ours)
    for theirs, (ours, _) in sd_scripts.BLOCKS.items():
        if numbers := getattr(lora, ours.partition(".")[2]):
            args[theirs] = ",".join(f"{number:g}" for number in numbers)
            sheet.take(ours)
    if lora.dropout:
        given["network_dropout"] = sheet.take("lora.dropout")
    if lora.scale_weight_norms:
        given["scale_weight_norms"] = sheet.take("lora.scale_weight_norms")
    if lora.start:
        given["network_weights"] = sheet.take("lora.start")
    return given | {"network_args": [f"{name}={value}" for name, value in args.items()]}


def _sd_loss(config: RunConfig, sheet: Sheet) -> dict[str, Any]:
    objective, given = config.objective, dict[str, Any]()
    if objective.loss in TO_LOSSES:
        given["loss_type"] = TO_LOSSES[sheet.take("objective.loss")]
        if objective.loss in ("huber", "smooth_l1"):
            given |= {name: sheet.take(f"objective.{name}") for name in ("huber_c", "huber_schedule", "huber_scale")}
    weighting = {"debiased": "debiased_estimation_loss", "v_scaled": "scale_v_pred_loss_like_noise_pred"}
    if objective.weighting in weighting:
        given[weighting[sheet.take("objective.weighting")]] = True
    elif objective.weighting == "v_like":
        given["v_pred_like_loss"] = sheet.take("objective.v_like_weight")
        sheet.take("objective.weighting")
    elif objective.min_snr_gamma:
        given["min_snr_gamma"] = sheet.take("objective.min_snr_gamma")
    for theirs, ours in (("noise_offset", "noise_offset"), ("ip_noise_gamma", "input_perturbation")):
        if value := getattr(objective, ours):
            given[theirs] = value
            sheet.take(f"objective.{ours}")
    if objective.pyramid_iterations:
        given["multires_noise_iterations"] = sheet.take("objective.pyramid_iterations")
        given["multires_noise_discount"] = sheet.take("objective.pyramid_discount")
    if objective.noise_offset_strength == "adaptive":
        given["adaptive_noise_scale"] = sheet.take("objective.offset_adaptation")
        sheet.take("objective.noise_offset_strength")
    if objective.min_timestep:
        given["min_timestep"] = sheet.take("objective.min_timestep")
    if objective.max_timestep < 999:
        given["max_timestep"] = sheet.take("objective.max_timestep") + 1
    return given


def _sd_datasets(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    """Write one dataset for each size; a concept without its own has the run's."""
    train, general = config.train, dict[str, Any]()
    exact = [size for size in sheet.take("train.buckets.resolutions") if "x" in size]
    areas = [size for size in train.buckets.resolutions if "x" not in size]
    size = [int(side) for side in exact[0].split("x")] if exact else int(areas[0]) if areas else train.resolution or 512
    left += [f"{setting('buckets.resolutions')} = {train.buckets.resolutions!r}"] if len(exact) + len(areas) > 1 else []
    sheet.take("train.resolution")
    general |= {"enable_bucket": not exact, "batch_size": sheet.take("train.batch_size")}
    general |= {"bucket_reso_steps": sheet.take("train.bucket_step") or 64}
    for theirs, ours in (("min_bucket_reso", "min_side"), ("max_bucket_reso", "max_side")):
        if side := sheet.take(f"train.buckets.{ours}"):
            general[theirs] = side
    if sheet.take("train.buckets.no_upscale"):
        general["bucket_no_upscale"] = True
    _as_there(config, sheet, "sd_scripts")
    datasets: dict[str, dict[str, Any]] = {}
    for concept in config.dataset.concepts:
        own = concept.resolutions[0] if concept.resolutions else ""
        sizes = [int(side) for side in own.split("x")] if "x" in own else int(own) if own else size
        dataset = datasets.setdefault(str(sizes), {"resolution": sizes, "subsets": []})
        dataset["subsets"].append(_sd_subset(concept, left))
    return {"general": general, "datasets": list(datasets.values())}


def _as_there(config: RunConfig, sheet: Sheet, shapes: str) -> None:
    """Count the shapes of pictures as said where they are the program's own."""
    if config.train.buckets.shapes == shapes:
        sheet.take("train.buckets.shapes")


def _sd_subset(concept: ConceptConfig, left: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {"image_dir": concept.folder, "num_repeats": max(1, round(concept.repeats))}
    given["caption_extension"] = concept.captions.extensions[0]
    for theirs, (ours, _) in sd_scripts.CAPTIONS.items():
        value = getattr(concept.captions, ours)
        usual = sd_scripts.DEFAULTS.get(theirs)
        if value not in ("", 0, False, usual) and not (ours == "dropout" and value < 0):
            given[theirs] = value
    given |= {"is_reg": True} if concept.role == "regularisation" else {}
    given |= {"flip_aug": True} if concept.flip else {}
    given |= {"random_crop": True} if concept.augment and concept.augment.crop_jitter else {}
    given |= {"alpha_mask": True} if concept.masks and concept.masks.source == "alpha" else {}
    if concept.role not in ("train", "regularisation"):
        left.append(f"{setting('concepts.role')} = {concept.role!r}")
    if concept.masks and concept.masks.source != "alpha":
        left.append(f"{setting('masks.source')} = {concept.masks.source!r}")
    return given


# --- ai-toolkit, OneTrainer --------------------------------------------------------------------------------


def _for_ai_toolkit(name: str, config: RunConfig, sheet: Sheet) -> tuple[dict[str, str], list[str]]:
    """Write the YAML of a job, as JSON, which is YAML, too."""
    _open(config)
    left: list[str] = []
    train, lora = config.train, config.lora
    kind = "lokr" if sheet.take("lora.algorithm") == "lokr" else "lora"
    if lora.algorithm not in ("lora", "lokr"):
        left.append(f"{setting('lora.algorithm')} = {lora.algorithm!r}")
    network: dict[str, Any] = {"type": kind, "linear": sheet.take("lora.rank"), "linear_alpha": lora.alpha or lora.rank}
    sheet.take("lora.alpha")
    if sheet.take("lora.preset") == "full":
        network |= {"conv": lora.conv_rank or lora.rank, "conv_alpha": lora.conv_alpha or lora.alpha or lora.rank}
        sheet.take("lora.conv_rank")
        sheet.take("lora.conv_alpha")
    rates = [sheet.take(f"optimizer.{rate}") for rate in RATES]
    ours = sheet.take("optimizer.name")
    if ours not in TO_OPTIMIZERS:
        left.append(f"{setting('optimizer.name')} = {ours!r}")
    optimizer = TO_OPTIMIZERS.get(ours, "adamw").rpartition(".")[2].lower()
    schedules = {ours: theirs for theirs, ours in ai_toolkit.SCHEDULES.items() if theirs != "constant_with_warmup"}
    schedule = sheet.take("scheduler.name")
    if schedule not in schedules:
        left.append(f"{setting('scheduler.name')} = {schedule!r}")
    options = {key: value for key, value in sheet.take("optimizer.options").items() if not key.startswith("beta")}
    precision = TO_PRECISIONS[sheet.take("base_model.precision")]
    step: dict[str, Any] = {
        "steps": sheet.take("train.steps"), "batch_size": sheet.take("train.batch_size"), "lr": rates[0],
        "gradient_accumulation": sheet.take("train.accumulate"), "optimizer": optimizer, "optimizer_params": options,
        "train_text_encoder": bool(rates[1]), "lr_scheduler": schedules.get(schedule, "cosine"),
        "max_grad_norm": sheet.take("optimizer.max_grad_norm"), "gradient_checkpointing": True,
        "dtype": {"no": "fp32"}.get(precision, precision),
    }  # fmt: skip
    if train.epochs:
        left.append(f"{setting('train.epochs')} = {sheet.take('train.epochs')}")
    for part, rate in zip(RATES[1:], rates[1:], strict=True):  # one rate is of all parts there
        if rate not in (0, rates[0]):
            left.append(f"{setting(f'optimizer.{part}')} = {rate:g}")
    if config.objective.min_snr_gamma:
        step["min_snr_gamma"] = sheet.take("objective.min_snr_gamma")
    if config.optimizer.ema_decay:
        step["ema_config"] = {"use_ema": True, "ema_decay": sheet.take("optimizer.ema_decay")}
    sheet.take("train.resolution")
    _as_there(config, sheet, "ai_toolkit")
    step_of_sizes = sheet.take("train.bucket_step") or 64
    datasets = []
    for concept in config.dataset.concepts:
        sizes = [int(size) for size in concept.resolutions if "x" not in size] or [train.resolution or 512]
        captions = concept.captions
        datasets.append({
            "folder_path": concept.folder, "caption_ext": captions.extensions[0].lstrip("."), "resolution": sizes,
            "caption_dropout_rate": max(0.0, captions.dropout), "shuffle_tokens": captions.shuffle,
            "num_repeats": max(1, round(concept.repeats)), "flip_x": concept.flip, "bucket_tolerance": step_of_sizes,
            "is_reg": concept.role == "regularisation",
        })  # fmt: skip
    job = {
        "type": "sd_trainer", "training_folder": "output", "device": "cuda:0", "network": network,
        "save": {"dtype": sheet.take("train.save_dtype"), "save_every": 250}, "datasets": datasets, "train": step,
        "model": {"name_or_path": sheet.take("base_model.path")},
    }  # fmt: skip
    if words := {concept.captions.prefix for concept in config.dataset.concepts if concept.captions.prefix}:
        job["trigger_word"] = min(words)
    return {"": json.dumps({"job": "extension", "config": {"name": name, "process": [job]}}, indent=2)}, left


def _for_onetrainer(name: str, config: RunConfig, sheet: Sheet) -> tuple[dict[str, str], list[str]]:
    """Write a configuration with its concepts."""
    _open(config)
    left: list[str] = []
    types = {ours: theirs for theirs, ours in onetrainer.TYPES.items() if theirs != "TFLOAT_32"}
    rates = [sheet.take(f"optimizer.{rate}") for rate in RATES]
    kinds = {ours: theirs for theirs, ours in onetrainer.ALGORITHMS.items()} | {"full": "LORA"}
    algorithm, schedule = sheet.take("lora.algorithm"), sheet.take("scheduler.name")
    if algorithm not in kinds:
        left.append(f"{setting('lora.algorithm')} = {algorithm!r}")
    curves = {"constant": "CONSTANT", "linear": "LINEAR", "rex": "REX", "cosine": "COSINE"} | {
        "cosine_with_restarts": "COSINE_WITH_HARD_RESTARTS"
    }
    if schedule not in curves:
        left.append(f"{setting('scheduler.name')} = {schedule!r}")
    warmup, percent = sheet.take("scheduler.warmup_steps"), sheet.take("scheduler.warmup_unit") == "percent"
    sizes = ",".join(sheet.take("train.buckets.resolutions")) or str(sheet.take("train.resolution") or 512)
    optimizer = {"adamw": "ADAMW", "adamw8bit": "ADAMW_8BIT", "adafactor": "ADAFACTOR", "prodigy": "PRODIGY"} | {
        "lion": "LION", "lion8bit": "LION_8BIT", "came": "CAME", "sgd": "SGD", "sgd8bit": "SGD_8BIT",
    }  # fmt: skip
    kind = sheet.take("optimizer.name")
    if kind not in optimizer:
        left.append(f"{setting('optimizer.name')} = {kind!r}")
    sheet.take("train.resolution")
    _as_there(config, sheet, "onetrainer")
    given: dict[str, Any] = {
        "__version": 6, "training_method": "FINE_TUNE" if algorithm == "full" else "LORA",
        "model_type": "STABLE_DIFFUSION_XL_10_BASE" if rates[2] else "STABLE_DIFFUSION_15",
        "base_model_name": sheet.take("base_model.path"), "output_model_destination": f"models/{name}.safetensors",
        "output_dtype": types[sheet.take("train.save_dtype")], "peft_type": kinds.get(algorithm, "LORA"),
        "train_dtype": types.get(sheet.take("base_model.precision"), "BFLOAT_16"),
        "lora_rank": sheet.take("lora.rank"), "lora_alpha": sheet.take("lora.alpha") or config.lora.rank,
        "epochs": sheet.take("train.epochs") or 100, "batch_size": sheet.take("train.batch_size"),
        "gradient_accumulation_steps": sheet.take("train.accumulate"), "learning_rate": rates[0],
        "learning_rate_scheduler": curves.get(schedule, "COSINE"), "resolution": sizes,
        "learning_rate_warmup_steps": warmup / 100 if percent else float(warmup * config.train.accumulate),
        "layer_filter_preset": "attn-mlp" if sheet.take("lora.preset") == "attn-mlp" else "full",
        "clip_grad_norm": sheet.take("optimizer.max_grad_norm"),
        "optimizer": {"optimizer": optimizer.get(kind, "ADAMW"), **sheet.take("optimizer.options")},
        "unet": {"train": rates[0] > 0, "learning_rate": rates[0]},
        "text_encoder": {"train": rates[1] > 0, "learning_rate": rates[1], "stop_training_after_unit": "NEVER"},
        "text_encoder_2": {"train": rates[2] > 0, "learning_rate": rates[2], "stop_training_after_unit": "NEVER"},
        "concepts": [_one_concept(concept, number) for number, concept in enumerate(config.dataset.concepts, 1)],
    }  # fmt: skip
    if not config.train.epochs:
        left.append(f"{setting('train.steps')} = {sheet.take('train.steps')}: OneTrainer counts epochs")
    if config.objective.min_snr_gamma:
        given |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": sheet.take("objective.min_snr_gamma")}
    if config.objective.noise_offset:
        given["offset_noise_weight"] = sheet.take("objective.noise_offset")
    if config.lora.dora:
        given["lora_decompose"] = sheet.take("lora.dora")
    return {"": json.dumps(given, indent=4)}, left


def _one_concept(concept: ConceptConfig, number: int) -> dict[str, Any]:
    captions = concept.captions
    source = {"file_name": "filename", "one_file": "concept"}.get(captions.source, "sample")
    return {
        "name": f"concept {number}", "path": concept.folder, "include_subdirectories": concept.recursive,
        "balancing": concept.repeats, "loss_weight": concept.loss_weight, "balancing_strategy": "REPEATS",
        "type": {"validation": "VALIDATION", "prior_prediction": "PRIOR_PREDICTION"}.get(concept.role, "STANDARD"),
        "image": {"enable_crop_jitter": bool(concept.augment and concept.augment.crop_jitter),
                  "enable_random_flip": concept.flip},
        "text": {"prompt_source": source, "enable_tag_shuffling": captions.shuffle, "keep_tags_count": captions.keep,
                 "prompt_path": captions.file},
    }  # fmt: skip


Writer = Callable[[str, RunConfig, Sheet], tuple[dict[str, str], list[str]]]
PROGRAMS: dict[str, tuple[str, Writer]] = {  # -> the ending of its file, and how it is written
    "sd-scripts": (".toml", _for_sd_scripts),
    "ai-toolkit": (".yaml", _for_ai_toolkit),
    "onetrainer": (".json", _for_onetrainer),
}
