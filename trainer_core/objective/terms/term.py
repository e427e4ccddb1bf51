"""A term of the loss: what it needs, and what it adds. Whatever guides a run beside its pictures is one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...config import ConceptConfig
from ...data.plan import MicroBatch
from ..path import AffinePath

if TYPE_CHECKING:
    from ..passes import Pass

Strengths = tuple[tuple[int, MicroBatch], ...]


class Term:
    """One term; what a kind of term has no part in stays as it is here."""

    learns_pictures = True  # False: of the pictures only their noised latents count

    def check(self, captions: Collection[str]) -> None:
        """Raise ValueError if it does nothing for the captions that are trained."""

    def beside(self, caption: str) -> set[str]:
        """List the captions that a pass reads beside this one."""
        return set()

    def prompts(self, micro_batch: int | None = None) -> set[str]:
        """List what a micro-batch reads whatever its captions; None: what any of the run does."""
        return set()

    def share(self, concept: ConceptConfig, masked: bool) -> float:
        """Tell how much it acts on a sample of a concept, for terms that act on some; masked: trained by a mask."""
        return 0.0

    def strengths(self, micro_batch: MicroBatch) -> Strengths | None:
        """List the strengths of the network that a micro-batch is trained at, with its samples at each; None: 1."""
        return None

    def begin(self, path: AffinePath, seed: int, device: torch.device) -> None:
        """Build what it trains along, before the first step."""

    def target(self, target: Tensor, seen: Pass, prediction: Tensor) -> Tensor:
        """Move the target of a prediction, (B, C, *axes) both."""
        del seen, prediction
        return target

    def beside_the_target(self, prediction: Tensor, seen: Pass) -> Tensor | None:
        """Compute a loss that is added to that of each sample, (B,), before its weight; None for none."""
        return None

    def weigh(self, losses: Tensor, levels: Tensor) -> Tensor:
        """Weigh the losses of samples, (B,), for the backward pass alone: reports show them as they are."""
        return losses

    def apart(self, seen: Pass) -> Tensor | None:
        """Compute a weighted loss of each sample, (B,), that has a backward pass of its own; None for none."""
        return None

    @property
    def parameters(self) -> Sequence[Tensor]:
        """List what it trains along."""
        return ()

    def forget_gradients(self) -> None:
        """Drop the gradients of what it trains along, also those of passes that failed."""

    def update(self, loss_scale: float) -> None:
        """Update what it trains along, by gradients of a loss that was multiplied by loss_scale."""

    def state_dict(self) -> dict[str, Any]:
        """Collect everything needed to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
