"""The settings of a run, one node for each configuration."""

from __future__ import annotations

from ..trainer_core.config import LoraConfig, ObjectiveConfig, OptimizerConfig, SchedulerConfig
from .sockets import (
    CATEGORY,
    LoraConfigSocket,
    ObjectiveSocket,
    OptimizerSocket,
    SchedulerSocket,
    io,
)


class AtelierOptimizer(io.ComfyNode):
    """How the LoRA's weights move."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierOptimizer",
            display_name="Optimizer",
            category=CATEGORY,
            description="How fast, and by which rule, the LoRA's weights move.",
            search_aliases=["adamw", "learning rate", "train lora", "kohya", "atelier"],
            inputs=[
                io.Combo.Input(
                    "name",
                    options=["adamw", "adamw8bit"],
                    default="adamw",
                    tooltip="adamw runs everywhere. adamw8bit keeps its state in 8 bits: less memory, needs the "
                    "bitsandbytes package.",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=0.0,
                    max=100.0,
                    step=1e-5,
                    round=1e-9,
                    tooltip="Size of a step for the UNet's part of the LoRA. 1e-4 is a good start; 0 leaves the UNet "
                    "as it is. Range 0 to 100.",
                ),
                io.Float.Input(
                    "text_encoder_learning_rate",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=1e-5,
                    round=1e-9,
                    tooltip="Size of a step for the text encoder's part. 0 = the text encoder is not trained, which is "
                    "faster and safer; 5e-5 is usual otherwise. Range 0 to 100.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=0.01,
                    min=0.0,
                    max=100.0,
                    step=0.001,
                    round=1e-6,
                    tooltip="How strongly weights are pulled towards 0, as a share of the learning rate. 0 = not.",
                    advanced=True,
                ),
                io.Float.Input(
                    "beta1",
                    default=0.9,
                    min=0.0,
                    max=0.999999,
                    step=0.001,
                    round=1e-6,
                    tooltip="Memory of the mean gradient, 0 to 0.999999. 0.9 averages about 10 steps.",
                    advanced=True,
                ),
                io.Float.Input(
                    "beta2",
                    default=0.999,
                    min=0.0,
                    max=0.999999,
                    step=0.001,
                    round=1e-6,
                    tooltip="Memory of the mean squared gradient, 0 to 0.999999. 0.999 averages about 1000 steps.",
                    advanced=True,
                ),
                io.Float.Input(
                    "eps",
                    default=1e-8,
                    min=0.0,
                    max=1.0,
                    step=1e-8,
                    round=1e-12,
                    tooltip="Added to the divisor so that tiny gradients do not make huge steps. 1e-8 is usual.",
                    advanced=True,
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=1e-6,
                    tooltip="Longer gradients are shortened to this length. 1 is usual, 0 = never.",
                    advanced=True,
                ),
                io.Float.Input(
                    "text_encoder_2_learning_rate",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=1e-5,
                    round=1e-9,
                    optional=True,
                    tooltip="Size of a step for the second text encoder's part, which models of Stable Diffusion XL "
                    "have. 0 = it is not trained. Range 0 to 100.",
                    advanced=True,
                ),
                io.Int.Input(
                    "text_encoder_stop",
                    default=0,
                    min=0,
                    max=1_000_000,
                    optional=True,
                    tooltip="After so many steps or epochs (stop_unit) the text encoder stays as it is by then, which "
                    "guards it against learning too much. 0 = it learns to the end.",
                    advanced=True,
                ),
                io.Int.Input(
                    "text_encoder_2_stop",
                    default=0,
                    min=0,
                    max=1_000_000,
                    optional=True,
                    tooltip="The same for the second text encoder of Stable Diffusion XL. 0 = it learns to the end.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "stop_unit",
                    options=["steps", "epochs"],
                    default="steps",
                    optional=True,
                    tooltip="What text_encoder_stop and text_encoder_2_stop count.",
                    advanced=True,
                ),
            ],
            outputs=[OptimizerSocket.Output(display_name="OPTIMIZER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(OptimizerConfig(**values))


class AtelierScheduler(io.ComfyNode):
    """The learning rate's shape over the run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierScheduler",
            display_name="Scheduler",
            category=CATEGORY,
            description="How the learning rate changes from the first step to the last.",
            search_aliases=["learning rate schedule", "cosine", "warmup", "train lora", "atelier"],
            inputs=[
                io.Combo.Input(
                    "name",
                    options=["constant", "linear", "cosine"],
                    default="cosine",
                    tooltip="constant: the same throughout. linear: a straight line down. cosine: slow, fast, slow "
                    "down; a good choice for most runs.",
                ),
                io.Int.Input(
                    "warmup_steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip="Steps in which the learning rate rises from 0 before the shape begins. 0 = none.",
                ),
                io.Float.Input(
                    "min_lr_ratio",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-6,
                    tooltip="Where linear and cosine end, as a share of the learning rate, 0 to 1.",
                    advanced=True,
                ),
            ],
            outputs=[SchedulerSocket.Output(display_name="SCHEDULER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(SchedulerConfig(**values))


class AtelierLoraConfig(io.ComfyNode):
    """The network that is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierLoraConfig",
            display_name="LoRA Config",
            category=CATEGORY,
            description="How large the LoRA is and which layers of the model it changes.",
            search_aliases=["rank", "network dim", "alpha", "lora network", "train lora", "kohya", "atelier"],
            inputs=[
                io.Int.Input(
                    "rank",
                    default=16,
                    min=1,
                    max=4096,
                    tooltip="Size of the LoRA in each layer (network dim). 8 to 32 suits a character or a style; the "
                    "file grows with it. Range 1 to 4096.",
                ),
                io.Float.Input(
                    "alpha",
                    default=16.0,
                    min=0.001,
                    max=65536.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="The LoRA acts with alpha / rank. Equal to the rank = full strength; lower works like a "
                    "lower learning rate. Above 0.",
                ),
                io.Combo.Input(
                    "preset",
                    options=["attn-only", "attn-mlp", "full"],
                    default="attn-mlp",
                    tooltip="Which layers are trained. attn-only: attention. attn-mlp: attention and the layers "
                    "between (what most LoRAs train). full: all of these and the convolutions; best for styles.",
                ),
                io.Int.Input(
                    "conv_rank",
                    default=0,
                    min=0,
                    max=4096,
                    tooltip="Rank of the 3x3 convolutions with the preset full; 0 = the same as rank.",
                    advanced=True,
                ),
                io.Float.Input(
                    "conv_alpha",
                    default=0.0,
                    min=0.0,
                    max=65536.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="Alpha of the 3x3 convolutions with the preset full; 0 = the same as alpha.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "dtype",
                    options=["float32", "bfloat16"],
                    default="float32",
                    optional=True,
                    tooltip="Precision of the LoRA's own weights while they are trained. bfloat16 halves their memory; "
                    "each step is rounded at random, so that small steps are not lost. float32 is exact.",
                    advanced=True,
                ),
            ],
            outputs=[LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(LoraConfig(**values))


class AtelierObjective(io.ComfyNode):
    """What is learned at which noise level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierObjective",
            display_name="Noise & Loss",
            category=CATEGORY,
            description="Optional: how errors weigh at each noise level. Without this node every timestep weighs the "
            "same and noise is plain.",
            search_aliases=["min snr", "noise offset", "timestep", "loss", "train lora", "atelier"],
            inputs=[
                io.Float.Input(
                    "min_snr_gamma",
                    default=5.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    round=1e-4,
                    tooltip="Weighs down nearly clean pictures, whose loss drowns the rest (Min-SNR). 5 is usual, "
                    "0 = every timestep weighs the same.",
                ),
                io.Float.Input(
                    "noise_offset",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Shifts the brightness of the noise, so that very dark and very bright pictures can be "
                    "learned. 0.03 to 0.1 is usual, 0 = off.",
                ),
                io.Int.Input(
                    "min_timestep",
                    default=0,
                    min=0,
                    max=999,
                    tooltip="The least noise that is trained, 0 (clean) to 999 (pure noise).",
                    advanced=True,
                ),
                io.Int.Input(
                    "max_timestep",
                    default=999,
                    min=0,
                    max=999,
                    tooltip="The most noise that is trained, 0 (clean) to 999 (pure noise).",
                    advanced=True,
                ),
            ],
            outputs=[ObjectiveSocket.Output(display_name="OBJECTIVE", tooltip="For Train LoRA's input objective.")],
        )

    @classmethod
    def execute(cls, **values: object) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(ObjectiveConfig(**values))
