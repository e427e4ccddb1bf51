"""The whole algorithm, top to bottom, in the order it happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .batch import build_batch, build_sample_conditions
from .callbacks import Callbacks, StepReport
from .config import RunConfig
from .encode import Encoded, encode_plan
from .export import build_metadata, save_lora, unused_path
from .loss import sample_losses
from .memory import DTYPES, choose_dtype, enable_checkpointing
from .models import (
    BaseModel,
    check_base_model,
    find_tokenizer,
    load_base_model,
    load_tokenizer,
    predict,
    remarks,
    unet_layer_names,
)
from .networks import Network
from .noise import add_noise, alphas_cumprod, build_target
from .optim import build_optimizer, check_optimizer
from .plan import Plan, build_plan
from .report import long_captions, report
from .sample import sample_images
from .scan import Index, scan
from .schedule import check_schedule, lr_factor
from .store import Store
from .validate import check_prediction, validation_loss

INDEX = "index.sqlite"  # in the cache folder: what the scan knows of every file
NOT_FINITE_LIMIT = 5  # skipped updates in a row that end a run
FP16_SCALE = 2.0**12  # first loss scale in float16; halved after each overflow


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run leaves behind."""

    path: Path  # the LoRA file
    tensors: dict[str, Tensor]  # as they are in the file
    losses: list[float]  # of each step, NaN where it was not finite
    validation: list[tuple[int, float]]  # (steps finished, loss of the validation pictures)
    samples: Tensor  # (N, H, W, 3) in 0..1
    plan: Plan


def train_lora(
    config: RunConfig,
    output: Path,
    cache: Path,
    device: torch.device | str = "cpu",
    callbacks: Callbacks | None = None,
    verify: Callable[[Path], None] | None = None,
    cache_limit: int = 0,
) -> Result:
    """Train a LoRA and write it to `output` (another number is added when the name is taken).

    cache: folder of the store, which is kept below cache_limit bytes (0 = any size). verify: a last word on the
    finished file, raises to refuse it. Everything wrong with the input raises ValueError before a model is loaded.
    When the run is stopped or fails after its first step, what was learned is saved beside `output` before the
    exception leaves.
    """
    device, callbacks, started = torch.device(device), callbacks or Callbacks(), time.time()
    check_base_model(config.base_model)
    check_optimizer(config.optimizer, device)
    with Index(cache / INDEX) as index:
        manifest = scan(config.dataset, index, callbacks)
    plan = build_plan(manifest, config.dataset, config.train)
    check_schedule(plan.steps, config.scheduler)
    tokenizer = load_tokenizer(find_tokenizer(config.base_model.tokenizer, Path(config.base_model.path)))
    callbacks.note("\n".join([report(plan), *(f"- {sentence}" for sentence in long_captions(plan, tokenizer))]))

    base = load_base_model(config.base_model, choose_dtype(config.base_model.precision, device))
    rates = learning_rates(config, base)
    train_text = any(rates[text.kohya] > 0 for text in base.texts)
    prompts = None if train_text else {*config.sample.prompts, config.sample.negative}
    with Store(cache, cache_limit) as store:
        vae_dtype = DTYPES.get(config.base_model.vae_precision, torch.float32)
        encoded = encode_plan(base, plan, store, device, callbacks, prompts=prompts, vae_dtype=vae_dtype)
        store.prune()
    base.texts = base.texts if train_text else ()
    for text in base.texts:
        text.model.to(device)

    base.unet.to(device)
    network = Network(
        base.unet if rates["lora_unet"] > 0 else None,
        {text.kohya: (text.model, text.depth) for text in base.texts if rates[text.kohya] > 0},
        config.lora,
        config.train.seed,
        unet_layer_names(base),
    ).to(device)
    alphas = alphas_cumprod(zero_terminal_snr=base.zero_terminal_snr)
    for sentence in (*remarks(config.base_model), *check_prediction(base, encoded, plan, config, alphas, device)):
        callbacks.note(sentence)
    losses: list[float] = []
    validation: list[tuple[int, float]] = []

    def describe(path: Path) -> dict[str, str]:
        return build_metadata(config, plan, base, name=path.stem, steps=len(losses), started=started)

    try:
        with network.attached():
            try:
                train(base, network, plan, encoded, config, device, callbacks, losses, validation)
                path = unused_path(output)
                tensors = save_lora(path, network.tensors(), describe(path), config.train.save_dtype, verify)
            except BaseException:
                if losses:
                    stopped = unused_path(output.with_name(f"{output.stem}-stopped-at-{len(losses)}.safetensors"))
                    save_lora(stopped, network.tensors(), describe(stopped), "float32")
                    callbacks.note(f"Stopped at step {len(losses)} of {plan.steps}; what was learned is in {stopped}.")
                raise
            samples = sample_images(
                base,
                config.sample,
                device,
                encode=None if train_text else encoded.conditioning,
                callbacks=callbacks,
            )
    finally:
        base.unet, base.texts, base.vae = None, (), None
        network.let_go()  # an exception's traceback may keep this frame, and must not keep the weights
    return Result(path=path, tensors=tensors, losses=losses, validation=validation, samples=samples, plan=plan)


def learning_rates(config: RunConfig, base: BaseModel) -> dict[str, float]:
    """Return the learning rate of each model by what names of its layers in a LoRA file begin with."""
    optimizer = config.optimizer
    texts = (optimizer.text_encoder_learning_rate, optimizer.text_encoder_2_learning_rate)
    kohya = (text.kohya for text in base.family.texts)
    return {"lora_unet": optimizer.learning_rate, **dict(zip(kohya, texts, strict=False))}


def train(
    base: BaseModel,
    network: Network,
    plan: Plan,
    encoded: Encoded,
    config: RunConfig,
    device: torch.device,
    callbacks: Callbacks,
    losses: list[float],
    validation: list[tuple[int, float]],
) -> None:
    """Run every step of the plan on an attached network; append to `losses` and `validation` as they come."""
    if config.memory.checkpointing not in ("auto", "0"):
        enable_checkpointing([base.unet, *(text.model for text in base.texts)])
    optimizer = build_optimizer(config.optimizer, network.groups(learning_rates(config, base)))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler = torch.amp.GradScaler(device.type, init_scale=FP16_SCALE, enabled=base.dtype == torch.float16)
    alphas = alphas_cumprod(zero_terminal_snr=base.zero_terminal_snr)
    not_finite = 0

    def validate(steps: int) -> None:
        if plan.validation:
            validation.append((steps, validation_loss(base, encoded, plan, config, alphas, device, callbacks)))
            callbacks.validation(*validation[-1])

    validate(0)
    for step in range(plan.steps):
        began = time.perf_counter()
        micro_batches = plan.step(step)
        window = sum(len(micro_batch.samples) for micro_batch in micro_batches)
        step_loss = torch.zeros((), device=device)
        areas: list[Tensor] = []  # mean of the masks of each micro-batch
        for micro_batch in micro_batches:
            callbacks.check()
            batch = build_batch(base, encoded, micro_batch, plan, config, alphas, device)
            conditions = build_sample_conditions(base, encoded, plan, micro_batch.samples, device)
            noised = add_noise(batch.latents, batch.noise, batch.alphas)
            prediction = predict(base, noised, batch.timesteps, conditions)
            target = build_target(base.prediction, batch.latents, batch.noise, batch.alphas)
            prior = None
            if batch.prior_weight is not None:
                with torch.no_grad(), network.detached():
                    prior = predict(base, noised, batch.timesteps, conditions)
            each = sample_losses(prediction, target, batch.mask, batch.normalize, prior, batch.prior_weight)
            loss = (each * batch.weights).sum() / window
            scaler.scale(loss).backward()
            step_loss += loss.detach()
            areas += [batch.mask.mean()] if batch.mask is not None else []

        factor = lr_factor(step, plan.steps, config.scheduler)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        scaler.unscale_(optimizer)
        limit = config.optimizer.max_grad_norm or math.inf
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        finite = math.isfinite(grad_norm) and math.isfinite(loss_value := float(step_loss))
        if finite:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        losses.append(loss_value if finite else math.nan)
        callbacks.step(
            StepReport(
                step=step + 1,
                steps=plan.steps,
                loss=losses[-1],
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
