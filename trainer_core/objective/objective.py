"""The objective of a run: the formula, from clean latents to the loss of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.axes import like, mean_of_samples
from ..common.rng import sample_uniform
from ..config import ObjectiveConfig
from ..models.base import LevelDefaults, NoiseModel
from .loss import huber_thresholds, reduction_factor, sample_losses
from .noise import offset_growth, perturb, sample_noise
from .path import Mix, Path
from .timesteps import chosen_levels, level_probabilities, sample_strata, sample_timesteps, shift_of
from .weighting import snr_weight

PLAIN = LevelDefaults()  # every level equally often


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The numbers of a micro-batch in its run; with the seed they decide its random numbers."""

    micro_batch: int  # counted over the whole run
    step: int  # optimizer step
    first: int = 0  # number of its first sample within the step
    step_samples: int = 1  # samples of the whole step


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B samples of one bucket, on the CPU."""

    place: Place
    latents: Tensor  # (B, C, *axes) float32, clean, in model scale
    weights: Tensor  # (B,) of the samples' concepts
    mask: Tensor | None = None  # (B, 1, *axes); None when no sample has one
    normalize: Tensor | None = None  # (B,) bool, divide the loss by the mask's mean
    prior_weight: Tensor | None = None  # (B,); None without masked prior preservation
    held: Tensor | None = None  # (B,) bool, samples whose target is the frozen model's prediction; None without any


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
    mask: Tensor | None
    normalize: Tensor | None
    prior_weight: Tensor | None
    held: Tensor | None

    def plain(self, losses: Tensor) -> Tensor:
        """Divide losses of samples, (B,), by their weights and trained areas; not finite where these are 0."""
        plain = losses / self.weights
        if self.mask is None:
            return plain
        area = mean_of_samples(self.mask)
        return plain / (area if self.normalize is None else area.masked_fill(self.normalize, 1))

    @property
    def needs_frozen(self) -> bool:
        """Tell whether the loss needs the frozen model's prediction."""
        return self.prior_weight is not None or self.held is not None


class Objective:
    """The loss that a run minimises, on the path of its base model.

    levels: what the base model's family is trained with, where the settings say "auto".
    """

    def __init__(self, config: ObjectiveConfig, noise: NoiseModel, seed: int, levels: LevelDefaults = PLAIN) -> None:
        self.config, self.seed, self.path = config, seed, Path(noise)
        self.levels = chosen_levels(config, levels)
        self._probabilities: dict[float, Tensor] = {}  # of levels, by their shift

    def draw(self, batch: Batch, device: torch.device) -> Draws:
        """Draw levels and noise, mix them with the clean latents, and compute target and weights."""
        levels = self._levels(batch)
        noise = self._noise(batch, levels)
        seen = noise  # with input perturbation the model sees more noise than it should predict
        if strength := self.config.input_perturbation:
            seen = perturb(noise, self.seed, batch.place.micro_batch, strength)
        mix = self.path.at(levels, device)
        latents = batch.latents.to(device)

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Draws(
            latents=latents,
            levels=levels.to(device),
            noised=mix.noised(latents, seen.to(device)),
            target=mix.target(latents, noise.to(device)),
            mix=mix,
            weights=(batch.weights * self.level_weights()[levels]).to(device),
            huber_c=self._huber_c(levels).to(device),
            mask=move(batch.mask),
            normalize=move(batch.normalize),
            prior_weight=move(batch.prior_weight),
            held=move(batch.held),
        )

    def loss(
        self,
        prediction: Tensor,
        draws: Draws,
        frozen: Tensor | None = None,
        blank: Tensor | None = None,
        slid: Tensor | None = None,
    ) -> Tensor:
        """Compute the weighted loss of each sample, (B,) float32.

        frozen: the frozen model's prediction, where `needs_frozen`; it is the target of held samples, and outside the
        mask that of masked prior preservation. blank: with guidance_loss s, the prediction u without a caption; the
        target v becomes u + s (v - u), which keeps a guidance-distilled model where its guidance has put it
        (kohya-ss/musubi-tuner#1045). slid: of a slider, the target in place of the pictures' own.
        """
        target, mix = draws.target if slid is None else slid, draws.mix
        if blank is not None:
            target = blank.float().lerp(target, self.config.guidance_loss)
        if self.config.loss_on == "x0":
            prediction = mix.clean(prediction, draws.noised)
            target = draws.latents
            frozen = None if frozen is None else mix.clean(frozen, draws.noised)
        if draws.held is not None and frozen is not None:
            target = torch.where(like(draws.held, target), frozen, target)
        losses = sample_losses(
            prediction,
            target,
            draws.mask,
            draws.normalize,
            frozen,
            draws.prior_weight,
            self.config.loss,
            draws.huber_c,
        )
        return losses * draws.weights

    def preservation_loss(self, prediction: Tensor, frozen: Tensor, draws: Draws, kept: Tensor) -> Tensor:
        """Compute the weighted loss of each sample against the frozen model's prediction for another caption, (B,).

        kept: (B,) 1 for samples that have another caption, else 0. Of the whole picture, without mask.
        """
        losses = sample_losses(prediction, frozen, loss=self.config.loss, huber_c=draws.huber_c)
        return losses * draws.weights * kept * self.config.preservation_weight

    def reduction_factor(self, samples: int, micro_batches: int) -> float:
        """Compute what the mean loss of a step of so many samples is multiplied by before its backward pass."""
        return reduction_factor(self.config.loss_reduction, samples, micro_batches)

    def level_weights(self) -> Tensor:
        """Compute the weight of the loss at every level, (N,)."""
        return level_weights(self.config, self.path)

    def probabilities(self, size: Sequence[int]) -> Tensor:
        """Compute the cumulative probabilities of the levels min_timestep..max_timestep for latents of a size.

        size: their axes behind the channels. float64; a table for each shift, computed once.
        """
        shift = shift_of(self.levels, size)
        if shift not in self._probabilities:
            table = level_probabilities(self.config, self.path, self.levels.distribution, shift)
            self._probabilities[shift] = table
        return self._probabilities[shift]

    def _levels(self, batch: Batch) -> Tensor:
        """Draw the levels of a micro-batch, (B,) int64."""
        place, count, strata = batch.place, len(batch.latents), None
        if self.config.stratified_timesteps:
            strata = sample_strata(self.seed, place.step, place.step_samples)[place.first : place.first + count]
        return sample_timesteps(
            self.seed,
            place.micro_batch,
            count,
            self.probabilities(batch.latents.shape[2:]),
            self.config.min_timestep,
            strata,
            place.step_samples,
        )

    def _noise(self, batch: Batch, levels: Tensor) -> Tensor:
        """Draw the noise of a micro-batch, (B, C, *axes) float32."""
        config = self.config
        return sample_noise(
            self.seed,
            batch.place.micro_batch,
            batch.latents.shape,
            self._offsets(batch, levels),
            config.pyramid_iterations,
            config.pyramid_discount,
        )

    def _offsets(self, batch: Batch, levels: Tensor) -> Tensor:
        """Compute the strength of the noise offset of each sample and channel, (B, C)."""
        config, latents = self.config, batch.latents
        count, channels = latents.shape[:2]
        strengths = torch.full((count, 1), config.noise_offset)
        if config.noise_offset_strength == "random":
            draws = [sample_uniform(self.seed, "offset_strength", batch.place.micro_batch, i) for i in range(count)]
            strengths = strengths * torch.tensor(draws)[:, None]
        elif config.noise_offset_strength == "by_timestep":
            growth = offset_growth(self.path.noise.alpha, self.path.noise.sigma)
            strengths = strengths * growth[levels][:, None]
        elif config.noise_offset_strength == "adaptive":
            means = latents.mean(dim=tuple(range(2, latents.dim()))).abs()
            strengths = (strengths + config.offset_adaptation * means).clamp(min=0)
        return strengths.expand(-1, channels)

    def _huber_c(self, levels: Tensor) -> Tensor:
        """Compute where the Huber losses of samples turn from squared to absolute, (B,)."""
        config = self.config
        times = levels / len(self.path)
        sigmas = self.path.noise.ratio[levels]
        return huber_thresholds(config.huber_c, config.huber_schedule, config.huber_scale, times, sigmas)


def level_weights(config: ObjectiveConfig, path: Path) -> Tensor:
    """Compute the weight of the loss at every level of a path, (N,)."""
    return snr_weight(
        path.snr,
        path.kind,
        path.clean_factor,
        config.weighting,
        min_snr_gamma=config.min_snr_gamma,
        p2_gamma=config.p2_gamma,
        v_like_weight=config.v_like_weight,
        floor=config.snr_weight_floor,
    )
