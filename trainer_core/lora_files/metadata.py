"""Metadata of a LoRA file: the keys that other tools read (`ss_*`, `modelspec.*`), and the run's configuration."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..common.axes import Size
from ..config import (
    ALGORITHMS,
    MODEL_FILES,
    SPATIAL,
    ConceptConfig,
    DatasetConfig,
    LoraConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)
from ..data.captions import tags_of_lines
from ..data.plan import Plan
from ..memory.gradient_checkpointing import Recomputed
from ..models import BaseModel
from ..models.base import Side
from ..optim import describe
from ..optim.schedule import warmup_steps

if TYPE_CHECKING:
    from ..data.scan import Manifest

VERSION = "0.1.0"


def build_metadata(
    config: RunConfig,
    plan: Plan,
    base: BaseModel,
    *,
    name: str,
    steps: int,
    started: float,
    models: Mapping[str, str],
    run_key: str,
    start: Mapping[str, Any] | None = None,
    validation_loss: float | None = None,
) -> dict[str, str]:
    """Build all metadata of a LoRA file, as text.

    Nothing depends on the time of writing, so that a resumed run writes the same bytes. steps: finished by these
    weights; validation_loss: measured then. started: creation of the run, seconds since 1970. models: sha256 of the
    base model's files by role. run_key: hexadecimal. start: file, hash, rank and alpha of the continued LoRA.
    """
    optimizer, train, objective = config.optimizer, config.train, config.objective
    created = datetime.datetime.fromtimestamp(started, datetime.timezone.utc)
    facts = base.facts
    prefixes = (concept.captions.prefix.strip(" ,") for concept in config.dataset.concepts)
    triggers = dict.fromkeys(prefix for prefix in prefixes if prefix)
    kohya = {
        "v2": facts["v2"],
        "base_model_version": facts["base_model_version"],
        **_model_files(config, base, models),
        **network_metadata(config.lora, start, optimizer.lora_plus_ratio),
        "output_name": name,
        "session_id": int(run_key[:8], 16),
        "training_started_at": started,
        "learning_rate": optimizer.learning_rate,
        facts["rate"]: optimizer.learning_rate,
        "text_encoder_lr": _text_rates(optimizer, base),
        "zero_terminal_snr": facts["zero_terminal_snr"],
        "optimizer": describe(optimizer),
        "lr_scheduler": config.scheduler.name,
        "lr_warmup_steps": warmup_steps(plan.steps, config.scheduler),
        "max_grad_norm": optimizer.max_grad_norm,
        "gradient_accumulation_steps": train.accumulate,
        "gradient_checkpointing": any(
            isinstance(module.forward, Recomputed) for module in base.denoiser.module.modules()
        ),
        "mixed_precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(base.denoiser.dtype, "no"),
        "max_train_steps": plan.steps,
        "steps": steps,
        "epoch": math.ceil(plan.epochs_after(steps)),
        "num_epochs": math.ceil(plan.epochs),
        "num_batches_per_epoch": plan.batches_in(0),
        "seed": train.seed,
        "clip_skip": config.base_model.clip_skip if config.base_model.clip_skip > 1 else None,
        **_objective_metadata(objective),
        **_dataset_metadata(config, plan),
    }
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{facts['architecture']}/lora",
        "implementation": facts["implementation"],
        "title": name,
        "resolution": f"{train.resolution}x{train.resolution}",
        "date": created.isoformat(timespec="seconds"),
        "prediction_type": facts["prediction_type"],
        "trigger_phrase": ", ".join(triggers),
        "timestep_range": timesteps(objective, base.levels.sides),
        "encoder_layer": str(facts["encoder_layer"]),
    }
    return {
        **{f"ss_{k}": str(v) for k, v in kohya.items()},
        **{f"modelspec.{k}": v for k, v in spec.items() if v},
        "atelier.version": VERSION,
        "atelier.run": run_key,
        **({"atelier.validation_loss": f"{validation_loss:.6g}"} if validation_loss is not None else {}),
        "atelier.config": json.dumps(_without_paths(config, base), sort_keys=True, ensure_ascii=False),
        **({"atelier.start": json.dumps(start, ensure_ascii=False)} if start is not None else {}),
    }


def timesteps(objective: ObjectiveConfig, sides: Sequence[Side]) -> str:
    """Write the first and the last timestep that were trained, on these sides of the noise."""
    low, high = objective.min_timestep, objective.max_timestep
    return f"{max(low, sides[0].first)},{min(high, sides[-1].last)}" if sides else f"{low},{high}"


def _without_paths(config: RunConfig, base: BaseModel) -> dict[str, Any]:
    """Build the configuration with names in the place of paths, which would reveal the user's machine."""
    public = config.to_dict()
    files = {name: Path(public["base_model"][name]).name for name in MODEL_FILES}
    public["base_model"] |= {**files, "path": base.name, "tokenizer": ""}
    public["lora"]["start"] = Path(config.lora.start).name
    for beneath in public["lora"]["beneath"]:
        beneath["path"] = Path(beneath["path"]).name
    for concept in public["dataset"]["concepts"]:
        concept["leave_out"] = []  # names of files
        for section, name in ((concept, "folder"), (concept["masks"] or {}, "folder"), (concept["captions"], "file")):
            if section.get(name):
                section[name] = Path(section[name]).name
        if concept["controls"]:
            concept["controls"]["folders"] = [Path(folder).name for folder in concept["controls"]["folders"]]
    return public


def _model_files(config: RunConfig, base: BaseModel, models: Mapping[str, str]) -> dict[str, Any]:
    """Name the base model's files and the hashes by which other tools find them; a folder has no hash."""
    found = {"sd_model_name": base.name}
    if "path" in models:
        found |= {"sd_model_hash": base.facts["short_hash"], "new_sd_model_hash": models["path"]}
    if config.base_model.vae:
        found |= {"vae_name": Path(config.base_model.vae).name, "new_vae_hash": models["vae"]}
    return found


def _text_rates(optimizer: OptimizerConfig, base: BaseModel) -> Any:
    """Learning rate of the text encoders: a number, a list where they differ, None where none is trained."""
    rates = optimizer.part_rates[1 : len(base.parts)]
    return list(rates) if len(set(rates)) > 1 else next(iter(rates), 0) or None


def _dataset_metadata(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Describe the dataset with kohya's keys; counts are visits in an epoch."""
    pictures, concepts, train = plan.manifest.pictures, plan.dataset.concepts, config.train
    members = {number: [i for i in plan.trained if pictures[i].concept == number] for number in range(len(concepts))}
    visits = {number: sum((plan.rates[i] for i in each), Fraction()) for number, each in members.items()}
    folders: dict[str, dict[str, Any]] = {}
    for number, concept in enumerate(concepts):
        if each := members[number]:
            entry = folders.setdefault(Path(concept.folder).name, {"n_repeats": 0, "img_count": 0})
            entry["n_repeats"] = _number(visits[number] / len(each))
            entry["img_count"] += len(each)
    of_role: Counter[str] = Counter()
    for number, concept in enumerate(concepts):
        of_role[concept.role] += round(visits[number])
    counts = {"num_train_images": of_role["train"], "num_reg_images": of_role["regularisation"]}
    buckets = {
        number: {"resolution": list(size), "count": sum(batches)}
        for number, (size, batches) in enumerate(plan.batch_sizes(0).items())
    }
    errors = [abs(_aspect(plan.size(i)) - _aspect(crop.bucket)) for i in plan.trained for crop in plan.first_crops(i)]
    bucket_info = {"buckets": buckets, "mean_img_ar_error": sum(errors) / len(errors)}
    tags = tag_frequency(plan.manifest, plan.dataset)
    dataset = {
        "is_dreambooth": True,
        "batch_size_per_device": train.batch_size,
        **counts,
        "resolution": [train.resolution, train.resolution],
        "enable_bucket": True,
        "min_bucket_reso": train.buckets.min_side or None,
        "max_bucket_reso": train.buckets.max_side or None,
        "tag_frequency": tags,
        "bucket_info": bucket_info,
        "subsets": [
            _subset(concepts[number], len(each), visits[number] / len(each)) for number, each in members.items() if each
        ],
    }
    prior_weights = {concept.loss_weight for concept in concepts if concept.role == "regularisation"} or {1.0}
    return {
        **counts,
        "num_validation_images": len(plan.validation),
        "prior_loss_weight": prior_weights.pop() if len(prior_weights) == 1 else None,
        "total_batch_size": train.batch_size * train.accumulate,
        "resolution": f"({train.resolution}, {train.resolution})",
        "cache_latents": True,
        "datasets": json.dumps([dataset]),
        "dataset_dirs": json.dumps(folders),
        "tag_frequency": json.dumps(tags),
        "bucket_info": json.dumps(bucket_info),
    }


def _subset(concept: ConceptConfig, pictures: int, repeats: Fraction) -> dict[str, Any]:
    captions, augment = concept.captions, concept.augment
    return {
        "img_count": pictures,
        "num_repeats": _number(repeats),
        "color_aug": augment is not None
        and any((augment.brightness, augment.contrast, augment.saturation, augment.hue)),
        "flip_aug": concept.flip,
        "random_crop": augment is not None and augment.crop_jitter > 0,
        "shuffle_caption": captions.shuffle,
        "keep_tokens": captions.keep,
        "caption_prefix": captions.prefix or None,
        "caption_suffix": captions.suffix or None,
        "image_dir": Path(concept.folder).name,
        "class_tokens": captions.class_prompt or None,
        "is_reg": concept.role == "regularisation",
    }


def _number(value: Fraction) -> int | float:
    """Convert whole numbers to int, as readers of kohya's files expect."""
    return value.numerator if value.denominator == 1 else float(value)


def _aspect(size: Size) -> float:
    return size[0] / size[1]


def _objective_metadata(objective: ObjectiveConfig) -> dict[str, Any]:
    """Describe the objective with kohya's keys; None for settings that are off, no key for those unknown to kohya."""
    weighting, pyramid = objective.weighting, objective.pyramid_iterations
    huber = objective.loss in ("huber", "smooth_l1")
    strength = objective.noise_offset_strength
    return {
        "min_snr_gamma": (objective.min_snr_gamma or None) if weighting == "min_snr" else None,
        "debiased_estimation": weighting == "debiased",
        "noise_offset": objective.noise_offset or None,
        "noise_offset_random_strength": strength == "random",
        "adaptive_noise_scale": objective.offset_adaptation if strength == "adaptive" else None,
        "multires_noise_iterations": pyramid or None,
        "multires_noise_discount": objective.pyramid_discount if pyramid else None,
        "ip_noise_gamma": objective.input_perturbation or None,
        "loss_type": "l2" if objective.loss == "mse" else objective.loss,
        "huber_schedule": objective.huber_schedule if huber else None,
        "huber_c": objective.huber_c if huber else None,
        "huber_scale": objective.huber_scale if huber else None,
    }


def network_metadata(
    lora: LoraConfig, start: Mapping[str, Any] | None = None, lora_plus_ratio: float = 1.0
) -> dict[str, Any]:
    """Build the `ss_network_*` keys, as LyCORIS writes them for what it knows, or sd-scripts for a plain LoRA.

    start: as for `build_metadata`; its kinds, rank and alpha then replace the configuration's.
    """
    algorithm = ALGORITHMS[lora.algorithm]
    plain = lora.algorithm == "lora" and not (lora.dora or lora.tucker or lora.use_scalar or lora.train_norm)
    plain = plain or not algorithm.lycoris
    kinds = start["kinds"] if start is not None else ["LoRA" if plain else ""]
    module = "networks.lora" if kinds == ["LoRA"] else "lycoris.kohya"
    size = {"rank": lora.rank, "alpha": lora.alpha} if start is None else start
    args: dict[str, Any] = {"rank_dropout": lora.rank_dropout, "module_dropout": lora.module_dropout}
    args |= {"loraplus_lr_ratio": lora_plus_ratio} if lora_plus_ratio != 1 else {}
    if start is None:
        args |= {"preset": lora.preset, "rs_lora": lora.rs_lora, "include": lora.include, "exclude": lora.exclude}
        if lora.preset in SPATIAL:
            args |= {"conv_dim": lora.conv_rank or lora.rank, "conv_alpha": lora.conv_alpha or lora.alpha}
        args |= {
            "block_dims": _list(lora.block_ranks),
            "block_alphas": _list(lora.block_alphas),
            "conv_block_dims": _list(lora.conv_block_ranks),
            "conv_block_alphas": _list(lora.conv_block_alphas),
            "block_lr_weight": _list(lora.block_weights),
            "kind_ranks": ",".join(lora.kind_ranks),
        }
        if module == "lycoris.kohya":
            args |= {
                "algo": algorithm.lycoris,
                "dora_wd": lora.dora,
                **({"wd_on_output": "False"} if lora.dora else {}),
                "use_tucker": lora.tucker,
                "use_scalar": lora.use_scalar,
                "train_norm": lora.train_norm,
                **{name: getattr(lora, name) for name in algorithm.lycoris_args},
            }
    return {
        "network_module": module,
        "network_dim": size["rank"],
        "network_alpha": size["alpha"],
        "network_args": json.dumps({name: str(value) for name, value in args.items() if value not in (0, "", ())}),
        "network_dropout": lora.dropout or None,
        "scale_weight_norms": lora.scale_weight_norms or None,
    }


def _list(numbers: Sequence[float]) -> str:
    """Join numbers as sd-scripts reads them."""
    return ",".join(f"{number:g}" for number in numbers)


def tag_frequency(manifest: Manifest, dataset: DatasetConfig) -> dict[str, dict[str, int]]:
    """Count the captions that hold each tag, by folder name: kohya's ss_tag_frequency.

    Each line of a picture is a caption. Tags are lower-case, as kohya's; prefix and suffix count as tags, glued tags
    one by one, wildcards as their first option.
    """
    counts: dict[str, Counter[str]] = {}
    for picture in manifest.pictures:
        concept = dataset.concepts[picture.concept]
        count = counts.setdefault(Path(concept.folder).name, Counter())
        for tags in tags_of_lines(picture.lines, concept.captions):
            count.update(tags)
    return {folder: dict(count.most_common()) for folder, count in counts.items()}
