"""Optimizers by name, how their steps are limited and rounded, and averages of the weights."""

from .average import Ema, averaged
from .build import build_optimizer, check_optimizer, describe, remarks
from .step import learning_rate, limit_gradients, take_step

__all__ = [
    "Ema",
    "averaged",
    "build_optimizer",
    "check_optimizer",
    "describe",
    "learning_rate",
    "limit_gradients",
    "remarks",
    "take_step",
]
