"""The objective that a run minimises: noise levels, noise, targets, weights and the loss."""

from .objective import Batch, Draws, Objective, Place
from .path import Path
from .settings import check_objective, describe_levels, objective_remarks
from .timesteps import level_shares

__all__ = [
    "Batch",
    "Draws",
    "Objective",
    "Path",
    "Place",
    "check_objective",
    "describe_levels",
    "level_shares",
    "objective_remarks",
]
