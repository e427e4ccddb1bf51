"""One optimizer step: forward, loss and backward of its micro-batches, limits, and the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .batch import Batch, build_batch, build_sample_conditions, loss_terms
from .callbacks import Norms
from .config import MemoryConfig
from .loss import sample_losses
from .memory import kept_activations, out_of_memory
from .models import Conditioning, Conditions, predict
from .noise import add_noise
from .optim import limit_gradients, take_step
from .outcome import Run
from .plan import MicroBatch
from .texts import text_reader

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What the passes of a step give beside the gradients."""

    loss: Tensor  # scalar, that of the step
    losses: list[Tensor]  # (B,) of each micro-batch: those of its samples, weighted
    areas: list[Tensor]  # (1,) mean mask of each micro-batch that has masks
    concepts: list[int]  # which concept each sample is of


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """What the device says of a step whose gradients are there."""

    loss: float
    grad_norm: float  # before it is limited
    noise: tuple[float, float]  # as `NoiseScale.record` takes them
    concepts: dict[str, float]  # mean loss of the samples of each concept
    masked_area: float | None  # mean of the masks, None without

    @property
    def finite(self) -> bool:
        """Tell whether the weights can be moved by these gradients."""
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


def with_memory(work: Callable[..., Result], *args: Any) -> Result | None:
    """Return what some work returns, None when memory has run out: nothing holds on to what it had made then."""
    try:
        return work(*args)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    return None


def accumulate_gradients(
    run: Run, encode: Callable[[str], Conditioning], alphas: Tensor, memory: MemoryConfig
) -> Passes:
    """Take the forward and backward passes of the next step; again, where one could not be compiled."""
    try:
        return _passes(run, encode, alphas, memory)
    except RuntimeError as error:
        if run.programs is None or not run.programs.end_for(error):
            raise
    run.optimizer.zero_grad(set_to_none=True)
    return _passes(run, encode, alphas, memory)


def _passes(run: Run, encode: Callable[[str], Conditioning], alphas: Tensor, memory: MemoryConfig) -> Passes:
    assert run.noise_scale is not None
    base, plan, config, device = run.base, run.plan, run.config, run.device
    micro_batches = plan.step(run.at)
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
        run.scaler.scale(loss).backward()
        step_loss += loss.detach()
        losses.append(each.detach())
        areas += [batch.mask.mean()[None]] if batch.mask is not None else []
        if number == len(micro_batches) // 2:
            run.noise_scale.halfway(sum(map(len, losses)), run.scaler.get_scale)
    run.network.at(None)
    pictures = plan.manifest.pictures
    concepts = [pictures[sample.picture].concept for micro_batch in micro_batches for sample in micro_batch.samples]
    return Passes(loss=step_loss, losses=losses, areas=areas, concepts=concepts)


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


def limit(run: Run, passes: Passes) -> Numbers:
    """Limit the gradients and return what there is to know of the step."""
    assert run.noise_scale is not None
    run.scaler.unscale_(run.optimizer)
    noise = run.noise_scale.finished(len(passes.concepts))
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    norm = limit_gradients(parameters, run.config.optimizer)
    # One list, so that the device is waited for once.
    numbers = torch.cat([torch.stack([passes.loss, norm]), noise, *passes.losses, *passes.areas]).tolist()
    (loss, grad_norm, *pair), numbers = numbers[:4], numbers[4:]
    losses, areas = numbers[: len(passes.concepts)], numbers[len(passes.concepts) :]
    return Numbers(
        loss=loss,
        grad_norm=grad_norm,
        noise=(pair[0], pair[1]),
        concepts={run.concept_names[number]: loss for number, loss in mean_by(passes.concepts, losses).items()},
        masked_area=sum(areas) / len(areas) if areas else None,
    )


def update(run: Run, numbers: Numbers) -> Norms | None:
    """Move the weights, unless loss or gradient is not finite, and count the step; return norms that were limited."""
    config, finite, norms = run.config, numbers.finite, None
    run.moving = True  # until weights, averages and counts belong together again
    take_step(run.optimizer, run.scaler, finite=finite)
    if finite:
        run.network.embeddings.keep_norms()
        if config.lora.scale_weight_norms:
            norms = run.network.limit_norms(config.lora.scale_weight_norms)
    if run.ema:
        run.ema.update(run.at + 1)
    run.at += 1
    run.losses.append(numbers.loss if finite else math.nan)
    for name, losses in run.concepts.items():
        losses.append(numbers.concepts.get(name, math.nan))
    run.moving = False
    return norms


def mean_by(keys: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Return the mean of the values of each key."""
    found: dict[int, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return {key: sum(each) / len(each) for key, each in sorted(found.items())}
