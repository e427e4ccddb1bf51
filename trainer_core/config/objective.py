"""Settings of the training objective: noise, timesteps, loss and weighting."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from .base import Config, check_choices, check_range

Loss = Literal["mse", "l1", "huber", "smooth_l1", "huber_true", "log_cosh"]
Weighting = Literal["min_snr", "soft_min_snr", "debiased", "p2", "v_scaled", "v_like", "cos_map", "sigma_sqrt"]
Distribution = Literal[
    "auto", "uniform", "logit_normal", "sigmoid", "beta", "snr_uniform", "mode", "cos_map", "inverted_parabola"
]

HUBER = ("huber", "smooth_l1", "huber_true")
MIN_SNR = ("min_snr", "soft_min_snr")
PRESERVING = ("blank", "class")
SLIDING = ("prompts",)

# Settings that have an effect with some choices of another setting only; with other choices they keep their default.
ACTS_WITH: dict[str, tuple[str, tuple[str, ...]]] = {
    "min_snr_gamma": ("weighting", MIN_SNR),
    "p2_gamma": ("weighting", ("p2",)),
    "v_like_weight": ("weighting", ("v_like",)),
    "huber_c": ("loss", HUBER),
    "huber_schedule": ("loss", HUBER),
    "huber_scale": ("loss", HUBER),
    "logit_mean": ("timestep_distribution", ("logit_normal",)),
    "logit_scale": ("timestep_distribution", ("logit_normal",)),
    "sigmoid_center": ("timestep_distribution", ("sigmoid",)),
    "sigmoid_slope": ("timestep_distribution", ("sigmoid",)),
    "beta_a": ("timestep_distribution", ("beta",)),
    "beta_b": ("timestep_distribution", ("beta",)),
    "mode_scale": ("timestep_distribution", ("mode",)),
    "parabola_center": ("timestep_distribution", ("inverted_parabola",)),
    "parabola_scale": ("timestep_distribution", ("inverted_parabola",)),
    "preservation_weight": ("preservation", PRESERVING),
    "preservation_trigger": ("preservation", ("class",)),
    "preservation_class": ("preservation", ("class",)),
    "offset_adaptation": ("noise_offset_strength", ("adaptive",)),
    "slider_positive": ("slider", SLIDING),
    "slider_negative": ("slider", SLIDING),
    "slider_keep": ("slider", SLIDING),
    "slider_strength": ("slider", SLIDING),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Config):
    """Noise, timesteps, loss and weighting of the training objective."""

    min_snr_gamma: float = 0.0  # of weighting min_snr and soft_min_snr; 0 = every timestep weighs the same, 5 is usual
    noise_offset: float = 0.0  # 0.03..0.1 helps with very dark and very bright pictures
    min_timestep: int = 0  # 0..999
    max_timestep: int = 999
    loss: Loss = "mse"  # of one element; huber and smooth_l1 are sd-scripts' pseudo forms
    huber_c: float = 0.1  # error at which a Huber loss turns from squared to absolute, > 0
    huber_schedule: Literal["constant", "exponential", "snr"] = "constant"  # c at a noise level: c, or from 1 down to c
    huber_scale: float = 1.0  # multiplies c at every noise level, > 0
    loss_on: Literal["prediction", "x0"] = (
        "prediction"  # x0: a diagnostic, on the clean latents that follow from the prediction
    )
    weighting: Weighting = "min_snr"  # of noise levels, by their SNR; the last two are for flow
    p2_gamma: float = 1.0  # of weighting p2, > 0
    v_like_weight: float = 0.1  # of weighting v_like: share of the v loss that is added, > 0
    snr_weight_floor: float = 0.0  # lower limit of the weights, 0..1; 0 = the published weights
    timestep_distribution: Distribution = "auto"  # over min_timestep..max_timestep; auto = the base model's family's
    timestep_shift: float = 0.0  # of times towards noise; 0 = the base model's family's, 1 = none
    logit_mean: float = 0.0  # of logit_normal; below 0 = less noise
    logit_scale: float = 1.0  # of logit_normal, > 0; small = narrow
    sigmoid_center: float = 0.5  # of sigmoid: position of its step in the range, 0..1
    sigmoid_slope: float = 10.0  # of sigmoid, not 0; > 0 = mostly more noise than at the center, < 0 = mostly less
    beta_a: float = 2.0  # of beta, > 0; large = more noise
    beta_b: float = 2.0  # of beta, > 0; large = less noise
    mode_scale: float = 1.29  # of mode, -1..1.75; above 0 = the middle most often, below 0 = both ends
    parabola_center: float = 0.5  # of inverted_parabola: position of its top in the range, 0..1
    parabola_scale: float = 8.0  # of inverted_parabola: the density is 2 - scale (t - center)^2, at least 0
    stratified_timesteps: bool = False  # spread the noise levels of an optimizer step evenly
    noise_offset_strength: Literal["fixed", "random", "adaptive", "by_timestep"] = "fixed"
    offset_adaptation: float = 0.1  # of adaptive: added to noise_offset per unit of a channel's mean
    pyramid_iterations: int = 0  # levels of pyramid noise; 0 = none, 6..10 are usual
    pyramid_discount: float = 0.3  # strength of a level relative to the one before, 0..1
    input_perturbation: float = 0.0  # extra input noise that is not part of the target; 0.1 is usual
    latent_sampling: Literal["sample", "mean"] = "sample"  # clean latents from the autoencoder's distribution
    guidance_loss: float = 0.0  # s: the target becomes u + s (target - u), u predicted without a caption; 0 = off
    # Keeps what the base model predicts for other captions: without words, or with a class for the trigger word.
    preservation: Literal["off", "blank", "class"] = "off"
    preservation_weight: float = 1.0  # factor of the loss against the base model's prediction, > 0
    preservation_trigger: str = ""  # of class: the word in the captions
    preservation_class: str = ""  # of class: what stands in its place, such as "a person"
    # A slider: the network at +1 learns what leads from one prompt to the other, and at -1 the opposite.
    slider: Literal["off", "prompts"] = "off"
    slider_positive: str = ""  # more of this at +1
    slider_negative: str = ""  # more of this at -1
    slider_keep: tuple[str, ...] = ()  # what neither direction should change, added to both prompts in turn
    slider_strength: float = 1.0  # factor of the difference between both prompts, > 0
    # of the samples' losses of a step: their mean, or its sum over the batch, over the accumulation, or over both
    loss_reduction: Literal["mean", "sum_batch", "sum_accumulate", "sum"] = "mean"
    # Learning rate of the uncertainty of each noise level, which weighs the losses; 0 = off, 0.01 is usual.
    uncertainty_rate: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "min_snr_gamma", 0)
        check_range(self, "noise_offset", 0)
        check_range(self, "min_timestep", 0, 999)
        check_range(self, "max_timestep", 0, 999)
        if self.min_timestep > self.max_timestep:
            raise ValueError(
                f"min_timestep {self.min_timestep} is above max_timestep {self.max_timestep}; swap the two in Noise & "
                "Loss."
            )
        check_range(self, "huber_c", 1e-6, 1000)
        check_range(self, "huber_scale", 1e-6, 1e6)
        check_range(self, "p2_gamma", 1e-6, 100)
        check_range(self, "v_like_weight", 1e-6, 1e6)
        check_range(self, "snr_weight_floor", 0, 1)
        check_range(self, "timestep_shift", 0, 100)
        check_range(self, "logit_mean", -10, 10)
        check_range(self, "logit_scale", 0.01, 10)
        check_range(self, "sigmoid_center", 0, 1)
        check_range(self, "sigmoid_slope", -100, 100)
        check_range(self, "beta_a", 0.05, 100)
        check_range(self, "beta_b", 0.05, 100)
        check_range(self, "mode_scale", -1, 1.75)
        check_range(self, "parabola_center", 0, 1)
        check_range(self, "parabola_scale", -1000, 1000)
        check_range(self, "offset_adaptation", -100, 100)
        check_range(self, "pyramid_iterations", 0, 16)
        check_range(self, "pyramid_discount", 0, 1)
        check_range(self, "input_perturbation", 0, 10)
        check_range(self, "guidance_loss", 0, 100)
        check_range(self, "preservation_weight", 1e-6, 1e6)
        check_range(self, "uncertainty_rate", 0, 1)
        check_range(self, "slider_strength", 1e-3, 100)
        self._check_combinations()

    @property
    def weighted(self) -> bool:
        """Tell whether noise levels weigh differently."""
        return self.weighting != "min_snr" or self.min_snr_gamma > 0

    def _check_combinations(self) -> None:
        """Raise ValueError for settings that have no effect with the others."""
        defaults = {field.name: field.default for field in fields(self)}
        for name, (choice, kinds) in ACTS_WITH.items():
            if getattr(self, choice) not in kinds and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} works with {choice} {' or '.join(kinds)} only, and {choice} is "
                    f"{getattr(self, choice)}; set {name} of Noise & Loss to {defaults[name]}."
                )
        if self.weighting == "soft_min_snr" and self.min_snr_gamma == 0:
            raise ValueError("weighting soft_min_snr needs min_snr_gamma; set it to 5 in Noise & Loss.")
        if self.uncertainty_rate and self.weighted:
            raise ValueError(
                "uncertainty_rate learns the weights of timesteps, which undoes other weights; set weighting of "
                "Noise & Loss to min_snr and min_snr_gamma to 0."
            )
        if self.snr_weight_floor and not self.weighted:
            raise ValueError("snr_weight_floor needs a weighting; set min_snr_gamma of Noise & Loss to 5.")
        if self.sigmoid_slope == 0:
            raise ValueError("sigmoid_slope is 0; set timestep_distribution of Noise & Loss to uniform instead.")
        if self.noise_offset_strength in ("random", "by_timestep") and self.noise_offset == 0:
            raise ValueError(
                f"noise_offset_strength is {self.noise_offset_strength} and noise_offset is 0; set noise_offset of "
                "Noise & Loss above 0, or the strength to fixed."
            )
        if self.pyramid_iterations == 0 and self.pyramid_discount != defaults["pyramid_discount"]:
            raise ValueError(
                "pyramid_discount needs pyramid noise; set pyramid_iterations of Noise & Loss to 6 or more."
            )
        if self.preservation == "class" and not (self.preservation_trigger.strip() and self.preservation_class.strip()):
            raise ValueError(
                "preservation class needs both words; set preservation_trigger of Noise & Loss to the trained word and "
                "preservation_class to what it is, for example a person."
            )
        self._check_slider()
        if self.loss_on == "x0" and self.guidance_loss:
            raise ValueError("guidance_loss is of predictions; set loss_on of Noise & Loss to prediction.")
        if self.loss_on == "x0" and self.weighted:
            raise ValueError(
                "loss_on x0 is a diagnostic with its own weighting; set weighting of Noise & Loss to min_snr and "
                "min_snr_gamma to 0."
            )

    def _check_slider(self) -> None:
        """Raise ValueError for a slider that has no direction, or that another setting takes the target from."""
        if self.slider == "off":
            return
        if self.slider_positive.strip() == self.slider_negative.strip():
            raise ValueError(
                "A slider needs two different prompts; set slider_positive and slider_negative of Noise & Loss, for "
                "example to an old person and a young person."
            )
        if self.guidance_loss:
            raise ValueError(
                "guidance_loss and slider both choose the target; set guidance_loss of Noise & Loss to 0, or slider to "
                "off."
            )
        if self.loss_on == "x0":
            raise ValueError("A slider is of predictions; set loss_on of Noise & Loss to prediction.")
