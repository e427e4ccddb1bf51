"""Optimizers and everything around their steps: schedule, clipping, rounding, averages, the noise scale."""

from .average import Ema, averaged
from .build import arguments, averages, build_optimizer, check_optimizer, describe, estimates, is_matrix, remarks
from .restore import check_shapes, load_exactly
from .step import learning_rate, limit_gradients, sum_of_norms

__all__ = [
    "Ema",
    "arguments",
    "averaged",
    "averages",
    "build_optimizer",
    "check_optimizer",
    "check_shapes",
    "describe",
    "estimates",
    "is_matrix",
    "learning_rate",
    "limit_gradients",
    "load_exactly",
    "remarks",
    "sum_of_norms",
]
