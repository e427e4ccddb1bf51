"""Write a run as the file of another trainer, as far as that can say it, with a list of what it cannot."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...config import ALGORITHMS, ConceptConfig, RunConfig, SampleConfig, SamplingDefaults, SavesConfig, setting
from ...config.dataset import AugmentConfig, MaskConfig
from ...config.optimizer import RATES
from ...config.prompt_lines import SAMPLERS
from ...config.sample import AUTO
from ...data.images import picture_extensions
from ...data.scan.folder import folder_repeats
from ..toml_text import write_toml
from . import ai_toolkit, onetrainer, sd_scripts


class Written(NamedTuple):
    """The files of another trainer, and what they cannot say."""

    files: dict[str, str]  # what follows the file's name, such as "-dataset.toml" -> text; "" for the file itself
    left: list[str]  # our settings, as `name = value`


class Sheet:
    """The settings of a run; remembers which were written."""

    def __init__(self, config: RunConfig, usual: RunConfig, stem: str = "") -> None:
        self.stem = stem  # the file's name, without its ending
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
            if name not in self._said and value != self._usual.get(name)
            if not name.startswith(UNTOLD) or name == "sample.sampler"
        ]


MOST_FOLDERS = 1000  # that are looked at
OF_BOTH = ("ddim", "euler", "heun", "dpm_2", "lms")  # samplers of one name here and in sd-scripts
UNTOLD = (
    "base_model.tokenizer",
    "memory",
    "saves",
    "existing",
    "train.log",
    "sample",
    "base_model.vae_",
)
FOR_PEOPLE = ("captions.lines", "captions.encoding", "captions.variants", "augment.variants", "on_problem", "min_side")


def unsaid_of(concept: ConceptConfig, said: set[str]) -> list[str]:
    """List what a file does not say of a concept: said has the names of what it does, such as captions.shuffle."""
    # Only models of other nodes train clips, and a run of such a model is refused before.
    usual = ConceptConfig(folder=concept.folder, augment=AugmentConfig(), masks=MaskConfig(), clips=concept.clips)
    known = dict(_leaves(usual.to_dict()))
    return [
        f"{setting(name if '.' in name else f'concepts.{name}')} = {value!r:.80}"
        for name, value in _leaves(concept.to_dict())
        if name not in said and name not in FOR_PEOPLE and value not in (None, known.get(name))
    ]


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "options":
            yield from _leaves(value, f"{before}{name}.")
        elif name != "concepts":
            yield f"{before}{name}", value


def write_for(program: str, name: str, config: RunConfig, usual: RunConfig, stem: str = "") -> Written:
    """Write a run for a program of PROGRAMS; raises ValueError for one that it cannot train at all.

    stem: the file's name without its ending, by which it names those beside it.
    """
    if config.base_model.connected is not None:
        raise ValueError(f"{name} trains on a model of other nodes, which its settings do not name.")
    sheet = Sheet(config, usual, stem or name)
    files, left = PROGRAMS[program][1](name, config, sheet)
    return Written(files, list(dict.fromkeys([*left, *sheet.unsaid()])))


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
    "came": "pytorch_optimizer.CAME", "soap": "pytorch_optimizer.SOAP",
}  # fmt: skip
TO_PRECISIONS = {"float32": "no", "float16": "fp16", "bfloat16": "bf16", "auto": "bf16"}
LARGEST_SIDE = 8192  # which stands for none
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
    if (weights := {each.loss_weight for each in config.dataset.concepts if each.role == "regularisation"}) and len(
        weights
    ) == 1:
        given["prior_loss_weight"] = min(weights)
    for theirs in ("validation_split", "validate_every_n_steps"):
        if value := sheet.take(sd_scripts.PLAIN[theirs][0]):
            given[theirs] = value
    given |= _sd_saves(config.saves)
    prompts = _lines(config.sample)
    every = config.saves.sample_every if config.saves.sample_unit != "minutes" else 0
    files = {sd_scripts.DATASETS: write_toml(_sd_datasets(config, sheet, left))}
    if prompts and every:
        given |= {f"sample_every_n_{config.saves.sample_unit}": every, "sample_prompts": f"{sheet.stem}-prompts.txt"}
        files["-prompts.txt"] = "".join(f"{line}\n" for line in prompts)
        sampler = SamplingDefaults().sampler if config.sample.sampler == AUTO else config.sample.sampler
        theirs = {ours: each for each, ours in SAMPLERS.items() if not each.startswith("k_")}
        if sampler in OF_BOTH or sampler in theirs:
            sheet.take("sample.sampler")
            given["sample_sampler"] = theirs.get(sampler, sampler)
    head = f"# Train by: --config_file {sheet.stem}.toml --dataset_config {sheet.stem}{sd_scripts.DATASETS}\n"
    return {"": head + write_toml(given), **files}, left


def _sd_saves(saves: SavesConfig) -> dict[str, Any]:
    """Write how often the run is saved; a program counts no minutes."""
    every, unit = saves.save_every, saves.save_unit
    if not every or unit == "minutes":
        return {}
    kept = saves.keep_last if unit == "epochs" else max(1, (saves.keep_last - 1) * every)
    return {f"save_every_n_{unit}": every} | ({} if saves.keep_every == 1 else {f"save_last_n_{unit}": kept})


def _lines(sample: SampleConfig) -> list[str]:
    """Write the samples' prompts, each with the numbers that it has from all of them."""
    shared = {"w": sample.width, "h": sample.height, "s": sample.steps, "l": sample.cfg, "d": sample.seed}
    shared = {flag: value for flag, value in shared.items() if value}
    if sample.negative:
        shared["n"] = sample.negative
    found = []
    for line in sample.prompts:
        more = "".join(f" --{flag} {value}" for flag, value in shared.items() if f" --{flag} " not in f"{line} ")
        found.append(line + more)
    return found


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
    name, options = sheet.take("optimizer.name"), _options_of(sheet, left)
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


def _options_of(sheet: Sheet, left: list[str]) -> dict[str, Any]:
    """Take the optimizer's own settings; separate is of ours alone."""
    options = dict(sheet.take("optimizer.options"))
    if options.pop("separate", False):
        left.append(f"{setting('options.separate')} = True")
    return options


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
    alpha = alpha if ALGORITHMS[algorithm].alpha else 1
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
    """Write one dataset for each size and batch; a concept without its own has the run's."""
    train, general = config.train, dict[str, Any]()
    exact = [size for size in sheet.take("train.buckets.resolutions") if "x" in size]
    areas = [size for size in train.buckets.resolutions if "x" not in size]
    size = [int(side) for side in exact[0].split("x")] if exact else int(areas[0]) if areas else train.resolution or 512
    left += [f"{setting('buckets.resolutions')} = {train.buckets.resolutions!r}"] if len(exact) + len(areas) > 1 else []
    sheet.take("train.resolution")
    general |= {"enable_bucket": not exact, "batch_size": sheet.take("train.batch_size")}
    general |= {"bucket_reso_steps": sheet.take("train.bucket_step") or 64}
    bounds = (sheet.take("train.buckets.min_side") or 64, sheet.take("train.buckets.max_side") or LARGEST_SIDE)
    if sheet.take("train.buckets.no_upscale"):
        general["bucket_no_upscale"] = True
    elif not exact:
        general |= dict(zip(("min_bucket_reso", "max_bucket_reso"), bounds, strict=True))
    _as_there(config, sheet, "sd_scripts")
    datasets: list[dict[str, Any]] = []
    for concept in config.dataset.concepts:
        if concept.role not in ("train", "regularisation"):
            left.append(f"{setting('concepts.role')} = {concept.role!r}: {concept.folder:.200} is left out")
            continue
        own = concept.resolutions[0] if concept.resolutions else ""
        sizes = [int(side) for side in own.split("x")] if "x" in own else int(own) if own else size
        dataset = {"resolution": sizes} | ({"batch_size": concept.batch_size} if concept.batch_size else {})
        if not datasets or {**datasets[-1], "subsets": 0} != {**dataset, "subsets": 0}:
            datasets.append({**dataset, "subsets": []})
        datasets[-1]["subsets"] += [_sd_subset(each, left) for each in _by_folder(concept)]
    return {"general": general, "datasets": datasets}


def _by_folder(concept: ConceptConfig) -> list[ConceptConfig]:
    """Split a concept by its sub-folders, for programs that read no folder below; one that is not here stays whole."""
    found: list[ConceptConfig] = []
    if concept.recursive and concept.captions.source == "text_file":
        root, endings = Path(concept.folder), tuple(picture_extensions())
        for at, below, files in islice(os.walk(root), MOST_FOLDERS):
            below.sort()
            if any(name.lower().endswith(endings) for name in files):
                name = f"{Path(at).relative_to(root).as_posix()}/"
                times = folder_repeats(name) if concept.folder_repeats else 1
                found.append(concept.replace(folder=at, repeats=concept.repeats * times))
    return found or [concept]


def _as_there(config: RunConfig, sheet: Sheet, shapes: str) -> None:
    """Count the shapes of pictures as said where they are the program's own."""
    if config.train.buckets.shapes == shapes:
        sheet.take("train.buckets.shapes")


def _sd_subset(concept: ConceptConfig, left: list[str]) -> dict[str, Any]:
    captions, augment, masks = concept.captions, concept.augment, concept.masks
    said = {"folder", "role", "flip", "captions.extensions", "recursive", "folder_repeats", "batch_size"}
    given: dict[str, Any] = {"image_dir": concept.folder, "num_repeats": max(1, round(concept.repeats))}
    given["caption_extension"] = captions.extensions[0]
    for theirs, (ours, _) in sd_scripts.CAPTIONS.items():
        value = getattr(captions, ours)
        usual = sd_scripts.DEFAULTS.get(theirs)
        said.add(f"captions.{ours}")
        if value not in ("", 0, False, usual) and not (ours == "dropout" and value < 0):
            given[theirs] = value
    if captions.missing in ("class_prompt", "empty"):
        said.add("captions.missing")
    if captions.source == "table" and captions.file:
        given["metadata_file"] = captions.file
        said |= {"captions.source", "captions.file"}
    given |= {"is_reg": True} if concept.role == "regularisation" else {}
    given |= {"flip_aug": True} if concept.flip else {}
    if augment and augment.crop_jitter:
        given["random_crop"] = True
        said.add("augment.crop_jitter")
    if augment and (augment.hue, augment.saturation) == sd_scripts.COLOURS:
        given["color_aug"] = True
        said |= {"augment.hue", "augment.saturation"}
    if masks and masks.source == "alpha" and not masks.unmasked_weight and not masks.unmasked_probability:
        given["alpha_mask"] = True
        said |= {"masks.source", "masks.unmasked_weight", "masks.unmasked_probability"}
    elif masks:
        left.append(f"{setting('masks.source')} = {masks.source!r}")
    if given["num_repeats"] == concept.repeats:
        said.add("repeats")
    if len(concept.resolutions) < 2:
        said.add("resolutions")
    if concept.role == "regularisation":  # for all of them, prior_loss_weight
        said.add("loss_weight")
    left += unsaid_of(concept, said)
    return given


# --- ai-toolkit, OneTrainer --------------------------------------------------------------------------------


def _for_ai_toolkit(name: str, config: RunConfig, sheet: Sheet) -> tuple[dict[str, str], list[str]]:
    """Write the YAML of a job, as JSON, which is YAML, too."""
    _open(config)
    left: list[str] = []
    train, objective, saves = config.train, config.objective, config.saves
    rates = [sheet.take(f"optimizer.{rate}") for rate in RATES]
    ours = sheet.take("optimizer.name")
    own = TO_OPTIMIZERS | {"automagic": "automagic3"}
    if ours not in own:
        left.append(f"{setting('optimizer.name')} = {ours!r}")
    optimizer = own.get(ours, "adamw").rpartition(".")[2].lower()
    options = _options_of(sheet, left)
    if ours == "automagic":  # there it steps inside of the backward pass unless that is off
        options |= {"polarity_history": options.pop("history"), "fused": False}
    else:
        betas = [options.pop(beta, usual) for beta, usual in (("beta1", 0.9), ("beta2", 0.999))]
        if betas != [0.9, 0.999] and ours in ("adamw", "adamw8bit"):
            options["betas"] = betas
    options = options if ours in own else {}
    precision = TO_PRECISIONS[sheet.take("base_model.precision")]
    step: dict[str, Any] = {
        "steps": sheet.take("train.steps"), "batch_size": sheet.take("train.batch_size"), "lr": rates[0],
        "gradient_accumulation": sheet.take("train.accumulate"), "optimizer": optimizer, "optimizer_params": options,
        "train_text_encoder": bool(rates[1]), "max_grad_norm": sheet.take("optimizer.max_grad_norm"),
        "gradient_checkpointing": True, "dtype": {"no": "fp32"}.get(precision, precision),
    }  # fmt: skip
    step |= _ai_schedule(config, sheet, left)
    if train.epochs:
        left.append(f"{setting('train.epochs')} = {sheet.take('train.epochs')}")
    for part, rate in zip(RATES[1:], rates[1:], strict=True):  # one rate is of all parts there
        if rate not in (0, rates[0]):
            left.append(f"{setting(f'optimizer.{part}')} = {rate:g}")
    losses = {ours: theirs for theirs, ours in ai_toolkit.LOSSES.items()}
    if objective.loss in losses:
        step["loss_type"] = losses[sheet.take("objective.loss")]
    v = config.base_model.prediction == "v_prediction"  # of which it weighs the loss like noise
    for same in ("noise_offset",) if v else ("min_snr_gamma", "noise_offset"):
        if getattr(objective, same):
            step[same] = sheet.take(f"objective.{same}")
    if objective.preservation == "class":
        sheet.take("objective.preservation")
        step |= {
            "diff_output_preservation": True,
            "diff_output_preservation_class": sheet.take("objective.preservation_class"),
            "diff_output_preservation_multiplier": sheet.take("objective.preservation_weight"),
        }
    if objective.nearest_noise > 1:
        step["optimal_noise_pairing_samples"] = sheet.take("objective.nearest_noise")
    if objective.guidance_loss:
        step |= {"do_guidance_loss": True, "guidance_loss_target": sheet.take("objective.guidance_loss")}
        if objective.differential_guidance:  # stands inside of the other there
            scale = sheet.take("objective.differential_guidance")
            step |= {"do_differential_guidance": True, "differential_guidance_scale": scale}
    if config.optimizer.ema_decay:
        step["ema_config"] = {"use_ema": True, "ema_decay": sheet.take("optimizer.ema_decay")}
    model: dict[str, Any] = {"name_or_path": sheet.take("base_model.path")}
    model |= {"is_xl": True} if rates[2] or "xl" in model["name_or_path"].rpartition("/")[2].lower() else {}
    if vae := sheet.take("base_model.vae"):
        model["vae_path"] = vae
    if config.base_model.prediction == "v_prediction":
        model["is_v_pred"] = bool(sheet.take("base_model.prediction"))
    sheet.take("train.resolution")
    _as_there(config, sheet, "ai_toolkit")
    step_of_sizes = sheet.take("train.bucket_step") or 64
    sizes = sheet.take("train.buckets.resolutions") or (str(train.resolution or 512),)
    trained = [each for each in config.dataset.concepts if each.role in ("train", "regularisation")]
    left += [
        f"{setting('concepts.role')} = {each.role!r}: {each.folder:.200} is left out"
        for each in config.dataset.concepts
        if each not in trained
    ]
    save: dict[str, Any] = {"dtype": sheet.take("train.save_dtype"), "max_step_saves_to_keep": saves.keep_last}
    save["save_every"] = saves.save_every if saves.save_every and saves.save_unit == "steps" else 250
    words = {each.captions.prefix for each in trained}
    folders = [each for concept in trained for each in _by_folder(concept)]
    job: dict[str, Any] = {
        "type": "sd_trainer", "training_folder": "output", "device": "cuda:0",
        "network": _ai_network(config, sheet, left), "save": save,
        "datasets": [_ai_dataset(each, sizes, step_of_sizes, min(words), left) for each in folders],
        "train": step, "model": model,
    }  # fmt: skip
    if word := min(words, default=""):
        job["trigger_word"] = word
    trigger = objective.preservation_trigger
    if objective.preservation == "class" and trigger == (word or "subject"):
        sheet.take("objective.preservation_trigger")
    sample = config.sample
    if sample.prompts and saves.sample_every and saves.sample_unit == "steps":
        numbers = {"width": sample.width, "height": sample.height, "sample_steps": sample.steps, "seed": sample.seed}
        numbers |= {"guidance_scale": sample.cfg, "neg": sample.negative, "sample_every": saves.sample_every}
        job["sample"] = {key: value for key, value in numbers.items() if value} | {"prompts": list(sample.prompts)}
    return {"": json.dumps({"job": "extension", "config": {"name": name, "process": [job]}}, indent=2)}, left


def _ai_network(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    lora, algorithm = config.lora, sheet.take("lora.algorithm")
    kind = "lokr" if algorithm == "lokr" else "dora" if algorithm == "lora" and sheet.take("lora.dora") else "lora"
    if algorithm not in ("lora", "lokr"):
        left.append(f"{setting('lora.algorithm')} = {algorithm!r}")
    rank, alpha = sheet.take("lora.rank"), sheet.take("lora.alpha")
    network: dict[str, Any] = {"type": kind, "linear": rank, "linear_alpha": alpha or rank}
    if kind == "lokr":
        network |= {
            "lokr_full_rank": sheet.take("lora.full_matrix"),
            "lokr_factor": sheet.take("lora.factor"),
        }
    if sheet.take("lora.preset") == "full" and not lora.full_matrix:
        conv, conv_alpha = sheet.take("lora.conv_rank"), sheet.take("lora.conv_alpha")
        network |= {"conv": conv or rank, "conv_alpha": conv_alpha or alpha or rank}
    for chance in ("dropout", "rank_dropout", "module_dropout"):
        if getattr(lora, chance):
            network[chance] = sheet.take(f"lora.{chance}")
    return network


def _ai_schedule(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    schedules = {ours: theirs for theirs, ours in ai_toolkit.SCHEDULES.items() if theirs != "constant_with_warmup"}
    name = sheet.take("scheduler.name")
    if name not in schedules or name == "points":
        left.append(f"{setting('scheduler.name')} = {name!r}")
        return {"lr_scheduler": "cosine"}
    least, rises = config.scheduler.min_lr_ratio, config.scheduler.warmup_steps
    if name.startswith("cosine") and least:
        least = sheet.take("scheduler.min_lr_ratio") * config.optimizer.learning_rate
        return {"lr_scheduler": schedules[name], "lr_scheduler_params": {"eta_min": least}}
    if name == "constant" and rises and config.scheduler.warmup_unit == "steps":
        rises = sheet.take("scheduler.warmup_steps")
        return {"lr_scheduler": "constant_with_warmup", "lr_scheduler_params": {"num_warmup_steps": rises}}
    return {"lr_scheduler": schedules[name]}


def _ai_dataset(
    concept: ConceptConfig, shared: Sequence[str], step: int, trigger: str, left: list[str]
) -> dict[str, Any]:
    captions, masks, augment = concept.captions, concept.masks, concept.augment
    said = {"folder", "role", "flip", "loss_weight", "recursive", "folder_repeats", "captions.extensions"}
    said |= {"captions.dropout", "captions.shuffle"}
    if captions.missing in ("class_prompt", "empty"):
        said.add("captions.missing")
    sizes = concept.resolutions or tuple(shared)
    exact = all(len(set(size.split("x"))) == 1 and "x" in size for size in sizes)
    if exact or not any("x" in size for size in sizes):
        said.add("resolutions")
    else:
        left.append(f"{setting('concepts.resolutions')} = {sizes!r:.80}")
    given: dict[str, Any] = {
        "folder_path": concept.folder, "caption_ext": captions.extensions[0].lstrip("."),
        "resolution": [int(size.partition("x")[0]) for size in sizes], "buckets": not exact, "bucket_tolerance": step,
        "caption_dropout_rate": max(0.0, captions.dropout), "shuffle_tokens": captions.shuffle,
        "num_repeats": max(1, round(concept.repeats)), "flip_x": concept.flip,
        "is_reg": concept.role == "regularisation",
    }  # fmt: skip
    if given["num_repeats"] == concept.repeats:
        said.add("repeats")
    if concept.loss_weight != 1:
        given["loss_multiplier"] = concept.loss_weight
    if captions.prefix == trigger:
        said.add("captions.prefix")
    if captions.tag_dropout and (captions.shuffle or captions.keep):
        given |= {"token_dropout_rate": captions.tag_dropout} | (
            {} if captions.shuffle else {"keep_tokens": captions.keep}
        )
        said |= {"captions.tag_dropout"} | (set() if captions.shuffle else {"captions.keep"})
    elif captions.tag_dropout:
        given["token_dropout_rate"] = captions.tag_dropout
        said.add("captions.tag_dropout")
    if captions.missing == "class_prompt":
        given["default_caption"] = captions.class_prompt
        said.add("captions.class_prompt")
    if augment and augment.crop_jitter == 1:
        given["random_crop"] = True
        said.add("augment.crop_jitter")
    if masks and not masks.unmasked_probability and (masks.source == "alpha" or masks.folder):
        given |= {"alpha_mask": True} if masks.source == "alpha" else {"mask_path": masks.folder}
        given["mask_min_value"] = masks.unmasked_weight
        said |= {"masks.source", "masks.folder", "masks.unmasked_weight", "masks.unmasked_probability", "masks.missing"}
    elif masks:
        left.append(f"{setting('masks.source')} = {masks.source!r}")
    if concept.controls and concept.controls.columns:
        left.append(f"{setting('controls.folders')} = {', '.join(concept.controls.folders)!r}")
        said |= {"controls.folders"}
    elif concept.controls:
        given["control_path"] = list(concept.controls.folders)
        said |= {"controls.folders", "controls.fit", "controls.use"}
    left += unsaid_of(concept, said)
    return given


def _for_onetrainer(name: str, config: RunConfig, sheet: Sheet) -> tuple[dict[str, str], list[str]]:
    """Write a configuration with its concepts."""
    _open(config)
    left: list[str] = []
    types = {ours: theirs for theirs, ours in onetrainer.TYPES.items() if theirs != "TFLOAT_32"}
    rates = [sheet.take(f"optimizer.{rate}") for rate in RATES]
    algorithm = sheet.take("lora.algorithm")
    optimizer = {"adamw": "ADAMW", "adamw8bit": "ADAMW_8BIT", "adafactor": "ADAFACTOR", "prodigy": "PRODIGY"} | {
        "lion": "LION", "lion8bit": "LION_8BIT", "came": "CAME", "sgd": "SGD", "sgd8bit": "SGD_8BIT",
        "schedulefree_adamw": "SCHEDULE_FREE_ADAMW",
    }  # fmt: skip
    kind, options = sheet.take("optimizer.name"), sheet.take("optimizer.options")
    if kind not in optimizer:  # nor are its own settings any of the other's
        left.append(f"{setting('optimizer.name')} = {kind!r}")
    path = sheet.take("base_model.path")
    second = bool(rates[2]) or "xl" in path.rpartition("/")[2].lower()
    sizes = ",".join(sheet.take("train.buckets.resolutions")) or str(sheet.take("train.resolution") or 512)
    sheet.take("train.resolution")
    _as_there(config, sheet, "onetrainer")
    if config.train.bucket_step == (64 if second else 8):
        sheet.take("train.bucket_step")
    chances = {max(0.0, each.captions.dropout) for each in config.dataset.concepts}
    texts = {"stop_training_after_unit": "NEVER", "dropout_probability": min(chances, default=0.0)}
    unet: dict[str, Any] = {"train": rates[0] > 0, "learning_rate": rates[0]}
    for part, stop in ((texts, "text_encoder_stop"), (unet, "denoiser_stop")):
        if getattr(config.optimizer, stop):
            unit = {"epochs": "EPOCH", "steps": "STEP"}[sheet.take("optimizer.stop_unit")]
            part |= {"stop_training_after": sheet.take(f"optimizer.{stop}"), "stop_training_after_unit": unit}
    if config.base_model.weights in types:
        unet["weight_dtype"] = types[sheet.take("base_model.weights")]
    given: dict[str, Any] = {
        "__version": 6, "training_method": "FINE_TUNE" if algorithm == "full" else "LORA",
        "model_type": "STABLE_DIFFUSION_XL_10_BASE" if second else "STABLE_DIFFUSION_15",
        "base_model_name": path, "output_model_destination": f"models/{name}.safetensors",
        "output_dtype": types[sheet.take("train.save_dtype")],
        "train_dtype": types.get(sheet.take("base_model.precision"), "BFLOAT_16"),
        "lora_weight_dtype": types.get(sheet.take("lora.dtype"), "FLOAT_32"),
        "epochs": sheet.take("train.epochs") or 100, "batch_size": sheet.take("train.batch_size"),
        "gradient_accumulation_steps": sheet.take("train.accumulate"), "learning_rate": rates[0], "resolution": sizes,
        "aspect_ratio_bucketing": "x" not in sizes,
        "layer_filter_preset": "attn-mlp" if sheet.take("lora.preset") == "attn-mlp" else "full",
        "clip_grad_norm": sheet.take("optimizer.max_grad_norm"),
        "optimizer": {"optimizer": optimizer.get(kind, "ADAMW"), **(options if kind in optimizer else {})},
        "unet": unet,
        "text_encoder": {"train": rates[1] > 0, "learning_rate": rates[1], **texts},
        "text_encoder_2": {"train": rates[2] > 0, "learning_rate": rates[2], "stop_training_after_unit": "NEVER"},
    }  # fmt: skip
    given |= _one_network(algorithm, config, sheet, left) | _one_schedule(config, sheet, left)
    given |= _one_loss(config, sheet) | _one_saves(config) | _one_model(config, sheet, second=second)
    masked, shared = _one_masks(config)
    given |= masked
    concepts = [each for each in config.dataset.concepts if each.role != "regularisation"]
    left += [
        f"{setting('concepts.role')} = 'regularisation': {each.folder:.200} is left out"
        for each in config.dataset.concepts
        if each not in concepts
    ]
    said = shared | ({"captions.dropout"} if len(chances) < 2 else set())
    given["concepts"] = [_one_concept(each, number, said, left) for number, each in enumerate(concepts, 1)]
    if not config.train.epochs:
        left.append(f"{setting('train.steps')} = {sheet.take('train.steps')}: OneTrainer counts epochs")
    return {"": json.dumps(given, indent=4)}, left


def _one_network(algorithm: str, config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    kinds = {ours: theirs for theirs, ours in onetrainer.ALGORITHMS.items()} | {"full": "LORA"}
    if algorithm not in kinds:
        left.append(f"{setting('lora.algorithm')} = {algorithm!r}")
    lora, kind = config.lora, kinds.get(algorithm, "LORA")
    rank = sheet.take("lora.rank")
    given: dict[str, Any] = {"peft_type": kind, "lora_rank": rank, "lora_alpha": sheet.take("lora.alpha") or rank}
    if kind == "OFT_2":  # whose blocks have a size of their own
        left.append(f"{setting('lora.rank')} = {rank}")
    if kind == "LOKR":
        given |= {"lokr_dim": rank, "lokr_decompose_factor": sheet.take("lora.factor")}
        for theirs, ours in onetrainer.OF_LOKR:
            given[theirs] = sheet.take(f"lora.{ours}")
    if kind == "LORA" and lora.dora:
        given["lora_decompose"] = sheet.take("lora.dora")
    if kind == "LORA" and lora.dropout:
        given["dropout_probability"] = sheet.take("lora.dropout")
    return given


def _one_schedule(config: RunConfig, sheet: Sheet, left: list[str]) -> dict[str, Any]:
    curves = {"constant": "CONSTANT", "linear": "LINEAR", "rex": "REX", "cosine": "COSINE"} | {
        "cosine_with_restarts": "COSINE_WITH_HARD_RESTARTS"
    }
    name = sheet.take("scheduler.name")
    if name not in curves:
        left.append(f"{setting('scheduler.name')} = {name!r}")
    rises, percent = sheet.take("scheduler.warmup_steps"), sheet.take("scheduler.warmup_unit") == "percent"
    given: dict[str, Any] = {
        "learning_rate_scheduler": curves.get(name, "COSINE"),
        "learning_rate_warmup_steps": rises / 100 if percent else float(rises * config.train.accumulate),
    }
    if name == "cosine_with_restarts":
        given["learning_rate_cycles"] = float(sheet.take("scheduler.cycles"))
    if name != "constant" and config.scheduler.min_lr_ratio:
        given["learning_rate_min_factor"] = sheet.take("scheduler.min_lr_ratio")
    return given


def _one_loss(config: RunConfig, sheet: Sheet) -> dict[str, Any]:
    objective, given = config.objective, dict[str, Any]()
    strengths = {ours: theirs for theirs, ours in onetrainer.LOSSES.items()}
    if objective.loss in strengths:
        given |= {theirs: float(ours == sheet.take("objective.loss")) for ours, theirs in strengths.items()}
        if objective.loss == "huber_true":
            given["huber_delta"] = sheet.take("objective.huber_c")
    if objective.weighting == "debiased" and config.base_model.prediction != "v_prediction":
        given["loss_weight_fn"] = "DEBIASED_ESTIMATION"
        sheet.take("objective.weighting")
    elif objective.weighting == "p2":
        given |= {"loss_weight_fn": "P2", "loss_weight_strength": sheet.take("objective.p2_gamma")}
        sheet.take("objective.weighting")
    elif objective.min_snr_gamma:
        given |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": sheet.take("objective.min_snr_gamma")}
    if objective.noise_offset:
        given["offset_noise_weight"] = sheet.take("objective.noise_offset")
    if objective.min_timestep:
        given["min_noising_strength"] = sheet.take("objective.min_timestep") / 1000
    if objective.max_timestep < 999:
        given["max_noising_strength"] = (sheet.take("objective.max_timestep") + 1) / 1000
    if objective.timestep_distribution == "uniform":
        sheet.take("objective.timestep_distribution")
    return given


def _one_model(config: RunConfig, sheet: Sheet, *, second: bool) -> dict[str, Any]:
    base, given = config.base_model, dict[str, Any]()
    if base.vae:
        given["vae"] = {"model_name": sheet.take("base_model.vae")}
    if base.clip_skip > 1 and not second:
        given["text_encoder_layer_skip"] = sheet.take("base_model.clip_skip") - 1
    if base.prediction in ("v_prediction", "epsilon"):
        given[f"force_{base.prediction.removesuffix('_prediction')}_prediction"] = True
        sheet.take("base_model.prediction")
    if base.zero_terminal_snr == "on":
        given["rescale_noise_scheduler_to_zero_terminal_snr"] = bool(sheet.take("base_model.zero_terminal_snr"))
    if config.optimizer.ema_decay:
        given |= {"ema": "CPU" if sheet.take("optimizer.ema_device") == "cpu" else "GPU"}
        given |= {
            "ema_decay": sheet.take("optimizer.ema_decay"),
            "ema_update_step_interval": sheet.take("optimizer.ema_every"),
        }
    if words := config.lora.embeddings:
        sheet.take("lora.embeddings")
        given["embedding_learning_rate"] = words[0].learning_rate
        given["additional_embeddings"] = [
            {
                "placeholder": f"<{word.token}>",
                "token_count": word.vectors,
                "initial_embedding_text": word.init,
                "train": True,
            }
            for word in words
        ]
    return given


def _one_saves(config: RunConfig) -> dict[str, Any]:
    saves, sample, given = config.saves, config.sample, dict[str, Any]()
    units = {"epochs": "EPOCH", "steps": "STEP", "minutes": "MINUTE"}
    if saves.save_every and saves.keep_every == 1:
        given |= {"save_every": saves.save_every, "save_every_unit": units[saves.save_unit]}
    if saves.sample_every and sample.prompts:
        given |= {"sample_after": saves.sample_every, "sample_after_unit": units[saves.sample_unit]}
        given["samples"] = [_one_sample(line) for line in _lines(sample)]
    return given


def _one_sample(line: str) -> dict[str, Any]:
    names = {"n": "negative_prompt", "w": "width", "h": "height", "d": "seed", "l": "cfg_scale", "s": "diffusion_steps"}
    prompt, *flags = re.split(r"\s--(?=\w)", line)
    given: dict[str, Any] = {"enabled": True, "prompt": prompt}
    for each in flags:
        flag, _, value = each.partition(" ")
        if flag in names:
            given[names[flag]] = value if flag == "n" else sd_scripts.plain(value)
    return given


def _one_masks(config: RunConfig) -> tuple[dict[str, Any], set[str]]:
    """Write the masks, which are the same for all concepts there: beside the pictures, with one ending."""
    masks = [each.masks for each in config.dataset.concepts]
    first = masks[0] if masks else None
    usual = MaskConfig()
    if not first or any(each != first for each in masks) or (first.source, first.folder, first.suffixes) != (
        usual.source, usual.folder, usual.suffixes,
    ):  # fmt: skip
        return {}, set()
    given = {
        "masked_training": True, "unmasked_weight": first.unmasked_weight,
        "unmasked_probability": first.unmasked_probability, "normalize_masked_area_loss": first.normalize_masked_area,
        "masked_prior_preservation_weight": first.prior_weight,
    }  # fmt: skip
    names = ("unmasked_weight", "unmasked_probability", "normalize_masked_area", "prior_weight", "missing")
    return given, {f"masks.{name}" for name in names}


def _one_concept(concept: ConceptConfig, number: int, shared: set[str], left: list[str]) -> dict[str, Any]:
    captions, augment = concept.captions, concept.augment or AugmentConfig()
    sources = {"text_file": "sample", "file_name": "filename", "one_file": "concept"}
    said = {"folder", "repeats", "flip", "loss_weight", "recursive", "folder_repeats", "role", "samples", *shared}
    said |= {"captions.shuffle", "captions.keep", "captions.file", "captions.extensions"}
    said |= {"captions.missing"} if captions.missing == "empty" else set()
    said |= {f"augment.{name}" for name in ("crop_jitter", "rotation", "brightness", "contrast", "saturation", "hue")}
    said |= {"captions.source"} if captions.source in sources else set()
    image: dict[str, Any] = {"enable_crop_jitter": bool(augment.crop_jitter), "enable_random_flip": concept.flip}
    for name in ("brightness", "contrast", "saturation", "hue"):
        if most := getattr(augment, name):
            image |= {f"enable_random_{name}": True, f"random_{name}_max_strength": most}
    if augment.rotation:
        image |= {"enable_random_rotate": True, "random_rotate_max_angle": augment.rotation}
    if concept.resolutions:
        image |= {"enable_resolution_override": True, "resolution_override": ",".join(concept.resolutions)}
        said.add("resolutions")
    if concept.masks and "masks.missing" not in shared:
        left.append(f"{setting('masks.source')} = {concept.masks.source!r}")
    text: dict[str, Any] = {
        "prompt_source": sources.get(captions.source, "sample"), "prompt_path": captions.file,
        "enable_tag_shuffling": captions.shuffle, "keep_tags_count": captions.keep, "tag_delimiter": captions.separator,
    }  # fmt: skip
    said.add("captions.separator")
    modes = {"uniform": "RANDOM", "weighted": "RANDOM WEIGHTED"}
    if captions.tag_dropout:
        text |= {"tag_dropout_enable": True, "tag_dropout_probability": captions.tag_dropout}
        text["tag_dropout_mode"] = modes[captions.tag_dropout_mode]
        said |= {"captions.tag_dropout", "captions.tag_dropout_mode"}
        if captions.protected:
            text |= {"tag_dropout_special_tags": ",".join(captions.protected)}
            text["tag_dropout_special_tags_mode"] = "WHITELIST"
            said.add("captions.protected")
    left += unsaid_of(concept, said)
    return {
        "name": f"concept {number}", "path": concept.folder, "include_subdirectories": concept.recursive,
        "balancing": float(concept.samples) if concept.samples else concept.repeats, "loss_weight": concept.loss_weight,
        "balancing_strategy": "SAMPLES" if concept.samples else "REPEATS", "image_variations": augment.variants,
        "type": {"validation": "VALIDATION", "prior_prediction": "PRIOR_PREDICTION"}.get(concept.role, "STANDARD"),
        "image": image, "text": text,
    }  # fmt: skip


Writer = Callable[[str, RunConfig, Sheet], tuple[dict[str, str], list[str]]]
PROGRAMS: dict[str, tuple[str, Writer]] = {  # -> the ending of its file, and how it is written
    "sd-scripts": (".toml", _for_sd_scripts),
    "ai-toolkit": (".yaml", _for_ai_toolkit),
    "onetrainer": (".json", _for_onetrainer),
}
