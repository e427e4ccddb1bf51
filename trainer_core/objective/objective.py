"""The objective of a run: the formula, from clean latents to the loss of each sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..common.rng import sample_uniform
from ..config import ObjectiveConfig
from ..models.base import LevelDefaults, NoiseModel, Side
from .draws import Batch, Draws
from .loss import huber_thresholds, reduction_factor, sample_losses
from .noise import offset_growth, perturb, sample_noise
from .passes import Pass
from .path import AffinePath, Mix
from .terms import Term
from .timesteps import chosen_levels, level_probabilities, mass_of, sample_strata, sample_timesteps, shift_of
from .weighting import SETTINGS, snr_weight

PLAIN = LevelDefaults()  # every level equally often


class Objective:
    """The loss that a run minimises, on the path of its base model.

    levels: what the base model's family is trained with, where the settings say "auto". terms: what else guides it.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        noise: NoiseModel,
        seed: int,
        levels: LevelDefaults = PLAIN,
        terms: Sequence[Term] = (),
    ) -> None:
        self.config, self.seed, self.path, self.terms = config, seed, AffinePath(noise), terms
        self.levels = chosen_levels(config, levels)
        self._probabilities: dict[float, Tensor] = {}  # of levels, by their shift

    def draw(self, batch: Batch, device: torch.device) -> Draws:
        """Draw levels and noise, mix them with the clean latents, and compute target and weights."""
        # All draws are made on the CPU: every device then trains with the same numbers.
        levels = self._levels(batch)
        noise = self._noise(batch, levels)
        seen = noise  # with input perturbation the model sees more noise than it should predict
        if strength := self.config.input_perturbation:
            seen = perturb(noise, self.seed, batch.index.micro_batch, strength)
        mix = self.path.at(levels, device)
        latents = batch.latents.to(device)

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Draws(
            latents=latents,
            levels=levels.to(device),
            noised=self._input(batch, mix).noised(latents, seen.to(device)),
            target=mix.target(latents, noise.to(device)),
            mix=mix,
            weights=(batch.weights * self.level_weights()[levels]).to(device),
            huber_c=self._huber_c(levels).to(device),
            mask=move(batch.mask),
            normalize=move(batch.normalize),
            shares={kind: share.to(device) for kind, share in batch.shares.items()},
        )

    def loss(self, prediction: Tensor, seen: Pass) -> Tensor:
        """Compute the weighted loss of each sample, (B,) float32: against the target as terms have moved it.

        loss_on x0 compares the clean latents that follow from the prediction with those of the picture.
        """
        draws = seen.draws
        target = draws.latents if self.config.loss_on == "x0" else draws.target
        prediction = seen.compared(prediction)
        # In the order of KINDS: a later term sees the target as an earlier one has moved it.
        for term in self.terms:
            target = term.target(target, seen, prediction)
        losses = sample_losses(prediction, target, draws.mask, draws.normalize, self.config.loss, draws.huber_c)
        # Added before the weights, so that concept and level weigh both parts alike.
        for term in self.terms:
            if (more := term.beside_the_target(prediction, seen)) is not None:
                losses = losses + more
        return losses * draws.weights

    def weigh(self, losses: Tensor, draws: Draws) -> Tensor:
        """Weigh the losses of samples, (B,), for the backward pass."""
        for term in self.terms:
            losses = term.weigh(losses, draws.levels)
        return losses

    def apart(self, seen: Pass) -> Iterator[Tensor]:
        """Compute the weighted losses, (B,) each, that have a backward pass of their own, one after another."""
        for term in self.terms:
            if (losses := term.apart(seen)) is not None:
                yield losses

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
        index, count, strata = batch.index, len(batch.latents), None
        if self.config.stratified_timesteps:
            # The strata are shared out over the whole step; these are the ones of this micro-batch.
            strata = sample_strata(self.seed, index.step, index.step_samples)[index.first : index.first + count]
        table, low = self.probabilities(batch.latents.shape[2:]), self.config.min_timestep
        side = self._side(index.step, table)
        return sample_timesteps(self.seed, index.micro_batch, count, table, low, strata, index.step_samples, side)

    def _side(self, step: int, table: Tensor) -> Side | None:
        """Choose the expert whose levels a step draws, by its side of a table of probabilities; None where one has all.

        A whole step is one expert's, as to load another one takes time; the levels of all steps have the distribution.
        """
        sides, every, low = self.levels.sides, self.levels.switch_every, self.config.min_timestep
        if len(sides) < 2:
            return sides[0] if sides else None
        if every:
            return sides[step // every % len(sides)]
        point = sample_uniform(self.seed, "expert", step)
        return next((side for side in sides if point < sum(mass_of(side, table, low))), sides[-1])

    def _noise(self, batch: Batch, levels: Tensor) -> Tensor:
        """Draw the noise of a micro-batch, (B, C, *axes) float32."""
        config = self.config
        return sample_noise(
            self.seed,
            batch.index.micro_batch,
            batch.latents.shape,
            self._offsets(batch, levels),
            config.pyramid_iterations,
            config.pyramid_discount,
            batch.latents,
            config.nearest_noise,
        )

    def _input(self, batch: Batch, mix: Mix) -> Mix:
        """Compute the coefficients of what the model sees: with mixflow noisier than its levels say."""
        most, index = self.config.mixflow, batch.index.micro_batch
        if not most:
            return mix
        draws = [sample_uniform(self.seed, "mixflow", index, i) for i in range(len(batch.latents))]
        return mix.noisier(most * torch.tensor(draws).to(mix.alpha))

    def _offsets(self, batch: Batch, levels: Tensor) -> Tensor:
        """Compute the strength of the noise offset of each sample and channel, (B, C)."""
        config, latents = self.config, batch.latents
        count, channels = latents.shape[:2]
        strengths = torch.full((count, 1), config.noise_offset)
        if config.noise_offset_strength == "random":
            draws = [sample_uniform(self.seed, "offset_strength", batch.index.micro_batch, i) for i in range(count)]
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


def level_weights(config: ObjectiveConfig, path: AffinePath) -> Tensor:
    """Compute the weight of the loss at every level of a path, (N,)."""
    return snr_weight(
        path.snr,
        path.kind,
        path.clean_factor,
        config.weighting,
        floor=config.snr_weight_floor,
        **{name: getattr(config, name) for name in SETTINGS},
    )
