"""What a step of train.py counts: its micro-batches, their losses, its numbers, and its report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..common.callbacks import Norms, StepReport
from ..common.wording import names
from ..data.fit import describe_left_out
from ..data.plan import MicroBatch
from ..memory import peak_bytes
from ..objective import Draws, prompts, strengths
from ..optim import learning_rate
from .state import Run


def micro_batches_of(run: Run) -> Iterator[MicroBatch]:
    """Yield this process's share of the next step, with the network at the strength that each micro-batch asks for.

    Encodes what they read, where nothing is kept; of pairs both ends follow one another.
    """
    micro_batches, network = run.plan.step(run.at), run.network
    own, half = run.world.mine(range(len(micro_batches))), len(micro_batches) // 2
    halfway = partial(run.noise_scale.halfway, micro_batches[half].first, run.scaler.get_scale)
    for number in own:
        if number == max(half, own[0]):
            halfway()
        for strength, micro_batch in strengths(run.objective.terms, micro_batches[number]):
            run.callbacks.check()
            run.encode(micro_batch.samples, prompts(run.objective.terms, micro_batch.index))
            # Dropout masks are drawn from this number, again where the backward pass recomputes.
            network.set_micro_batch(micro_batch.index)
            network.reverse(strength < 0)
            yield weighed(micro_batch, run)
    if not own or own[-1] < half:
        halfway()
    # Reached when the step asks for one more: validation and samples know no dropout.
    network.set_micro_batch(None)
    network.set_times(None, run.base.parts[0].prefix)
    network.reverse(False)


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
    at: int = -1  # number of the last micro-batch
    shared: tuple[Tensor, ...] = ()  # (parameters,) how many processes have a gradient of each; none of one alone

    def add(self, micro_batch: MicroBatch, draws: Draws, losses: Tensor, loss: Tensor, run: Run) -> None:
        """Add the losses of a micro-batch; those at its second strength to those at its first."""
        self.loss += loss
        if micro_batch.index == self.at:
            self.losses[-1] = self.losses[-1] + losses
            self.plain[-1] = self.plain[-1] + draws.plain(losses)
            return
        self.at = micro_batch.index
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
        every = [*parameters, *(p for term in run.objective.terms for p in term.parameters)]
        own = {
            "shared": torch.tensor([float(p.grad is not None) for p in parameters], device=run.device),
            "losses": zero_padded(self.losses, sizes, run),
            "plain": zero_padded(self.plain, sizes, run),
            "levels": zero_padded(self.levels, sizes, run),
            "areas": zero_padded(self.areas, masked, run),
            "half": scale.half[0] if scale.half else self.loss.new_zeros(0),
        }
        # A word that no caption here has leaves no gradient, but all processes send the same shapes.
        gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in every]
        summed = run.world.total([*own.values(), *gradients])  # one message
        found = dict(zip(own, summed, strict=False))
        for parameter, gradient in zip(every, summed[len(own) :], strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        scale.half = scale.half and (found["half"], scale.half[1])
        self.loss = torch.zeros_like(self.loss)
        for part in found["losses"].split(sizes):
            self.loss += part.sum() / len(found["losses"])
        self.losses, self.plain, self.levels = [found["losses"]], [found["plain"]], [found["levels"]]
        self.areas, self.shared = [found["areas"]], (found["shared"],)
        self.concepts, self.pictures = concepts_of(micro_batches, run), pictures_of(micro_batches)


@dataclass(kw_only=True, slots=True)
class StepNumbers:
    """The measured numbers of a step, as Python floats."""

    loss: float
    grad_norm: float  # before clipping
    noise: tuple[float, float]  # for `NoiseScale.record`
    concepts: dict[str, float]  # mean loss of the samples of each concept
    masked_area: float | None  # mean of the masks, None without
    samples: list[tuple[int, float, float]]  # picture, level and loss without weights of each sample
    moves: bool = True  # False: no parameter has a gradient
    norms: Norms | None = None  # the limited norms of weights, once these are updated

    @property
    def finite(self) -> bool:
        """Tell whether loss and gradients are finite, so that the weights may be updated."""
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


def measured(run: Run, passes: Passes, norm: Tensor, *, moves: bool) -> StepNumbers:
    """Read the numbers of a step from the device; norm: of its gradients, before clipping; moves: there are some."""
    noise = run.noise_scale.finished(len(passes.concepts))
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
    return StepNumbers(
        loss=loss,
        grad_norm=grad_norm,
        noise=(pair[0], pair[1]),
        concepts={concept_names[number]: loss for number, loss in mean_by(passes.concepts, losses).items()},
        masked_area=sum(numbers) / len(numbers) if numbers else None,
        samples=list(zip(passes.pictures, levels, plain, strict=True)),
        moves=moves,
    )


def count(run: Run, numbers: StepNumbers) -> None:
    """Count a step and keep its losses, whether it updated the weights or not; clear the gradients."""
    if numbers.moves:
        run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    if run.ema:
        run.ema.update(run.at + 1)
    run.at += 1
    run.losses.append(numbers.loss if numbers.finite else math.nan)
    for name, losses in run.concepts.items():
        losses.append(numbers.concepts.get(name, math.nan))
    fits = all(term.learns_pictures for term in run.objective.terms)
    for picture, level, loss in numbers.samples:
        if not fits or run.plan.concepts[picture].role != "train":  # others should not fit
            continue
        if run.fits.add(picture, level / len(run.objective.path), loss) and run.fits.leaves_out:
            known = run.plan.manifest.pictures[picture]
            run.callbacks.note(describe_left_out(known.name, known.lines, run.fits.fits()[picture], run.at))
    run.updating = False


def weighed(micro_batch: MicroBatch, run: Run) -> MicroBatch:
    """Weigh samples by what the watch over their pictures has found; the same object where all weigh 1."""
    weights = [run.fits.weight(sample.picture) for sample in micro_batch.samples]
    if all(weight == 1 for weight in weights):
        return micro_batch
    samples = zip(micro_batch.samples, weights, strict=True)
    return replace(micro_batch, samples=tuple(replace(each, weight=each.weight * weight) for each, weight in samples))


def pictures_of(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """List the numbers of the samples' pictures."""
    return [sample.picture for micro_batch in micro_batches for sample in micro_batch.samples]


def concepts_of(micro_batches: Sequence[MicroBatch], run: Run) -> list[int]:
    """List the numbers of the samples' concepts."""
    return [run.plan.manifest.pictures[picture].concept for picture in pictures_of(micro_batches)]


def zero_padded(values: Sequence[Tensor], lengths: Sequence[int], run: Run) -> Tensor:
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


def report_step(run: Run, numbers: StepNumbers, stopped: dict[str, float], began: float) -> None:
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
        norms=numbers.norms,
        concepts=numbers.concepts,
        noise_scale=run.noise_scale.record(*numbers.noise),
        peak_memory=peak_bytes(device),
    )
    several = {"concepts": numbers.concepts} if len(run.concepts) > 1 else {}
    numbers_of_log = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": rates, "s": report.seconds}
    run.record("step", step=report.step, **numbers_of_log, **several)
    run.callbacks.step(report)


def describe_step(run: Run, step: int, numbers: StepNumbers) -> str:
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
