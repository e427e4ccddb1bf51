"""The objective that a run minimises: noise levels, noise, targets, weights and the loss."""

from .objective import Batch, Draws, Objective, Place
from .path import Path
from .preserved import check_preservation, other_captions
from .settings import check_objective, describe_levels, objective_remarks
from .slider import check_slider
from .timesteps import level_shares

__all__ = [
    "Batch",
    "Draws",
    "Objective",
    "Path",
    "Place",
    "check_objective",
    "check_preservation",
    "check_slider",
    "describe_levels",
    "level_shares",
    "objective_remarks",
    "other_captions",
]
