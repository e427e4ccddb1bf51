"""Settings of the optimizer: learning rates, clipping, EMA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .base import Config, check_value, nearest, of_kind
from .optimizer_table import OPTIMIZERS
from .rows import Row, named, row

RATES = ("learning_rate", "text_encoder_learning_rate", "text_encoder_2_learning_rate", "conv_learning_rate")


def _rate(default: float, words: str, **more: Any) -> Any:
    """Declare the row of a learning rate."""
    return row(default, f"{words} Range 0 to 100.", span=(0, 100, 1e-5), round=1e-9, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """The optimizer, its learning rates, clipping and EMA."""

    SECTION: ClassVar = "optimizer"
    NODE: ClassVar = "Optimizer"

    name: str = row(
        "adamw", "\n".join(f"{name}: {kind.when}" for name, kind in OPTIMIZERS.items()), choices=tuple(OPTIMIZERS)
    )
    options: dict[str, Any] = field(default_factory=dict)  # its own parameters; those left out get its defaults
    learning_rate: float = _rate(
        1e-4, "Learning rate of the UNet. -1: as suits the model. 0 = the UNet is not trained.", open=-1.0
    )
    text_encoder_learning_rate: float = _rate(
        0.0, "Learning rate of the text encoder. 0 = the text encoder is not trained, which is faster and safer."
    )
    max_grad_norm: float = row(
        1.0,
        "Gradients are clipped to this norm. 1 is usual, 0 = no clipping.",
        span=(0, 1000, 0.1),
        round=1e-6,
        advanced=True,
    )
    text_encoder_2_learning_rate: float = _rate(
        0.0,
        "Learning rate of the second text encoder, where a model has one: Stable Diffusion XL and 3, FLUX.1. 0 = it is "
        "not trained.",
        advanced=True,
        optional=True,
    )
    text_encoder_stop: int = row(
        0,
        "Trains the text encoder only up to this step or epoch (stop_unit), which limits overfitting. 0 = it trains "
        "to the end.",
        span=(0, 1_000_000),
        advanced=True,
        optional=True,
    )
    text_encoder_2_stop: int = row(
        0,
        "The same for the second text encoder. 0 = it trains to the end.",
        span=(0, 1_000_000),
        advanced=True,
        optional=True,
    )
    stop_unit: Literal["steps", "epochs"] = row(
        "steps",
        "The unit of text_encoder_stop, text_encoder_2_stop and denoiser_stop.",
        advanced=True,
        optional=True,
    )
    conv_learning_rate: float = _rate(
        0.0,
        "Learning rate of the UNet's convolutions larger than 1x1, which the preset full trains. 0 = learning_rate.",
        advanced=True,
        optional=True,
    )
    lora_plus_ratio: float = row(
        1.0,
        "LoRA+: the learning rate of `up` is multiplied by this. 1 = as `down`; 4 to 16 trains faster, with a lower "
        "learning_rate. Not with optimizers that find their own step size. Range 1 to 1000.",
        span=(1, 1000, 1),
        round=0.001,
        advanced=True,
        optional=True,
    )
    max_grad_value: float = row(
        0.0,
        "Clips each value of the gradient to plus or minus this, after max_grad_norm. 0 = no clipping, which is "
        "usual; a guard against single outliers. Range 0 to 1000.",
        span=(0, 1000, 0.01),
        round=1e-6,
        advanced=True,
        optional=True,
    )
    ema_decay: float = row(
        0.0,
        "Keeps an EMA, a running average of the weights, saves it as <name>-ema and draws samples with it: smoother "
        "than the last step. 0.99 averages about the last 100 steps, 0.998 the last 500; long runs 0.999. 0 = none. "
        "Not with schedule-free optimizers, which average already.",
        span=(0, 0.999999, 0.001),
        round=1e-6,
        advanced=True,
        optional=True,
    )
    ema_every: int = row(
        1,
        "Steps between two updates of the average, 1 to 1000. More saves time if the average is kept in RAM; "
        "ema_decay still counts single steps.",
        span=(1, 1000),
        advanced=True,
        optional=True,
    )
    ema_device: Literal["same", "cpu"] = row(
        "same",
        "Where the average is kept. same: beside the LoRA, fastest. cpu: in RAM, which saves GPU memory (4 bytes per "
        "parameter of the LoRA).",
        advanced=True,
        optional=True,
    )
    ema_output: Literal["average", "plain"] = row(
        "average",
        "With ema_decay: which weights the outputs MODEL, CLIP, LORA and LORA_PATH of Train LoRA carry, and the "
        "validation loss measures. Both files are saved.",
        advanced=True,
        optional=True,
    )

    denoiser_stop: int = row(
        0,
        "Trains the UNet or transformer only up to this step or epoch (stop_unit); text encoders and words train on. "
        "0 = it trains to the end.",
        span=(0, 1_000_000),
        advanced=True,
        optional=True,
    )

    @property
    def part_rates(self) -> tuple[float, ...]:
        """List the learning rates of the denoiser and the text encoders, in the order of a base model's parts."""
        return self.learning_rate, self.text_encoder_learning_rate, self.text_encoder_2_learning_rate

    @property
    def part_stops(self) -> tuple[int, ...]:
        """List when each part is frozen, in stop_unit and in the order of `part_rates`; 0 = never."""
        return self.denoiser_stop, self.text_encoder_stop, self.text_encoder_2_stop

    @property
    def rates(self) -> dict[str, float]:
        """List the learning rates above 0, by name."""
        return {name: rate for name in RATES if (rate := getattr(self, name))}

    def check(self) -> None:
        """Raise ValueError for settings that do not go together, and for parameters that the optimizer has not."""
        object.__setattr__(self, "options", read_options(self.name, self.options))
        if self.conv_learning_rate and not self.learning_rate:
            raise ValueError(
                f"{self.named('conv_learning_rate')} is set, but learning_rate is 0, so the UNet is not trained; set "
                "both above 0, or both to 0."
            )
        kind = OPTIMIZERS[self.name]
        if kind.estimates and self.lora_plus_ratio != 1:
            raise ValueError(
                f"lora_plus_ratio is {self.lora_plus_ratio:g}, but {self.name} estimates one step size for all parts "
                f"of a layer; set {self.named('lora_plus_ratio')} to 1, or choose adamw."
            )
        if kind.averages and self.ema_decay:
            raise ValueError(f"{self.name} averages the weights already; set {self.named('ema_decay')} to 0.")
        if self.options.get("nesterov") and not self.options["momentum"]:
            raise ValueError(f"nesterov needs momentum; set {named_option('momentum')} to 0.9, or nesterov to off.")
        if self.options.get("warmup_init") and not self.options["relative_step"]:
            raise ValueError(
                f"warmup_init needs relative_step; set {named_option('relative_step')} to on, or warmup_init to off."
            )


def named_option(name: str) -> str:
    """Name one of an optimizer's own parameters for messages."""
    return named(f"{OptimizerConfig.SECTION}.options", Row(name=name, words=""), OptimizerConfig.NODE)


def read_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of an optimizer's parameters; raises ValueError for unknown names and bad values."""
    rows = {each.name: each for each in OPTIMIZERS[name].settings}
    if unknown := sorted(given.keys() - rows.keys()):
        raise ValueError(f"{name} has no parameter {unknown[0]:.80}; {nearest(unknown[0], rows)}")
    options: dict[str, Any] = {}
    for key, each in rows.items():
        value = of_kind(each.kind, given.get(key, each.default), named_option(key))
        check_value(each, value, named_option(key))
        options[key] = each.kind(value)
    return options
