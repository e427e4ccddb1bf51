"""The frozen model's prediction as a target: of whole samples (prior prediction), and of what a mask leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.axes import like
from ...config import ConceptConfig, RunConfig
from ..loss import element_errors, masked_mean
from ..passes import Pass
from .term import Term


class PriorPrediction(Term):
    """Held samples learn what the frozen model predicts for them, whatever else moves the target."""

    def share(self, concept: ConceptConfig, masked: bool) -> float:
        """Act on the captions that keep their predictions."""
        return float(concept.keeps_prediction)

    def target(self, target: Tensor, seen: Pass, prediction: Tensor) -> Tensor:
        """Give held samples the frozen model's prediction as their target."""
        held = seen.draws.shares.get(PriorPrediction)
        if held is None:  # that spares a pass
            return target
        return torch.where(like(held, target) > 0, seen.compared(seen.frozen()), target)


class MaskedPrior(Term):
    """Outside of its mask a picture keeps what the frozen model predicts there (masked prior preservation)."""

    def share(self, concept: ConceptConfig, masked: bool) -> float:
        """Act on samples with a mask, by the weight of their concept."""
        return concept.masks.prior_weight if masked and concept.masks else 0.0

    def beside_the_target(self, prediction: Tensor, seen: Pass) -> Tensor | None:
        """Compute the error against the frozen model's prediction outside of the mask, times prior_weight."""
        draws, weights = seen.draws, seen.draws.shares.get(MaskedPrior)
        if weights is None or draws.mask is None:
            return None
        # Where the mask is 0 the picture says nothing, and the network would drift unseen.
        drift = element_errors(prediction, seen.compared(seen.frozen()), seen.loss, draws.huber_c)
        return weights * masked_mean(drift, 1 - draws.mask, draws.normalize)


def terms_of(config: RunConfig) -> list[Term]:
    """List the terms of a run's concepts, if any."""
    concepts = config.dataset.concepts
    held = any(concept.keeps_prediction for concept in concepts)
    masked = any(concept.masks is not None and concept.masks.prior_weight > 0 for concept in concepts)
    return [*([PriorPrediction()] if held else []), *([MaskedPrior()] if masked else [])]
