"""Noise & Loss: noise, timesteps, loss and weighting of a run."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_objective
from .node import Node
from .objective_targets import number_input, preservation_input, slider_input
from .sockets import CATEGORY, ObjectiveSocket, io, titled

# Widgets whose choices have fields of their own.
CHOICES = ("loss", "weighting", "timestep_distribution", "noise_offset_strength", "pyramid_noise")
CHOICES += ("preservation", "slider")


class AtelierObjective(Node):
    """Choose noise, timesteps, loss and weighting."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierObjective",
            display_name=titled("Noise & Loss"),
            category=CATEGORY,
            description="Optional: noise, timesteps, the loss and its weighting. Without this node every timestep "
            "weighs the same, is drawn as the base model's family is trained, and the noise is plain.",
            search_aliases=["min snr", "noise offset", "timestep", "loss", "train lora", "atelier"],
            inputs=[
                io.Float.Input(
                    "min_snr_gamma",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="Min-SNR weighting: lowers the weight of nearly clean pictures, whose loss drowns the "
                    "rest. 0 (default) = every timestep weighs the same; 5 is usual for Stable Diffusion. Acts with "
                    "the weightings min_snr and soft_min_snr only.",
                ),
                io.Float.Input(
                    "noise_offset",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Shifts the brightness of the noise, so that the LoRA can draw very dark and very bright "
                    "pictures. 0.03 to 0.1 is usual, 0 = off.",
                ),
                io.Int.Input(
                    "min_timestep",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="The lowest timestep that is trained, 0 (clean) to 999 (pure noise).",
                    advanced=True,
                ),
                io.Int.Input(
                    "max_timestep",
                    default=999,
                    min=0,
                    max=999,
                    tooltip="The highest timestep that is trained, 0 (clean) to 999 (pure noise).",
                    advanced=True,
                ),
                io.DynamicCombo.Input(
                    "loss",
                    options=[
                        io.DynamicCombo.Option("mse", []),
                        io.DynamicCombo.Option("l1", []),
                        io.DynamicCombo.Option("huber", _huber(0.1)),
                        io.DynamicCombo.Option("smooth_l1", _huber(0.1)),
                        io.DynamicCombo.Option("huber_true", _huber(1.0)),
                        io.DynamicCombo.Option("log_cosh", []),
                    ],
                    optional=True,
                    tooltip="The loss function. mse (default): squared error, as base models are trained. l1: absolute "
                    "error. huber, smooth_l1: squared for small errors, absolute for large ones, as in sd-scripts; "
                    "they ignore outliers such as text or blemishes in some pictures. huber_true: Huber's own form. "
                    "log_cosh: much the same without a setting. A loss other than mse needs other learning rates.",
                    extra_dict={"advanced": True},
                ),
                io.DynamicCombo.Input(
                    "weighting",
                    options=[
                        io.DynamicCombo.Option("min_snr", []),
                        io.DynamicCombo.Option("soft_min_snr", []),
                        io.DynamicCombo.Option("debiased", []),
                        io.DynamicCombo.Option(
                            "p2", [number_input("p2_gamma", 1.0, 0.0001, 100.0, 0.1, "How strong; 0.5 to 1 is usual.")]
                        ),
                        io.DynamicCombo.Option("v_scaled", []),
                        io.DynamicCombo.Option(
                            "v_like",
                            [
                                number_input(
                                    "v_like_weight", 0.1, 0.0001, 1000.0, 0.05, "The share of the v loss; 0.1 is small."
                                )
                            ],
                        ),
                        io.DynamicCombo.Option("cos_map", []),
                        io.DynamicCombo.Option("sigma_sqrt", []),
                    ],
                    optional=True,
                    tooltip="The weight of each timestep. min_snr (default): set by min_snr_gamma. soft_min_snr: the "
                    "same with a smooth transition. debiased: the noisiest weigh most, for composition. p2: clean ones "
                    "weigh less, set by p2_gamma. v_scaled: v models as if they predicted noise. v_like: noise models "
                    "with a share of the v loss. For flow models: cos_map, mostly the middle; sigma_sqrt, clean ones.",
                    extra_dict={"advanced": True},
                ),
                number_input(
                    "snr_weight_floor",
                    0.0,
                    0.0,
                    1.0,
                    0.01,
                    "No timestep weighs less than this, 0 to 1. 0 (default) = weights as published. 0.1 with "
                    "zero_terminal_snr, whose last timestep has no weight otherwise.",
                    optional=True,
                ),
                io.DynamicCombo.Input(
                    "timestep_distribution",
                    options=[
                        io.DynamicCombo.Option("auto", []),
                        io.DynamicCombo.Option("uniform", []),
                        io.DynamicCombo.Option(
                            "logit_normal",
                            [
                                number_input("logit_mean", 0.0, -10.0, 10.0, 0.1, "Below 0: less noise. Above: more."),
                                number_input(
                                    "logit_scale", 1.0, 0.01, 10.0, 0.1, "Its width; 1 is usual, small = narrow."
                                ),
                            ],
                        ),
                        io.DynamicCombo.Option(
                            "sigmoid",
                            [
                                number_input(
                                    "sigmoid_center",
                                    0.5,
                                    0.0,
                                    1.0,
                                    0.05,
                                    "Where in the range the soft step lies, 0 to 1.",
                                ),
                                number_input(
                                    "sigmoid_slope",
                                    10.0,
                                    -100.0,
                                    100.0,
                                    1.0,
                                    "How steep. Above 0: mostly more noise than at the center. Below 0: mostly less.",
                                ),
                            ],
                        ),
                        io.DynamicCombo.Option(
                            "beta",
                            [
                                number_input("beta_a", 2.0, 0.05, 100.0, 0.1, "Larger = more noise."),
                                number_input("beta_b", 2.0, 0.05, 100.0, 0.1, "Larger = less noise."),
                            ],
                        ),
                        io.DynamicCombo.Option("snr_uniform", []),
                        io.DynamicCombo.Option(
                            "mode",
                            [
                                number_input(
                                    "mode_scale",
                                    1.29,
                                    -1.0,
                                    1.75,
                                    0.05,
                                    "Above 0: mostly the middle. Below 0: mostly both ends. 0 = all equally often.",
                                )
                            ],
                        ),
                        io.DynamicCombo.Option("cos_map", []),
                        io.DynamicCombo.Option(
                            "inverted_parabola",
                            [
                                number_input(
                                    "parabola_center",
                                    0.5,
                                    0.0,
                                    1.0,
                                    0.05,
                                    "Where in the range its top lies, 0 to 1.",
                                ),
                                number_input(
                                    "parabola_scale",
                                    8.0,
                                    -1000.0,
                                    1000.0,
                                    1.0,
                                    "How narrow. 0 = all equally often; 8 falls to 0 at both ends of the range; below "
                                    "0: mostly the ends.",
                                ),
                            ],
                        ),
                    ],
                    optional=True,
                    tooltip="How often each timestep between min_timestep and max_timestep is trained. auto "
                    "(default): as the base model's family is trained; equally often for Stable Diffusion. "
                    "uniform: equally often. logit_normal: mostly the middle (what others call sigmoid). sigmoid: "
                    "a soft step, mostly one end. beta: any hump. snr_uniform: evenly in the logarithm of "
                    "signal-to-noise, so mostly little noise. mode: the middle, with all others kept (what others call "
                    "heavy tail). cos_map: a little more of the middle. inverted_parabola: a hump, as in OneTrainer.",
                    extra_dict={"advanced": True},
                ),
                io.Boolean.Input(
                    "stratified_timesteps",
                    default=False,
                    optional=True,
                    tooltip="On: the samples of a step divide the timesteps among them instead of drawing each at "
                    "random. The same on average, but steps differ less. Needs several samples a step.",
                    advanced=True,
                ),
                io.DynamicCombo.Input(
                    "noise_offset_strength",
                    options=[
                        io.DynamicCombo.Option("fixed", []),
                        io.DynamicCombo.Option("random", []),
                        io.DynamicCombo.Option(
                            "adaptive",
                            [
                                number_input(
                                    "offset_adaptation",
                                    0.1,
                                    -100.0,
                                    100.0,
                                    0.01,
                                    "Added to noise_offset for each unit of a channel's mean in the picture; about "
                                    "as large as noise_offset is usual.",
                                )
                            ],
                        ),
                        io.DynamicCombo.Option("by_timestep", []),
                    ],
                    optional=True,
                    tooltip="How strong the noise offset is for a sample. fixed (default): noise_offset. random: 0 "
                    "to noise_offset. adaptive: more for very dark and very bright pictures. by_timestep: "
                    "noise_offset at the noisiest timestep, nearly none below (generalised offset noise).",
                    extra_dict={"advanced": True},
                ),
                io.DynamicCombo.Input(
                    "pyramid_noise",
                    options=[
                        io.DynamicCombo.Option("off", []),
                        io.DynamicCombo.Option(
                            "on",
                            [
                                io.Int.Input(
                                    "pyramid_iterations",
                                    default=6,
                                    min=1,
                                    max=16,
                                    tooltip="How many sizes of noise, 1 to 16; 6 to 10 are usual.",
                                ),
                                number_input(
                                    "pyramid_discount",
                                    0.3,
                                    0.0,
                                    1.0,
                                    0.05,
                                    "Strength of each size relative to the one before, 0 to 1; 0.1 to 0.4 is usual.",
                                ),
                            ],
                        ),
                    ],
                    optional=True,
                    tooltip="Adds noise of coarser and coarser patches, which changes the brightness of whole areas "
                    "(multi-resolution noise). off (default), or on for contrast instead of a noise offset.",
                    extra_dict={"advanced": True},
                ),
                number_input(
                    "input_perturbation",
                    0.0,
                    0.0,
                    10.0,
                    0.01,
                    "Adds noise to the model's input that it does not predict, against its own errors while "
                    "sampling. 0 (default) = off, 0.1 is usual.",
                    optional=True,
                ),
                io.Combo.Input(
                    "loss_on",
                    options=["prediction", "x0"],
                    default="prediction",
                    optional=True,
                    tooltip="prediction (default): the loss of what the base model predicts, noise or v. x0: the "
                    "loss of the clean picture that the prediction implies, a diagnostic to compare models of both "
                    "kinds; needs min_snr_gamma 0 and weighting min_snr.",
                    advanced=True,
                ),
                number_input(
                    "timestep_shift",
                    0.0,
                    0.0,
                    100.0,
                    0.1,
                    "Trains noisier timesteps more often, as flow models are sampled. 0 (default) = as the base "
                    "model's family is trained, 1 = no shift, above 1 = more noise, below 1 = less.",
                    optional=True,
                ),
                io.Combo.Input(
                    "latent_sampling",
                    options=["sample", "mean"],
                    default="sample",
                    optional=True,
                    tooltip="How pictures become latents, with Load Base Model. sample (default): drawn from the VAE's "
                    "distribution, new at each visit. mean: always its middle.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "loss_reduction",
                    options=["mean", "sum_batch", "sum_accumulate", "sum"],
                    default="mean",
                    optional=True,
                    tooltip="How the losses of a step's samples become one. mean (default): a larger batch does not "
                    "change the size of gradients. sum_batch, sum_accumulate, sum: summed over the batch, the "
                    "accumulation, or both (the loss scaler of others). Acts through max_grad_norm and with sgd; "
                    "AdamW and its kin divide it out again. The shown loss stays the mean.",
                    advanced=True,
                ),
                number_input(
                    "guidance_loss",
                    0.0,
                    0.0,
                    100.0,
                    0.5,
                    "For models with their guidance distilled into them (Flux, turbo models): keeps it, where plain "
                    "training wears it off. The target moves away from the prediction without a caption by this "
                    "factor; 3 to 4 is usual. Steps take about half as long again. 0 (default) = off.",
                    optional=True,
                ),
                preservation_input(),
                number_input(
                    "uncertainty_rate",
                    0.0,
                    0.0,
                    1.0,
                    0.001,
                    "Learns the usual loss of each timestep and divides by it, so that all weigh the same (EDM2). This "
                    "is its learning rate: 0.01 is usual, 0 (default) = off. Needs weighting min_snr and "
                    "min_snr_gamma 0.",
                    optional=True,
                ),
                slider_input(),
            ],
            outputs=[ObjectiveSocket.Output(display_name="OBJECTIVE", tooltip="For Train LoRA's input objective.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_objective(**values))


def _huber(threshold: float) -> list[Any]:
    """List the inputs of a Huber loss."""
    return [
        number_input(
            "huber_c",
            threshold,
            0.0001,
            1000.0,
            0.05,
            f"The error above which the loss is absolute instead of squared; {threshold:g} is usual.",
        ),
        io.Combo.Input(
            "huber_schedule",
            options=["constant", "exponential", "snr"],
            default="constant",
            tooltip="huber_c at each timestep. constant: the same. exponential, snr: 1 where there is no noise, "
            "falling to huber_c where there is most, by the timestep or by signal-to-noise.",
        ),
        number_input("huber_scale", 1.0, 0.0001, 1000.0, 0.1, "Multiplies huber_c at every timestep; 1 is usual."),
    ]
