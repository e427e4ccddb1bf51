"""A step around its passes: clipping, the update, its report, out-of-memory errors. The passes are in train.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..common.callbacks import Norms, StepReport
from ..common.wording import names
from ..data.plan import MicroBatch
from ..memory import kept_activations, out_of_memory
from ..objective import Draws
from ..objective.preserved import BLANK, preserved_caption
from ..objective.slider import slider_prompts, slider_sign, slider_target
from ..optim import apply_gradients, arguments, learning_rate, limit_gradients, sum_of_norms
from .batch import Read
from .saving import Saving
from .state import Run

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Passes:
    """The losses and masks of a step's forward and backward passes."""

    loss: Tensor  # scalar, of the whole step
    losses: list[Tensor] = field(default_factory=list)  # (B,) weighted, of each micro-batch; of pairs the sums
    areas: list[Tensor] = field(default_factory=list)  # (1,) mean mask of each micro-batch with masks
    concepts: list[int] = field(default_factory=list)  # number of each sample's concept
    pictures: list[int] = field(default_factory=list)  # number of each sample's picture
    plain: list[Tensor] = field(default_factory=list)  # (B,) losses without weights, of each micro-batch
    levels: list[Tensor] = field(default_factory=list)  # (B,) levels of each micro-batch
    shared: tuple[Tensor, ...] = ()  # (parameters,) how many processes have a gradient of each; none of one alone

    def add(self, micro_batch: MicroBatch, draws: Draws, losses: Tensor, loss: Tensor, run: Run) -> None:
        """Add the losses of a micro-batch; those at the other end of a slider to the ones before, of the same pairs."""
        self.loss += loss
        if micro_batch.samples[0].opposite:
            self.losses[-1] = self.losses[-1] + losses
            self.plain[-1] = self.plain[-1] + draws.plain(losses)
            return
        self.losses.append(losses)
        self.areas += [draws.mask.mean()[None]] if draws.mask is not None else []
        self.concepts += concepts_of([micro_batch], run)
        self.pictures += pictures_of([micro_batch])
        self.plain.append(draws.plain(losses))
        self.levels.append(draws.levels)

    def total(self, run: Run) -> None:
        """Sum gradients over the processes; all then have the losses of the whole step, in the order of the plan."""
        if run.world.size == 1:
            return
        run.scaler.scale(self.loss)  # makes the scaler ready where a process had no micro-batch
        micro_batches, parameters, scale = run.plan.step(run.at), trained_parameters(run), run.noise_scale
        sizes = [len(each.samples) for each in micro_batches]
        masked = [int(any(run.plan.has_mask(sample.picture) for sample in each.samples)) for each in micro_batches]
        own = (
            torch.tensor([float(p.grad is not None) for p in parameters], device=run.device),
            placed(self.losses, sizes, run),
            placed(self.plain, sizes, run),
            placed(self.levels, sizes, run),
            placed(self.areas, masked, run),
            scale.half[0] if scale.half else self.loss.new_zeros(0),
        )
        every = [*parameters, run.uncertainty.weight] if run.uncertainty else parameters
        gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in every]
        shared, losses, plain, levels, areas, half, *gradients = run.world.total([*own, *gradients])
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        scale.half = scale.half and (half, scale.half[1])
        self.loss = torch.zeros_like(self.loss)
        for part in losses.split(sizes):
            self.loss += part.sum() / len(losses)
        self.losses, self.plain, self.levels = [losses], [plain], [levels]
        self.areas, self.shared = [areas], (shared,)
        self.concepts, self.pictures = concepts_of(micro_batches, run), pictures_of(micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The measured numbers of a step, as Python floats."""

    loss: float
    grad_norm: float  # before clipping
    noise: tuple[float, float]  # for `NoiseScale.record`
    concepts: dict[str, float]  # mean loss of the samples of each concept
    masked_area: float | None  # mean of the masks, None without
    samples: list[tuple[int, float, float]]  # picture, level and loss without weights of each sample

    @property
    def finite(self) -> bool:
        """Tell whether loss and gradients are finite, so that the weights may be updated."""
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


def pictures_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """List the numbers of the samples' pictures."""
    return [sample.picture for micro_batch in micro_batches for sample in micro_batch.samples]


def concepts_of(micro_batches: Sequence[MicroBatch], run: Run) -> list[int]:
    """List the numbers of the samples' concepts."""
    return [run.plan.manifest.pictures[picture].concept for picture in pictures_of(micro_batches)]


def placed(values: Sequence[Tensor], lengths: Sequence[int], run: Run) -> Tensor:
    """Put the values of this process's micro-batches between zeros for those of the others, (sum of lengths,)."""
    whole, before = torch.zeros(sum(lengths), device=run.device), run.world.mine(range(len(lengths)))[:1]
    if values:
        found, first = torch.cat(list(values)), sum(lengths[: before[0]])
        whole[first : first + len(found)] = found
    return whole


def parameters_of(run: Run) -> list[Tensor]:
    """List the parameters of the optimizer."""
    return [p for group in run.optimizer.param_groups for p in group["params"]]


def trained_parameters(run: Run) -> list[Tensor]:
    """List the parameters that are still trained."""
    return [p for p in parameters_of(run) if p.requires_grad]


def catch_out_of_memory(work: Callable[..., T], *args: Any) -> T | None:
    """Call a function; None when it runs out of memory, with all that it allocated freed."""
    try:
        return work(*args)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    return None


@torch.no_grad()
def predict_frozen(run: Run, micro_batch: MicroBatch, draws: Draws, conditions: Any = None) -> Tensor:
    """Predict with the base model without the network, (B, C, H, W). conditions: of the captions, where they are known.

    Trained text encoders encode the captions again without the network; other captions come from the cache.
    """
    with run.network.detached():
        if conditions is None or run.base.text_encoders:
            read: Read = run.reader(training=True)
            conditions = run.conditions(micro_batch.samples, read)
        return run.base.predict(draws.noised, draws.levels, conditions)


@torch.no_grad()
def predict_blank(run: Run, micro_batch: MicroBatch, draws: Draws, read: Read) -> Tensor:
    """Predict for a micro-batch without its captions, with the network, (B, C, H, W)."""
    samples = [replace(sample, caption=BLANK) for sample in micro_batch.samples]
    return run.base.predict(draws.noised, draws.levels, run.conditions(samples, read))


def predict_slider(run: Run, micro_batch: MicroBatch, draws: Draws, frozen: Tensor | None) -> Tensor | None:
    """Predict the target of a slider in this micro-batch's direction, (B, C, H, W); None without a slider.

    frozen: the frozen model's prediction for the captions.
    """
    config = run.config.objective
    if frozen is None or config.slider == "off":
        return None

    def predict(prompt: str) -> Tensor:
        samples = tuple(replace(sample, caption=prompt) for sample in micro_batch.samples)
        return predict_frozen(run, replace(micro_batch, samples=samples), draws)

    positive, negative = map(predict, slider_prompts(config, micro_batch.index))
    return slider_target(frozen, positive, negative, slider_sign(micro_batch.index) * config.slider_strength)


def preservation_losses(
    run: Run, micro_batch: MicroBatch, draws: Draws, read: Read, models: Sequence[Any]
) -> Tensor | None:
    """Compute how far each sample's prediction for its other caption is from the frozen model's, (B,).

    None where no sample has another caption. models: those whose activations the backward pass needs.
    """
    others = [preserved_caption(sample.caption, run.config.objective) for sample in micro_batch.samples]
    if all(other is None for other in others):
        return None
    pairs = zip(micro_batch.samples, others, strict=True)
    samples = tuple(sample if other is None else replace(sample, caption=other) for sample, other in pairs)
    with kept_activations(run.memory, models, run.device, written=run.base.writes_inputs):
        conditions = run.conditions(samples, read)
        prediction = run.base.predict(draws.noised, draws.levels, conditions)
    frozen = predict_frozen(run, replace(micro_batch, samples=samples), draws, conditions)
    kept = torch.tensor([other is not None for other in others], device=run.device).float()
    return run.objective.preservation_loss(prediction, frozen, draws, kept)


def limit(run: Run, passes: Passes) -> Numbers:
    """Clip the gradients and read the step's numbers from the device."""
    run.scaler.unscale_(run.optimizer)
    noise = run.noise_scale.finished(len(passes.concepts))
    norm = limit_gradients(parameters_of(run), run.config.optimizer)
    # One list: every copy would wait for the device.
    samples = (*passes.losses, *passes.plain, *passes.levels)
    values = [torch.stack([passes.loss, norm]), noise, *samples, *passes.shared, *passes.areas]
    numbers = torch.cat(values).tolist()
    (loss, grad_norm, *pair), numbers = numbers[:4], numbers[4:]
    of = len(passes.concepts)
    losses, plain, levels, numbers = numbers[:of], numbers[of : 2 * of], numbers[2 * of : 3 * of], numbers[3 * of :]
    if passes.shared:
        parameters = trained_parameters(run)
        shared, numbers = numbers[: len(parameters)], numbers[len(parameters) :]
        for parameter, processes in zip(parameters, shared, strict=True):
            if not processes:  # no caption of the step has the word: the optimizer leaves such parameters alone
                parameter.grad = None
    concept_names = run.plan.concept_names()
    return Numbers(
        loss=loss,
        grad_norm=grad_norm,
        noise=(pair[0], pair[1]),
        concepts={concept_names[number]: loss for number, loss in mean_by(passes.concepts, losses).items()},
        masked_area=sum(numbers) / len(numbers) if numbers else None,
        samples=list(zip(passes.pictures, levels, plain, strict=True)),
    )


def update(run: Run, numbers: Numbers) -> Norms | None:
    """Update the weights if loss and gradient are finite, and count the step; return the limited norms of weights."""
    config, finite, norms = run.config, numbers.finite, None
    run.updating = True  # until weights, averages and counts match again
    if finite and run.uncertainty:
        run.uncertainty.update(run.scaler.get_scale())
    apply_gradients(run.optimizer, run.scaler, finite=finite)
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
    slides = run.config.objective.slider != "off"  # and does not learn the pictures
    for picture, level, loss in numbers.samples:
        if run.plan.concepts[picture].role == "train" and not slides:  # others should not fit
            run.fits.add(picture, level / len(run.objective.path), loss)
    run.updating = False
    return norms


def check_weights(run: Run, saving: Saving) -> None:
    """Raise RuntimeError if the last update made weights that are not finite, with the run as it was before if it can.

    Such weights are never saved, so that without a backup the last save stays.
    """
    run.weights_norm = sum_of_norms(parameters_of(run))
    if math.isfinite(run.weights_norm):
        return
    step, before = run.at, "stopped before that step was saved"
    if saving.roll_back():
        before = f"went back to step {run.at} and stopped"
    settings = run.config.optimizer
    remedy = "learning_rate of Optimizer lower"
    if arguments(settings).get("eps") == 0:
        remedy = "eps of Optimizer to 1e-08" if settings.name != "custom" else "eps=1e-8 in arguments of Optimizer"
    raise RuntimeError(
        f"Step {step} made weights that are not finite, although loss and gradients were, so the run {before}; set "
        f"{remedy}."
    )


def report_step(run: Run, numbers: Numbers, norms: Norms | None, stopped: dict[str, float], began: float) -> None:
    """Report the last step and write it into the run's log; stopped: frozen models; began: by time.perf_counter."""
    optimizer, device = run.optimizer, run.device
    rates = {
        group["name"]: 0.0 if group["model"] in stopped else learning_rate(optimizer, group)
        for group in optimizer.param_groups
    }
    report = StepReport(
        step=run.at,
        steps=run.plan.steps,
        loss=run.losses[-1],
        grad_norm=numbers.grad_norm,
        learning_rates=rates,
        updated=numbers.finite,
        seconds=time.perf_counter() - began,
        epoch=run.plan.epochs_after(run.at),
        masked_area=numbers.masked_area,
        norms=norms,
        concepts=numbers.concepts,
        noise_scale=run.noise_scale.record(*numbers.noise),
        peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )
    several = {"concepts": numbers.concepts} if len(run.concepts) > 1 else {}
    numbers_of_log = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": rates, "s": report.seconds}
    run.record("step", step=report.step, **numbers_of_log, **several)
    run.callbacks.step(report)


def describe_step(run: Run, step: int, numbers: Numbers) -> str:
    """Describe the loss, gradient norm and pictures of a step, counted from 0."""
    plan = run.plan
    pictures = {sample.picture for micro_batch in plan.step(step) for sample in micro_batch.samples}
    seen = names([plan.manifest.pictures[number].name for number in sorted(pictures)])
    return f"step {step + 1} (loss {numbers.loss:.4g}, gradient norm {numbers.grad_norm:.4g}) on {seen}"


def mean_by(keys: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Average the values of each key."""
    found: dict[int, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return {key: sum(each) / len(each) for key, each in sorted(found.items())}
