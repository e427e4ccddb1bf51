"""Preservation: beside its own caption a sample keeps the base model's prediction for another one."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ...config import ObjectiveConfig, RunConfig
from ...data.captions import replace_word
from ..loss import sample_losses
from ..passes import BLANK, Pass
from .term import Term


class Preservation(Term):
    """The prediction for other words, or for none, stays the frozen model's; both are ai-toolkit's.

    blank: no words. class: the trigger word, in any case and as whole words, gives way to its class (differential
    output preservation). Nothing is kept for a caption that stays the same: it is trained. Its backward pass comes
    after that of the loss, whose activations are freed by then, so that memory stays that of one pass.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def other(self, caption: str) -> str | None:
        """Find the caption whose prediction is kept beside this one's; None: none."""
        other, config = BLANK, self.config
        if config.preservation == "class":
            other = replace_word(caption, config.preservation_trigger, config.preservation_class)
        return None if other == caption else other

    def beside(self, caption: str) -> set[str]:
        """The caption that is kept."""
        other = self.other(caption)
        return set() if other is None else {other}

    def check(self, captions: Collection[str]) -> None:
        """Raise ValueError if no trained caption has another one."""
        if any(self.other(caption) is not None for caption in captions):
            return
        if self.config.preservation == "class":
            trigger, named = self.config.preservation_trigger, self.config.named("preservation_trigger")
            raise ValueError(
                f"No caption that is trained contains {trigger!r:.80}; set {named} to a word of the captions."
            )
        named = self.config.named("preservation")
        raise ValueError(f"No picture that is trained has a caption; set {named} to off.")

    def apart(self, seen: Pass) -> Tensor | None:
        """Compute how far each prediction for the other caption is from the frozen model's, of the whole picture."""
        others = [self.other(caption) for caption in seen.captions]
        if all(other is None for other in others):
            return None
        # Samples without another caption run along, so that the batch keeps its shape; `kept` drops their loss.
        captions = [own if other is None else other for own, other in zip(seen.captions, others, strict=True)]
        prediction, frozen = seen.again(captions)
        kept = torch.tensor([other is not None for other in others], device=seen.device).float()
        losses = sample_losses(prediction, frozen, loss=seen.loss, huber_c=seen.draws.huber_c)
        return losses * seen.draws.weights * kept * self.config.preservation_weight


def terms_of(config: RunConfig) -> list[Term]:
    """List the term of a run's settings, if any."""
    return [Preservation(config.objective)] if config.objective.preservation != "off" else []
