"""A model of two files, experts for the two sides of a boundary of noise: which levels are whose, and who predicts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....trainer_core.config import ConnectedConfig, setting
from ....trainer_core.models.architectures import Halves
from ....trainer_core.models.base import Expert, Side
from ....trainer_core.models.sd.layers import PREFIX
from ....trainer_core.networks.layers.shape import weight_shape
from . import gradients
from .beside import beside_of
from .denoiser import BatchConditions, RawDenoiser
from .layers import list_layers
from .noise import LEVELS, NODE, own_shift, sigmas

if TYPE_CHECKING:
    from .wired import Wired

LOW, HIGH = PREFIX, f"{PREFIX}_high_noise"  # of the layers' names in the network
EXPERTS = (Expert("low", LOW), Expert("high", HIGH))  # in the order of their sides

ROUNDING = 1e-9  # of a boundary times the number of levels


def sides_of(patcher: Any, halves: Halves | None, config: ConnectedConfig, *, both: bool = False) -> tuple[Side, ...]:
    """Find the levels of a MODEL that is one expert alone, or of both; () where one predicts at all.

    halves: of its architecture. Raises ValueError where nothing tells the boundary.
    """
    if both and config.noise_range != "all":
        raise ValueError(
            f"Both experts are linked to {NODE}, and noise_range is {config.noise_range}; set "
            f"{setting('connected.noise_range')} to all, or unlink model_high."
        )
    if config.noise_range == "all" and not both:
        return ()
    low, high = _split(_boundary(patcher, halves, config))
    return (low, high) if both else (high if config.noise_range == "high" else low,)


def named_high(name: str) -> str:
    """Name a layer of the expert for high noise in the network, by what it is called in a file of its own."""
    return HIGH + name.removeprefix(LOW)


def named_low(name: str) -> str:
    """Name a layer of the expert for high noise as in a file of its own."""
    return LOW + name.removeprefix(HIGH)


def check_experts(high: Any, model: Any, sampled: Any) -> None:
    """Raise ValueError for a model_high that is no expert beside the MODEL; None is none."""
    if high is None:
        return
    shapes = [{layer.path: weight_shape(layer.module) for layer in list_layers(each.model)} for each in (high, model)]
    if type(high.model) is not type(model.model) or shapes[0] != shapes[1]:
        raise ValueError(
            f"The model_high linked to {NODE} has other layers than its model; link the two experts of one model."
        )
    if not torch.equal(sigmas(high), sigmas(model)) or own_shift(high) != own_shift(model):
        raise ValueError(
            f"model and model_high linked to {NODE} are sampled differently; put the same ModelSamplingSD3 on both, or "
            "none."
        )
    if sampled is not None:
        raise ValueError(f"Two experts draw their samples themselves; unlink sample_model of {NODE}.")


def predict(wired: Wired, noised: Tensor, levels: Tensor, conditions: BatchConditions) -> Tensor:
    """Compute the raw output for (B, C, *axes) noised latents at (B,) levels, each by the expert for its level."""
    if len(wired.denoisers) == 1:
        return _by(wired.denoisers[0], noised, levels, conditions)
    high = (levels >= wired.sides[1].first).tolist()
    if len(set(high)) == 1:  # as always in training
        return _by(wired.take(wired.denoisers[high[0]]), noised, levels, conditions)
    parts: list[Tensor] = [noised] * len(noised)
    for whose in (False, True):
        numbers = [number for number, each in enumerate(high) if each is whose]
        some = BatchConditions(tuple(conditions.samples[number] for number in numbers))
        found = _by(wired.take(wired.denoisers[whose]), noised[numbers], levels[numbers], some)
        for number, part in zip(numbers, found, strict=True):
            parts[number] = part
    return torch.stack(parts)


def _by(denoiser: RawDenoiser, noised: Tensor, levels: Tensor, conditions: BatchConditions) -> Tensor:
    return denoiser.predict(noised, levels, conditions, gradients.options(denoiser.patcher))


def _boundary(patcher: Any, halves: Halves | None, config: ConnectedConfig) -> float:
    """Find the time from which on the noisier expert predicts: the person's, else that of the architecture."""
    if config.boundary:
        return config.boundary
    if halves is None:
        raise ValueError(
            f"No two experts are known of this MODEL's architecture; set {setting('connected.noise_range')} to all, or "
            f"{setting('connected.boundary')} to the share of timesteps from which on the high one predicts."
        )
    return halves.from_picture if beside_of(patcher.model).pictures else halves.boundary


def _split(boundary: float) -> tuple[Side, Side]:
    """Split all levels at a time: those below it, and the others. Level k is the time (k + 1) / LEVELS."""
    first = min(max(math.ceil(boundary * LEVELS - ROUNDING) - 1, 1), LEVELS - 1)
    return Side(0, first - 1), Side(first, LEVELS - 1)
