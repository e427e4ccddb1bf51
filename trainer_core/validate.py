"""The loss on pictures that are never trained, and what follows from it: the best weights, an early end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .batch import build_sample_conditions
from .callbacks import Callbacks
from .config import RunConfig, TrainConfig
from .encode import Encoded
from .loss import sample_losses
from .memory import in_parts
from .models import BaseModel, Conditioning, predict
from .noise import TIMESTEPS, add_noise, build_target
from .plan import Plan, Sample
from .rng import generator

CLEAR = 0.5  # mean squared error below which a prediction is of that kind
MIDDLE = TIMESTEPS // 2  # where noise and v differ, and a model can tell both
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)  # noise levels, as shares of all timesteps

Measurements = Sequence[tuple[int, float]]  # (steps finished, validation loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The weights of the lowest validation loss so far, as a copy in RAM."""

    steps: int  # finished
    loss: float
    weights: dict[str, Tensor]


def check_validation(train: TrainConfig, plan: Plan) -> None:
    """Raise ValueError when the best weights are asked for and there is nothing to tell them by."""
    if train.keeps_by and not plan.validation:
        raise ValueError(
            f"{train.keeps_by} needs pictures that are not trained, and there are none; set the role of one concept to "
            "validation."
        )


def better(best: Best | None, measured: Measurements, network: nn.Module) -> Best | None:
    """Return what is best after the last measurement; the one before the first step, with nothing learned, is none."""
    steps, loss = measured[-1]
    if not steps or not math.isfinite(loss) or (best is not None and loss >= best.loss):
        return best
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in network.state_dict().items()}
    return Best(steps=steps, loss=loss, weights=weights)


def without_improvement(measured: Measurements, share: float) -> int:
    """Return how many measurements are over since the loss last fell by more than `share` of what it was at best."""
    lowest, since = math.inf, 0
    for steps, loss in measured:
        if steps and loss < lowest * (1 - share):
            lowest, since = loss, 0
        elif steps:
            since += 1
    return since


def early_end(train: TrainConfig, measured: Measurements, steps: int) -> str:
    """Say that and why a run of so many steps ends after its last measurement; empty where it goes on."""
    patience, share, at = train.early_stop_patience, train.early_stop_min_improvement, measured[-1][0]
    if not patience or not 0 < at < steps or without_improvement(measured, share) < patience:
        return ""
    fallen = f"by more than {share:.1%} " if share else ""
    since = f"the validation loss has not fallen {fallen}in {patience} measurements"
    return f"Ended early after step {at} of {steps}: {since}."


@torch.no_grad()
def validation_loss(
    base: BaseModel,
    encoded: Encoded,
    encode: Callable[[str], Conditioning],
    plan: Plan,
    config: RunConfig,
    alphas: Tensor,
    device: torch.device,
    callbacks: Callbacks,
) -> float:
    """Return the mean squared error over the validation pictures at TIMES, each with its own fixed noise.

    Plain: no mask, no weight, no variation; the same weights always give the same number.
    """
    timesteps = torch.tensor([int(t * TIMESTEPS) for t in TIMES])
    size, total = config.train.batch_size, torch.zeros((), device=device)

    def losses(sample: Sample, part: Sequence[int]) -> Tensor:
        callbacks.check()
        latents = encoded.latents(sample)[0][None]
        draws = [generator(config.train.seed, "validation", sample.picture, i) for i in part]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(device)
        clean, levels = latents.expand(len(part), -1, -1, -1).to(device), alphas[timesteps[list(part)]].to(device)
        conditions = build_sample_conditions(base, encoded, encode, plan, [sample] * len(part), device)
        prediction = predict(base, add_noise(clean, noise, levels), timesteps[list(part)].to(device), conditions)
        return sample_losses(prediction, build_target(base.prediction, clean, noise, levels))

    for sample in plan.validation:
        for first in range(0, len(timesteps), size):
            part = range(first, min(first + size, len(timesteps)))
            total += in_parts(lambda which, *, of=sample, part=part: losses(of, part[which]), len(part), device).sum()
    return float(total) / (len(plan.validation) * len(timesteps))


@torch.no_grad()
def check_prediction(
    base: BaseModel,
    encoded: Encoded,
    encode: Callable[[str], Conditioning],
    plan: Plan,
    config: RunConfig,
    alphas: Tensor,
    device: torch.device,
) -> list[str]:
    """Return a sentence when what the model gives for the first batch is clearly of the other kind than the run's."""
    samples, seed = plan.step(0)[0].samples, config.train.seed
    latents = torch.stack([encoded.latents(sample)[0] for sample in samples]).to(device)
    draws = [generator(seed, "kind", i) for i in range(len(samples))]
    noise = torch.stack([torch.randn(latents.shape[1:], generator=draw) for draw in draws]).to(device)
    timesteps = torch.full((len(samples),), MIDDLE, device=device)
    levels = alphas.to(device)[timesteps]
    conditions = build_sample_conditions(base, encoded, encode, plan, samples, device)
    prediction = predict(base, add_noise(latents, noise, levels), timesteps, conditions)
    errors = {
        kind: float(sample_losses(prediction, build_target(kind, latents, noise, levels)).mean())
        for kind in ("epsilon", "v_prediction")
    }
    chosen = errors.pop(base.prediction)
    ((kind, other),) = errors.items()
    if not (other < CLEAR and chosen > 2 * other):
        return []
    return [
        f"{base.name} behaves like a model that predicts {kind}, not {base.prediction} (error {other:.2f} against "
        f"{chosen:.2f}): unless that is meant, stop and set prediction to {kind}."
    ]
