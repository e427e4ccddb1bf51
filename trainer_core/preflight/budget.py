"""Stand in for blocks under the compiler's budget in a dry run, which compiles nothing.

The budget is a share of what a block would keep beside its inputs, and the compiler keeps at most that. So what a block
keeps uncompiled is counted and that share of it held. In the backward pass the whole block is there once, as in a
compiled one, whose rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..memory import WHOLE, keep_activations
from ..memory.gradient_checkpointing import Recomputed, Unit


class Held(Recomputed):
    """A block's forward that is computed again, and beside its inputs holds a share of what it would keep."""

    def __init__(self, forward: Callable[..., Any], unit: nn.Module, share: float) -> None:
        super().__init__(forward)
        self._unit, self._share = unit, share

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; the block gives one tensor."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in (*_weights(self._unit), *_tensors((args, kwargs)))}
        size = round(self._share * kept_bytes(lambda: self.forward(*args, **kwargs), known))
        output = super().__call__(*args, **kwargs)
        return _Hold.apply(output, torch.empty(size, dtype=torch.uint8, device=output.device))


class _Hold(torch.autograd.Function):
    """Hold a tensor until the backward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, held: Tensor) -> Tensor:
        """Keep it."""
        ctx.save_for_backward(held)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on."""
        return gradients[0], None


def hold(units: Iterable[Unit], share: float) -> None:
    """Let whole blocks hold a share of what they would keep; may be called again with another share.

    share: 0 to 1; 1 lets blocks keep all again, as they are.
    """
    blocks = [unit for unit, least in units if least >= WHOLE]
    keep_activations(block for block in blocks if isinstance(block.__dict__.get("forward"), Held))
    for block in blocks if share < 1 else ():
        block.forward = Held(block.forward, block, share)


def kept_bytes(forward: Callable[[], Any], known: set[int]) -> int:
    """Count the bytes that a forward pass keeps for its backward pass; known: storages that do not count."""
    kept: dict[int, Any] = {}  # held, or an address would come again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor.detach()  # the tensor itself would be held by its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _weights(unit: nn.Module) -> Iterator[Tensor]:
    """List a block's frozen weights, those in RAM too, and what is trained on its layers."""
    for module in unit.modules():
        yield from module.parameters(recurse=False)
        yield from getattr(module.__dict__.get("kept"), "parts", ())
        if (delta := module.__dict__.get("delta")) is not None:
            yield from delta.parameters()
