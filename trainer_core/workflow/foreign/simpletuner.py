"""Read the config.json of SimpleTuner, and the list of data backends that it names: what both programs share.

Source of names and defaults: its documentation of options and of data loaders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.json_files import parse_json
from ...common.wording import say
from .clips import frames_of
from .imported import Given, Imported, number, on, put_number, real, table, take, whole, without_counterpart
from .sd_scripts import put_network, put_optimizer, put_warmup
from .texts import beside, placed

PROGRAM = "SimpleTuner"
DEFAULTS: dict[str, Any] = {
    "model_type": "lora", "lora_type": "standard", "lora_rank": 16, "learning_rate": 4e-7, "optimizer": "adamw_bf16",
    "lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 0, "lr_end": 4e-7, "lr_power": 0.8,
    "train_batch_size": 4, "gradient_accumulation_steps": 1, "max_train_steps": 0, "num_train_epochs": 1,
    "mixed_precision": "bf16",
    "max_grad_norm": 2.0, "grad_clip_method": "value", "resolution": 1024, "resolution_type": "pixel_area",
    "caption_dropout_probability": 0.1, "checkpoint_step_interval": 500, "lora_dropout": 0.1, "loss_type": "l2",
    "flow_schedule_shift": 3.0, "flow_sigmoid_scale": 1.0, "validation_step_interval": 100, "huber_c": 0.1,
    "huber_schedule": "snr", "noise_offset_probability": 0.25, "noise_offset": 0.1,
    "training_scheduler_timestep_spacing": "trailing", "timestep_bias_strategy": "none", "t5_padding": "unmodified",
}  # fmt: skip
FAMILIES = {"sdxl": "", "sd1x": "", "sd2x": "", "sd3": "sd3", "flux": "flux", "flux2": "flux2", "chroma": "chroma"} | {
    "pixart_sigma": "pixart", "qwen_image": "qwen_image", "wan": "wan", "hidream": "hidream", "lumina2": "lumina2",
    "ltxvideo": "ltxv", "omnigen": "omnigen", "z_image": "z_image", "auraflow": "auraflow",
}  # fmt: skip
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear"} | {
    "polynomial": "polynomial",
    "cosine_with_restarts": "constant",  # it starts again at every step there
}
WAVES = {  # by its length in steps, which is written as the warm-up
    "sine": "0.5 * (1 + sin(pi * step / {length}))",
    "cosine": "0.5 * (1 + cos(pi * step / {length}))",
}
STEPS = {"anima": 16, "cosmos": 16, "cosmos3": 16, "flux2": 16, "mageflow": 16} | {  # of the sides, by model family
    "qwen_image": 32, "wan": 32, "wan_s2v": 32, "deepfloyd": 32,
}  # fmt: skip
LOSSES = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}
OF_SPEED = re.compile(  # and of places, pictures on the way, and what is done here by other means
    "validation_.*|vae_.*|dynamo_.*|eval_.*|evaluation_.*|sdnq_.*|ramtorch.*|gradient_checkpointing_.*|offload_.*"
    "|disable_bucket_pruning|num_processes|trust_remote_code|text_encoder_batch_size|allow_dataset_oversubscription"
    "|musubi_blocks_to_swap|context_parallel_.*|ema_validation|hub_.*|cosmos3_.*_component|framerate"
)
WITHOUT_EFFECT = frozenset({
    "output_dir", "resume_from_checkpoint", "report_to", "tracker_project_name", "tracker_run_name", "hub_model_id",
    "push_to_hub", "push_checkpoints_to_hub", "data_backend_config", "aspect_bucket_rounding", "minimum_image_size",
    "disable_benchmark", "vae_batch_size", "cache_dir", "checkpoints_total_limit", "validation_seed",
    "base_model_precision",
    "validation_guidance", "validation_resolution", "validation_num_inference_steps", "validation_negative_prompt",
    "use_ema", "lora_alpha", "user_prompt_library", "webhook_config", "attention_mechanism",
    "compress_disk_cache", "delete_problematic_images", "override_dataset_config", "validation_torch_compile",
    "validation_prompt", "validation_steps", "model_flavour", "resolution_type", "lora_type", "model_type",
    "num_eval_images",
    "text_encoder_1_precision", "text_encoder_2_precision", "text_encoder_3_precision", "quantize_via", "save_state",
    "validation_guidance_rescale", "validation_using_datasets", "metadata_update_interval", "write_batch_size",
    "caption_dropout_probability", "flow_schedule_shift", "flow_schedule_auto_shift", "checkpointing_steps",
})  # fmt: skip


def recognises(values: Any) -> bool:
    """Tell whether a JSON is a config.json of SimpleTuner."""
    names = {str(name).lstrip("-") for name in values} if isinstance(values, Mapping) else set()
    return "model_family" in names or {"data_backend_config", "lora_rank"} <= names


def recognises_backends(values: Any) -> bool:
    """Tell whether a JSON is a list of data backends of SimpleTuner."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(each, Mapping) and "id" in each for each in values)
        and any({"dataset_type", "caption_strategy"} & each.keys() for each in values)
    )


def read_backends(values: list[Mapping[str, Any]], folder: Path) -> Imported:
    """Read a list of data backends alone; the rest is open."""
    found = Imported(program=PROGRAM)
    found.put("base_model.path", "")
    _concepts(found, Given({}, DEFAULTS), values, folder)
    return found


def read_simpletuner(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a configuration; folder: in which relative paths start."""
    given = Given({str(name).lstrip("-"): value for name, value in values.items()}, DEFAULTS)
    if (trained := str(given.take("model_type"))) not in ("lora", "full"):
        raise ValueError(f"its model_type is {trained:.60}, and here LoRAs are trained; set it to lora")
    found = Imported(program=PROGRAM, name=Path(str(given.take("output_dir") or "my_lora")).name or "my_lora")
    kind = str(given.take("model_family") or "")
    found.family = FAMILIES.get(kind, kind)
    path = str(given.take("pretrained_model_name_or_path") or "")
    if found.family:
        found.models["diffusion_model"] = str(given.take("pretrained_transformer_model_name_or_path") or path)
    else:
        found.put("base_model.path", path)
    if trained == "full":
        found.put("lora.algorithm", "full")
        found.put("lora.preset", "auto" if found.family else "full")
        given.ignore(("lora_rank", "lora_dropout", "lycoris_config"))
    else:
        _network(found, given, folder)
        put_number(found, given, "lora_dropout", "lora.dropout")
    steps = number(found, given, "max_train_steps")
    epochs = number(found, given, "num_train_epochs")
    found.put("train.steps", whole(steps)) if steps else found.put("train.epochs", max(1, whole(epochs or 1)))
    take(found, given, "train_batch_size", "train.batch_size", whole)
    take(found, given, "gradient_accumulation_steps", "train.accumulate", whole)
    take(found, given, "seed", "train.seed", lambda value: max(0, whole(value)))
    by_value = given.take("grad_clip_method") == "value"
    found.put("optimizer.max_grad_norm", 0.0)
    take(found, given, "max_grad_norm", f"optimizer.max_grad_{'value' if by_value else 'norm'}", real)
    found.put("optimizer.learning_rate", number(found, given, "learning_rate") or 0.0)
    optimizer = str(given.take("optimizer"))
    put_optimizer(found, "adamw" if optimizer in ("adamw_bf16", "optimi-adamw") else optimizer)
    if optimizer == "adamw_bf16":
        found.put("optimizer.options.eps", 1e-6)
    _schedule(found, given)
    precision = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}.get(str(given.take("mixed_precision")))
    if precision:
        found.put("base_model.precision", precision)
    put_number(found, given, "snr_gamma", "objective.min_snr_gamma")
    if on(given.take("offset_noise")):  # at a share of the steps
        found.leave("offset_noise", given.take("noise_offset"))
    given.ignore(("noise_offset", "noise_offset_probability"))
    _loss(found, given)
    if on(given.take("gradient_checkpointing")):
        found.put("memory.checkpointing", "full")
    if on(given.take("use_ema")):
        found.put("optimizer.ema_decay", number(found, given, "ema_decay") or 0.995)
        take(found, given, "ema_update_interval", "optimizer.ema_every", whole)
    given.ignore(("ema_decay", "ema_update_interval"))
    every = number(found, given, "checkpointing_steps") or number(found, given, "checkpoint_step_interval")
    given.ignore(("checkpoint_step_interval",))
    if every:
        found.put("saves.save_every", whole(every))
        found.put("saves.save_unit", "steps")
    if prompt := str(given.take("validation_prompt") or "").strip():
        found.put("sample.prompts", [" ".join(prompt.split())])
        found.put(
            "saves.sample_every",
            whole(number(found, given, "validation_steps") or number(found, given, "validation_step_interval") or 100),
        )
    _backends(found, given, folder)
    for key, value in given.unread():
        if key not in WITHOUT_EFFECT and not OF_SPEED.fullmatch(key):
            found.leave(key, value)
    return found


def _loss(found: Imported, given: Given) -> None:
    """Read the loss, and how a flow model's noise levels are drawn."""
    loss = str(given.take("loss_type"))
    found.put("objective.loss", LOSSES[loss]) if loss in LOSSES else found.leave("loss_type", loss)
    if loss in ("huber", "smooth_l1"):
        take(found, given, "huber_c", "objective.huber_c", real)
        take(found, given, "huber_schedule", "objective.huber_schedule", str)
    given.ignore(("huber_c", "huber_schedule"))
    if not found.family:
        given.ignore(("flow_sigmoid_scale", "flow_schedule_shift"))
        return
    if on(given.take("mixflow_enabled")):  # with levels of its own
        share = number(found, given, "mixflow_gamma")
        found.put("objective.mixflow", 0.8 if share is None else share)
        for setting, value in (("timestep_distribution", "beta"), ("beta_a", 1.0), ("beta_b", 2.0)):
            found.put(f"objective.{setting}", value)
        given.ignore(("flow_use_uniform_schedule", "flow_use_beta_schedule"))
    elif on(given.take("flow_use_uniform_schedule")):
        found.put("objective.timestep_distribution", "uniform")
    elif on(given.take("flow_use_beta_schedule")):
        found.put("objective.timestep_distribution", "beta")
        for name, setting in (("flow_beta_schedule_alpha", "beta_a"), ("flow_beta_schedule_beta", "beta_b")):
            found.put(f"objective.{setting}", number(found, given, name) or 2.0)
    else:
        found.put("objective.timestep_distribution", "logit_normal")
        found.put("objective.logit_scale", number(found, given, "flow_sigmoid_scale") or 1.0)
    given.ignore(("flow_sigmoid_scale",))
    shift, by_size = number(found, given, "flow_schedule_shift"), on(given.take("flow_schedule_auto_shift"))
    if shift or not by_size:  # a fixed one goes before
        found.put("objective.timestep_shift", shift or 1.0)


def _network(found: Imported, given: Given, folder: Path) -> None:
    """Read the network: LyCORIS has a file of its own, whose words are those of its other users."""
    rank, alpha = number(found, given, "lora_rank") or 16, number(found, given, "lora_alpha")
    lycoris = str(given.take("lora_type")) == "lycoris"
    name = str(given.take("lycoris_config") or "lycoris_config.json")
    text = beside(folder, name) if lycoris else None
    values = parse_json(text) if text else None
    if isinstance(values, Mapping):
        plain = ("algo", "factor", "conv_dim", "conv_alpha", "use_tucker", "full_matrix", "dropout", "rank_dropout")
        args = {key: values[key] for key in plain if key in values}
        args |= {"preset": "full"}
        network = {"network_module": "lycoris.kohya", "network_dim": values.get("linear_dim"), "network_args": args}
        put_network(found, Given({**network, "network_alpha": values.get("linear_alpha")}, {}), found.family)
        return
    if lycoris:
        found.open.append(
            say("The network is described in {0}, which does not lie beside the file; put it there.", name)
        )
    found.put("lora.rank", whole(rank))
    found.put("lora.alpha", rank if alpha is None else alpha)
    found.put("lora.preset", "auto" if found.family else "attn-mlp")


def _schedule(found: Imported, given: Given) -> None:
    """Read the curve: its waves are as long as the warm-up there, which they have none of."""
    name, length = str(given.take("lr_scheduler")), whole(number(found, given, "lr_warmup_steps") or 0)
    rate, end = found.values["optimizer"]["learning_rate"], number(found, given, "lr_end") or 0.0
    if name in WAVES:
        found.put("scheduler.name", "expression")
        found.put("scheduler.expression", WAVES[name].format(length=max(1, length)))
    elif name in SCHEDULES:
        found.put("scheduler.name", SCHEDULES[name])
        if name not in ("constant", "cosine_with_restarts"):
            put_warmup(found, length)
    else:
        raise without_counterpart("lr_scheduler", name)
    if name == "polynomial":
        take(found, given, "lr_power", "scheduler.power", real)
    if (name == "polynomial" or name in WAVES) and rate and end:
        found.put("scheduler.min_lr_ratio", min(1.0, end / rate))
    given.ignore(("lr_end", "lr_power", "lr_num_cycles"))


def _size(value: Any, kind: str) -> str:
    """Write a size: megapixels as the side of a square."""
    side = real(value or 1024)
    return str(max(64, round(side if "pixel" in kind else 1000 * side**0.5) // 8 * 8))


def _backends(found: Imported, given: Given, folder: Path) -> None:
    """Read the backends that hold pictures; one is left open where their file does not lie beside."""
    name, values = str(given.take("data_backend_config") or ""), []
    if name:
        text = beside(folder, name)
        values = parse_json(text) if text else []
        if text is None:
            found.open.append(
                say("The pictures are listed in {0}, which does not lie beside the file; put it there.", name)
            )
    _concepts(found, given, values, folder)


def _concepts(found: Imported, given: Given, values: Any, folder: Path) -> None:
    """Add a concept for each backend that holds pictures."""
    usual, kind = given.take("resolution"), str(given.take("resolution_type"))
    step = number(found, given, "aspect_bucket_alignment") or 64
    found.put("train.buckets.shapes", "simpletuner")
    found.put("train.bucket_step", STEPS.get(str(given.take("model_family")), whole(step)))
    dropout = real(given.take("caption_dropout_probability") or 0.0)
    for each in values if isinstance(values, list) else ():
        if not isinstance(each, Mapping) or each.get("dataset_type") == "text_embeds" or on(each.get("disabled")):
            continue
        path = str(each.get("instance_data_dir") or "")
        source = {"filename": "file_name", "instanceprompt": "none"}.get(str(each.get("caption_strategy")), "text_file")
        captions: dict[str, Any] = {"source": source, "dropout": dropout}
        if source == "none" and each.get("instance_prompt"):
            captions["prefix"] = str(each["instance_prompt"])
        own = str(each.get("resolution_type") or kind)
        size = _size(each.get("resolution") or usual, own)
        if own == "pixel" and not any(line.startswith("resolution_type =") for line in found.left):
            found.leave("resolution_type", own)  # of the shorter side there, so that its pictures have a larger area
        if on(each.get("crop")) and each.get("crop_aspect", "square") == "square":
            size = f"{size}x{size}"
        concept: dict[str, Any] = {"folder": placed(folder, path), "resolutions": [size]}
        concept |= {"folder_repeats": False, "captions": captions, "recursive": True}
        if repeats := real(each.get("repeats") or 0):  # visits beyond the first
            concept["repeats"] = repeats + 1
        if on(each.get("is_regularisation_data")):
            concept["role"] = "regularisation"
        if found.family and each.get("dataset_type") == "video":
            frames = frames_of(table(each.get("video")).get("num_frames") or 125)
            concept["clips"] = {"frames": frames or [1], "rate": 0.0}  # every frame is used there
        found.concept(**concept)
    if not found.values.get("dataset", {}).get("concepts"):
        if kind == "pixel":
            found.leave("resolution_type", kind)
        found.put("train.resolution", whole(_size(usual, kind)))
        found.concept(folder="")
