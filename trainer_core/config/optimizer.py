"""How weights move."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from .base import Config, check_choices, check_range
from .optimizers import OPTIMIZERS

RATES = ("learning_rate", "text_encoder_learning_rate", "text_encoder_2_learning_rate", "conv_learning_rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """How weights move."""

    name: str = "adamw"  # one of OPTIMIZERS
    options: dict[str, Any] = field(default_factory=dict)  # its own parameters; those left out get its defaults
    learning_rate: float = 1e-4  # of the UNet's network
    text_encoder_learning_rate: float = 0.0  # 0 leaves the (first) text encoder as it is
    text_encoder_2_learning_rate: float = 0.0  # of the second one, in models that have two
    conv_learning_rate: float = 0.0  # of the UNet's convolutions larger than 1x1; 0 = as the rest of the UNet
    lora_plus_ratio: float = 1.0  # learning rate of the parts that begin with 0 over that of the others (LoRA+)
    max_grad_norm: float = 1.0  # 0 = no clipping
    max_grad_value: float = 0.0  # of each number of the gradient, after the norm; 0 = no clipping
    text_encoder_stop: int = 0  # the (first) text encoder stays as it is from then on; 0 = trains to the end
    text_encoder_2_stop: int = 0
    stop_unit: Literal["steps", "epochs"] = "steps"  # of the two above
    ema_decay: float = 0.0  # of the running average of the weights; 0 = none
    ema_every: int = 1  # steps between two updates of it
    ema_device: Literal["same", "cpu"] = "same"  # where it is kept
    ema_output: Literal["average", "plain"] = "average"  # what the outputs get, and what is validated

    def __post_init__(self) -> None:
        check_choices(self)
        if self.name not in OPTIMIZERS:
            raise ValueError(f"The optimizer is {self.name!r}; choose one of {list(OPTIMIZERS)}.")
        object.__setattr__(self, "options", read_options(self.name, self.options))
        for name in RATES:
            check_range(self, name, 0, 100)
        check_range(self, "lora_plus_ratio", 1, 1000)
        check_range(self, "max_grad_norm", 0)
        check_range(self, "max_grad_value", 0)
        check_range(self, "text_encoder_stop", 0)
        check_range(self, "text_encoder_2_stop", 0)
        check_range(self, "ema_decay", 0, 0.999999)
        check_range(self, "ema_every", 1)
        if not any(getattr(self, name) for name in RATES[:3]):
            raise ValueError("All learning rates are 0, nothing would be trained; set learning_rate above 0.")
        if self.conv_learning_rate and not self.learning_rate:
            raise ValueError(
                "conv_learning_rate is set but learning_rate is 0: the UNet is not trained; set both or none."
            )
        kind = OPTIMIZERS[self.name]
        if kind.estimates and self.lora_plus_ratio != 1:
            raise ValueError(
                f"lora_plus_ratio is {self.lora_plus_ratio:g}, but {self.name} finds its step size by itself, one for "
                "all parts of a layer; set it to 1, or choose adamw."
            )
        if kind.averages and self.ema_decay:
            raise ValueError(f"{self.name} averages the weights already; set ema_decay to 0.")
        if self.options.get("nesterov") and not self.options["momentum"]:
            raise ValueError("nesterov needs momentum; set momentum to 0.9, or nesterov off.")
        if self.options.get("warmup_init") and not self.options["relative_step"]:
            raise ValueError("warmup_init acts with relative_step only; switch that on, or warmup_init off.")

    @property
    def rates(self) -> dict[str, float]:
        """Return those learning rates that are not 0, by their names."""
        return {name: rate for name in RATES if (rate := getattr(self, name))}


def read_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return all of an optimizer's own parameters, defaults filled in; raises ValueError for what it does not know."""
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
