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
from .files import check_writable
from .gradient_noise import NoiseScale
from .log import check_log, logged
from .loss import sample_losses
from .memory import (
    DTYPES,
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
from .outcome import Run, Shelf
from .plan import MicroBatch, Plan, build_plan
from .preflight import check_disk, fit_memory
from .report import long_captions, report
from .result import Result, describe_best, finish, taken
from .run import Checkpoint, RunFolder, build_keys, choose_run, model_digests, working_run
from .saving import Saving, describe_stop, disk_told, go_on, keep, publish, save
from .scan import Index, manifest_digest, names, scan
from .schedule import check_schedule, lr_factor
from .store import Store
from .texts import check_embeddings, check_stops, embedding_stops, text_reader, text_stops
from .validate import better, check_prediction, check_validation, validation_loss, without_improvement

INDEX = "index.sqlite"  # in the cache folder: what the scan knows of every file
NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run
TO_LOWER = "lower batch_size (raise accumulate by the same factor) or the resolution, or keep weights as float8 or nf4."
FP16_SCALE = 2.0**12  # first loss scale in float16; halved after each overflow


@disk_told()
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
    runs: Path | None = None,
) -> Result:
    """Train a LoRA, or take or go on with what an earlier run has learned, and copy its file to `output`.

    output: where the LoRA goes; its stem is the run's name, and another number is added when the name is taken. cache:
    folder of the store, which is kept below cache_limit bytes (0 = any size). verify: a last word on each LoRA file,
    raises to refuse it. logs: folder in which the run's log, if it writes one, gets a folder of its own. embeddings:
    folder for words that are learned, by default output's. runs: folder of run folders, by default beside output.
    Everything wrong with the input raises ValueError before a model is loaded. When the run is stopped or fails, what
    was learned is saved in its folder, and its LoRA copied beside `output`, before the exception leaves.
    """
    device, callbacks = torch.device(device), callbacks or Callbacks()
    runs = runs or output.parent / "runs"
    shelf = Shelf(output=output, words=embeddings or output.parent, saves=config.saves)
    shelf.check_names([word.token for word in config.lora.embeddings])
    check_base_model(config.base_model)
    check_objective(config)
    check_lora_files(config)
    check_optimizer(config.optimizer, config.scheduler, device)
    check_log(config.train.log, logs)
    dtype = choose_dtype(config.base_model.precision, device)
    if config.lora.dtype == "bfloat16" and dtype == torch.float16:  # float16 scales gradients, CUDA none in bfloat16
        raise ValueError("A LoRA in bfloat16 does not go with precision float16; set dtype of LoRA Config to float32.")
    for setting in ("unet_weights", "text_weights"):
        check_weights(getattr(config.base_model, setting), setting)
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
    choice = choose_run(runs, keys, plan.steps, config.existing, other_steps(config, plan.steps))
    if choice.own is not None and choice.finished is not None:
        log = log_folder(config, logs, choice.own)
        result = taken(choice.own, choice.finished, plan, shelf, config.sample, choice.sentence, log)
        if result is not None:
            callbacks.note(choice.sentence)
            return result
    check_disk(config, plan, runs, sum(save.size for save in choice.own.checkpoints()) if choice.own else 0)
    shelf.check_folders()
    check_writable(runs)
    network_size = describe_network(measure_run(config))
    long = long_captions(plan, tokenizer, word_ids(config.lora.embeddings))
    callbacks.note("\n".join([report(plan), *(f"- {sentence}" for sentence in long)]))
    callbacks.note(network_size)
    ladder, needed = fit_memory(config, plan, tokenizer, dtype, device)
    settings = (*objective_remarks(config), *remarks_on_algorithm(config.lora), *optimizer_remarks(config.optimizer))
    for sentence in (needed, *remarks(config.base_model), *settings):
        callbacks.note(sentence)

    about = {"config": config.to_dict(), "pictures": len(manifest.pictures), "models": models}
    working = working_run(runs, choice, keys, output.stem, plan.steps, callbacks.note, **about)
    with working as (run_folder, checkpoint, how):
        if checkpoint is not None:
            callbacks.note(how)
        parts = {"callbacks": callbacks, "folder": run_folder, "shelf": shelf, "verify": verify}
        try:
            run = prepare_run(config, plan, cache, cache_limit, dtype, device, **parts)
        except Exception:
            raise
        except BaseException:  # a Cancel
            callbacks.note(describe_stop(checkpoint, plan))
            raise
        log = log_folder(config, logs, run_folder)
        try:
            kernel, programs = (
                attention_kernel(config.memory.attention, device),
                room_for_programs(config.memory.compile),
            )
            with run.network.attached(), kernel, programs:
                set_up(run, ladder[0], checkpoint)
                try:
                    with logged(callbacks, config.train.log, log, log_columns(run), run.losses) as run.callbacks:
                        train(run, ladder)
                    if choice.finished is None or choice.finished.step != run.at:
                        checkpoint = save(run, stays=True, at_end=True)
                except BaseException:
                    keep(run)
                    raise
                assert checkpoint is not None
                result = finish(run, checkpoint, how, log, stopped=run.at < plan.steps and not run.ended)
        finally:
            run.base.unet, run.base.texts, run.base.vae = None, (), None
            run.network.let_go()  # an exception's traceback may keep this frame, and must not keep the weights
            give_back(device)
    if sentence := describe_best(result):
        callbacks.note(sentence)
    return result


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
        concepts={name: [] for name in plan.concept_names().values()},
        **parts,
    )


def set_up(run: Run, memory: MemoryConfig, checkpoint: Checkpoint | None) -> None:
    """Bring models, optimizer and averages to the device, and let the run be where it was at a save if there is one."""
    base, config, device = run.base, run.config, run.device
    if config.memory.compile:
        compile_blocks(base.unet, run.callbacks.note)
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


def train(run: Run, ladder: Sequence[MemoryConfig]) -> None:
    """Take the steps of the plan that are left, on an attached network that is set up; all is noted in the run.

    ladder: the memory settings to work with, then those to fall back on when memory runs out.
    """
    base, plan, config, device, callbacks = run.base, run.plan, run.config, run.device, run.callbacks
    optimizer, scaler, noise_scale, settings = run.optimizer, run.scaler, run.noise_scale, config.optimizer
    assert noise_scale is not None
    rates = learning_rates(settings, base)
    stops = text_stops(settings, base, plan)
    word_stops = embedding_stops(config.lora.embeddings, plan)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    in_use = run.ema.swapped if run.ema and settings.ema_output == "average" else functools.partial(averaged, optimizer)
    alphas = alphas_cumprod(zero_terminal_snr=base.zero_terminal_snr)
    encode = text_reader(base, run.encoded, device, learning=True)
    concept_names = plan.concept_names()
    stopped: dict[str, float] = {}  # learning rates of models that have stopped
    not_finite: list[str] = []  # what was seen at the last steps without an update
    memory, *harder = ladder
    saving = Saving(run)

    def measure() -> None:
        """Measure the validation loss if that is due and not done, and end the run if it has not fallen for long."""
        every, patience, at = config.train.validate_every, config.train.early_stop_patience, run.at
        if not plan.validation or not (at == plan.steps or (at % every == 0 if every else at == 0)):
            return
        if not run.validation or run.validation[-1][0] != at:  # else measured before the run was cut off
            with in_use():  # other weights than those that training's reader may remember captions of
                read = text_reader(base, run.encoded, device, learning=True)
                loss = validation_loss(base, run.encoded, read, plan, config, alphas, device, callbacks)
                run.validation.append((at, loss))
                if config.train.keeps_by:
                    run.best = better(run.best, run.validation, run.network)
            run.record("validation", step=at, loss=loss)
            callbacks.validation(at, loss)
        share = config.train.early_stop_min_improvement
        if patience and 0 < at < plan.steps and without_improvement(run.validation, share) >= patience:
            fallen = f"by more than {share:.1%} " if share else ""
            callbacks.note(
                f"Ended early after step {at} of {plan.steps}: the validation loss has not fallen {fallen}in "
                f"{patience} measurements."
            )
            run.ended = True

    if run.at == 0:
        for sentence in check_prediction(base, run.encoded, encode, plan, config, alphas, device):
            callbacks.note(sentence)
    measure()
    while run.at < plan.steps and not run.ended:
        step = run.at
        began = time.perf_counter()
        stopping = [prefix for prefix, stop in stops.items() if stop <= step and prefix not in stopped]
        for prefix in stopping:
            run.network.freeze(prefix)
            rates[prefix] = stopped[prefix] = 0.0
        words = [word for word, stop in word_stops.items() if stop <= step and f"embedding {word}" not in stopped]
        for word in words:
            run.network.embeddings.freeze(word)
            stopped[f"embedding {word}"] = 0.0
        if stopping or words:
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
            settle(run, memory)
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
        if finite or scaler.is_enabled():  # a GradScaler looks for the scale that fits by trying
            saving.forget()
        else:
            saving.remember()
        run.moving = True  # until weights, averages and counts belong together again
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
        for number, name in concept_names.items():
            run.concepts[name].append(by_concept.get(number, math.nan))
        run.moving = False
        rates_now = {group["model"]: learning_rate(optimizer, group) for group in reversed(optimizer.param_groups)}
        report = StepReport(
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
            concepts={concept_names[number]: loss for number, loss in by_concept.items()},
            noise_scale=noise_scale.record(*pair),
            peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )
        run.record("step", step=report.step, loss=report.loss, grad_norm=grad_norm, lr=rates_now, s=report.seconds)
        callbacks.step(report)
        not_finite = [] if finite else [*not_finite, describe_step(plan, step, loss_value, grad_norm)]
        if len(not_finite) == NOT_FINITE_LIMIT and not scaler.is_enabled():
            saving.go_back()
            raise RuntimeError(
                f"Loss or gradient was not finite {NOT_FINITE_LIMIT} times in a row, so the run went back to step "
                f"{run.at} and stopped: {'; '.join(not_finite)}. Lower the learning rate, look at these pictures, or "
                "use float32 or bfloat16 precision."
            )
        measure()
        asked = callbacks.asked()
        saving.after_step(asked)
        if "stop" in asked and step + 1 < plan.steps:
            callbacks.note(f"Stopped and kept after step {step + 1} of {plan.steps}. Queue again to go on from there.")
            break
    if sentence := noise_scale.sentence(config.train.batch_size * config.train.accumulate):
        callbacks.note(sentence)


def describe_step(plan: Plan, step: int, loss: float, grad_norm: float) -> str:
    """Say what was seen at a step, 0 and up, and on which pictures."""
    pictures = {sample.picture for micro_batch in plan.step(step) for sample in micro_batch.samples}
    seen = names([plan.manifest.pictures[number].name for number in sorted(pictures)])
    return f"step {step + 1} (loss {loss:.4g}, gradient norm {grad_norm:.4g}) on {seen}"


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


def settle(run: Run, memory: MemoryConfig) -> None:
    """Bring the models to the device as the memory settings say, or further down from what they were."""
    base, weights = run.base, run.config.base_model.unet_weights
    with run.network.detached():
        prepare(base.unet, memory, weights, base.dtype, run.device, run.stream)
    for text in base.texts:
        recompute(text.model, memory.checkpointing)


def log_folder(config: RunConfig, logs: Path | None, run: RunFolder) -> Path | None:
    """Return where the log of a run is, None when it writes none."""
    return logs / run.path.name if logs is not None and config.train.log != "none" else None


def log_columns(run: Run) -> list[str]:
    """Return the columns of a log that only this run has."""
    learning = [model for model, rate in learning_rates(run.config.optimizer, run.base).items() if rate > 0]
    learning += [f"embedding {word.token}" for word in run.config.lora.embeddings]
    return [f"lr_{model}" for model in learning] + [f"loss_{name}" for name in run.concepts]
