"""A pass: one micro-batch of noised latents, and what the model predicts of it. Nobody else asks the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import MemoryConfig
from ..memory import kept_activations
from ..models import BaseModel
from .draws import Draws

BLANK = ""  # the caption of a prediction without one


@dataclass(kw_only=True, slots=True)
class Pass:
    """The predictions of a micro-batch, (B, C, *axes) each: with the network or without, for its captions or others.

    Training, validation, checks and estimates of memory all predict by it.
    """

    base: BaseModel
    network: Any  # attached to the base model; `networks.Network`
    draws: Draws
    captions: Sequence[str]  # of each sample
    conditions: Callable[[Sequence[str], bool], Any]  # of a batch, by captions, and whether the network may change them
    memory: MemoryConfig | None = None  # how activations are kept; None: as they come
    index: int = 0  # number of the micro-batch in the run
    loss: str = "mse"
    space: str = "prediction"  # in which predictions are compared
    _own: Any = None  # conditions of its captions
    _frozen: Tensor | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        """Where its latents lie."""
        return self.draws.noised.device

    def predict(self) -> Tensor:
        """Predict for its captions, with what the backward pass needs."""
        prediction, self._own = self._with_gradients(self.captions)
        return prediction

    def again(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Predict for other captions, with what the backward pass needs; also return what the frozen model predicts."""
        prediction, conditions = self._with_gradients(captions)
        return prediction, self._by_the_base(captions, conditions)

    def frozen(self, captions: Sequence[str] | None = None) -> Tensor:
        """Predict without the network, by default for its captions, and then only once."""
        if captions is not None:
            return self._by_the_base(captions)
        # Several terms may ask for the same prediction, which costs a whole pass.
        if self._frozen is None:
            self._frozen = self._by_the_base(self.captions, self._own)
        return self._frozen

    @torch.no_grad()
    def without_gradients(self, captions: Sequence[str] | None = None) -> Tensor:
        """Predict with the network, for nothing but the numbers; by default for its captions."""
        return self._ask(self.conditions(self.captions if captions is None else captions, True))

    def compared(self, prediction: Tensor) -> Tensor:
        """Turn a prediction into what the loss compares: itself, or the clean latents that follow from it."""
        return self.draws.mix.clean(prediction, self.draws.noised) if self.space == "x0" else prediction

    def _with_gradients(self, captions: Sequence[str]) -> tuple[Tensor, Any]:
        with self._kept():
            # Trained text encoders run here, so their activations are kept like the denoiser's.
            conditions = self.conditions(captions, True)
            return self._ask(conditions), conditions

    def _kept(self) -> Any:
        if self.memory is None:
            return nullcontext()
        models = (self.base.denoiser.module, *(text.model for text in self.base.text.encoders))
        return kept_activations(self.memory, models, self.device, written=self.base.denoiser.written is not None)

    @torch.no_grad()
    def _by_the_base(self, captions: Sequence[str], conditions: Any = None) -> Tensor:
        """Predict without the network; trained text encoders encode the captions again without it."""
        with self.network.detached():
            # Without trained text encoders the network has no part in the conditions.
            if conditions is None or self.base.text.encoders:
                conditions = self.conditions(captions, False)
            return self._ask(conditions)

    def _ask(self, conditions: Any) -> Tensor:
        return self.base.denoiser.predict(self.draws.noised, self.draws.levels, conditions)
