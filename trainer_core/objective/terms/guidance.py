"""The guidance loss: a guidance-distilled model stays where its guidance has put it (kohya-ss/musubi-tuner#1045)."""

from __future__ import annotations

from torch import Tensor

from ...config import RunConfig
from ..passes import BLANK, Pass
from .term import Term


class GuidanceLoss(Term):
    """The target v becomes u + s (v - u), with the prediction u without a caption, by the model as it is now."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def prompts(self, micro_batch: int | None = None) -> set[str]:
        """The empty caption."""
        return {BLANK}

    def target(self, target: Tensor, seen: Pass, prediction: Tensor) -> Tensor:
        """Move the target away from the prediction without a caption."""
        blank = seen.without_gradients([BLANK] * len(seen.captions))
        # That is blank + scale (target - blank).
        return blank.float().lerp(target, self.scale)


def terms_of(config: RunConfig) -> list[Term]:
    """List the term of a run's settings, if any."""
    return [GuidanceLoss(config.objective.guidance_loss)] if config.objective.guidance_loss else []
