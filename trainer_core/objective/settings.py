"""Check the settings of the objective against the base model, and list remarks on surprising ones."""

from __future__ import annotations

from ..config import RunConfig
from ..models.base import NoiseModel
from .objective import level_weights
from .path import Path

KIND_OF_WEIGHTING = {"v_scaled": "v_prediction", "v_like": "epsilon"}  # weightings for one kind of prediction
DIFFUSION_WEIGHTINGS = ("debiased", "p2", *KIND_OF_WEIGHTING)  # weightings for diffusion only


def check_objective(config: RunConfig, noise: NoiseModel) -> None:
    """Raise ValueError for settings that do not suit the base model's kind of prediction."""
    objective = config.objective
    wanted = KIND_OF_WEIGHTING.get(objective.weighting, noise.kind)
    if wanted != noise.kind or (
        objective.weighting in DIFFUSION_WEIGHTINGS and noise.kind not in ("epsilon", "v_prediction")
    ):
        raise ValueError(
            f"weighting {objective.weighting} is not for models that predict {noise.kind}, as this one does; set "
            "weighting of Noise & Loss to min_snr."
        )
    if objective.noise_offset_strength == "by_timestep" and ends_in_noise(noise):
        raise ValueError(
            "noise_offset_strength by_timestep is undefined where the last timestep is pure noise, as in this model; "
            "set noise_offset_strength of Noise & Loss to fixed and noise_offset to 0."
        )


def ends_in_noise(noise: NoiseModel) -> bool:
    """Tell whether the last level is pure noise."""
    return float(noise.alpha[-1]) == 0


def objective_remarks(config: RunConfig, noise: NoiseModel) -> list[str]:
    """List sentences on settings that can be trained but may surprise."""
    objective, train = config.objective, config.train
    changes = ["a noise offset"] if objective.noise_offset or objective.noise_offset_strength == "adaptive" else []
    changes += ["pyramid noise"] if objective.pyramid_iterations else []
    sentences = []
    pure, diffusion = ends_in_noise(noise), noise.kind in ("epsilon", "v_prediction")
    if pure and diffusion and changes:
        sentences.append(
            "This model's last timestep is pure noise (zero terminal SNR), from which samplers start. With "
            f"{' and '.join(changes)} the LoRA is trained to start from other noise. Very dark and very bright "
            "pictures do not need it here: turn it off."
        )
    if pure and diffusion and level_weights(objective, Path(noise))[objective.max_timestep] == 0:
        sentences.append(
            f"With weighting {objective.weighting} the last timestep, pure noise, has the weight 0 and is not trained. "
            "Set snr_weight_floor of Noise & Loss, for example to 0.1."
        )
    if objective.loss_on == "x0":
        sentences.append(
            "loss_on x0 measures the loss on clean latents, for diagnosis: compare the numbers with other such runs "
            "only. Mostly the noisiest timesteps are trained."
        )
    if objective.stratified_timesteps and train.batch_size * train.accumulate == 1:
        sentences.append(
            "stratified_timesteps has no effect on one sample a step; raise batch_size or accumulate of Train LoRA."
        )
    if len(changes) > 1:
        sentences.append("A noise offset and pyramid noise both shift whole areas, and add up; try one of them first.")
    return sentences
