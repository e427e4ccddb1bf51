"""The gradients of a run's next step, and losses for predictions that a test makes up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lora_atelier.trainer_core import train
from lora_atelier.trainer_core.objective import Draws, Objective, Pass
from lora_atelier.trainer_core.objective.terms.guidance import GuidanceLoss
from lora_atelier.trainer_core.objective.terms.prior import MaskedPrior, PriorPrediction
from lora_atelier.trainer_core.objective.terms.term import Term
from lora_atelier.trainer_core.training.state import Run
from lora_atelier.trainer_core.training.step import Passes


class Enough(Exception):
    """The passes of a step are done."""


def gradients(run: Run, read: Callable[..., Any] | None = None) -> Passes:
    """Take the passes of the next step, and leave their gradients, unclipped, where the update would find them."""
    found: list[Passes] = []

    def stop(_: Run, passes: Passes, __: Tensor, *, moves: bool) -> None:
        del moves
        found.append(passes)
        raise Enough

    with mock.patch.multiple(train, measured=stop, limit_gradients=lambda *_: torch.zeros(())):
        try:
            train.step(run, read or run.reader(training=True))
        except Enough:
            run.updating = False
    return found[0]


class Told(Pass):
    """A pass whose predictions are given."""

    def __init__(self, draws: Draws, frozen: Tensor | None, blank: Tensor | None, objective: Objective) -> None:
        config = objective.config
        super().__init__(
            base=None,  # type: ignore[arg-type]
            network=None,
            draws=draws,
            captions=[""] * len(draws.noised),
            conditions=lambda *_: None,
            loss=config.loss,
            space=config.loss_on,
        )
        self.given, self.blank = frozen, blank

    def frozen(self, captions: Any = None) -> Tensor:
        """The frozen model's prediction."""
        assert self.given is not None
        return self.given

    def without_gradients(self, captions: Any = None) -> Tensor:
        """The prediction without a caption."""
        assert self.blank is not None
        return self.blank


class Target(Term):
    """A target of its own, in place of the pictures'."""

    def __init__(self, target: Tensor) -> None:
        self.own = target

    def target(self, target: Tensor, seen: Pass, prediction: Tensor) -> Tensor:
        """Its own."""
        return self.own


def loss_of(
    objective: Objective,
    prediction: Tensor,
    draws: Draws,
    frozen: Tensor | None = None,
    blank: Tensor | None = None,
    slid: Tensor | None = None,
) -> Tensor:
    """Compute the loss of a prediction with the terms that the given predictions stand for."""
    terms = [Target(slid)] if slid is not None else []
    terms += [GuidanceLoss(objective.config.guidance_loss)] if blank is not None else []
    terms += [PriorPrediction(), MaskedPrior()] if frozen is not None else []
    with mock.patch.object(objective, "terms", terms):
        return objective.loss(prediction, Told(draws, frozen, blank, objective))
