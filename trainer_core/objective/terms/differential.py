"""Differential guidance: the target lies past itself, seen from the prediction (ai-toolkit)."""

from __future__ import annotations

from torch import Tensor

from ...config import RunConfig
from ..passes import Pass
from .term import Term


class DifferentialGuidance(Term):
    """The target v becomes p + s (v - p), with the prediction p as it is now; no gradient flows through the target."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def target(self, target: Tensor, seen: Pass, prediction: Tensor) -> Tensor:
        """Move the target away from the prediction."""
        del seen
        # That is prediction + scale (target - prediction).
        return prediction.detach().float().lerp(target.float(), self.scale)


def terms_of(config: RunConfig) -> list[Term]:
    """List the term of a run's settings, if any."""
    scale = config.objective.differential_guidance
    return [DifferentialGuidance(scale)] if scale else []
