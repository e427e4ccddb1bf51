"""A model of two files, each an expert for its side of a boundary of noise: which levels are whose."""

from __future__ import annotations

import math
from typing import Any

from ....trainer_core.config import ConnectedConfig, setting
from ....trainer_core.models.architectures import Halves
from ....trainer_core.models.base import Side
from .noise import LEVELS

ROUNDING = 1e-9  # of a boundary times the number of levels


def sides_of(patcher: Any, halves: Halves | None, config: ConnectedConfig) -> tuple[Side, ...]:
    """Find the levels of a MODEL that is one expert alone; () where it predicts at all.

    halves: of its architecture. Raises ValueError where nothing tells the boundary.
    """
    if config.noise_range == "all":
        return ()
    low, high = _split(_boundary(patcher, halves, config))
    return (high if config.noise_range == "high" else low,)


def _boundary(patcher: Any, halves: Halves | None, config: ConnectedConfig) -> float:
    """Find the time from which on the noisier expert predicts: the person's, else that of the architecture."""
    if config.boundary:
        return config.boundary
    if halves is None:
        raise ValueError(
            f"No two experts are known of this MODEL's architecture; set {setting('connected.noise_range')} to all, or "
            f"{setting('connected.boundary')} to the share of timesteps from which on the high one predicts."
        )
    return halves.from_picture if getattr(patcher.model, "image_to_video", False) else halves.boundary


def _split(boundary: float) -> tuple[Side, Side]:
    """Split all levels at a time: those below it, and the others. Level k is the time (k + 1) / LEVELS."""
    first = min(max(math.ceil(boundary * LEVELS - ROUNDING) - 1, 1), LEVELS - 1)
    return Side(0, first - 1), Side(first, LEVELS - 1)
