"""A batch on its way to the loss: its clean latents, and the noise that is drawn for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..common.axes import mean_of_samples
from .path import Mix

Shares = Mapping[type, Tensor]  # by kind of term: how much it acts on each sample, (B,); none where it acts on no one


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawIndex:
    """The numbers of a micro-batch in its run; with the seed they decide its random numbers."""

    micro_batch: int  # counted over the whole run
    step: int  # optimizer step
    first: int = 0  # number of its first sample within the step
    step_samples: int = 1  # samples of the whole step


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B samples of one bucket, on the CPU."""

    index: DrawIndex
    latents: Tensor  # (B, C, *axes) float32, clean, in model scale
    weights: Tensor  # (B,) of the samples' concepts
    mask: Tensor | None = None  # (B, 1, *axes); None when no sample has one
    normalize: Tensor | None = None  # (B,) bool, divide the loss by the mask's mean
    shares: Shares = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """A batch with noise drawn for it, on the device."""

    latents: Tensor  # (B, C, *axes) float32, clean
    levels: Tensor  # (B,) int64, indices on the path
    noised: Tensor  # (B, C, *axes) float32, what the model sees
    target: Tensor  # (B, C, *axes) float32, what the model should predict
    mix: Mix  # coefficients of the levels
    weights: Tensor  # (B,) concept weight x weight of the level
    huber_c: Tensor  # (B,) where the Huber losses turn from squared to absolute
    mask: Tensor | None = None
    normalize: Tensor | None = None
    shares: Shares = field(default_factory=dict)

    def plain(self, losses: Tensor) -> Tensor:
        """Divide losses of samples, (B,), by their weights and trained areas; not finite where these are 0."""
        plain = losses / self.weights
        if self.mask is None:
            return plain
        area = mean_of_samples(self.mask)
        return plain / (area if self.normalize is None else area.masked_fill(self.normalize, 1))


def draws_at(latents: Tensor, noise: Tensor, levels: Tensor, mix: Mix) -> Draws:
    """Mix clean latents and noise at given levels, (B,), for a plain loss."""
    ones = latents.new_ones(len(latents))
    noised, target = mix.noised(latents, noise), mix.target(latents, noise)
    return Draws(
        latents=latents,
        levels=levels.to(latents.device),
        noised=noised,
        target=target,
        mix=mix,
        weights=ones,
        huber_c=ones,
    )
