"""How weights move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Config, check_choices, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Config):
    """How weights move."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    learning_rate: float = 1e-4  # of the UNet's network
    text_encoder_learning_rate: float = 0.0  # 0 leaves the (first) text encoder as it is
    text_encoder_2_learning_rate: float = 0.0  # of the second one, in models that have two
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # 0 = no clipping
    text_encoder_stop: int = 0  # the (first) text encoder stays as it is from then on; 0 = trains to the end
    text_encoder_2_stop: int = 0
    stop_unit: Literal["steps", "epochs"] = "steps"  # of the two above

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "learning_rate", 0, 100)
        check_range(self, "text_encoder_learning_rate", 0, 100)
        check_range(self, "text_encoder_2_learning_rate", 0, 100)
        check_range(self, "weight_decay", 0)
        check_range(self, "beta1", 0, 0.999999)
        check_range(self, "beta2", 0, 0.999999)
        check_range(self, "eps", 0)
        check_range(self, "max_grad_norm", 0)
        check_range(self, "text_encoder_stop", 0)
        check_range(self, "text_encoder_2_stop", 0)
        if not self.learning_rate and not self.text_encoder_learning_rate and not self.text_encoder_2_learning_rate:
            raise ValueError("All learning rates are 0, nothing would be trained; set learning_rate above 0.")
