"""Read the TOML of diffusion-pipe, and the list of directories that it names: what it has in common with this pack.

Source of names and defaults: its examples and train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.wording import say
from ..toml_text import read_toml
from .clips import frames_of
from .imported import Given, Imported, listing, number, on, put_number, real, table, tables, whole
from .sd_scripts import put_beneath, put_optimizer, put_start, put_warmup
from .texts import beside, placed

PROGRAM = "diffusion-pipe"
TOP = {"epochs": 1000, "micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
TOP |= {"lr_scheduler": "constant", "warmup_steps": 0, "video_clip_mode": "single_beginning"}
MODEL = {"dtype": "bfloat16", "timestep_sample_method": "logit_normal", "sigmoid_scale": 1.0}
FAMILIES = {"sdxl": "", "wan": "wan", "wan_22": "wan", "hunyuan-video": "hunyuan_video", "ltx-video": "ltxv"} | {
    "qwen_image": "qwen_image", "lumina_2": "lumina2", "omnigen2": "omnigen2", "cosmos": "cosmos", "flux2": "flux2",
    "z_image": "z_image", "hunyuan_image": "hunyuan_image", "chroma": "chroma", "flux": "flux", "sd3": "sd3",
}  # fmt: skip
FILES = {  # of the model -> the role
    "ckpt_path": "diffusion_model", "diffusers_path": "diffusion_model", "transformer_path": "diffusion_model",
    "checkpoint_path": "checkpoint", "vae_path": "vae", "llm_path": "text_encoder_1",
    "text_encoder_path": "text_encoder_1", "t5_path": "text_encoder_1", "clip_path": "text_encoder_2",
    "diffusion_model": "diffusion_model", "vae": "vae", "text_encoder": "text_encoder_1",
}  # fmt: skip
OF_SHAPES = ("min_ar", "max_ar", "num_ar_buckets", "ar_buckets", "size_buckets")
COSINE_END = 1e-6  # the rate at which a cosine ends there
OPTIMIZERS = {"adamw_optimi": "adamw", "adamw8bit": "adamw8bit", "adamw8bitkahan": "adamw8bit", "adamw": "adamw"}
WITHOUT_EFFECT = frozenset({
    "output_dir", "dataset", "model", "adapter", "optimizer", "pipeline_stages", "eval_every_n_epochs", "eval_datasets",
    "eval_before_first_step", "eval_micro_batch_size_per_gpu", "eval_gradient_accumulation_steps", "monitoring",
    "checkpoint_every_n_minutes", "checkpoint_every_n_epochs", "activation_checkpointing", "partition_method",
    "save_dtype", "caching_batch_size", "steps_per_print", "blocks_to_swap",
    "reentrant_activation_checkpointing",
    "image_micro_batch_size_per_gpu", "compile", "x_axis_examples", "map_num_proc", "disable_block_swap_for_eval",
    "transformer_dtype", "diffusion_model_dtype", "type", "dtype", "lr", "betas", "weight_decay", "eps",
    "save_every_n_epochs",
    "save_every_n_steps", "bypass_guidance_embedding", "flux_shift", "shift",
})  # fmt: skip


def recognises(values: Any) -> bool:
    """Tell whether a TOML is a main file of diffusion-pipe."""
    return isinstance(values, Mapping) and {"model", "optimizer"} <= values.keys() and (
        "micro_batch_size_per_gpu" in values or "adapter" in values
    )  # fmt: skip


def read_diffusion_pipe(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a main file; folder: in which relative paths start."""
    names = ("adapter", "optimizer", "model")
    parts = {name: table(values.get(name)) for name in names}
    if str(parts["adapter"].get("type", "")) != "lora":
        raise ValueError("it has no adapter of type lora, and here LoRAs are trained; add one")
    given = Given(values, TOP)
    found = Imported(program=PROGRAM, name=Path(str(values.get("output_dir") or "my_lora")).name or "my_lora")
    model = Given(parts["model"], MODEL)
    _model(found, model)
    adapter = Given(parts["adapter"], {})
    rank = number(found, adapter, "rank") or 32
    found.put("lora.rank", whole(rank))
    found.put("lora.alpha", number(found, adapter, "alpha") or rank)
    if dropout := number(found, adapter, "dropout"):
        found.put("lora.dropout", dropout)
    put_start(found, str(adapter.take("init_from_existing") or ""))
    found.put("lora.preset", "auto")
    found.put("train.epochs", whole(number(found, given, "epochs") or 1000))
    found.put("train.batch_size", whole(number(found, given, "micro_batch_size_per_gpu") or 1))
    found.put("train.accumulate", whole(number(found, given, "gradient_accumulation_steps") or 1))
    found.put("optimizer.max_grad_norm", number(found, given, "gradient_clipping") or 0.0)
    schedule = str(given.take("lr_scheduler"))
    known = schedule in ("constant", "linear", "cosine")
    found.put("scheduler.name", schedule if known else "constant")
    if not known:
        found.leave("lr_scheduler", schedule)
    put_warmup(found, given.take("warmup_steps"))
    _optimizer(found, Given(parts["optimizer"], {"lr": 1e-4}), model)
    if schedule == "cosine" and (rate := found.values["optimizer"]["learning_rate"]):
        found.put("scheduler.min_lr_ratio", min(1.0, COSINE_END / rate))
    if every := number(found, given, "save_every_n_epochs"):
        found.put("saves.save_every", whole(every))
        found.put("saves.save_unit", "epochs")
    if on(given.take("activation_checkpointing")):
        found.put("memory.checkpointing", "full")
    kept = number(found, model, "first_frame_conditioning_p") if found.family.startswith("ltx") else 0
    _dataset(found, given, folder, min(1.0, max(0.0, kept or 0.0)))
    for name, part in (("", given), ("model.", model), ("adapter.", adapter)):
        for key, value in part.unread():
            if key not in WITHOUT_EFFECT:
                found.leave(f"{name}{key}", value)
    return found


def recognises_directories(values: Any) -> bool:
    """Tell whether a TOML is a list of directories."""
    return isinstance(values, Mapping) and isinstance(values.get("directory"), list)


def read_directories(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a list of directories alone; the rest is open."""
    found = Imported(program=PROGRAM)
    found.put("base_model.path", "")
    _concepts(found, values, folder)
    return found


def _model(found: Imported, given: Given) -> None:
    kind = str(given.take("type") or "")
    found.family = FAMILIES.get(kind, kind.replace("-", "_"))
    for name, role in FILES.items():
        if value := given.take(name):
            found.models.setdefault(role, str(value))
    encoders = [each for each in listing(given.take("text_encoders")) if isinstance(each, Mapping)]
    paths = [path for each in encoders for path in listing(each.get("paths") or each.get("path"))]
    for place, path in enumerate(paths[:4], 1):
        found.models.setdefault(f"text_encoder_{place}", str(path))
    for path in listing(given.take("merge_adapters"))[:20]:
        put_beneath(found, str(path))
    if not found.family:
        found.put("base_model.path", found.models.pop("checkpoint", ""))
        found.models.clear()
    precision = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}.get(str(given.take("dtype")))
    if precision:
        found.put("base_model.precision", precision)
    method = str(given.take("timestep_sample_method"))
    if found.family and method in ("logit_normal", "uniform"):
        found.put("objective.timestep_distribution", method)
        shift = number(found, given, "image_shift") or number(found, given, "shift")
        if not on(given.take("flux_shift")):
            found.put("objective.timestep_shift", shift or 1.0)
        if method == "logit_normal" and (scale := number(found, given, "sigmoid_scale")):
            found.put("objective.logit_scale", scale)
    put_number(found, given, "min_snr_gamma", "objective.min_snr_gamma")
    if on(given.take("debiased_estimation_loss")):
        found.put("objective.weighting", "debiased")
    if on(given.take("v_pred")):
        found.put("base_model.prediction", "v_prediction")


def _optimizer(found: Imported, given: Given, model: Given) -> None:
    kind = str(given.take("type") or "adamw_optimi")
    name = put_optimizer(found, OPTIMIZERS.get(kind.lower(), kind))
    rate = number(found, given, "lr") or 0.0
    own = number(found, model, "unet_lr")
    found.put("optimizer.learning_rate", rate if own is None else own)
    if not found.family:
        for part, setting in (("text_encoder_1_lr", "text_encoder"), ("text_encoder_2_lr", "text_encoder_2")):
            text = number(found, model, part)
            found.put(f"optimizer.{setting}_learning_rate", 0.0 if text is None else text)
    if kind.lower() == "adamw_optimi":  # as its library has them
        found.values["optimizer"].setdefault("options", {}).update(beta2=0.99, eps=1e-6)
    betas = given.take("betas")
    if name != "custom" and isinstance(betas, list):
        for setting, value in zip(("beta1", "beta2"), betas, strict=False):
            found.put(f"optimizer.options.{setting}", real(value))
    for key in ("weight_decay", "eps"):
        value = number(found, given, key)
        if value is not None and name.startswith("adamw"):
            found.put(f"optimizer.options.{key}", value)


def _dataset(found: Imported, given: Given, folder: Path, first_frame: float) -> None:
    """Read the directories; one is left open where their file does not lie beside.

    first_frame: the share of the visits at which clips keep it, which the file of the model tells. Source: its
    models/ltx_video.py, prepare_inputs; its other models read no such number.
    """
    name = str(given.take("dataset") or "")
    text = beside(folder, name) if name else None
    values = read_toml(text) if text else {}
    if name and text is None:
        found.open.append(
            say("The pictures are listed in {0}, which does not lie beside the file; put it there.", name)
        )
    _concepts(found, values, folder, first_frame)
    if not values.get("directory"):
        found.concept(folder="")


def _shapes(found: Imported, values: Mapping[str, Any], directory: Mapping[str, Any]) -> None:
    """List what says which shapes pictures are cut to; here they follow from the area."""
    for name in OF_SHAPES:
        value = directory.get(name, values.get(name))
        if value not in (None, [], [1]) and not any(line.startswith(f"{name} =") for line in found.left):
            found.leave(name, value)


def _concepts(found: Imported, values: Mapping[str, Any], folder: Path, first_frame: float = 0.0) -> None:
    for each in tables(values.get("directory")):
        path, sizes = str(each.get("path") or ""), each.get("resolutions") or values.get("resolutions") or []
        concept: dict[str, Any] = {"folder": placed(folder, path), "recursive": False}
        captions: dict[str, Any] = {"dropout": 0.0, "missing": "empty"}
        captions |= {"prefix": str(each["caption_prefix"])} if each.get("caption_prefix") else {}
        captions |= {"shuffle": True} if on(each.get("shuffle_tags")) else {}
        concept |= {"folder_repeats": False, "captions": captions}
        plain = [str(whole(size)) for size in listing(sizes) if not isinstance(size, list)]
        if on(each.get("enable_ar_bucket", values.get("enable_ar_bucket"))):
            _shapes(found, values, each)
        else:  # every picture is cut to a square
            plain = [f"{size}x{size}" for size in plain]
        concept |= {"resolutions": plain} if plain else {}
        if (repeats := real(each.get("num_repeats") or 1)) != 1:
            concept["repeats"] = repeats
        if each.get("mask_path"):
            concept["masks"] = {"folder": str(each["mask_path"]), "missing": "ones", "unmasked_weight": 0.0}
        if frames := frames_of(each.get("frame_buckets", values.get("frame_buckets"))):
            concept["clips"] = {"frames": frames}  # each clip is trained with the most that it has, there too
            concept["clips"] |= {"first_frame": first_frame} if first_frame else {}
        found.concept(**concept)
