"""What is left out of a layer while it learns: a pure function of the run's seed, the micro-batch and the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.rng import generator


@dataclass(kw_only=True, slots=True)
class Dropouts:
    """The dropouts of one layer; nothing is drawn while `micro_batch` is None.

    The same micro-batch gives the same masks however often it is asked, so that what is computed again for the
    backward pass is the same. Captions that a text encoder reads one by one share the masks of their micro-batch.
    """

    elements: float  # chance of each number after `down`
    ranks: float  # chance of each rank, per sample
    layers: float  # chance of the whole layer, per sample
    scaled: bool  # ranks that stay act as much stronger as others are left out
    seed: int
    name: str  # of the layer
    micro_batch: int | None = None  # running over the run

    def samples(self, x: Tensor) -> Tensor | None:
        """Return 0 or 1 for each sample (B,): where the layer changes anything; None: in all. x: (B, …)."""
        return self._kept("layers", self.layers, (len(x),), x)

    def rank_mask(self, count: int, rank: int, like: Tensor) -> Tensor | None:
        """Return what multiplies each rank, (count, rank), None: nothing; dtype and device are those of `like`."""
        kept = self._kept("ranks", self.ranks, (count, rank), like)
        return kept if kept is None or not self.scaled else kept / (1 - self.ranks)

    def hidden_mask(self, x: Tensor, rank: int, positions: int) -> Tensor | None:
        """Return what multiplies the numbers between down and up, (B, rank, positions or 1), None: nothing.

        All three dropouts in one: B (m * A x) leaves out what m leaves out of the delta.
        """
        mask = self.rank_mask(len(x), rank, x)
        mask = None if mask is None else mask[:, :, None]
        if (kept := self.samples(x)) is not None:
            mask = kept[:, None, None] if mask is None else mask * kept[:, None, None]
        if (kept := self._kept("elements", self.elements, (len(x), rank, positions), x)) is not None:
            kept = kept / (1 - self.elements)
            mask = kept if mask is None else mask * kept
        return mask if mask is None else mask.expand(-1, rank, -1)

    def _kept(self, kind: str, chance: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        if not chance:
            return None
        return _draw(self, kind, chance, shape, like)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # it is of the run, not of the program: a new micro-batch is no new program
def _draw(dropouts: Dropouts, kind: str, chance: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Return 0 with a chance, else 1; on the device, since masks are as large as what they act on."""
    if dropouts.micro_batch is None:
        return None
    if like.is_meta:  # a dry run
        return torch.empty(shape, dtype=like.dtype, device="meta")
    draws = generator(dropouts.seed, f"dropout/{kind}/{dropouts.name}", dropouts.micro_batch, device=like.device)
    return (torch.rand(shape, generator=draws, device=like.device) >= chance).to(like.dtype)
