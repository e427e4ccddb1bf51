"""What the settings of Noise & Loss are for a base model: numbers for each sample, refusals, and words of warning."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .config import ObjectiveConfig, RunConfig
from .loss import huber_thresholds
from .models import noise_model
from .noise import LEAST_ALPHA, TIMESTEPS, alphas_cumprod, offset_growth, sample_noise, snr
from .rng import sample_uniform
from .timesteps import beta, logit_normal, sigmoid_density, snr_uniform, uniform
from .weighting import snr_weight


@functools.lru_cache(maxsize=8)
def timestep_probabilities(objective: ObjectiveConfig, zero_terminal_snr: bool) -> Tensor:
    """Return the cumulative probabilities of the timesteps min_timestep..max_timestep, float64."""
    low, high = objective.min_timestep, objective.max_timestep
    count = high - low + 1
    if objective.timestep_distribution == "logit_normal":
        return logit_normal(count, objective.logit_mean, objective.logit_scale)
    if objective.timestep_distribution == "sigmoid":
        return sigmoid_density(count, objective.sigmoid_center, objective.sigmoid_slope)
    if objective.timestep_distribution == "beta":
        return beta(count, objective.beta_a, objective.beta_b)
    if objective.timestep_distribution == "snr_uniform":
        alphas = alphas_cumprod(zero_terminal_snr=zero_terminal_snr)[low : high + 1]
        return snr_uniform(snr(alphas.clamp(min=LEAST_ALPHA)))
    return uniform(count)


def draw_noise(objective: ObjectiveConfig, seed: int, index: int, latents: Tensor, timesteps: Tensor) -> Tensor:
    """Draw the noise of a micro-batch as the objective says, the shape of latents (B, C, H, W), float32."""
    return sample_noise(
        seed,
        index,
        latents.shape,
        _offsets(objective, seed, index, latents, timesteps),
        objective.pyramid_iterations,
        objective.pyramid_discount,
    )


def _offsets(objective: ObjectiveConfig, seed: int, index: int, latents: Tensor, timesteps: Tensor) -> Tensor:
    """Return the strength of the noise offset of each sample and channel, (B, C, 1, 1)."""
    count, channels = latents.shape[:2]
    strengths = torch.full((count, 1, 1, 1), objective.noise_offset)
    if objective.noise_offset_strength == "random":
        draws = [sample_uniform(seed, "offset_strength", index, i) for i in range(count)]
        strengths = strengths * torch.tensor(draws).view(-1, 1, 1, 1)
    elif objective.noise_offset_strength == "by_timestep":
        strengths = strengths * offset_growth(alphas_cumprod())[timesteps].view(-1, 1, 1, 1)
    elif objective.noise_offset_strength == "adaptive":
        means = latents.mean(dim=(2, 3), keepdim=True).abs()
        strengths = (strengths + objective.offset_adaptation * means).clamp(min=0)
    return strengths.expand(-1, channels, -1, -1)


def loss_weights(objective: ObjectiveConfig, prediction: str, alphas: Tensor) -> Tensor:
    """Return the weights of noise levels by their cumulative alphas, same shape."""
    return snr_weight(
        snr(alphas),
        prediction,
        objective.weighting,
        min_snr_gamma=objective.min_snr_gamma,
        p2_gamma=objective.p2_gamma,
        v_like_weight=objective.v_like_weight,
        floor=objective.snr_weight_floor,
    )


def loss_thresholds(objective: ObjectiveConfig, timesteps: Tensor, alphas: Tensor) -> Tensor:
    """Return where the Huber losses of samples turn from squared to absolute, (B,); other losses do not ask."""
    times = timesteps / TIMESTEPS
    return huber_thresholds(objective.huber_c, objective.huber_schedule, objective.huber_scale, times, alphas)


def check_objective(config: RunConfig) -> None:
    """Raise ValueError for settings that are meaningless with what the base model predicts."""
    objective = config.objective
    prediction, zero = noise_model(config.base_model)
    if objective.weighting == "v_scaled" and prediction == "epsilon":
        raise ValueError("weighting v_scaled is for models that predict v, and this one predicts epsilon; set min_snr.")
    if objective.weighting == "v_like" and prediction != "epsilon":
        raise ValueError("weighting v_like is for models that predict epsilon, and this one predicts v; set min_snr.")
    if objective.noise_offset_strength == "by_timestep" and zero:
        raise ValueError(
            "noise_offset_strength by_timestep is not defined for noise that ends in pure noise (zero_terminal_snr); "
            "set it to fixed and noise_offset to 0."
        )


def objective_remarks(config: RunConfig) -> list[str]:
    """Return sentences about combinations that can be trained but may surprise."""
    objective, train = config.objective, config.train
    zero = noise_model(config.base_model)[1]
    changes = ["a noise offset"] if objective.noise_offset or objective.noise_offset_strength == "adaptive" else []
    changes += ["pyramid noise"] if objective.pyramid_iterations else []
    sentences = []
    if zero and changes:
        sentences.append(
            "The base model's noise ends in pure noise (zero_terminal_snr), from which samplers start: with "
            f"{' and '.join(changes)} the LoRA learns to start from other noise. Very dark and very bright pictures "
            "need neither here; unless that is meant, turn it off."
        )
    last = alphas_cumprod(zero_terminal_snr=zero)[objective.max_timestep]
    if zero and loss_weights(objective, "v_prediction", last) == 0:
        sentences.append(
            f"With weighting {objective.weighting} and noise that ends in pure noise (zero_terminal_snr) the last "
            "timestep weighs nothing and is not learned; snr_weight_floor, for example 0.1, gives it a weight."
        )
    if objective.loss_on == "x0":
        sentences.append(
            "The loss is measured on clean latents (loss_on x0): a diagnostic, whose numbers compare with those of "
            "other such runs only, and which learns mostly from the noisiest timesteps."
        )
    if objective.stratified_timesteps and train.batch_size * train.accumulate == 1:
        sentences.append(
            "stratified_timesteps has nothing to share out: a step is one sample; raise batch_size or accumulate."
        )
    if len(changes) > 1:
        sentences.append(
            "A noise offset and pyramid noise both shift whole areas; together they are stronger than their numbers "
            "say, so begin with one of them."
        )
    return sentences
