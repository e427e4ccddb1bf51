"""How weights move."""

from __future__ import annotations

import math
from typing import Any

from ..trainer_core.config import OPTIMIZERS, OptimizerConfig
from ..trainer_core.config.optimizers import Setting
from .sockets import CATEGORY, OptimizerSocket, io

MOST = 1_000_000  # of whole numbers without a limit of their own


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
                    tooltip="Longer gradients are shortened to this length. 1 is usual, 0 = never.",
                    advanced=True,
                ),
                rate(
                    "text_encoder_2_learning_rate",
                    0.0,
                    "Size of a step for the second text encoder's part, which models of Stable Diffusion XL have. 0 = "
                    "it is not trained. Range 0 to 100.",
                    optional=True,
                    advanced=True,
                ),
                io.Int.Input(
                    "text_encoder_stop",
                    default=0,
                    min=0,
                    max=MOST,
                    optional=True,
                    tooltip="After so many steps or epochs (stop_unit) the text encoder stays as it is by then, which "
                    "guards it against learning too much. 0 = it learns to the end.",
                    advanced=True,
                ),
                io.Int.Input(
                    "text_encoder_2_stop",
                    default=0,
                    min=0,
                    max=MOST,
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
                rate(
                    "conv_learning_rate",
                    0.0,
                    "Size of a step for the UNet's convolutions larger than 1x1, where the LoRA has any (preset full). "
                    "0 = learning_rate. Range 0 to 100.",
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
                    tooltip="LoRA+: the part of a layer that begins with 0 (up) learns so many times faster than the "
                    "other. 1 = alike; 4 to 16 learns sooner, with a lower learning_rate. Not with optimizers that "
                    "find their step size by themselves. Range 1 to 1000.",
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
                    tooltip="Each number of the gradient is kept within plus and minus this, after max_grad_norm. 0 = "
                    "any, which is usual; a guard against single outliers. Range 0 to 1000.",
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
                    tooltip="A running average of the weights beside them, saved as <name>-ema and sampled as well: "
                    "calmer than the last step. 0.99 averages about the last 100 steps, 0.998 the last 500; long runs "
                    "0.999. 0 = none. Not with schedule-free optimizers, which average already.",
                    advanced=True,
                ),
                io.Int.Input(
                    "ema_every",
                    default=1,
                    min=1,
                    max=1000,
                    optional=True,
                    tooltip="Steps between two updates of the average, 1 to 1000. More saves time where it is kept in "
                    "RAM; ema_decay counts single steps all the same.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "ema_device",
                    options=["same", "cpu"],
                    default="same",
                    optional=True,
                    tooltip="Where the average is kept. same: beside the LoRA, fastest. cpu: in RAM, so that it takes "
                    "no GPU memory (4 bytes for each number of the LoRA).",
                    advanced=True,
                ),
                io.Combo.Input(
                    "ema_output",
                    options=["average", "plain"],
                    default="average",
                    optional=True,
                    tooltip="With ema_decay: which of the two the outputs MODEL, CLIP, LORA and LORA_PATH of Train "
                    "LoRA get, and the validation measures. Both files are saved.",
                    advanced=True,
                ),
            ],
            outputs=[OptimizerSocket.Output(display_name="OPTIMIZER", tooltip="For Train LoRA.")],
        )

    @classmethod
    def execute(cls, name: dict[str, Any], **values: Any) -> io.NodeOutput:
        """Return the configuration."""
        own = dict(name)
        chosen = own.pop("name")
        rates = {key: own.pop(key) for key in ("learning_rate", "text_encoder_learning_rate")}
        return io.NodeOutput(OptimizerConfig(name=chosen, options=own, **rates, **values))


def rate(name: str, default: float, tooltip: str, **options: Any) -> io.Input:
    """Return an input for a learning rate."""
    return io.Float.Input(name, default=default, min=0.0, max=100.0, step=1e-5, round=1e-9, tooltip=tooltip, **options)


def own_inputs(name: str) -> list[io.Input]:
    """Return the inputs that show while an optimizer is chosen: learning rates, then its own parameters."""
    kind = OPTIMIZERS[name]
    text = (
        "1 trains the text encoder as well, 0 leaves it as it is, which is faster and safer."
        if kind.estimates
        else "Size of a step for the text encoder's part. 0 = the text encoder is not trained, which is faster and "
        f"safer; {kind.learning_rate / 2:g} is usual otherwise. Range 0 to 100."
    )
    unet = (
        "A factor on the step size that is found: 1. 0 leaves the UNet as it is. Range 0 to 100."
        if kind.estimates
        else f"Size of a step for the UNet's part of the LoRA. {kind.learning_rate:g} is a good start; 0 leaves the "
        "UNet as it is. Range 0 to 100."
    )
    rates = [rate("learning_rate", kind.learning_rate, unet), rate("text_encoder_learning_rate", 0.0, text)]
    return [*rates, *(own_input(setting) for setting in kind.settings)]


def own_input(setting: Setting) -> io.Input:
    """Return the input of one of an optimizer's own parameters."""
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
