"""The whole algorithm, top to bottom, in the order it happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import build_batch, build_sample_conditions
from .callbacks import Callbacks, StepReport
from .config import MemoryConfig, RunConfig
from .encode import Encoded, encode_plan
from .existing import build_network, check_lora_files, learning_rates, load_start, merge_beneath
from .export import build_metadata, save_embeddings, save_lora, unused_path
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
    BaseModel,
    Conditioning,
    check_base_model,
    find_tokenizer,
    load_base_model,
    load_tokenizer,
    predict,
    remarks,
    word_ids,
)
from .networks import Network
from .noise import add_noise, alphas_cumprod, build_target
from .optim import build_optimizer, check_optimizer
from .plan import Plan, build_plan
from .preflight import fit_memory
from .report import long_captions, report
from .sample import sample_images
from .scan import Index, scan
from .schedule import check_schedule, lr_factor
from .store import Store
from .texts import check_embeddings, check_stops, embedding_stops, text_reader, text_stops
from .validate import check_prediction, validation_loss

INDEX = "index.sqlite"  # in the cache folder: what the scan knows of every file
NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run
TO_LOWER = "lower batch_size (raise accumulate by the same factor) or the resolution, or keep weights as float8 or nf4."
FP16_SCALE = 2.0**12  # first loss scale in float16; halved after each overflow


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves behind."""

    path: Path  # the LoRA file
    tensors: dict[str, Tensor]  # as they are in the file
    embeddings: dict[str, Path]  # the file of each word that was learned
    losses: list[float]  # of each step, NaN where it was not finite
    validation: list[tuple[int, float]]  # (steps finished, loss of the validation pictures)
    samples: Tensor  # (N, H, W, 3) in 0..1
    plan: Plan


@dataclass(kw_only=True)
class Run:
    """What the steps of a run work with, and what has happened so far."""

    base: BaseModel
    network: Network
    plan: Plan
    encoded: Encoded
    config: RunConfig
    device: torch.device
    callbacks: Callbacks
    losses: list[float] = field(default_factory=list)  # of each step, NaN where it was not finite
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps finished, loss)


def train_lora(
    config: RunConfig,
    output: Path,
    cache: Path,
    device: torch.device | str = "cpu",
    callbacks: Callbacks | None = None,
    verify: Callable[[Path], None] | None = None,
    cache_limit: int = 0,
    embeddings: Path | None = None,
) -> Result:
    """Train a LoRA and write it to `output` (another number is added when the name is taken).

    cache: folder of the store, which is kept below cache_limit bytes (0 = any size). verify: a last word on the
    finished file, raises to refuse it. embeddings: the folder for words that are learned, by default output's.
    Everything wrong with the input raises ValueError before a model is loaded.
    When the run is stopped or fails after its first step, what was learned is saved beside `output` before the
    exception leaves.
    """
    device, callbacks, started = torch.device(device), callbacks or Callbacks(), time.time()
    check_base_model(config.base_model)
    check_lora_files(config)
    check_optimizer(config.optimizer, device)
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
    tokenizer = load_tokenizer(find_tokenizer(config.base_model.tokenizer, Path(config.base_model.path)))
    check_embeddings(config.lora.embeddings, plan, tokenizer)
    long = long_captions(plan, tokenizer, word_ids(config.lora.embeddings))
    callbacks.note("\n".join([report(plan), *(f"- {sentence}" for sentence in long)]))

    ladder, needed = fit_memory(config, plan, tokenizer, dtype, device)
    for sentence in (needed, *remarks(config.base_model)):
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

    run = Run(base=base, network=network, plan=plan, encoded=encoded, config=config, device=device, callbacks=callbacks)

    def metadata(path: Path) -> dict[str, str]:
        steps = len(run.losses)
        return build_metadata(config, plan, base, name=path.stem, steps=steps, started=started, start=continued)

    def save_words(path: Path) -> dict[str, Path]:
        folder, vectors = embeddings or path.parent, network.embeddings.tensors()
        return save_embeddings(folder, path.stem, vectors, base.family, metadata(path))

    try:
        with network.attached():
            try:
                with attention_kernel(config.memory.attention, device), room_for_programs(config.memory.compile):
                    train(run, ladder)
                path = unused_path(output)
                tensors = save_lora(path, network.tensors(), metadata(path), config.train.save_dtype, verify)
                words = save_words(path)
            except BaseException:
                if steps := len(run.losses):
                    stopped = unused_path(output.with_name(f"{output.stem}-stopped-at-{steps}.safetensors"))
                    save_lora(stopped, network.tensors(), metadata(stopped), "float32")
                    kept = ", ".join(map(str, (stopped, *save_words(stopped).values())))
                    callbacks.note(f"Stopped at step {steps} of {plan.steps}; what was learned is in {kept}.")
                raise
            encode = text_reader(base, encoded, device, learning=False)
            samples = sample_images(base, config.sample, device, encode=encode, callbacks=callbacks)
    finally:
        base.unet, base.texts, base.vae = None, (), None
        network.let_go()  # an exception's traceback may keep this frame, and must not keep the weights
        give_back(device)
    return Result(
        path=path,
        tensors=tensors,
        embeddings=words,
        losses=run.losses,
        validation=run.validation,
        samples=samples,
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
    optimizer = build_optimizer(config.optimizer, run.network.groups(rates), config.train.seed)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler = torch.amp.GradScaler(device.type, init_scale=FP16_SCALE, enabled=base.dtype == torch.float16)
    alphas = alphas_cumprod(zero_terminal_snr=base.zero_terminal_snr)
    encode = text_reader(base, run.encoded, device, learning=True)
    not_finite = 0

    def validate(steps: int) -> None:
        if plan.validation:
            loss = validation_loss(base, run.encoded, encode, plan, config, alphas, device, callbacks)
            run.validation.append((steps, loss))
            callbacks.validation(steps, loss)

    for sentence in check_prediction(base, run.encoded, encode, plan, config, alphas, device):
        callbacks.note(sentence)
    validate(0)
    for step in range(plan.steps):
        began = time.perf_counter()
        for prefix in [prefix for prefix, stop in stops.items() if stop == step]:
            run.network.freeze(prefix)
            rates[prefix] = 0.0
        for token in [token for token, stop in word_stops.items() if stop == step]:
            run.network.embeddings.freeze(token)
        if step in (*stops.values(), *word_stops.values()):
            learning = run.network.embeddings.learning or any(rates[text.kohya] > 0 for text in base.texts)
            encode = text_reader(base, run.encoded, device, learning=learning)
        for again in (False, True):
            if (done := accumulated(run, step, encode, alphas, scaler, memory)) is not None:
                break
            optimizer.zero_grad(set_to_none=True)
            give_back(device)
            if again or not harder:
                raise RuntimeError(f"Memory ran out at step {step + 1} with {describe(memory)}: {TO_LOWER}")
            memory, *harder = harder
            settle(run, memory, stream)
            callbacks.note(f"Memory ran out at step {step + 1}; the step is taken again with {describe(memory)}.")
        assert done is not None
        step_loss, areas = done

        factor = lr_factor(step, plan.steps, config.scheduler)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        scaler.unscale_(optimizer)
        limit = config.optimizer.max_grad_norm or math.inf
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        finite = math.isfinite(grad_norm) and math.isfinite(loss_value := float(step_loss))
        if finite:
            scaler.step(optimizer)
            run.network.embeddings.keep_norms()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        run.losses.append(loss_value if finite else math.nan)
        callbacks.step(
            StepReport(
                step=step + 1,
                steps=plan.steps,
                loss=run.losses[-1],
                grad_norm=grad_norm,
                learning_rate=optimizer.param_groups[0]["lr"],
                updated=finite,
                seconds=time.perf_counter() - began,
                masked_area=float(torch.stack(areas).mean()) if areas else None,
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


def accumulated(*args: Any) -> tuple[Tensor, list[Tensor]] | None:
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
) -> tuple[Tensor, list[Tensor]]:
    """Take the forward and backward passes of one step; return its loss and the mean mask of each micro-batch."""
    base, plan, config, device = run.base, run.plan, run.config, run.device
    micro_batches = plan.step(step)
    window = sum(len(micro_batch.samples) for micro_batch in micro_batches)
    step_loss = torch.zeros((), device=device)
    areas: list[Tensor] = []
    for micro_batch in micro_batches:
        run.callbacks.check()
        batch = build_batch(base, run.encoded, micro_batch, plan, config, alphas, device)
        noised = add_noise(batch.latents, batch.noise, batch.alphas)
        with kept_activations(memory, (base.unet, *(text.model for text in base.texts)), device):
            conditions = build_sample_conditions(base, run.encoded, encode, plan, micro_batch.samples, device)
            prediction = predict(base, noised, batch.timesteps, conditions)
        target = build_target(base.prediction, batch.latents, batch.noise, batch.alphas)
        prior = None
        if batch.prior_weight is not None:
            with torch.no_grad(), run.network.detached():
                prior = predict(base, noised, batch.timesteps, conditions)
        each = sample_losses(prediction, target, batch.mask, batch.normalize, prior, batch.prior_weight)
        loss = (each * batch.weights).sum() / window
        scaler.scale(loss).backward()
        step_loss += loss.detach()
        areas += [batch.mask.mean()] if batch.mask is not None else []
    return step_loss, areas


def settle(run: Run, memory: MemoryConfig, stream: Stream) -> None:
    """Bring the models to the device as the memory settings say, or further down from what they were."""
    base, weights = run.base, run.config.base_model.unet_weights
    with run.network.detached():
        prepare(base.unet, memory, weights, base.dtype, run.device, stream)
    for text in base.texts:
        recompute(text.model, memory.checkpointing)
