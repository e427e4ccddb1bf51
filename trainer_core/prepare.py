"""What happens before the first step: the settings are checked, the run is planned, and its models are made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .callbacks import Callbacks
from .config import MemoryConfig, RunConfig
from .encode import encode_plan
from .existing import build_network, check_lora_files, learning_rates, load_start, merge_beneath
from .files import check_writable
from .gradient_noise import NoiseScale
from .log import check_log
from .memory import DTYPES, check_weights, compile_blocks, keep_weights, prepare, recompute
from .models import check_base_model, find_tokenizer, load_base_model, load_tokenizer, remarks, word_ids
from .network_report import describe_network, measure_run
from .networks import remarks_on_algorithm
from .objective import check_objective, objective_remarks
from .optim import Ema, build_optimizer, check_optimizer
from .optim import remarks as optimizer_remarks
from .outcome import Run, Shelf
from .plan import Plan, build_plan
from .preflight import check_disk, fit_memory
from .report import long_captions, report
from .run import Checkpoint, Keys, RunFolder, build_keys, model_digests
from .saving import go_on, publish
from .scan import Index, manifest_digest, scan
from .schedule import check_schedule, lr_factor
from .store import Store
from .texts import check_embeddings, check_stops
from .validate import check_validation

INDEX = "index.sqlite"  # in the cache folder: what the scan knows of every file
FP16_SCALE = 2.0**12  # first loss scale in float16; halved after each overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What is known of a run before anything is loaded."""

    plan: Plan
    keys: Keys
    models: dict[str, str]  # digests of the files that it learns from, beside the pictures
    tokenizer: Any


# --- before anything is loaded -----------------------------------------------------------------------------


def check_settings(config: RunConfig, shelf: Shelf, logs: Path | None, device: torch.device) -> None:
    """Raise ValueError for settings that cannot be, by themselves, together or on this machine."""
    shelf.check_names([word.token for word in config.lora.embeddings])
    check_base_model(config.base_model)
    check_objective(config)
    check_lora_files(config)
    check_optimizer(config.optimizer, config.scheduler, device)
    check_log(config.train.log, logs)


def check_precision(config: RunConfig, dtype: torch.dtype) -> None:
    """Raise ValueError for kinds of weights that do not go with what is computed in, or not on this machine."""
    if config.lora.dtype == "bfloat16" and dtype == torch.float16:  # float16 scales gradients, CUDA none in bfloat16
        raise ValueError("A LoRA in bfloat16 does not go with precision float16; set dtype of LoRA Config to float32.")
    for setting in ("unet_weights", "text_weights"):
        check_weights(getattr(config.base_model, setting), setting)


def plan_run(config: RunConfig, cache: Path, callbacks: Callbacks) -> Planned:
    """Scan the pictures and plan every step; ValueError for settings that do not go with what was found."""
    folder = find_tokenizer(config.base_model.tokenizer, Path(config.base_model.path))
    tokenizer = load_tokenizer(folder)
    with Index(cache / INDEX) as index:
        manifest = scan(config.dataset, index, callbacks)
        models = model_digests(config, folder, index)
    plan = build_plan(manifest, config.dataset, config.train)
    check_schedule(plan.steps, config.scheduler)
    check_stops(config.optimizer, plan, config.lora.embeddings)
    check_validation(config.train, plan)
    check_embeddings(config.lora.embeddings, plan, tokenizer)
    keys = build_keys(config, models, manifest_digest(manifest))
    return Planned(plan=plan, keys=keys, models=models, tokenizer=tokenizer)


def other_steps(config: RunConfig, steps: int) -> Callable[[RunFolder, int], str]:
    """Return what tells in what a run of another length has not taken the steps that one of `steps` takes up to one.

    The end of a sentence; empty where they are the same.
    """
    train = config.train

    def other(run: RunFolder, step: int) -> str:
        if run.steps == steps:
            return ""
        if any(lr_factor(k, run.steps, config.scheduler) != lr_factor(k, steps, config.scheduler) for k in range(step)):
            return "its learning rate followed the curve of a run of that length"
        if any(word.stop and word.stop_unit == "share" for word in config.lora.embeddings):
            return "its embeddings stopped as in a run of that length"
        if step == run.steps and train.accumulate > 1:  # the last step of so many epochs may be a part of one
            return "its last step may have had fewer pictures"
        if step == run.steps and train.keeps_by and step % train.validate_every:
            return "it was measured once more, at its end, and these weights count among the best"
        return ""

    return other


def check_places(config: RunConfig, plan: Plan, runs: Path, own: RunFolder | None, shelf: Shelf) -> None:
    """Raise ValueError where a run's saves find no room, or its files no folder; own: what there is of it already."""
    check_disk(config, plan, runs, sum(save.size for save in own.checkpoints()) if own else 0)
    shelf.check_folders()
    check_writable(runs)


def look_ahead(
    config: RunConfig, planned: Planned, dtype: torch.dtype, device: torch.device, note: Callable[[str], None]
) -> list[MemoryConfig]:
    """Tell what the run will be; return the memory settings to begin with, then those to fall back on.

    Raises ValueError for a run that cannot fit into memory.
    """
    plan, tokenizer = planned.plan, planned.tokenizer
    network_size = describe_network(measure_run(config))
    long = long_captions(plan, tokenizer, word_ids(config.lora.embeddings))
    note("\n".join([report(plan), *(f"- {sentence}" for sentence in long)]))
    note(network_size)
    ladder, needed = fit_memory(config, plan, tokenizer, dtype, device)
    settings = (*objective_remarks(config), *remarks_on_algorithm(config.lora), *optimizer_remarks(config.optimizer))
    for sentence in (needed, *remarks(config.base_model), *settings):
        note(sentence)
    return ladder


# --- models, network and optimizer -------------------------------------------------------------------------


def prepare_run(
    config: RunConfig, plan: Plan, cache: Path, cache_limit: int, dtype: torch.dtype, device: torch.device, **parts: Any
) -> Run:
    """Load the base model, build the network, and fill the store with what the plan asks for; parts: of the Run."""
    start = load_start(config)
    base = load_base_model(config.base_model, dtype, amend=lambda base: merge_beneath(base, config.lora.beneath))
    rates = learning_rates(config.optimizer, base)
    train_text = any(rates[text.kohya] > 0 for text in base.texts)
    if (kind := config.base_model.text_weights) != "auto":
        for text in base.texts:
            keep_weights(text.model, kind, dtype, device)
            text.model.to("cpu")
        base.identity["text_encoder"] += f"/{kind}"
    prompts = None if train_text else {*config.sample.prompts, config.sample.negative}
    network = build_network(base, config, rates, start).to(device, DTYPES[config.lora.dtype])
    with Store(cache, cache_limit) as store, network.attached():  # what is continued acts on captions, too
        vae_dtype = DTYPES.get(config.base_model.vae_precision, torch.float32)
        encoded = encode_plan(base, plan, store, device, parts["callbacks"], prompts=prompts, vae_dtype=vae_dtype)
        store.prune()
    if not train_text and not config.lora.embeddings:
        network.let_go(*(text.kohya for text in base.texts))
        base.texts = ()
    for text in base.texts:
        text.model.to(device)
    return Run(
        base=base,
        network=network,
        plan=plan,
        encoded=encoded,
        config=config,
        device=device,
        continued=start.describe() if start else None,
        **parts,
    )


def set_up(run: Run, memory: MemoryConfig, checkpoint: Checkpoint | None) -> None:
    """Bring models, optimizer and averages to the device, and let the run be where it was at a save if there is one."""
    base, config, device = run.base, run.config, run.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # what is told of the run is not what encoding took, or others
    if config.memory.compile:
        run.programs = compile_blocks(base.unet, run.callbacks.note)
    settle(run, memory)
    settings = config.optimizer
    groups = run.network.groups(learning_rates(settings, base), settings.conv_learning_rate, settings.lora_plus_ratio)
    run.optimizer = build_optimizer(settings, groups, config.train.seed)
    parameters = [p for group in groups for p in group["params"]]
    if settings.ema_decay:
        run.ema = Ema(parameters, settings.ema_decay, settings.ema_every, settings.ema_device)
    run.scaler = torch.amp.GradScaler(device.type, init_scale=FP16_SCALE, enabled=base.dtype == torch.float16)
    run.noise_scale = NoiseScale(parameters)
    if checkpoint is not None:
        go_on(run, checkpoint)
        inside = checkpoint.path.is_relative_to(run.folder.path) and run.at < run.plan.steps and not run.ended
        if checkpoint.stays and config.saves.publish and inside:
            publish(run, checkpoint, f"-step-{run.at:06}")  # the process may have been cut off before it did
        run.callbacks.resumed(run.losses, run.concepts, run.validation)


def settle(run: Run, memory: MemoryConfig) -> None:
    """Bring the models to the device as the memory settings say, or further down from what they were."""
    base, weights, run.memory = run.base, run.config.base_model.unet_weights, memory
    with run.network.detached():
        prepare(base.unet, memory, weights, base.dtype, run.device, run.stream)
    for text in base.texts:
        recompute(text.model, memory.checkpointing)


def log_columns(run: Run) -> list[str]:
    """Return the columns of a log that only this run has."""
    learning = [model for model, rate in learning_rates(run.config.optimizer, run.base).items() if rate > 0]
    learning += [f"embedding {word.token}" for word in run.config.lora.embeddings]
    return [f"lr_{model}" for model in learning] + [f"loss_{name}" for name in run.concepts]
