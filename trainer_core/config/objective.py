"""Settings of the training objective: noise, timesteps, loss and weighting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config
from .rows import row, rows_of

Loss = Literal["mse", "l1", "huber", "smooth_l1", "huber_true", "log_cosh"]
Distribution = Literal[
    "auto", "uniform", "logit_normal", "sigmoid", "beta", "snr_uniform", "mode", "cos_map", "inverted_parabola"
]


DIFFUSION = ("epsilon", "v_prediction")
WEIGHTINGS: dict[str, tuple[str, ...]] = {  # with the kinds of prediction that each is for; () = all
    "min_snr": (),
    "soft_min_snr": (),
    "debiased": DIFFUSION,
    "p2": DIFFUSION,
    "v_scaled": ("v_prediction",),
    "v_like": ("epsilon",),
    "cos_map": ("flow",),
    "sigma_sqrt": ("flow",),
}  # their formulas are in objective/weighting.py
HUBER = ("huber", "smooth_l1", "huber_true")
MIN_SNR = ("min_snr", "soft_min_snr")
MOST_NOISES = 256  # of which the nearest is taken
PRESERVING = ("blank", "class")
SLIDING = ("prompts",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Config):
    """Noise, timesteps, loss and weighting of the training objective."""

    SECTION: ClassVar = "objective"
    NODE: ClassVar = "Noise & Loss"

    min_snr_gamma: float = row(
        0.0,
        "Min-SNR weighting: lowers the weight of nearly clean pictures, whose loss drowns the rest. 0 (default) = "
        "every timestep weighs the same; 5 is usual for Stable Diffusion. Acts with the weightings min_snr and "
        "soft_min_snr only.",
        span=(0, 1000, 0.5),
        acts_with=("weighting", MIN_SNR),
        beside=True,
    )
    noise_offset: float = row(
        0.0,
        "Shifts the brightness of the noise, so that the LoRA can draw very dark and very bright pictures. 0.03 to "
        "0.1 is usual, 0 = off.",
        span=(0, 1, 0.01),
    )
    min_timestep: int = row(
        0, "The lowest timestep that is trained, 0 (clean) to 999 (pure noise).", span=(0, 999), advanced=True
    )
    max_timestep: int = row(
        999, "The highest timestep that is trained, 0 (clean) to 999 (pure noise).", span=(0, 999), advanced=True
    )
    loss: Loss = row(
        "mse",
        "The loss function. mse (default): squared error, as base models are trained. l1: absolute error. huber, "
        "smooth_l1: squared for small errors, absolute for large ones, as in sd-scripts; they ignore outliers such "
        "as text or blemishes in some pictures. huber_true: Huber's own form. log_cosh: much the same without a "
        "setting. A loss other than mse needs other learning rates.",
        advanced=True,
        optional=True,
    )
    huber_c: float = row(
        0.1,
        "The error above which the loss is absolute instead of squared; {default:g} is usual.",
        span=(0.0001, 1000, 0.05),
        acts_with=("loss", HUBER),
        defaults={"huber_true": 1.0},
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = row(
        "constant",
        "huber_c at each timestep. constant: the same. exponential, snr: 1 where there is no noise, falling to "
        "huber_c where there is most, by the timestep or by signal-to-noise.",
        acts_with=("loss", HUBER),
    )
    huber_scale: float = row(
        1.0, "Multiplies huber_c at every timestep; 1 is usual.", span=(0.0001, 1000, 0.1), acts_with=("loss", HUBER)
    )
    weighting: str = row(
        "min_snr",
        "The weight of each timestep. min_snr (default): set by min_snr_gamma. soft_min_snr: the same with a smooth"
        " transition. debiased: the noisiest weigh most, for composition. p2: clean ones weigh less, set by "
        "p2_gamma. v_scaled: v models as if they predicted noise. v_like: noise models with a share of the v loss. "
        "For flow models: cos_map, mostly the middle; sigma_sqrt, clean ones.",
        choices=tuple(WEIGHTINGS),
        advanced=True,
        optional=True,
    )
    p2_gamma: float = row(
        1.0, "How strong; 0.5 to 1 is usual.", span=(0.0001, 100, 0.1), acts_with=("weighting", ("p2",))
    )
    v_like_weight: float = row(
        0.1, "The share of the v loss; 0.1 is small.", span=(0.0001, 1000, 0.05), acts_with=("weighting", ("v_like",))
    )
    snr_weight_floor: float = row(
        0.0,
        "No timestep weighs less than this, 0 to 1. 0 (default) = weights as published. 0.1 with zero_terminal_snr,"
        " whose last timestep has no weight otherwise.",
        span=(0, 1, 0.01),
        advanced=True,
        optional=True,
    )
    timestep_distribution: Distribution = row(
        "auto",
        "How often each timestep between min_timestep and max_timestep is trained. auto (default): as the base "
        "model's family is trained; equally often for Stable Diffusion. uniform: equally often. logit_normal: "
        "mostly the middle (what others call sigmoid). sigmoid: a soft step, mostly one end. beta: any hump. "
        "snr_uniform: evenly in the logarithm of signal-to-noise, so mostly little noise. mode: the middle, with "
        "all others kept (what others call heavy tail). cos_map: a little more of the middle. inverted_parabola: a "
        "hump, as in OneTrainer.",
        advanced=True,
        optional=True,
    )
    logit_mean: float = row(
        0.0,
        "Below 0: less noise. Above: more.",
        span=(-10, 10, 0.1),
        acts_with=("timestep_distribution", ("logit_normal",)),
    )
    logit_scale: float = row(
        1.0,
        "Its width; 1 is usual, small = narrow.",
        span=(0.01, 10, 0.1),
        acts_with=("timestep_distribution", ("logit_normal",)),
    )
    sigmoid_center: float = row(
        0.5,
        "Where in the range the soft step lies, 0 to 1.",
        span=(0, 1, 0.05),
        acts_with=("timestep_distribution", ("sigmoid",)),
    )
    sigmoid_slope: float = row(
        10.0,
        "How steep. Above 0: mostly more noise than at the center. Below 0: mostly less.",
        span=(-100, 100, 1),
        acts_with=("timestep_distribution", ("sigmoid",)),
    )
    beta_a: float = row(
        2.0, "Larger = more noise.", span=(0.05, 100, 0.1), acts_with=("timestep_distribution", ("beta",))
    )
    beta_b: float = row(
        2.0, "Larger = less noise.", span=(0.05, 100, 0.1), acts_with=("timestep_distribution", ("beta",))
    )
    mode_scale: float = row(
        1.29,
        "Above 0: mostly the middle. Below 0: mostly both ends. 0 = all equally often.",
        span=(-1, 1.75, 0.05),
        acts_with=("timestep_distribution", ("mode",)),
    )
    parabola_center: float = row(
        0.5,
        "Where in the range its top lies, 0 to 1.",
        span=(0, 1, 0.05),
        acts_with=("timestep_distribution", ("inverted_parabola",)),
    )
    parabola_scale: float = row(
        8.0,
        "How narrow. 0 = all equally often; 8 falls to 0 at both ends of the range; below 0: mostly the ends.",
        span=(-1000, 1000, 1),
        acts_with=("timestep_distribution", ("inverted_parabola",)),
    )
    stratified_timesteps: bool = row(
        False,
        "On: the samples of a step divide the timesteps among them instead of drawing each at random. The same on "
        "average, but steps differ less. Needs several samples a step.",
        advanced=True,
        optional=True,
    )
    noise_offset_strength: Literal["fixed", "random", "adaptive", "by_timestep"] = row(
        "fixed",
        "How strong the noise offset is for a sample. fixed (default): noise_offset. random: 0 to noise_offset. "
        "adaptive: more for very dark and very bright pictures. by_timestep: noise_offset at the noisiest timestep,"
        " nearly none below (generalised offset noise).",
        advanced=True,
        optional=True,
    )
    offset_adaptation: float = row(
        0.1,
        "Added to noise_offset for each unit of a channel's mean in the picture; about as large as noise_offset is "
        "usual.",
        span=(-100, 100, 0.01),
        acts_with=("noise_offset_strength", ("adaptive",)),
    )
    pyramid_iterations: int = row(
        0, "How many sizes of noise, 1 to 16; 6 to 10 are usual.", span=(0, 16), acts_with=("pyramid_noise", ("on",))
    )
    pyramid_discount: float = row(
        0.3,
        "Strength of each size relative to the one before, 0 to 1; 0.1 to 0.4 is usual.",
        span=(0, 1, 0.05),
        acts_with=("pyramid_noise", ("on",)),
    )
    input_perturbation: float = row(
        0.0,
        "Adds noise to the model's input that it does not predict, against its own errors while sampling. 0 "
        "(default) = off, 0.1 is usual.",
        span=(0, 10, 0.01),
        advanced=True,
        optional=True,
    )
    loss_on: Literal["prediction", "x0"] = row(
        "prediction",
        "prediction (default): the loss of what the base model predicts, noise or v. x0: the loss of the clean "
        "picture that the prediction implies, a diagnostic to compare models of both kinds; needs min_snr_gamma 0 "
        "and weighting min_snr.",
        advanced=True,
        optional=True,
    )
    timestep_shift: float = row(
        0.0,
        "Trains noisier timesteps more often, as flow models are sampled. 0 (default) = as the base model's family "
        "is trained, 1 = no shift, above 1 = more noise, below 1 = less.",
        span=(0, 100, 0.1),
        advanced=True,
        optional=True,
    )
    latent_sampling: Literal["sample", "mean"] = row(
        "sample",
        "How pictures become latents, with Load Base Model. sample (default): drawn from the VAE's distribution, "
        "new at each visit. mean: always its middle.",
        advanced=True,
        optional=True,
    )
    loss_reduction: Literal["mean", "sum_batch", "sum_accumulate", "sum"] = row(
        "mean",
        "How the losses of a step's samples become one. mean (default): a larger batch does not change the size of "
        "gradients. sum_batch, sum_accumulate, sum: summed over the batch, the accumulation, or both (the loss "
        "scaler of others). Acts through max_grad_norm and with sgd; AdamW and its kin divide it out again. The "
        "shown loss stays the mean.",
        advanced=True,
        optional=True,
    )
    guidance_loss: float = row(
        0.0,
        "For models with their guidance distilled into them (Flux, turbo models): keeps it, where plain training "
        "wears it off. The target moves away from the prediction without a caption by this factor; 3 to 4 is usual."
        " Steps take about half as long again. 0 (default) = off.",
        span=(0, 100, 0.5),
        advanced=True,
        optional=True,
    )
    preservation: Literal["off", "blank", "class"] = row(
        "off",
        "Keeps what the base model draws for other captions, so that the subject does not spread. off (default). "
        "blank: without a caption. class: with the subject's class in place of the trigger word (differential "
        "output preservation). Steps take more than twice as long.",
        advanced=True,
        optional=True,
    )
    preservation_weight: float = row(
        1.0,
        "Its loss is multiplied by this; 1 is usual. Higher keeps more and learns more slowly.",
        span=(0.0001, 1000, 0.1),
        acts_with=("preservation", PRESERVING),
    )
    preservation_trigger: str = row(
        "", "The word in your captions that names the subject.", acts_with=("preservation", ("class",))
    )
    preservation_class: str = row(
        "", "What stands in its place: the kind of subject, such as a person.", acts_with=("preservation", ("class",))
    )
    uncertainty_rate: float = row(
        0.0,
        "Learns the usual loss of each timestep and divides by it, so that all weigh the same (EDM2). This is its "
        "learning rate: 0.01 is usual, 0 (default) = off. Needs weighting min_snr and min_snr_gamma 0.",
        span=(0, 1, 0.001),
        advanced=True,
        optional=True,
    )
    slider: Literal["off", "prompts"] = row(
        "off",
        "Trains a slider: a LoRA that draws more of one thing at strength 1 and more of its opposite at -1. off "
        "(default). prompts: two prompts say which; of the pictures only noise and captions count, so that those of"
        " Drawn Pictures will do. Steps take about twice as long.",
        advanced=True,
        optional=True,
    )
    slider_positive: str = row(
        "",
        "More of this at strength 1, for example a very old person.",
        placeholder="a very old person",
        acts_with=("slider", SLIDING),
    )
    slider_negative: str = row(
        "",
        "More of this at strength -1, for example a very young person.",
        placeholder="a very young person",
        acts_with=("slider", SLIDING),
    )
    slider_keep: tuple[str, ...] = row(
        (),
        "What should not change with it, separated by commas: each is added to both prompts in turn. Empty = nothing.",
        placeholder="man, woman",
        acts_with=("slider", SLIDING),
    )
    slider_strength: float = row(
        1.0,
        "How far strength 1 goes, as a multiple of the difference between both prompts; 1 to 4 is usual.",
        span=(0.001, 100, 0.5),
        acts_with=("slider", SLIDING),
    )

    differential_guidance: float = row(
        0.0,
        "Learns past the target: moves it away from the prediction by this factor; 3 is usual. With loss mse it only "
        "multiplies gradients, which AdamW and its kin divide out. The shown loss grows by its square. 0 (default) = "
        "off, as is 1.",
        span=(0, 100, 0.5),
        advanced=True,
        optional=True,
    )

    nearest_noise: int = row(
        1,
        "Draws this many noises for each picture and takes the one nearest to it, so that noise and picture are less "
        "mixed up (immiscible diffusion, kNN); 4 to 64 is usual. 1 (default) = off.",
        span=(1, MOST_NOISES),
        advanced=True,
        optional=True,
    )
    mixflow: float = row(
        0.0,
        "For flow models, against their own errors while sampling: the model sees a picture that is noisier than its "
        "level says, by up to this share of the way to pure noise. 0.8 as published, with timestep_distribution beta, "
        "beta_a 1 and beta_b 2. 0 (default) = off.",
        span=(0, 1, 0.1),
        advanced=True,
        optional=True,
    )

    easy_weight: float = row(
        1.0,
        "The least weight of easy pictures, whose loss stays in the lowest quarter of their concept. It halves every 8 "
        "visits, and grows again once they are no longer easy. 0.125 is usual. 1 (default) = off.",
        span=(0.01, 1, 0.05),
        round=0.001,
        advanced=True,
        optional=True,
    )
    odd_pictures: Literal["name", "leave_out"] = row(
        "name",
        "What happens to a picture whose loss stands out twice, at looks 8 visits apart. name (default): the report "
        "names it. leave_out: it teaches nothing from then on.",
        advanced=True,
        optional=True,
    )

    @property
    def weighted(self) -> bool:
        """Tell whether noise levels weigh differently."""
        return self.weighting != "min_snr" or self.min_snr_gamma > 0

    def check(self) -> None:
        """Raise ValueError for settings that have no effect with the others."""
        if self.min_timestep > self.max_timestep:
            raise ValueError(
                f"min_timestep {self.min_timestep} is above max_timestep {self.max_timestep}; set "
                f"{self.named('min_timestep')} lower."
            )
        if self.weighting == "soft_min_snr" and self.min_snr_gamma == 0:
            raise ValueError(f"weighting soft_min_snr needs min_snr_gamma; set {self.named('min_snr_gamma')} to 5.")
        if self.uncertainty_rate and self.weighted:
            raise ValueError(
                "uncertainty_rate learns the weights of timesteps, which undoes other weights; set "
                f"{self.named('weighting')} to min_snr and min_snr_gamma to 0."
            )
        if self.snr_weight_floor and not self.weighted:
            raise ValueError(f"snr_weight_floor needs a weighting; set {self.named('min_snr_gamma')} to 5.")
        if self.sigmoid_slope == 0:
            raise ValueError(f"sigmoid_slope is 0; set {self.named('timestep_distribution')} to uniform instead.")
        if self.noise_offset_strength in ("random", "by_timestep") and self.noise_offset == 0:
            raise ValueError(
                f"noise_offset_strength is {self.noise_offset_strength} and noise_offset is 0; set "
                f"{self.named('noise_offset')} above 0, or the strength to fixed."
            )
        if self.pyramid_iterations == 0 and self.pyramid_discount != rows_of(type(self))["pyramid_discount"].default:
            raise ValueError(
                f"pyramid_discount needs pyramid noise; set {self.named('pyramid_iterations')} to 6 or more."
            )
        if self.preservation == "class" and not (self.preservation_trigger.strip() and self.preservation_class.strip()):
            raise ValueError(
                f"preservation class needs both words; set {self.named('preservation_trigger')} to the trained word "
                "and preservation_class to what it is, for example a person."
            )
        self._check_slider()
        if self.loss_on == "x0" and self.guidance_loss:
            raise ValueError(f"guidance_loss is of predictions; set {self.named('loss_on')} to prediction.")
        if self.loss_on == "x0" and self.mixflow:
            raise ValueError(
                "With mixflow the picture that a prediction implies is not the one that it was given; set "
                f"{self.named('loss_on')} to prediction."
            )
        if self.loss_on == "x0" and self.weighted:
            raise ValueError(
                f"loss_on x0 is a diagnostic with its own weighting; set {self.named('weighting')} to min_snr and "
                "min_snr_gamma to 0."
            )

    def _check_slider(self) -> None:
        """Raise ValueError for a slider that has no direction, or that another setting takes the target from."""
        if self.slider == "off":
            return
        if self.slider_positive.strip() == self.slider_negative.strip():
            raise ValueError(
                f"A slider needs two different prompts; set slider_positive and {self.named('slider_negative')}, for "
                "example to an old person and a young person."
            )
        if self.guidance_loss:
            raise ValueError(
                f"guidance_loss and slider both choose the target; set {self.named('guidance_loss')} to 0, or slider "
                "to off."
            )
        if self.loss_on == "x0":
            raise ValueError(f"A slider is of predictions; set {self.named('loss_on')} to prediction.")
        watched = {"easy_weight": self.easy_weight < 1, "odd_pictures": self.odd_pictures != "name"}
        if name := next((name for name, on in watched.items() if on), ""):
            raise ValueError(
                f"A slider learns its prompts and no picture, so none is easy or odd; set {self.named(name)} to "
                f"{rows_of(type(self))[name].default}."
            )
