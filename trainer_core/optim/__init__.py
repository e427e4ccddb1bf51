"""Optimizers and everything around their steps: schedule, clipping, rounding, averages, the noise scale.

A new optimizer is a row of `config/optimizer_table.py`, and a library of its own a function of `libraries.py`. A class
of our own is a module here, as `automagic.py`. A new shape of the schedule has its words in `config/scheduler.py` and
its formula in `schedule.py`.
"""

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
