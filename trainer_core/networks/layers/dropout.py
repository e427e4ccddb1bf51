"""Dropout masks of network layers: pure functions of the run's seed, the micro-batch and the layer."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...common.rng import generator
from ...common.subset import current_subset

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Dropouts] = weakref.WeakValueDictionary()  # by their numbers


@dataclass(kw_only=True)
class Dropouts:
    """The dropouts of one layer; nothing is drawn while `micro_batch` is None, no rank left out while `times` is None.

    The same micro-batch always gives the same masks, so that gradient checkpointing recomputes the same activations.
    Captions that a text encoder reads one by one share the masks of their micro-batch. Samples that the denoiser
    computes one by one have those of their numbers in it.
    """

    elements: float  # chance to drop each activation after `down`
    ranks: float  # chance to drop each rank, per sample
    layers: float  # chance to drop the whole layer, per sample
    scaled: bool  # scale the remaining ranks up by 1 / (1 - ranks)
    seed: int
    name: str  # of the layer
    least_rank: int = 0  # that acts at the noisiest timestep; 0 = all act at all
    micro_batch: int | None = None  # counted over the run
    times: Tensor | None = None  # (B,) of its samples, 0 (clean) to 1 (noise)
    drawing: bool = field(
        init=False
    )  # all that compiled code may ask of the micro-batch: its number is another each time
    number: Tensor = field(init=False, repr=False, compare=False)  # by which compiled code names the layer

    def __post_init__(self) -> None:
        """Give the layer a number."""
        self.number = torch.tensor(next(_numbers), device="cpu")
        _layers[int(self.number)] = self
        self.begin(self.micro_batch)

    def begin(self, micro_batch: int | None) -> None:
        """Set the micro-batch whose masks are drawn from now on; None: none."""
        self.micro_batch, self.drawing = micro_batch, micro_batch is not None

    def sample_mask(self, x: Tensor) -> Tensor | None:
        """Draw for each sample of x (B, …) whether the layer acts on it: 0 or 1, (B,); None: on all."""
        return self._mask("layers", self.layers, (len(x),), x)

    def rank_mask(self, count: int, rank: int, like: Tensor) -> Tensor | None:
        """Draw the factor of each rank, (count, rank), in dtype and device of `like`; None: no dropout."""
        drawn = self._mask("ranks", self.ranks, (count, rank), like)
        return drawn if drawn is None or not self.scaled else drawn / (1 - self.ranks)

    def hidden_mask(self, x: Tensor, rank: int, positions: int) -> Tensor | None:
        """Draw the factor of the activations between down and up, (B, rank, positions or 1); None: no dropout.

        One mask for all three dropouts: in B (m * A x), m drops samples, ranks and single activations.
        """
        mask = self.rank_mask(len(x), rank, x)
        mask = None if mask is None else mask[:, :, None]
        if (drawn := self.sample_mask(x)) is not None:
            mask = drawn[:, None, None] if mask is None else mask * drawn[:, None, None]
        if (drawn := self._mask("elements", self.elements, (len(x), rank, positions), x)) is not None:
            drawn = drawn / (1 - self.elements)
            mask = drawn if mask is None else mask * drawn
        if (acting := self.timestep_mask(x, rank)) is not None:
            mask = acting[:, :, None] if mask is None else mask * acting[:, :, None]
        return mask if mask is None else mask.expand(-1, rank, -1)

    def timestep_mask(self, x: Tensor, rank: int) -> Tensor | None:
        """Compute which ranks act on each sample of x (B, …): 0 or 1, (B, rank); None: all.

        The first floor((rank - least) (1 - t)) + least at time t: more as there is less noise (T-LoRA, Soboleva et al.
        2025, section 3.2).
        """
        if not self.least_rank or self.times is None:
            return None
        return _acting(self, x, rank)

    def _mask(self, kind: str, chance: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        if not chance or not self.drawing:
            return None
        if torch.compiler.is_compiling():
            return _drawn(self.number, kind, chance, shape, like.detach())
        return _draw(self, kind, chance, shape, like)


def _acting(dropouts: Dropouts, like: Tensor, rank: int) -> Tensor | None:
    """Compute the mask of `Dropouts.timestep_mask`, in dtype and device of `like`; None for an input of no sample."""
    assert dropouts.times is not None
    times, subset = dropouts.times, current_subset()
    times = times if subset is None else times[list(subset.samples)]
    if len(like) % len(times):
        return None
    least = min(dropouts.least_rank, rank)
    acting = ((rank - least) * (1 - times)).floor() + least
    mask = torch.arange(rank, device=times.device) < acting[:, None]
    return mask.to(like).repeat_interleave(len(like) // len(times), 0)


def _draw(dropouts: Dropouts, kind: str, chance: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """Draw a mask of 0 with probability `chance`, else 1; on the device, since masks are as large as activations."""
    assert dropouts.micro_batch is not None
    if like.is_meta:  # a dry run
        return torch.empty(shape, dtype=like.dtype, device="meta")
    draws = generator(dropouts.seed, f"dropout/{kind}/{dropouts.name}", dropouts.micro_batch, device=like.device)
    subset, (rows, *rest) = current_subset(), shape
    if subset is None or rows % len(subset.samples):
        drawn = torch.rand(shape, generator=draws, device=like.device)
    else:  # of the whole micro-batch, where each sample may have several rows
        drawn = torch.rand(subset.count, rows // len(subset.samples), *rest, generator=draws, device=like.device)
        drawn = drawn[list(subset.samples)].reshape(shape)
    return (drawn >= chance).to(like.dtype)


# One operator to the compiler. The layer is the value of a tensor, so that all blocks of a kind share one program, and
# each new micro-batch the same one. Two copies of this module in a process have an operator each.
@torch.library.custom_op(
    f"lora_atelier::draw_{re.sub(r'[^0-9a-zA-Z]', '_', __name__)}",
    mutates_args=(),
    schema="(Tensor number, str kind, float chance, SymInt[] shape, Tensor like) -> Tensor",
)
def _drawn(number: Tensor, kind: str, chance: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """Draw a mask of the layer of a number."""
    return _draw(_layers[int(number)], kind, chance, shape, like)


@_drawn.register_fake
def _of_its_shape(number: Tensor, kind: str, chance: float, shape: Sequence[int], like: Tensor) -> Tensor:
    """Give a mask's shape, dtype and device."""
    del number, kind, chance
    return like.new_empty(shape)
