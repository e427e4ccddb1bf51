"""Copy between RAM and a GPU while it computes: weights ahead of their use, activations until the backward pass."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..common.devices import module_of
from .written import stay, stayed

AHEAD = 3  # weights in transfer at a time
WORTH_MOVING = 1 << 20  # bytes; smaller activations stay on the device
UNDER_WAY = 256 << 20  # bytes of activations in transfer to RAM, whose memory is not free yet


Use = tuple["Streamable", bool]  # a weight, and whether in a backward pass


class Streamable(Protocol):
    """Anything with tensors in RAM, or one in a file, that `Stream` can fetch."""

    parts: tuple[Tensor, ...]
    stored: Any  # reads a tensor from a file; None: `parts` are in RAM

    def placed(self, read: Tensor) -> Tensor:
        """Give a tensor that was read from the file the shape and the dtype of the part."""
        ...


class Stream:
    """Copies weights to the device ahead of their use, in the order in which the previous step used them.

    The order is recorded as weights are used: what follows two uses. One alone would not do, as a recomputed block uses
    each weight twice in the backward pass, for its result and for its gradient. A wrong guess costs a wait and a copy.
    Nothing is copied back: frozen weights stay in RAM as they are. Those in a file are read by a thread of its own, so
    that the disk works while the device computes; no more of them are in RAM than are expected.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = _streams(device)
        self._side = self._streams.Stream(device) if self._streams else None
        self.waited = 0.0  # seconds in which the computation waited for a file
        self._reader: ThreadPoolExecutor | None = None  # one thread, as a disk serves one best
        self._arriving: dict[Streamable, tuple[tuple[Tensor, ...] | Future[Tensor], Any]] = {}
        self._following: dict[tuple[Use | None, Use], Use] = {}
        self._used: deque[Any] = deque()
        self._last: tuple[Use | None, Use] | None = None  # the last two uses

    def host(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Move tensors to RAM, pinned where that lets copies overlap with computation."""
        if self.device.type == "meta":  # a dry run
            return parts
        return tuple(_pinned(part.cpu()) if self._side else part.cpu() for part in parts)

    def replace(self, kept: Streamable, parts: tuple[Tensor, ...]) -> None:
        """Give a weight other tensors, which wait in RAM; none of the old ones is on its way any more."""
        self._arriving.pop(kept, None)
        kept.parts = self.host(parts)

    @torch.compiler.disable  # transfers are no part of the computation
    def fetch(self, kept: Streamable) -> tuple[Tensor, ...]:
        """Fetch a weight's tensors to the device, and start copying the weights that are expected next."""
        # The number of the backward pass that runs, -1 outside of one.
        use = (kept, torch._C._current_graph_task_id() != -1)
        if self._last is not None:
            self._following[self._last] = use
        self._last = (self._last and self._last[1], use)
        parts, arrived = self._arriving.pop(kept, None) or self._send(kept)
        if isinstance(parts, Future):
            parts = self._read(kept, parts)
        if self._side:
            current = self._streams.current_stream(self.device)
            if arrived is not None:
                current.wait_event(arrived)
            # Its memory belongs to the side stream: the allocator must wait for this use, too.
            for part in parts:
                part.record_stream(current)
            # The CPU may be far ahead of the GPU: wait, so that the memory of used weights is free for the next ones.
            self._used.append(current.record_event())
            if len(self._used) > 2 * AHEAD:
                self._used.popleft().synchronize()
        last, expected = self._last, []
        while len(expected) < AHEAD and (following := self._following.get(last)) is not None:
            expected.append(following[0])
            last = (last[1], following)
        # A wrong guess: drop the copy, or its memory would wait for a use that may never come.
        for other in [other for other in self._arriving if other not in expected]:
            dropped, _ = self._arriving.pop(other)
            if isinstance(dropped, Future):
                dropped.cancel()
        if kept in expected:
            self._arriving[kept] = parts, arrived
        for other in expected:
            if other not in self._arriving:
                self._arriving[other] = self._send(other)
        return parts

    def _read(self, kept: Streamable, reading: Future[Tensor]) -> tuple[Tensor, ...]:
        """Wait for a tensor from a file, and copy it to the device."""
        began = time.perf_counter()
        read = reading.result()
        self.waited += time.perf_counter() - began
        placed = kept.placed(read)
        return ((_pinned(placed) if self._side else placed).to(self.device, non_blocking=True),)

    def _send(self, kept: Streamable) -> tuple[tuple[Tensor, ...] | Future[Tensor], Any]:
        if self.device.type == "meta":
            return tuple(torch.empty_like(part) for part in kept.parts), None
        if kept.stored is not None:
            self._reader = self._reader or ThreadPoolExecutor(1, "weights from a file")
            return self._reader.submit(kept.stored.read), None
        with self._streams.stream(self._side) if self._side else nullcontext():
            parts = tuple(part.to(self.device, non_blocking=True) for part in kept.parts)
        return parts, self._side.record_event() if self._side else None


def _streams(device: torch.device) -> Any:
    """Find the module of torch with a device's streams; None where copies cannot overlap with computation."""
    module = module_of(device)
    return module if hasattr(module, "Stream") else None


def _kept_parts(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from getattr(module.__dict__.get("kept"), "parts", ())


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()


@contextmanager
def activations_in_ram(
    device: torch.device, models: Iterable[nn.Module], least: int = WORTH_MOVING, *, written: bool = False
) -> Iterator[None]:
    """Keep the activations that are saved for the backward pass in RAM, for the length of a `with` block.

    Weights of `models`, and tensors of fewer than `least` bytes, stay where they are. written: the models may write
    into what is saved, so that it is copied at once.
    """
    weights = [tensor for model in models for tensor in (*model.parameters(), *_kept_parts(model))]
    frozen = {tensor.untyped_storage()._cdata for tensor in weights}
    streams = _streams(device)
    side = streams.Stream(device) if streams else None
    leaving: deque[tuple[Any, int]] = deque()  # (event when they are in RAM, bytes)

    def pack(tensor: Tensor) -> Any:
        if tensor.nbytes < least or tensor.untyped_storage()._cdata in frozen:
            return stay(tensor)
        if tensor.is_meta:  # a dry run: only the shape counts
            return (None, (tensor.shape, tensor.stride(), tensor.dtype))
        if side is None:
            return (tensor.clone(), None)
        if written:
            tensor = tensor.clone()
        # The GPU may not have computed the activation yet.
        side.wait_stream(streams.current_stream(device))
        with streams.stream(side):
            away = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            # Once nobody holds the activation, its memory would be used again while the copy reads it.
            tensor.record_stream(side)
        left = side.record_event()
        leaving.append((left, tensor.nbytes))
        while len(leaving) > 1 and sum(size for _, size in leaving) > UNDER_WAY:  # the CPU is ahead of the copies
            leaving.popleft()[0].synchronize()
        return (away, left)

    def unpack(saved: Any) -> Tensor:
        if type(saved) is not tuple:
            return stayed(saved)
        away, left = saved
        if away is None:
            shape, stride, dtype = left
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if left is None:
            return away
        streams.current_stream(device).wait_event(left)
        return away.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
