"""How weights move."""

from __future__ import annotations

from ..trainer_core.config import OptimizerConfig
from .sockets import CATEGORY, OptimizerSocket, io


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
