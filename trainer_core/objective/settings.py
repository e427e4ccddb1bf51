"""Check the settings of the objective against the base model, and list remarks on surprising ones."""

from __future__ import annotations

from ..config import MIN_SNR, WEIGHTINGS, ObjectiveConfig, RunConfig, setting
from ..models.base import LevelDefaults, NoiseModel
from .objective import PLAIN, level_weights
from .path import PURE_NOISE, AffinePath
from .timesteps import chosen_levels


def check_objective(config: RunConfig, noise: NoiseModel, family: LevelDefaults = PLAIN) -> None:
    """Raise ValueError for settings that do not suit the base model's kind of prediction, or its levels."""
    objective = config.objective
    for side in family.sides:
        if side.last < objective.min_timestep or side.first > objective.max_timestep:
            raise ValueError(
                f"The model predicts at the timesteps {side.first} to {side.last}, and none of them is trained; set "
                f"{setting('objective.min_timestep')} to 0 and {setting('objective.max_timestep')} to 999."
            )
    if noise.kind not in (WEIGHTINGS[objective.weighting] or (noise.kind,)):
        raise ValueError(
            f"weighting {objective.weighting} is not for models that predict {noise.kind}, as this one does; set "
            f"{setting('objective.weighting')} to min_snr."
        )
    if objective.mixflow and noise.kind != "flow":
        raise ValueError(
            f"mixflow is for flow models, and this one predicts {noise.kind}; set {setting('objective.mixflow')} to 0."
        )
    if objective.noise_offset_strength == "by_timestep" and AffinePath(noise).ends_in_noise:
        raise ValueError(
            "noise_offset_strength by_timestep is undefined where the last timestep is pure noise, as in this model; "
            f"set {setting('objective.noise_offset_strength')} to fixed and noise_offset to 0."
        )


def _neglects_noise(objective: ObjectiveConfig, path: AffinePath) -> bool:
    """Tell whether the noisiest third of the trained levels weighs less than half of the others' mean."""
    weights = level_weights(objective, path)[objective.min_timestep : objective.max_timestep + 1]
    return bool(weights[-len(weights) // 3 :].mean() < weights.mean() / 2)


def describe_levels(levels: LevelDefaults) -> str:
    """Describe a distribution of levels and its shift, such as "logit_normal, shift 2.2"."""
    shift = f", shift {levels.shift:g}" if levels.shift != 1 else ""
    if levels.by_tokens is not None:
        low, high, few, many = levels.by_tokens
        shift = f", shift exp({low:g}) at {few} tokens to exp({high:g}) at {many}"
    alone = f", timesteps {levels.sides[0].first} to {levels.sides[0].last} alone" if len(levels.sides) == 1 else ""
    return levels.distribution + shift + alone


def objective_remarks(config: RunConfig, noise: NoiseModel, family: LevelDefaults = PLAIN) -> list[str]:
    """List sentences on settings that can be trained but may surprise."""
    objective, train = config.objective, config.train
    changes = ["a noise offset"] if objective.noise_offset or objective.noise_offset_strength == "adaptive" else []
    changes += ["pyramid noise"] if objective.pyramid_iterations else []
    sentences = []
    path, diffusion = AffinePath(noise), noise.kind in ("epsilon", "v_prediction")
    pure, levels = path.ends_in_noise, chosen_levels(objective, family)
    partly = objective.timestep_distribution == "auto" or not objective.timestep_shift  # the family's
    if partly and describe_levels(family) != describe_levels(PLAIN):
        source = f", as this model's family is trained ({levels.source})" if levels == family else ""
        sentences.append(f"Timesteps are drawn from {describe_levels(levels)}{source}.")
    if noise.kind == "flow" and _neglects_noise(objective, path):
        snr = objective.weighting in MIN_SNR
        gamma = f" with min_snr_gamma {objective.min_snr_gamma:g}" if snr else ""
        remedy = f"{setting('objective.min_snr_gamma')} to 0" if snr else f"{setting('objective.weighting')} to min_snr"
        sentences.append(
            f"weighting {objective.weighting}{gamma} hardly trains the noisy timesteps of a flow model, which decide "
            f"the composition. Set {remedy}."
        )
    if pure and changes:
        sentences.append(
            "This model's last timestep is pure noise, from which samplers start. With "
            f"{' and '.join(changes)} the LoRA is trained to start from other noise. Very dark and very bright "
            "pictures do not need it here: turn it off."
        )
    if pure and diffusion and level_weights(objective, path)[objective.max_timestep] < PURE_NOISE:
        sentences.append(
            f"With weighting {objective.weighting} the last timestep, pure noise, has the weight 0 and is not trained. "
            f"Set {setting('objective.snr_weight_floor')}, for example to 0.1."
        )
    if objective.loss_on == "x0":
        sentences.append(
            "loss_on x0 measures the loss on clean latents, for diagnosis: compare the numbers with other such runs "
            "only. Mostly the noisiest timesteps are trained."
        )
    largest = max([train.batch_size, *(each.batch_size for each in config.dataset.concepts)])
    if objective.stratified_timesteps and largest * train.accumulate == 1:
        sentences.append(
            "stratified_timesteps has no effect on one sample a step; raise batch_size or "
            f"{setting('train.accumulate')}."
        )
    if len(changes) > 1:
        sentences.append("A noise offset and pyramid noise both shift whole areas, and add up; try one of them first.")
    return sentences
