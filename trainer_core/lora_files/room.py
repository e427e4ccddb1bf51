"""Memory for a layer's work, of what is free now: small factors of a stranger's file may have an endless product."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

import psutil
import torch

from ..common.cancel import look
from ..common.side_by_side import SOON
from .formats import FileLayer, delta_weight

MOST_NUMBERS = 2**29  # of a layer's change; the largest layers of models have half of that
# Bytes for each number of a change, at the peak of what is done with it.
CHECKED, DECOMPOSED, MERGED = 24, 64, 28  # read and written with its norm; decomposed; merged, for each LoRA
_promised: list[int] = []  # bytes for layers at work in other threads
_asking = Lock()


def numbers_of(layer: FileLayer) -> int | None:
    """Count the numbers of a layer's change; 0 where the weight decides, None for impossible shapes."""
    if layer.form.of_weight or layer.of_bias_alone:
        return 0
    empty = {part: torch.empty(tensor.shape, device="meta") for part, tensor in layer.tensors.items()}
    try:
        return delta_weight(FileLayer(source=layer.source, kind=layer.kind, tensors=empty, alpha=0.0)).numel()
    except (RuntimeError, IndexError, ValueError):  # torch and unpacking raise these for shapes that do not match
        return None


def check_layers(layers: Iterable[FileLayer], lora: str) -> None:
    """Raise ValueError for a layer whose tensors do not belong together, or whose change no memory here holds.

    lora: its name, for messages.
    """
    free = psutil.virtual_memory().available
    for layer in layers:
        numbers = numbers_of(layer)
        if numbers is None or numbers > MOST_NUMBERS:
            raise ValueError(f"{layer.source} in {lora} has impossible shapes; get the LoRA again.")
        if not layer.form.exact_rank:  # else it is never made whole
            _check(f"{layer.source} in {lora}", CHECKED * numbers, free)


@contextmanager
def room_for(what: str, needed: int) -> Iterator[None]:
    """Hold bytes of memory for a layer in a `with` block; wait where layers in other threads have them.

    what: the layer, for messages. Raises ValueError where there is less.
    """
    while not _promise(what, needed):
        look()
        time.sleep(SOON)
    try:
        yield
    finally:
        with _asking:
            _promised.remove(needed)


def _promise(what: str, needed: int) -> bool:
    """Promise memory to a layer; False where it has to wait for others, ValueError where there are none."""
    with _asking:
        free = psutil.virtual_memory().available - sum(_promised)
        if needed > free and _promised:
            return False
        _check(what, needed, free)
        _promised.append(needed)
        return True


def _check(what: str, needed: int, free: int) -> None:
    if needed > free:
        raise ValueError(
            f"{what} takes {needed / 1e9:.1f} GB of RAM, and {free / 1e9:.1f} GB are free; close other programs, or "
            "use another LoRA."
        )
