"""The whole algorithm, top to bottom, in the order it happens."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, build_batch, build_sample_conditions, loss_terms
from .callbacks import Callbacks, StepReport
from .config import MemoryConfig, RunConfig
from .encode import encode_plan
from .existing import build_network, check_lora_files, learning_rates, load_start, merge_beneath
from .export import unused_path
from .gradient_noise import NoiseScale
from .log import check_log, logged
from .loss import sample_losses
from .memory import (
    DTYPES,
    Stream,
    attention_kernel,
    check_weights,
    choose_dtype,
    compile_blocks,
    describe,
    give_back,
    keep_weights,
    kept_activations,
    out_of_memory,
    prepare,
    recompute,
    room_for_programs,
)
from .models import (
    Conditioning,
    Conditions,
    check_base_model,
    find_tokenizer,
    load_base_model,
    load_tokenizer,
    predict,
    remarks,
    word_ids,
)
from .network_report import describe_network, measure_run
from .networks import remarks_on_algorithm
from .noise import add_noise, alphas_cumprod
from .objective import check_objective, objective_remarks
from .optim import Ema, averaged, build_optimizer, check_optimizer, learning_rate, limit_gradients, take_step
from .optim import remarks as optimizer_remarks
from .outcome import Result, Run, save_run, save_stopped, versions
from .plan import MicroBatch, build_plan
from .preflight import fit_memory
from .report import long_captions, report
from .sample import sample_images
from .scan import Index, scan
from .schedule import check_schedule, lr_factor
from .store import Store
from .texts import check_embeddings, check_stops, embedding_stops, text_reader, text_stops
from .validate import better, check_prediction, check_validation, validation_loss, without_improvement

INDEX = "index.sqlite"  # in the cache folder: what the scan knows of every file
NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run
TO_LOWER = "lower batch_size (raise accumulate by the same factor) or the resolution, or keep weights as float8 or nf4."
FP16_SCALE = 2.0**12  # first loss scale in float16; halved after each overflow


def train_lora(
    config: RunConfig,
    output: Path,
    cache: Path,
    device: torch.device | str = "cpu",
    callbacks: Callbacks | None = None,
    verify: Callable[[Path], None] | None = None,
    cache_limit: int = 0,
    logs: Path | None = None,
    embeddings: Path | None = None,
) -> Result:
    """Train a LoRA and write it to `output` (another number is added when the name is taken).

    cache: folder of the store, which is kept below cache_limit bytes (0 = any size). verify: a last word on the
    finished file, raises to refuse it. logs: folder in which the run's log, if it writes one, gets a folder of its own.
    embeddings: folder for words that are learned, by default output's.
    Everything wrong with the input raises ValueError before a model is loaded. When the run is stopped or fails after
    its first step, what was learned is saved beside `output` before the exception leaves.
    """
    device, callbacks, started = torch.device(device), callbacks or Callbacks(), time.time()
    check_base_model(config.base_model)
    check_objective(config)
    check_lora_files(config)
    network_size = describe_network(measure_run(config))
    check_optimizer(config.optimizer, config.scheduler, device)
    check_log(config.train.log, logs)
    dtype = choose_dtype(config.base_model.precision, device)
    if config.lora.dtype == "bfloat16" and dtype == torch.float16:  # float16 scales gradients, CUDA none in bfloat16
        raise ValueError("A LoRA in bfloat16 does not go with precision float16; set dtype of LoRA Config to float32.")
    for setting in ("unet_weights", "text_weights"):
        check_weights(getattr(config.base_model, setting), setting)
    with Index(cache / INDEX) as index:
        manifest = scan(config.dataset, index, callbacks)
    plan = build_plan(manifest, config.dataset, config.train)
    check_schedule(plan.steps, config.scheduler)
    check_stops(config.optimizer, plan, config.lora.embeddings)
    check_validation(config.train, plan)
    tokenizer = load_tokenizer(find_tokenizer(config.base_model.tokenizer, Path(config.base_model.path)))
    check_embeddings(config.lora.embeddings, plan, tokenizer)
    long = long_captions(plan, tokenizer, word_ids(config.lora.embeddings))
    callbacks.note("\n".join([report(plan), *(f"- {sentence}" for sentence in long)]))
    callbacks.note(network_size)

    ladder, needed = fit_memory(config, plan, tokenizer, dtype, device)
    settings = (*objective_remarks(config), *remarks_on_algorithm(config.lora), *optimizer_remarks(config.optimizer))
    for sentence in (needed, *remarks(config.base_model), *settings):
        callbacks.note(sentence)

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
    continued = start.describe() if start else None
    del start
    with Store(cache, cache_limit) as store, network.attached():  # what is continued acts on captions, too
        vae_dtype = DTYPES.get(config.base_model.vae_precision, torch.float32)
        encoded = encode_plan(base, plan, store, device, callbacks, prompts=prompts, vae_dtype=vae_dtype)
        store.prune()
    if not train_text and not config.lora.embeddings:
        network.let_go(*(text.kohya for text in base.texts))
        base.texts = ()
    for text in base.texts:
        text.model.to(device)

    run = Run(
        base=base,
        network=network,
        plan=plan,
        encoded=encoded,
        config=config,
        device=device,
        callbacks=callbacks,
        started=started,
        continued=continued,
        concepts={name: [] for name in plan.concept_names().values()},
    )
    learning = [model for model, rate in rates.items() if rate > 0]
    learning += [f"embedding {word.token}" for word in config.lora.embeddings]
    columns = [f"lr_{model}" for model in learning] + [f"loss_{name}" for name in run.concepts]
    try:
        with network.attached():
            try:
                kernel = attention_kernel(config.memory.attention, device)
                programs = room_for_programs(config.memory.compile)
                writing = logged(callbacks, config.train.log, logs, unused_path(output).stem, columns)
                with kernel, programs, writing as (run.callbacks, log):
                    train(run, ladder)
                saved = save_run(run, output, embeddings, verify)
            except BaseException:
                if run.at:
                    stopped = save_stopped(run, output, embeddings)
                    files = ", ".join(str(path) for version in stopped for path in version.files)
                    callbacks.note(f"Stopped at step {run.at} of {plan.steps}; what was learned is in {files}.")
                raise
            samples = []
            for version in versions(run):
                if version.ending != "-last":
                    with version.weights():
                        read = text_reader(base, encoded, device, learning=False)
                        samples.append(sample_images(base, config.sample, device, encode=read, callbacks=callbacks))
    finally:
        base.unet, base.texts, base.vae = None, (), None
        network.let_go()  # an exception's traceback may keep this frame, and must not keep the weights
        give_back(device)
    return Result(
        path=saved[0].path,
        tensors=saved[0].tensors,
        embeddings=saved[0].words,
        losses=run.losses,
        concepts=run.concepts,
        validation=run.validation,
        best=(run.best.steps, run.best.loss) if run.best else None,
        others=tuple(file.path for file in saved[1:]),
        log=log,
        samples=torch.cat(samples),
        plan=plan,
    )


def train(run: Run, ladder: Sequence[MemoryConfig]) -> None:
    """Run every step of the plan on an attached network; what happens is appended to `run.losses` and `run.validation`.

    ladder: the memory settings to work with, then those to fall back on when memory runs out.
    """
    base, plan, config, device, callbacks = run.base, run.plan, run.config, run.device, run.callbacks
    rates = learning_rates(config.optimizer, base)
    stops = text_stops(config.optimizer, base, plan)
    word_stops = embedding_stops(config.lora.embeddings, plan)
    memory, *harder = ladder
    stream = Stream(device)
    if config.memory.compile:
        compile_blocks(base.unet, callbacks.note)
    settle(run, memory, stream)
    settings = config.optimizer
    groups = run.network.groups(rates, settings.conv_learning_rate, settings.lora_plus_ratio)
    run.optimizer = optimizer = build_optimizer(settings, groups, config.train.seed)
    parameters = [p for group in groups for p in group["params"]]
    if settings.ema_decay:
        run.ema = Ema(parameters, settings.ema_decay, settings.ema_every, settings.ema_device)
    in_use = run.ema.swapped if run.ema and settings.ema_output == "average" else functools.partial(averaged, optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=FP16_SCALE, enabled=base.dtype == torch.float16)
    alphas = alphas_cumprod(zero_terminal_snr=base.zero_terminal_snr)
    encode = text_reader(base, run.encoded, device, learning=True)
    noise_scale = NoiseScale(parameters)
    names = plan.concept_names()
    stopped: dict[str, float] = {}  # learning rates of models that have stopped
    not_finite = 0

    def validate(steps: int) -> None:
        if plan.validation:
            with in_use():  # other weights than those that training's reader may remember captions of
                read = text_reader(base, run.encoded, device, learning=True)
                loss = validation_loss(base, run.encoded, read, plan, config, alphas, device, callbacks)
                run.validation.append((steps, loss))
                if config.train.keeps_by:
                    run.best = better(run.best, run.validation, run.network)
            callbacks.validation(steps, loss)

    for sentence in check_prediction(base, run.encoded, encode, plan, config, alphas, device):
        callbacks.note(sentence)
    validate(0)
    for step in range(plan.steps):
        began = time.perf_counter()
        for prefix in [prefix for prefix, stop in stops.items() if stop == step]:
            run.network.freeze(prefix)
            rates[prefix] = stopped[prefix] = 0.0
        for token in [token for token, stop in word_stops.items() if stop == step]:
            run.network.embeddings.freeze(token)
            stopped[f"embedding {token}"] = 0.0
        if step in (*stops.values(), *word_stops.values()):
            learning = run.network.embeddings.learning or any(rates[text.kohya] > 0 for text in base.texts)
            encode = text_reader(base, run.encoded, device, learning=learning)
        for again in (False, True):
            if (done := accumulated(run, step, encode, alphas, scaler, memory, noise_scale)) is not None:
                break
            optimizer.zero_grad(set_to_none=True)
            give_back(device)
            if again or not harder:
                raise RuntimeError(f"Memory ran out at step {step + 1} with {describe(memory)}: {TO_LOWER}")
            memory, *harder = harder
            settle(run, memory, stream)
            callbacks.note(f"Memory ran out at step {step + 1}; the step is taken again with {describe(memory)}.")
        assert done is not None

        factor = lr_factor(step, plan.steps, config.scheduler)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        scaler.unscale_(optimizer)
        noise = noise_scale.finished(len(done.concepts))
        norm = limit_gradients(parameters, settings)
        # One list, so that the device is waited for once.
        numbers = torch.cat([torch.stack([done.loss, norm]), noise, *done.losses, *done.areas]).tolist()
        (loss_value, grad_norm, *pair), numbers = numbers[:4], numbers[4:]
        losses, areas = numbers[: len(done.concepts)], numbers[len(done.concepts) :]
        finite = math.isfinite(grad_norm) and math.isfinite(loss_value)
        take_step(optimizer, scaler, finite=finite)
        if finite:
            run.network.embeddings.keep_norms()
        norms = None
        if finite and config.lora.scale_weight_norms:
            norms = run.network.limit_norms(config.lora.scale_weight_norms)
        if run.ema:
            run.ema.update(step + 1)

        run.at = step + 1
        run.losses.append(loss_value if finite else math.nan)
        by_concept = mean_by(done.concepts, losses)
        for number, name in names.items():
            run.concepts[name].append(by_concept.get(number, math.nan))
        rates_now = {group["model"]: learning_rate(optimizer, group) for group in reversed(optimizer.param_groups)}
        callbacks.step(
            StepReport(
                step=step + 1,
                steps=plan.steps,
                loss=run.losses[-1],
                grad_norm=grad_norm,
                learning_rates=rates_now | stopped,
                updated=finite,
                seconds=time.perf_counter() - began,
                epoch=plan.epochs_after(step + 1),
                masked_area=sum(areas) / len(areas) if areas else None,
                norms=norms,
                concepts={names[number]: loss for number, loss in by_concept.items()},
                noise_scale=noise_scale.record(*pair),
                peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            )
        )
        not_finite = 0 if finite else not_finite + 1
        if not_finite == NOT_FINITE_LIMIT and not scaler.is_enabled():
            raise RuntimeError(
                f"Loss or gradient was not finite {not_finite} times in a row up to step {step + 1}; the weights are "
                "those before. Lower the learning rate, or use float32 or bfloat16 precision."
            )
        every = config.train.validate_every
        if step + 1 == plan.steps or (every and (step + 1) % every == 0):
            validate(step + 1)
            share, patience = config.train.early_stop_min_improvement, config.train.early_stop_patience
            if patience and step + 1 < plan.steps and without_improvement(run.validation, share) >= patience:
                fallen = f"by more than {share:.1%} " if share else ""
                callbacks.note(
                    f"Ended early after step {step + 1} of {plan.steps}: the validation loss has not fallen {fallen}in "
                    f"{patience} measurements."
                )
                break
    if sentence := noise_scale.sentence(config.train.batch_size * config.train.accumulate):
        callbacks.note(sentence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """What the passes of a step give beside the gradients."""

    loss: Tensor  # scalar, that of the step
    losses: list[Tensor]  # (B,) of each micro-batch: those of its samples, weighted
    areas: list[Tensor]  # (1,) mean mask of each micro-batch that has masks
    concepts: list[int]  # which concept each sample is of


def mean_by(keys: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Return the mean of the values of each key."""
    found: dict[int, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return {key: sum(each) / len(each) for key, each in sorted(found.items())}


def accumulated(*args: Any) -> Accumulated | None:
    """Return what `accumulate_gradients` does, None when memory has run out: nothing holds on to the step then."""
    try:
        return accumulate_gradients(*args)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    return None


def accumulate_gradients(
    run: Run,
    step: int,
    encode: Callable[[str], Conditioning],
    alphas: Tensor,
    scaler: torch.amp.GradScaler,
    memory: MemoryConfig,
    noise_scale: NoiseScale,
) -> Accumulated:
    """Take the forward and backward passes of one step."""
    base, plan, config, device = run.base, run.plan, run.config, run.device
    micro_batches = plan.step(step)
    window = sum(len(micro_batch.samples) for micro_batch in micro_batches)
    step_loss = torch.zeros((), device=device)
    losses: list[Tensor] = []
    areas: list[Tensor] = []
    for number, micro_batch in enumerate(micro_batches, 1):
        run.callbacks.check()
        run.network.at(micro_batch.index)
        batch = build_batch(base, run.encoded, micro_batch, plan, config, alphas, device)
        noised = add_noise(batch.latents, batch.seen, batch.alphas)
        with kept_activations(memory, (base.unet, *(text.model for text in base.texts)), device):
            conditions = build_sample_conditions(base, run.encoded, encode, plan, micro_batch.samples, device)
            prediction = predict(base, noised, batch.timesteps, conditions)
        frozen = None
        if batch.prior_weight is not None or batch.held is not None:
            frozen = predict_frozen(run, micro_batch, batch, noised, conditions)
        compared = loss_terms(base.prediction, config.objective, batch, noised, prediction, frozen)
        each = sample_losses(*compared, config.objective.loss, batch.huber_c) * batch.weights
        loss = each.sum() / window
        scaler.scale(loss).backward()
        step_loss += loss.detach()
        losses.append(each.detach())
        areas += [batch.mask.mean()[None]] if batch.mask is not None else []
        if number == len(micro_batches) // 2:
            noise_scale.halfway(sum(map(len, losses)), scaler.get_scale)
    run.network.at(None)
    pictures = plan.manifest.pictures
    concepts = [pictures[sample.picture].concept for micro_batch in micro_batches for sample in micro_batch.samples]
    return Accumulated(loss=step_loss, losses=losses, areas=areas, concepts=concepts)


@torch.no_grad()
def predict_frozen(run: Run, micro_batch: MicroBatch, batch: Batch, noised: Tensor, conditions: Conditions) -> Tensor:
    """Return what the base model predicts without the network, (B, C, H, W).

    Text encoders that learn read the captions again without it; captions from the store are read as the run reads them.
    """
    base, device = run.base, run.device
    with run.network.detached():
        if base.texts:
            encode = text_reader(base, run.encoded, device, learning=True)
            conditions = build_sample_conditions(base, run.encoded, encode, run.plan, micro_batch.samples, device)
        return predict(base, noised, batch.timesteps, conditions)


def settle(run: Run, memory: MemoryConfig, stream: Stream) -> None:
    """Bring the models to the device as the memory settings say, or further down from what they were."""
    base, weights = run.base, run.config.base_model.unet_weights
    with run.network.detached():
        prepare(base.unet, memory, weights, base.dtype, run.device, stream)
    for text in base.texts:
        recompute(text.model, memory.checkpointing)
