"""Settings of the optimizer: learning rates, clipping, EMA."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .base import Config, check_choices, check_open, check_range
from .optimizers import OPTIMIZERS

RATES = ("learning_rate", "text_encoder_learning_rate", "text_encoder_2_learning_rate", "conv_learning_rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """The optimizer, its learning rates, clipping and EMA."""

    SECTION: ClassVar = "optimizer"
    NODE: ClassVar = "Optimizer"

    name: str = "adamw"  # one of OPTIMIZERS
    options: dict[str, Any] = field(default_factory=dict)  # its own parameters; those left out get its defaults
    learning_rate: float = 1e-4  # of the UNet's network; 0 = not trained, -1 = as suits the model
    text_encoder_learning_rate: float = 0.0  # of the (first) text encoder; 0 = not trained
    text_encoder_2_learning_rate: float = 0.0  # of the second text encoder, if there is one; 0 = not trained
    conv_learning_rate: float = 0.0  # of the UNet's convolutions larger than 1x1; 0 = learning_rate
    lora_plus_ratio: float = 1.0  # factor on the learning rate of `up` (LoRA+)
    max_grad_norm: float = 1.0  # 0 = no clipping
    max_grad_value: float = 0.0  # of each number of the gradient, after the norm; 0 = no clipping
    text_encoder_stop: int = 0  # when the (first) text encoder is frozen; 0 = never
    text_encoder_2_stop: int = 0
    stop_unit: Literal["steps", "epochs"] = "steps"  # of the two above
    ema_decay: float = 0.0  # decay of the exponential moving average; 0 = no average
    ema_every: int = 1  # steps between two updates of the average
    ema_device: Literal["same", "cpu"] = "same"  # where the average is kept
    ema_output: Literal["average", "plain"] = "average"  # which weights are validated and saved as the LoRA

    @property
    def part_rates(self) -> tuple[float, ...]:
        """List the learning rates of the denoiser and the text encoders, in the order of a base model's parts."""
        return self.learning_rate, self.text_encoder_learning_rate, self.text_encoder_2_learning_rate

    @property
    def text_stops(self) -> tuple[int, ...]:
        """List when each text encoder is frozen, in stop_unit; 0 = never."""
        return self.text_encoder_stop, self.text_encoder_2_stop

    def __post_init__(self) -> None:
        check_choices(self)
        if self.name not in OPTIMIZERS:
            raise ValueError(f"name of Optimizer is {self.name!r:.80}; choose one of {list(OPTIMIZERS)}.")
        object.__setattr__(self, "options", read_options(self.name, self.options))
        check_open(self, "learning_rate", -1, 0, 100)
        for name in RATES[1:]:
            check_range(self, name, 0, 100)
        check_range(self, "lora_plus_ratio", 1, 1000)
        check_range(self, "max_grad_norm", 0)
        check_range(self, "max_grad_value", 0)
        check_range(self, "text_encoder_stop", 0)
        check_range(self, "text_encoder_2_stop", 0)
        check_range(self, "ema_decay", 0, 0.999999)
        check_range(self, "ema_every", 1)
        if not any(getattr(self, name) for name in RATES[:3]):
            raise ValueError("All learning rates are 0, so nothing is trained; set learning_rate of Optimizer above 0.")
        if self.conv_learning_rate and not self.learning_rate:
            raise ValueError(
                "conv_learning_rate is set, but learning_rate is 0, so the UNet is not trained; set both of Optimizer "
                "above 0, or both to 0."
            )
        kind = OPTIMIZERS[self.name]
        if kind.estimates and self.lora_plus_ratio != 1:
            raise ValueError(
                f"lora_plus_ratio is {self.lora_plus_ratio:g}, but {self.name} estimates one step size for all parts "
                "of a layer; set lora_plus_ratio of Optimizer to 1, or choose adamw."
            )
        if kind.averages and self.ema_decay:
            raise ValueError(f"{self.name} averages the weights already; set ema_decay of Optimizer to 0.")
        if self.options.get("nesterov") and not self.options["momentum"]:
            raise ValueError("nesterov needs momentum; set momentum of Optimizer to 0.9, or nesterov to off.")
        if self.options.get("warmup_init") and not self.options["relative_step"]:
            raise ValueError(
                "warmup_init needs relative_step; set relative_step of Optimizer to on, or warmup_init to off."
            )

    @property
    def rates(self) -> dict[str, float]:
        """List the learning rates above 0, by name."""
        return {name: rate for name in RATES if (rate := getattr(self, name))}


def read_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of an optimizer's parameters; raises ValueError for unknown names and bad values."""
    settings = {setting.name: setting for setting in OPTIMIZERS[name].settings}
    if unknown := sorted(set(given) - set(settings)):
        raise ValueError(f"{name} has no parameter {unknown[0]!r}; it has {list(settings)}.")
    options = {}
    for key, setting in settings.items():
        kind, value = type(setting.default), given.get(key, setting.default)
        if isinstance(value, bool) != (kind is bool) or isinstance(value, str) != (kind is str):
            raise ValueError(f"{key} of {name} is {value!r}; it must be like {setting.default!r}.")
        if kind in (int, float) and not setting.low <= value <= setting.high:
            limit = f"at least {setting.low:g}"
            limit = limit if setting.high == math.inf else f"between {setting.low:g} and {setting.high:g}"
            raise ValueError(f"{key} of {name} is {value}; it must be {limit}.")
        if kind is int and value != int(value):
            raise ValueError(f"{key} of {name} is {value}; it must be a whole number.")
        options[key] = kind(value)
    return options
