"""Measure the loss on pictures that are never trained; choose the best weights by it, and end a run early."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..common.rng import generator
from ..common.wording import count
from ..config import OptimizerConfig, TrainConfig, setting
from ..data.plan import MicroBatch, Plan, Sample
from ..memory import in_parts
from ..objective import draws_at, strengths
from ..objective.loss import sample_losses
from ..optim import averaged, averages, describe
from .batch import ReadConditioning
from .state import Best, Run

CLEAR_ERROR = 0.5  # mean squared error below which a prediction is clearly of a kind
SEEN = 32  # sides of the latents that show the kind: at full size each run would wait for a whole pass
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)  # noise levels of the validation loss, as shares of all levels

Measurements = Sequence[tuple[int, float]]  # (steps finished, validation loss)


def check_validation(train: TrainConfig, plan: Plan, optimizer: OptimizerConfig) -> None:
    """Raise ValueError when settings need a validation loss and no concept has the role validation.

    Also where the rate would fall by it, and the optimizer has no rate that falls.
    """
    if train.plateau_patience and (averages(optimizer) or optimizer.options.get("relative_step")):
        raise ValueError(
            f"{describe(optimizer, False)} sets its learning rate itself, so that no plateau lowers it; set "
            f"{setting('train.plateau_patience')} to 0, or {setting('optimizer.name')} to adamw."
        )
    if train.keeps_by and not plan.validation:
        raise ValueError(
            f"{train.keeps_by} needs pictures that are not trained, and there are none; set "
            f"{setting('train.validation_share')} to 0.1, or {setting('concepts.role')} to validation."
        )


def better(best: Best | None, measured: Measurements, network: nn.Module) -> Best | None:
    """Choose the best weights after the last measurement; the one before the first step does not count."""
    steps, loss = measured[-1]
    if not steps or not math.isfinite(loss) or (best is not None and loss >= best.loss):
        return best
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in network.state_dict().items()}
    return Best(steps=steps, loss=loss, weights=weights)


def without_improvement(measured: Measurements, share: float) -> int:
    """Count the measurements since the loss last fell by more than `share` of its lowest value."""
    lowest, since = math.inf, 0
    for steps, loss in measured:
        if steps and loss < lowest * (1 - share):
            lowest, since = loss, 0
        elif steps:
            since += 1
    return since


def falls(train: TrainConfig, measured: Measurements) -> list[int]:
    """List the steps after which the rate falls by plateau: a function of the measurements alone.

    After a fall the patience begins anew, and the lowest loss so far stays.
    """
    lowest, since, found = math.inf, 0, list[int]()
    for steps, loss in measured if train.plateau_patience else ():
        if steps and loss < lowest * (1 - train.early_stop_min_improvement):
            lowest, since = loss, 0
        elif steps:
            since += 1
        if since == train.plateau_patience:
            found.append(steps)
            since = 0
    return found


def plateau_factor(run: Run) -> float:
    """Compute the factor on the learning rate after the plateaus so far."""
    return run.config.train.plateau_factor ** len(falls(run.config.train, run.validation))


def fell(run: Run) -> bool:
    """Tell whether the rate fell by plateau at the last measurement, which may have brought earlier weights back."""
    return run.at in falls(run.config.train, run.validation)


def go_back(run: Run) -> None:
    """Tell of a fall of the rate after the last measurement, and go on from the best weights if that is wanted.

    The optimizer's memory stays. Once more at the same step it changes nothing, as in a run that resumes there.
    """
    train, at = run.config.train, run.at
    if not 0 < at < run.plan.steps or not fell(run):
        return
    where = ""
    if train.plateau_roll_back and run.best is not None:
        where = f", from the weights of step {run.best.steps}"
        run.network.load_state_dict(run.best.weights)
        if run.ema is not None:
            run.ema.restart()
    run.callbacks.note(
        f"After step {at} the validation loss had not fallen in {count(train.plateau_patience, 'measurement')}: the "
        f"run goes on at {plateau_factor(run):.3g} of the learning rate{where}."
    )


def early_end(train: TrainConfig, measured: Measurements, steps: int) -> str:
    """Explain why a run ends early after its last measurement; "" if it does not."""
    patience, share, at = train.early_stop_patience, train.early_stop_min_improvement, measured[-1][0]
    if not patience or not 0 < at < steps or without_improvement(measured, share) < patience:
        return ""
    fallen = f"by more than {share:.1%} " if share else ""
    since = f"the validation loss has not fallen {fallen}in {count(patience, 'measurement')}"
    return f"Ended early after step {at} of {steps}: {since}."


def measure(run: Run) -> None:
    """Measure the validation loss if it is due, and end the run if it has not fallen for long."""
    plan, config, callbacks = run.plan, run.config, run.callbacks
    every, at = config.train.validate_every, run.at
    if not plan.validation or not (at == plan.steps or (at % every == 0 if every else at == 0)):
        return
    if not run.validation or run.validation[-1][0] != at:  # else measured before the run was interrupted
        average = run.ema if config.optimizer.ema_output == "average" else None
        # A new reader, as training's may have cached captions of other weights.
        with average.swapped() if average else averaged(run.optimizer):
            loss = validation_loss(run, run.reader(training=True))
            run.validation.append((at, loss))
            levels = level_losses(run, run.reader(training=True)) if config.train.validation_levels else {}
            before = run.best
            if config.train.keeps_by:
                run.best = better(run.best, run.validation, run.network)
        run.record("validation", step=at, loss=loss, **({"levels": levels} if levels else {}))
        callbacks.validation(at, loss)
        if run.best is not before:
            callbacks.best(at, loss)
        if levels:
            callbacks.validation_levels(at, levels)
    go_back(run)
    if sentence := early_end(config.train, run.validation, plan.steps):
        callbacks.note(sentence)
        run.ended = True


@torch.no_grad()
def validation_loss(run: Run, read: ReadConditioning) -> float:
    """Compute the mean squared error over the validation pictures at TIMES, each with its own fixed noise.

    Without mask, weight or augmentation; the same weights always give the same number.
    """
    total = torch.zeros((), device=run.device)
    for _, losses in losses_at(run, read, levels_at(run, TIMES)):
        total += losses.sum()
    return float(total) / (len(run.plan.validation) * len(TIMES))


@torch.no_grad()
def level_losses(run: Run, read: ReadConditioning) -> dict[int, float]:
    """Compute the mean squared error over the validation pictures at each of the validation_levels.

    As in `validation_loss`; the levels lie in the middle of equal parts of all levels.
    """
    levels = measured_levels(run)
    sums = torch.zeros(len(levels), device=run.device)
    for part, losses in losses_at(run, read, levels):
        sums[part.start : part.stop] += losses
    means = (sums / len(run.plan.validation)).tolist()
    return dict(zip(levels, means, strict=True))


def measured_levels(run: Run) -> list[int]:
    """List the noise levels whose validation losses are measured one by one."""
    count = run.config.train.validation_levels if run.plan.validation else 0
    return levels_at(run, [(k + 0.5) / count for k in range(count)])


def levels_at(run: Run, times: Sequence[float]) -> list[int]:
    """Find the levels at these shares of all that the model predicts."""
    return [run.objective.levels.at(t, len(run.objective.path)) for t in times]


def losses_at(run: Run, read: ReadConditioning, at: Sequence[int]) -> Iterator[tuple[range, Tensor]]:
    """Yield (part of the levels `at`, (part,) mean squared errors) for each validation picture and part of batch_size.

    Each picture and level has its own fixed noise. Of pairs it is the sum of both ends, each at its strength of the
    network, as in training.
    """
    path, device, plan = run.objective.path, run.device, run.plan
    levels, size = torch.tensor(at), run.config.train.batch_size

    def losses(sample: Sample, part: Sequence[int]) -> Tensor:
        run.callbacks.check()
        latents = run.encoded.latents(sample)[0][None]
        draws = [generator(run.config.train.seed, "validation", sample.picture, i) for i in part]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws])
        clean, at = latents.expand(len(part), *latents.shape[1:]).to(device), levels[list(part)]
        drawn = draws_at(clean, noise.to(device), at, path.at(at, device))
        prediction = run.passing([sample] * len(part), drawn, read).without_gradients()
        return sample_losses(prediction, drawn.target)

    found: list[tuple[range, Tensor]] = []
    for sample in run.world.mine(plan.validation):
        ends = strengths(run.objective.terms, MicroBatch(index=0, samples=(sample,), bucket=sample.crop.shape))
        run.encode([end for _, micro_batch in ends for end in micro_batch.samples])
        for first in range(0, len(levels), size):
            part = range(first, min(first + size, len(levels)))
            total = torch.zeros(len(part), device=device)
            for strength, micro_batch in ends:
                run.network.reverse(strength < 0)
                (end,) = micro_batch.samples
                total += in_parts(lambda which, *, of=end, part=part: losses(of, part[which]), len(part), device)
            found.append((part, total))
    run.network.reverse(False)
    if run.world.size > 1:  # in the order of the pictures, whichever process has measured them
        shares = run.world.gather([(part, each.cpu()) for part, each in found])
        found = [(part, each.to(device)) for share in shares for part, each in share]
    yield from found


@torch.no_grad()
def check_prediction(run: Run, read: ReadConditioning) -> list[str]:
    """Warn when the model's output for the middle of the first picture is clearly of the other kind (epsilon or v)."""
    path, device, base = run.objective.path, run.device, run.base
    kinds = ("epsilon", "v_prediction")
    if path.kind not in kinds:
        return []
    samples = run.plan.step(0)[0].samples[:1]
    run.encode(samples)
    latents = run.encoded.latents(samples[0])[0][None]
    # A linked model may take no small picture; what some see beside their latents has the picture's size.
    if not (base.host or base.inpainting or base.controls):
        latents = _middle(latents)
    noise = torch.randn(latents.shape, generator=generator(run.config.train.seed, "kind", 0)).to(device)
    latents = latents.to(device)
    # Where epsilon and v differ, and a model can predict both.
    levels = torch.full((1,), base.levels.at(0.5, len(path)))
    drawn = draws_at(latents, noise, levels, path.at(levels, device))
    prediction = run.passing(samples, drawn, read).without_gradients()
    errors = {
        kind: float(sample_losses(prediction, path.at(levels, device, kind).target(latents, noise)).mean())
        for kind in kinds
    }
    chosen = errors.pop(path.kind)
    ((kind, other),) = errors.items()
    if not (other < CLEAR_ERROR and chosen > 2 * other):
        return []
    remedy = base.host.remedy(kind) if base.host else f"{setting('base_model.prediction')} to {kind}"
    return [
        f"{base.name} behaves like a model that predicts {kind}, not {path.kind} (error {other:.2f} against "
        f"{chosen:.2f}). Unless that is meant, stop and set {remedy}."
    ]


def _middle(latents: Tensor) -> Tensor:
    """Cut the middle out of latents (B, C, *axes): SEEN latents high and wide, or fewer."""
    top, left = (max(0, side - SEEN) // 2 for side in latents.shape[-2:])
    return latents[..., top : top + SEEN, left : left + SEEN]
