"""Optimizer: the rule and the learning rates of a run."""

from __future__ import annotations

import math
from typing import Any

from ..trainer_core.config import OPEN, OPTIMIZERS
from ..trainer_core.config.optimizers import Setting
from ..trainer_core.workflow.settings import read_optimizer
from .node import Node
from .sockets import CATEGORY, OptimizerSocket, io, titled

MOST = 1_000_000  # of whole numbers without a limit of their own


class AtelierOptimizer(Node):
    """Choose the optimizer and its learning rates."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierOptimizer",
            display_name=titled("Optimizer"),
            category=CATEGORY,
            description="Which optimizer trains the LoRA, and at which learning rates.",
            search_aliases=[*OPTIMIZERS, "learning rate", "ema", "train lora", "kohya", "atelier"],
            inputs=[
                io.DynamicCombo.Input(
                    "name",
                    options=[io.DynamicCombo.Option(name, own_inputs(name)) for name in OPTIMIZERS],
                    tooltip="\n".join(f"{name}: {kind.when}" for name, kind in OPTIMIZERS.items()),
                ),
                io.Float.Input(
                    "max_grad_norm",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=1e-6,
                    tooltip="Gradients are clipped to this norm. 1 is usual, 0 = no clipping.",
                    advanced=True,
                ),
                rate(
                    "text_encoder_2_learning_rate",
                    0.0,
                    "Learning rate of the second text encoder, which Stable Diffusion XL has. 0 = it is not "
                    "trained. Range 0 to 100.",
                    optional=True,
                    advanced=True,
                ),
                io.Int.Input(
                    "text_encoder_stop",
                    default=0,
                    min=0,
                    max=MOST,
                    optional=True,
                    tooltip="Trains the text encoder only up to this step or epoch (stop_unit), which limits "
                    "overfitting. 0 = it trains to the end.",
                    advanced=True,
                ),
                io.Int.Input(
                    "text_encoder_2_stop",
                    default=0,
                    min=0,
                    max=MOST,
                    optional=True,
                    tooltip="The same for the second text encoder of Stable Diffusion XL. 0 = it trains to the end.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "stop_unit",
                    options=["steps", "epochs"],
                    default="steps",
                    optional=True,
                    tooltip="The unit of text_encoder_stop and text_encoder_2_stop.",
                    advanced=True,
                ),
                rate(
                    "conv_learning_rate",
                    0.0,
                    "Learning rate of the UNet's convolutions larger than 1x1, which the preset full trains. 0 = "
                    "learning_rate. Range 0 to 100.",
                    optional=True,
                    advanced=True,
                ),
                io.Float.Input(
                    "lora_plus_ratio",
                    default=1.0,
                    min=1.0,
                    max=1000.0,
                    step=1.0,
                    round=1e-3,
                    optional=True,
                    tooltip="LoRA+: the learning rate of `up` is multiplied by this. 1 = as `down`; 4 to 16 trains "
                    "faster, with a lower learning_rate. Not with optimizers that find their own step "
                    "size. Range 1 to 1000.",
                    advanced=True,
                ),
                io.Float.Input(
                    "max_grad_value",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.01,
                    round=1e-6,
                    optional=True,
                    tooltip="Clips each value of the gradient to plus or minus this, after max_grad_norm. 0 = no "
                    "clipping, which is usual; a guard against single outliers. Range 0 to 1000.",
                    advanced=True,
                ),
                io.Float.Input(
                    "ema_decay",
                    default=0.0,
                    min=0.0,
                    max=0.999999,
                    step=0.001,
                    round=1e-6,
                    optional=True,
                    tooltip="Keeps an EMA, a running average of the weights, saves it as <name>-ema and draws samples "
                    "with it: smoother than the last step. 0.99 averages about the last 100 steps, 0.998 the last 500; "
                    "long runs 0.999. 0 = none. Not with schedule-free optimizers, which average already.",
                    advanced=True,
                ),
                io.Int.Input(
                    "ema_every",
                    default=1,
                    min=1,
                    max=1000,
                    optional=True,
                    tooltip="Steps between two updates of the average, 1 to 1000. More saves time if the average "
                    "is kept in RAM; ema_decay still counts single steps.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "ema_device",
                    options=["same", "cpu"],
                    default="same",
                    optional=True,
                    tooltip="Where the average is kept. same: beside the LoRA, fastest. cpu: in RAM, which saves "
                    "GPU memory (4 bytes per parameter of the LoRA).",
                    advanced=True,
                ),
                io.Combo.Input(
                    "ema_output",
                    options=["average", "plain"],
                    default="average",
                    optional=True,
                    tooltip="With ema_decay: which weights the outputs MODEL, CLIP, LORA and LORA_PATH of Train "
                    "LoRA carry, and the validation loss measures. Both files are saved.",
                    advanced=True,
                ),
            ],
            outputs=[OptimizerSocket.Output(display_name="OPTIMIZER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_optimizer(**inputs))


def rate(name: str, default: float, tooltip: str, least: float = 0.0, **options: Any) -> io.Input:
    """Build the input of a learning rate."""
    return io.Float.Input(
        name, default=default, min=least, max=100.0, step=1e-5, round=1e-9, tooltip=tooltip, **options
    )


def own_inputs(name: str) -> list[io.Input]:
    """List the inputs of an optimizer: learning rates, then its own parameters."""
    kind = OPTIMIZERS[name]
    text = (
        "1 trains the text encoder as well; 0 does not, which is faster and safer."
        if kind.estimates
        else "Learning rate of the text encoder. 0 = the text encoder is not trained, which is faster and safer; "
        f"{kind.learning_rate / 2:g} is usual otherwise. Range 0 to 100."
    )
    unet = (
        "A factor on the step size that the optimizer finds. -1: 1, which suits every model. 0 = the UNet is not "
        "trained. Range 0 to 100."
        if kind.estimates
        else f"Learning rate of the UNet. -1: as suits the model, {kind.learning_rate:g} for Stable Diffusion. 0 = the "
        "UNet is not trained. Range 0 to 100."
    )
    rates = [rate("learning_rate", OPEN, unet, least=OPEN), rate("text_encoder_learning_rate", 0.0, text)]
    return [*rates, *(own_input(setting) for setting in kind.settings)]


def own_input(setting: Setting) -> io.Input:
    """Build the input of one of an optimizer's own parameters."""
    common: dict[str, Any] = {"default": setting.default, "tooltip": setting.tooltip}
    if isinstance(setting.default, bool):
        return io.Boolean.Input(setting.name, **common, advanced=True)
    if isinstance(setting.default, str):
        return io.String.Input(setting.name, **common)
    high = MOST if setting.high == math.inf else setting.high
    if isinstance(setting.default, int):
        return io.Int.Input(setting.name, **common, min=int(setting.low), max=int(high), advanced=True)
    step = min(0.001, setting.default) if setting.default > 0 else 0.001
    return io.Float.Input(
        setting.name, **common, min=setting.low, max=high, step=step, round=min(1e-6, step / 1e4), advanced=True
    )
