"""Optimizers by name, how their steps are limited and rounded, and averages of the weights."""

from .again import load_exactly
from .average import Ema, averaged
from .build import arguments, build_optimizer, check_optimizer, describe, remarks
from .step import learning_rate, limit_gradients, take_step

__all__ = [
    "Ema",
    "arguments",
    "averaged",
    "build_optimizer",
    "check_optimizer",
    "describe",
    "learning_rate",
    "limit_gradients",
    "load_exactly",
    "remarks",
    "take_step",
]
