"""Which blocks of a linked MODEL are compiled: those whose layers compute with their weights as they lie there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.ops
import torch
from torch import Tensor, nn

from ....trainer_core.memory import WHOLE
from ....trainer_core.models.base import Unit
from .frozen import COMPILED, FrozenLayer, is_known

CASTS = "comfy_cast_weights"  # attribute of ComfyUI's layers: whether they cast their weights at each use


@contextmanager
def as_they_lie(units: Sequence[Unit], dtype: torch.dtype, device: torch.device) -> Iterator[list[Unit]]:
    """Let layers of blocks read their weights without a cast that does nothing, and yield the blocks where all can.

    dtype, device: in and on which the MODEL computes. Layers that stream, patch or dequantize weights do so in code
    that cannot be traced; so does code of custom nodes.
    """
    chosen = [unit for unit in units if unit[1] >= WHOLE and _can(unit[0], dtype, device)]
    layers = {layer for block, _ in chosen for layer in block.modules()}
    casting = [layer for layer in layers if isinstance(layer, comfy.ops.CastWeightBiasOp) and getattr(layer, CASTS)]
    own = [CASTS in vars(layer) for layer in casting]  # else it is their class's
    for layer in casting:
        layer.__dict__[CASTS] = False
    for layer in layers:
        layer.__dict__[COMPILED] = True
    try:
        yield chosen
    finally:
        for layer, its_own in zip(casting, own, strict=True):
            if its_own:
                layer.__dict__[CASTS] = True
            else:
                del layer.__dict__[CASTS]
        for layer in layers:
            del layer.__dict__[COMPILED]


def _can(block: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether every layer of a block computes with its own tensors as they are."""
    return all(_plain(layer, dtype, device) for layer in block.modules())


def _plain(layer: Any, dtype: torch.dtype, device: torch.device) -> bool:
    if getattr(layer, "weight_function", ()) or getattr(layer, "bias_function", ()) or hasattr(layer, "_v"):
        return False
    if isinstance(layer, FrozenLayer) and not is_known(layer):
        return False
    held = [tensor for tensor in layer._parameters.values() if tensor is not None]
    return all(_as_it_is(tensor, dtype, device) for tensor in held)


def _as_it_is(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == dtype and tensor.device == device
