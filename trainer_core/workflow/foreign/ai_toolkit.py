"""Read the YAML or JSON of ai-toolkit: one job that trains a LoRA.

Source of names and defaults: its config_modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.wording import say
from ...config import OPTIMIZERS, instead_of
from ...config import setting as named
from ...config.objective import MOST_NOISES
from ...config.optimizer import RATES
from ...config.prompt_lines import MOST_FRAMES
from .clips import ai_toolkit_clips, put_experts
from .imported import (
    Given,
    Imported,
    listing,
    number,
    on,
    put_number,
    put_prompts,
    real,
    table,
    tables,
    take,
    whole,
    without_counterpart,
)
from .sd_scripts import put_beneath, put_optimizer, put_start, put_warmup
from .texts import placed

PROGRAM = "ai-toolkit"
MOST_STEPS = 1_000_000
TRAINERS = ("sd_trainer", "ui_trainer", "diffusion_trainer")
NETWORK = {"type": "lora", "alpha": 1.0, "lokr_full_rank": True, "transformer_only": True, "lokr_factor": -1}
TRAIN = {
    "noise_scheduler": "ddpm", "steps": 1000, "lr": 1e-6, "optimizer": "adamw", "lr_scheduler": "constant",
    "max_grad_norm": 1.0, "train_unet": True, "batch_size": 1, "dtype": "fp32", "gradient_accumulation_steps": 1,
    "gradient_accumulation": 1, "gradient_checkpointing": True, "loss_type": "mse", "timestep_type": "sigmoid",
    "content_or_style": "balanced", "diff_output_preservation_multiplier": 1.0,
    "diff_output_preservation_class": "", "noise_offset": 0.0, "max_denoising_steps": 999, "reg_weight": 1.0,
    "blank_prompt_preservation_multiplier": 1.0, "num_train_timesteps": 1000, "loss_target": "noise",
    "optimal_noise_pairing_samples": 1, "guidance_loss_target": 3.0, "differential_guidance_scale": 3.0,
}  # fmt: skip
SAVE = {"save_every": 1000, "dtype": "float16", "max_step_saves_to_keep": 5}
SAMPLE = {"sample_every": 100, "width": 512, "height": 512, "guidance_scale": 7, "sample_steps": 20, "seed": 0}
DATASET = {"resolution": 512, "caption_ext": ".txt", "num_repeats": 1, "loss_multiplier": 1.0, "network_weight": 1.0}
DATASET |= {"buckets": True, "bucket_tolerance": 64, "do_i2v": True}
PRECISIONS = {"fp32": "float32", "float32": "float32", "float": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
PRECISIONS |= {"fp16": "float16", "float16": "float16", "half": "float16"}
LOSSES = {"mse": "mse", "mae": "l1", "huber": "huber_true", "smooth_l1": "smooth_l1"}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "linear": "points",
}
FAMILIES = {"sdxl": "", "sd1": "", "sd2": "", "sd": "", "ssd": "", "vega": "", "sd3": "sd3", "flex1": "flux"} | {
    "flex2": "flux", "flux": "flux", "flux_kontext": "flux", "flux2": "flux2", "zimage": "z_image", "wan21": "wan",
    "wan22": "wan", "qwen_image": "qwen_image", "chroma": "chroma", "lumina2": "lumina2", "hidream": "hidream",
    "omnigen2": "omnigen2", "pixart": "pixart", "pixart_sigma": "pixart",
}  # fmt: skip
FLAGS = {"is_flux": "flux", "is_v3": "sd3", "is_auraflow": "auraflow", "is_pixart": "pixart", "is_lumina2": "lumina2"}
WITHOUT_EFFECT = frozenset({
    "type", "training_folder", "device", "performance_log_every", "logging", "meta", "config_file",
    "disable_sampling", "skip_first_sample", "cache_latents", "cache_latents_to_disk", "cache_text_embeddings",
    "push_to_hub", "hf_private", "hf_repo_id", "sampler", "walk_seed", "quantize", "quantize_te", "qtype", "qtype_te",
    "low_vram", "arch", "is_xl", "is_v2", "dtype", "force_first_sample", "unload_text_encoder", "save_format",
    "attention_backend", "bypass_guidance_embedding", "trigger_word", "num_workers", "prefetch_factor", "buckets",
    "bucket_tolerance", "compile", "layer_offloading", "neg", "prompts", "samples", "seed",
    "xformers", "sdp", "layer_offloading_transformer_percent", "layer_offloading_text_encoder_percent", "lokr_factor",
    "lokr_full_rank", "old_lokr_format", "conv_alpha", "conv", "guidance_scale",
    "diff_output_preservation_class", "diff_output_preservation_multiplier", "lr_scheduler_params", "model_kwargs",
    "linear_timesteps", "linear_timesteps2", "target_noise_multiplier", "control_path", "free_u", "network_kwargs",
    "standardize_images", "is_reg", "cache_clip_vision_to_disk", "extras_name_or_path", "auto_memory", "num_repeats",
})  # fmt: skip


def recognises(values: Any) -> bool:
    """Tell whether a YAML or JSON is a job of ai-toolkit."""
    config = values.get("config") if isinstance(values, Mapping) else None
    return isinstance(config, Mapping) and isinstance(config.get("process"), list)


def read_ai_toolkit(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a job; folder: in which relative paths start."""
    config = values["config"]
    jobs = [each for each in config["process"] if isinstance(each, Mapping) and each.get("type") in TRAINERS]
    if len(jobs) != 1:
        raise ValueError(f"it holds {len(jobs)} jobs that train, and one is read; keep one process of type sd_trainer")
    job = jobs[0]
    if "adapter" in job:
        raise ValueError("it trains an adapter, and here LoRAs are trained; choose a job with a network")
    found = Imported(program=PROGRAM, name=str(config.get("name") or "my_lora"))
    parts = {
        name: Given(table(job.get(name)), defaults)
        for name, defaults in (
            ("network", NETWORK),
            ("train", TRAIN),
            ("save", SAVE),
            ("model", {}),
            ("sample", SAMPLE),
        )
    }
    _model(found, parts["model"])
    _experts(found, parts["model"], parts["train"])
    if isinstance(job.get("network"), Mapping):
        _network(found, parts["network"])
    elif job.get("network") is None:  # the whole model
        found.put("lora.algorithm", "full")
    else:
        raise ValueError(f"its network is {job['network']!r:.60}, where a table belongs; correct it there")
    model = table(job.get("model"))
    second = on(model.get("is_xl")) or str(model.get("arch")).startswith(("sdxl", "ssd", "vega"))
    _train(found, parts["train"], str(job.get("trigger_word") or ""), second=second)
    _save(found, parts["save"], parts["sample"])
    for each in tables(job.get("datasets")):
        cached = {"cache_text_embeddings": True} if on(table(job.get("train")).get("cache_text_embeddings")) else {}
        _dataset(found, Given({**each, **cached}, DATASET), folder, str(job.get("trigger_word") or ""))
    if not found.values.get("dataset", {}).get("concepts"):
        found.concept(folder="")
    for name, part in parts.items():
        for key, value in part.unread():
            if key not in WITHOUT_EFFECT:
                found.leave(f"{name}.{key}", value)
    return found


def _model(found: Imported, given: Given) -> None:
    arch = str(given.take("arch") or "").partition(":")[0].lower()
    flagged = next((family for flag, family in FLAGS.items() if on(given.take(flag))), "")
    path = str(given.take("name_or_path") or "")
    for known, family in FAMILIES.items():
        if arch == known or (family and arch.startswith(known)):
            arch = family
            break
    found.family = flagged or arch
    if found.family:
        found.models["diffusion_model"] = path
    else:
        found.put("base_model.path", path)
    if vae := given.take("vae_path"):
        if found.family:
            found.models["vae"] = str(vae)
        else:
            found.put("base_model.vae", str(vae))
    for name in ("assistant_lora_path", "lora_path"):  # such as an adapter that undoes what distillation did
        put_beneath(found, str(given.take(name) or ""))
    if on(given.take("is_v_pred")):
        found.put("base_model.prediction", "v_prediction")


def _experts(found: Imported, model: Given, train: Given) -> None:
    """Read which experts of Wan 2.2 14B a job trains, and after how many steps it changes from one to the other."""
    turns = max(1, whole(number(found, train, "switch_boundary_every") or 1))
    if not str(model.take("arch") or "").lower().startswith("wan22_14b"):
        return
    kwargs = table(model.take("model_kwargs"))
    high, low = (on(kwargs.get(f"train_{each}_noise", True)) for each in ("high", "low"))
    put_experts(found, high=high, low=low)
    if high and low:
        found.put("base_model.connected.switch_every", turns)
        found.open.append(
            say("Wan 2.2 has two files; choose that of low noise above, and that of high noise in the last loader.")
        )


def _network(found: Imported, given: Given) -> None:
    kind = str(given.take("type")).lower()
    algorithm = {"lora": "lora", "locon": "lora", "lokr": "lokr", "dora": "lora"}.get(kind)
    if algorithm is None:
        raise without_counterpart("network type", kind, instead_of(kind) or f"train it with {PROGRAM}")
    found.put("lora.algorithm", algorithm)
    if kind == "dora":
        found.put("lora.dora", True)
    if kind == "lokr" and on(given.take("lokr_full_rank")):
        found.put("lora.full_matrix", True)
        given.ignore(("linear", "linear_alpha", "rank", "alpha", "conv", "conv_alpha"))
    else:
        rank = number(found, given, "rank") or number(found, given, "linear") or 4
        given.ignore(("linear",))
        found.put("lora.rank", whole(rank))
        alpha = number(found, given, "linear_alpha")
        found.put("lora.alpha", (number(found, given, "alpha") if alpha is None else alpha) or 1.0)
        given.ignore(("alpha",))
    put_start(found, str(given.take("pretrained_lora_path") or ""))
    if kind == "lokr":
        found.put("lora.factor", whole(number(found, given, "lokr_factor") or -1))
    conv = number(found, given, "conv")
    whole_matrix = found.values["lora"].get("full_matrix")
    found.put("lora.preset", "auto" if found.family else "full" if conv or whole_matrix else "attn-mlp")
    if conv and not found.family and not whole_matrix:
        found.put("lora.conv_rank", whole(conv))
        found.put("lora.conv_alpha", number(found, given, "conv_alpha") or conv)
    for name, setting in (
        ("dropout", "dropout"),
        ("rank_dropout", "rank_dropout"),
        ("module_dropout", "module_dropout"),
    ):
        if chance := number(found, given, name):
            found.put(f"lora.{setting}", chance)
    kwargs = given.take("network_kwargs")
    for name, setting in (("only_if_contains", "include"), ("ignore_if_contains", "exclude")):
        patterns = kwargs.get(name) if isinstance(kwargs, Mapping) else None
        if patterns:
            found.leave(f"network.{name}", patterns)
            said = say("The file chooses layers by {0}; write them into {1}.", name, named(f"lora.{setting}"))
            found.open.append(said)


def _train(found: Imported, given: Given, trigger: str, *, second: bool) -> None:
    steps = whole(number(found, given, "steps") or 1000)
    found.put("train.steps", min(MOST_STEPS, steps))
    if steps > MOST_STEPS:
        found.leave("train.steps", steps)
    take(found, given, "batch_size", "train.batch_size", whole)
    batches = max(number(found, given, f"gradient_accumulation{end}") or 1 for end in ("", "_steps"))
    found.put("train.accumulate", whole(batches))
    take(found, given, "max_grad_norm", "optimizer.max_grad_norm", real)
    rate = number(found, given, "lr") or 0.0
    given.ignore(("unet_lr", "text_encoder_lr"))  # of a network, all parts have the one rate there
    found.put("optimizer.learning_rate", rate if on(given.take("train_unet")) else 0.0)
    trains_text, family = on(given.take("train_text_encoder")), found.family
    # Of a flow model's text encoders a network there has layers in CLIPs alone, and in PixArt's T5.
    texts = (1, 2) if second or family == "sd3" else () if family not in ("", "flux", "pixart") else (1,)
    for place in texts:
        found.put(f"optimizer.{RATES[place]}", rate if trains_text else 0.0)
    if trains_text and not texts:
        found.leave("train.train_text_encoder", True)
    name = _optimizer(found, str(given.take("optimizer")))
    known = {each.name for each in OPTIMIZERS[name].settings} if name != "custom" else set[str]()
    for key, value in table(given.take("optimizer_params")).items():
        if key == "betas":
            for setting, each in zip(("beta1", "beta2"), listing(value), strict=False):
                found.put(f"optimizer.options.{setting}", real(each))
        elif (key := {"polarity_history": "history"}.get(key, key)) in known:
            kept = value if isinstance(value, bool) else whole(value) if key == "history" else real(value)
            found.put(f"optimizer.options.{key}", kept)
        elif (key, name) != ("fused", "automagic"):  # ours never steps inside of the backward pass
            found.leave(f"train.optimizer_params.{key}", value)
    _schedule(found, given)
    loss = str(given.take("loss_type"))
    found.put("objective.loss", LOSSES[loss]) if loss in LOSSES else found.leave("train.loss_type", loss)
    if fixed := number(found, given, "snr_gamma"):  # not cut off at 1, and instead of the other
        found.leave("train.snr_gamma", fixed)
        given.ignore(("min_snr_gamma",))
    elif gamma := number(found, given, "min_snr_gamma"):
        v = found.values.get("base_model", {}).get("prediction") == "v_prediction"  # which it weighs like noise
        found.leave("train.min_snr_gamma", gamma) if v else found.put("objective.min_snr_gamma", gamma)
    put_number(found, given, "noise_offset", "objective.noise_offset")
    choices = whole(number(found, given, "optimal_noise_pairing_samples") or 1)
    if choices > 1:
        found.put("objective.nearest_noise", min(choices, MOST_NOISES))
    precision = PRECISIONS.get(str(given.take("dtype")))
    found.put("base_model.precision", precision) if precision else found.leave("train.dtype", given.take("dtype"))
    if on(given.take("gradient_checkpointing")):
        found.put("memory.checkpointing", "full")
    average = given.take("ema_config")
    if isinstance(average, Mapping) and on(average.get("use_ema")):
        found.put("optimizer.ema_decay", real(average.get("ema_decay") or 0.999))
    if on(given.take("diff_output_preservation")):
        found.put("objective.preservation", "class")
        found.put("objective.preservation_trigger", trigger or "subject")
        found.put("objective.preservation_class", str(given.take("diff_output_preservation_class") or "person"))
        found.put("objective.preservation_weight", number(found, given, "diff_output_preservation_multiplier") or 1.0)
    elif on(given.take("blank_prompt_preservation")):
        found.put("objective.preservation", "blank")
        found.put("objective.preservation_weight", number(found, given, "blank_prompt_preservation_multiplier") or 1.0)
    given.ignore(("blank_prompt_preservation_multiplier",))
    _guidance(found, given)
    _levels(found, given)


def _guidance(found: Imported, given: Given) -> None:
    """Read what moves the target; differential guidance stands inside of the guidance loss there."""
    past, scale = on(given.take("do_differential_guidance")), number(found, given, "differential_guidance_scale") or 0.0
    if on(given.take("do_guidance_loss")):
        target = given.take("guidance_loss_target")
        if isinstance(target, list):  # drawn anew for each picture
            found.leave("train.guidance_loss_target", target)
        else:
            put_number(found, given, "guidance_loss_target", "objective.guidance_loss")
        if past:
            found.put("objective.differential_guidance", scale)
    elif past:
        found.open.append(
            say(
                "ai-toolkit computes differential guidance only beside its guidance loss, which is off in this job; "
                "set {0} to {1} to have it here.",
                named("objective.differential_guidance"),
                f"{scale:g}",
            )
        )


THEIR_OPTIMIZERS = {"adam": "adamw", "adam8bit": "adamw8bit", "automagic3": "automagic"}


def _optimizer(found: Imported, kind: str) -> str:
    """Set the optimizer, with the numbers that it is built with there; an estimator's rate below 0.1 is 1."""
    plain = kind.lower()
    if plain.startswith("automagic") and plain != "automagic3":  # earlier ones have a rate for each weight
        raise without_counterpart("optimizer", kind)
    known = "prodigy" if plain.startswith("prodigy") else THEIR_OPTIMIZERS.get(plain, kind)
    name = put_optimizer(found, known)
    if plain in ("adam", "adam8bit", "adam8"):
        found.put("optimizer.options.weight_decay", 0.0)
    if name in ("adamw", "adamw8bit", "prodigy"):
        found.put("optimizer.options.eps", 1e-6)
    if name == "automagic":
        found.put("optimizer.options.history", 8)
    if name == "adafactor":
        found.values["optimizer"]["options"] |= {"relative_step": False, "scale_parameter": False}
    if plain.startswith(("prodigy", "dadapt")):
        for each, rate in found.values["optimizer"].items():
            if each in RATES and 0 < rate < 0.1:
                found.put(f"optimizer.{each}", 1.0)
    return name


def _schedule(found: Imported, given: Given) -> None:
    """Read the curve: its classes are torch's own, whose straight line rises from a third."""
    name = str(given.take("lr_scheduler"))
    params = table(given.take("lr_scheduler_params"))
    if name not in SCHEDULES:
        raise without_counterpart("lr_scheduler", name)
    found.put("scheduler.name", SCHEDULES[name])
    rate = found.values["optimizer"][RATES[0]]
    known = {"total_iters", "max_iterations"}
    if name in ("cosine", "cosine_with_restarts") and (least := real(params.get("eta_min") or 0.0)) and rate:
        found.put("scheduler.min_lr_ratio", min(1.0, least / rate))
    if name == "cosine_with_restarts":
        found.put("scheduler.cycles", 1)
    if name == "linear":
        first, last = (real(params.get(each, usual)) for each, usual in (("start_factor", 1 / 3), ("end_factor", 1.0)))
        found.put("scheduler.points", f"0:{first:.9g}, 1:{last:.9g}")
    if name == "constant_with_warmup":
        put_warmup(found, params.get("num_warmup_steps", 1000))
    for key, value in params.items():
        if key not in known | {"eta_min", "start_factor", "end_factor", "num_warmup_steps"}:
            found.leave(f"train.lr_scheduler_params.{key}", value)


def _levels(found: Imported, given: Given) -> None:
    """Read how noise levels are drawn; a model of the older kind draws all equally often."""
    kind, flow = str(given.take("timestep_type")), str(given.take("noise_scheduler")) == "flowmatch"
    if flow and kind == "sigmoid":
        found.put("objective.timestep_distribution", "logit_normal")
        found.put("objective.timestep_shift", 1.0)
    elif flow and kind == "linear":
        found.put("objective.timestep_distribution", "uniform")
        found.put("objective.timestep_shift", 1.0)
    elif flow and kind not in ("shift", "flux_shift", "lumina2_shift", "qwen_shift"):
        found.leave("train.timestep_type", kind)
    if (where := str(given.take("content_or_style"))) != "balanced":
        found.leave("train.content_or_style", where)


def _save(found: Imported, given: Given, sample: Given) -> None:
    if every := number(found, given, "save_every"):
        found.put("saves.save_every", whole(every))
        found.put("saves.save_unit", "steps")
    kept = number(found, given, "max_step_saves_to_keep")
    found.put("saves.keep_last", max(1, min(1000, whole(kept or 5))))
    dtype = PRECISIONS.get(str(given.take("dtype")))
    found.put("train.save_dtype", dtype) if dtype else found.leave("save.dtype", given.take("dtype"))
    lines = []
    for each in [*listing(sample.take("prompts")), *listing(sample.take("samples"))]:
        own = each if isinstance(each, Mapping) else {"prompt": each}
        flags = (("w", "width"), ("h", "height"), ("d", "seed"), ("l", "guidance_scale"), ("s", "sample_steps"))
        text = " ".join(str(own.get("prompt") or "").split())
        if text:
            lines.append(text + "".join(f" --{flag} {own[name]}" for flag, name in flags if own.get(name)))
    if not lines:
        sample.ignore(SAMPLE)
        return
    put_prompts(found, lines)
    for name, setting in (("width", "width"), ("height", "height"), ("sample_steps", "steps"), ("seed", "seed")):
        take(found, sample, name, f"sample.{setting}", whole)
    if (frames := whole(number(found, sample, "num_frames") or 1)) > 1 and found.family:
        found.put("sample.frames", min(MOST_FRAMES, frames))
    sample.ignore(("num_frames", "fps"))  # clips have the rate of the model
    take(found, sample, "guidance_scale", "sample.cfg", real)
    if negative := sample.take("neg"):
        found.put("sample.negative", str(negative))
    take(found, sample, "sample_every", "saves.sample_every", whole)


def _dataset(found: Imported, given: Given, folder: Path, trigger: str) -> None:
    path = str(given.take("folder_path") or given.take("dataset_path") or "")
    concept: dict[str, Any] = {"folder": placed(folder, path), "recursive": False, "folder_repeats": False}
    sizes = [str(whole(size)) for size in listing(given.take("resolution"))]
    if on(given.take("buckets")):
        found.put("train.buckets.shapes", "ai_toolkit")
        found.put("train.bucket_step", whole(given.take("bucket_tolerance")))
    concept["resolutions"] = sizes if on(given.take("buckets")) else [f"{size}x{size}" for size in sizes]
    ending = str(given.take("caption_ext") or ".txt")
    captions: dict[str, Any] = {"extensions": [ending if ending.startswith(".") else f".{ending}"], "missing": "empty"}
    drawn = not on(given.take("cache_text_embeddings"))  # else no tag is left out, and one order stays
    captions["dropout"] = real(given.take("caption_dropout_rate") or 0.0)
    if default := given.take("default_caption"):
        captions |= {"missing": "class_prompt", "class_prompt": str(default)}
    chance, shuffled = real(given.take("token_dropout_rate") or 0.0), on(given.take("shuffle_tokens"))
    if shuffled:  # also those that are kept
        captions |= {"shuffle": True} | ({} if drawn else {"variants": 1})
    kept = whole(given.take("keep_tokens") or 0)
    if chance and drawn:
        captions |= {"tag_dropout": chance} | ({} if shuffled else {"keep": kept})
        if shuffled and kept:
            found.leave("datasets.keep_tokens", kept)
    if trigger:
        captions["prefix"] = trigger
        told = say("ai-toolkit puts the trigger word only before captions that lack it; here it stands before each.")
        if told not in found.open:
            found.open.append(told)
    concept["captions"] = captions
    if (repeats := real(given.take("num_repeats") or 1)) != 1:
        concept["repeats"] = repeats
    if on(given.take("is_reg")):
        concept["role"] = "regularisation"
    if on(given.take("flip_x")):
        concept["flip"] = True
    if on(given.take("random_crop")):
        concept["augment"] = {"crop_jitter": 1.0}
    if on(given.take("alpha_mask")):
        concept["masks"] = {"source": "alpha", "unmasked_probability": 0.0,
            "unmasked_weight": real(given.take("mask_min_value") or 0.0)}  # fmt: skip
    elif masks := given.take("mask_path"):
        concept["masks"] = {"folder": str(masks), "missing": "ones", "unmasked_probability": 0.0,
            "unmasked_weight": real(given.take("mask_min_value") or 0.0)}  # fmt: skip
    if controls := given.take("control_path"):
        concept["controls"] = {"folders": [str(each) for each in listing(controls)[:3]]}
    if (weight := real(given.take("loss_multiplier"))) != 1:
        concept["loss_weight"] = weight
    if found.family and (clips := ai_toolkit_clips(found, given)):
        concept["clips"] = clips
    given.ignore(
        ("num_frames", "fps", "shrink_video_to_frames", "auto_frame_count", "trim_auto_frame_count_tail", "do_i2v")
    )
    found.concept(**concept)
    for key, value in given.unread():
        if key not in WITHOUT_EFFECT:
            found.leave(f"datasets.{key}", value)
