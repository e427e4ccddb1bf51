"""Two cards for one model: some of its blocks lie on a second card, with all that is trained of them.

Each such block takes its inputs over to its card and gives its result back, so all else is as with one card. The cards
wait for each other: memory is shared out, and no step is faster.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..common.devices import computes, module_of
from ..config import MemoryConfig, setting
from .gradient_checkpointing import WHOLE, Unit
from .weights import LIES_ON, weight_bytes

HALF = 0.5  # of the bytes of blocks, where nobody has measured the free memory of both cards
_dry_run = threading.local()


def second_card(memory: MemoryConfig, device: torch.device) -> torch.device | None:
    """Find the second card of a run on `device`, None without one; a dry run has it on the same meta device.

    Raises ValueError, with the setting, for one that is not there, or is the first.
    """
    if not memory.second_card or device.type == "meta":
        return device if memory.second_card else None
    name, remedy = memory.second_card.strip(), f"clear {setting('memory.second_card')}"
    try:
        found = torch.device(device.type, int(name)) if name.isdecimal() else torch.device(name)
    except (RuntimeError, OverflowError):  # of torch: no device has such a name, or number
        raise ValueError(f"No device is called {name:.40}; {remedy} or write a number, as 1.") from None
    count = _count(found)
    if (found.index or 0) >= count:
        several = f"{count or 'no'} {found.type} device{'' if count == 1 else 's'}"
        raise ValueError(f"There is no second card {name}, as this machine has {several}; {remedy}.")
    if found.type == device.type and _number(found) == _number(device):
        raise ValueError(f"{name} is the card that the run is on; {remedy} or name another one.")
    return found


def check_second_card(memory: MemoryConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for a second card that cannot be used, or not with the other settings of memory."""
    if (card := second_card(memory, device)) is None:
        return
    if not computes(card, dtype):
        number = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"The second card {card} does not compute in {number}; set {setting('base_model.precision')} to float32."
        )
    if dtype == torch.float16 and card.type != device.type:
        raise ValueError(  # torch's loss scale reads what it copies between kinds too early
            f"float16 needs two cards of one kind, and {card} is none of {device.type}; set "
            f"{setting('base_model.precision')} to float32."
        )
    for name, plain in {
        "offload_weights": ("auto", "none"),
        "offload_activations": ("auto", "off"),
        "compile": (False,),
        "compute": ("exact",),
    }.items():
        if getattr(memory, name) not in plain:
            raise ValueError(
                f"{name} does not work with two cards for one model; set {setting(f'memory.{name}')} to "
                f"{'off' if name == 'compile' else plain[-1]}, or clear {setting('memory.second_card')}."
            )


def place(units: Iterable[Unit], memory: MemoryConfig, device: torch.device) -> None:
    """Choose the blocks of a frozen model on `device` that lie on the second card, if there is one.

    `keep_weights` and `to_devices` then bring them there. Further calls change nothing.
    """
    blocks = [unit for unit, least in units if least >= WHOLE]
    card = second_card(memory, device)
    if card is None or any(LIES_ON in block.__dict__ for block in blocks):
        return
    for block in _last(blocks, memory.second_card_share or HALF):
        for module in block.modules():
            module.__dict__[LIES_ON] = card
        block.register_forward_pre_hook(functools.partial(_enter, card), with_kwargs=True)
        block.register_forward_hook(functools.partial(_leave, device))


def bytes_beside(units: Iterable[Unit]) -> int:
    """Count the bytes of the blocks of a model that lie on the second card."""
    return sum(weight_bytes(unit) for unit, least in units if least >= WHOLE and LIES_ON in unit.__dict__)


@contextmanager
def counted_beside() -> Iterator[None]:
    """Count what a `with` block of a dry run allocates as of the second card."""
    _dry_run.beside = True
    try:
        yield
    finally:
        _dry_run.beside = False


def is_beside() -> bool:
    """Tell whether a dry run computes on the second card now."""
    return getattr(_dry_run, "beside", False)


def _last(blocks: list[nn.Module], share: float) -> list[nn.Module]:
    """List the last blocks whose bytes come nearest to a share of those of all; never all, and at least one."""
    sizes = [weight_bytes(block) for block in blocks]
    wanted = share * sum(sizes)
    first = min(range(1, len(blocks)), key=lambda i: abs(sum(sizes[i:]) - wanted), default=1)
    return blocks[first:]


def _count(device: torch.device) -> int:
    module = module_of(device)
    if module is None:
        return int(device.type == "cpu")
    return module.device_count() if module.is_available() else 0


def _number(device: torch.device) -> int:
    module = module_of(device)
    return device.index if device.index is not None else module.current_device() if module else 0


def _enter(card: torch.device, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    del block
    return tree_map_only(Tensor, functools.partial(_over, card, True), (args, kwargs))


def _leave(device: torch.device, block: nn.Module, args: Any, result: Any) -> Any:
    del block, args
    return tree_map_only(Tensor, functools.partial(_over, device, False), result)


def _over(device: torch.device, beside: bool, tensor: Tensor) -> Tensor:
    """Copy a tensor to a device; a dry run counts there from now on, and in the backward pass where it was."""
    return _Crossing.apply(tensor, beside) if tensor.is_meta else tensor.to(device)


class _Crossing(torch.autograd.Function):
    """The copy of a dry run, whose two cards are one meta device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, beside: bool) -> Tensor:
        """Go over, and take the tensor along."""
        ctx.beside, _dry_run.beside = beside, beside
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Go back, and take the gradient along."""
        _dry_run.beside = not ctx.beside
        return gradients[0].clone(), None
