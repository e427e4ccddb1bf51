"""Estimate the peak memory of a training step by a dry run of the real code on tensors without data."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..common.axes import Size
from ..common.cancel import look
from ..common.devices import BLOCK
from ..config import OPTIMIZERS, MemoryConfig, OptimizerConfig
from ..data.plan import MicroBatch
from ..memory import counted_beside, is_beside, weight_bytes
from ..models import BaseModel
from ..networks import Network
from ..objective import Objective, Pass, draws_at, strengths
from ..objective.path import Mix
from ..optim import build_optimizer, is_matrix
from ..optim.noise_scale import compare, looked_at

SMALLEST_8BIT = 4096  # values; bitsandbytes keeps the state of smaller parameters in float32
ABSMAX_BLOCK = 256  # 8-bit values that share one float32 scale
NEGATIVE = MicroBatch(index=1, samples=(), bucket=(0, 0))  # at strength -1, where terms alternate
KNOWN_RESULTS = 20_000  # layouts kept, more than the operators of a few large models with different shapes

_results: dict[Any, Any] = {}  # layouts of operators' results on the meta device, by their arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The memory of a training step at its peak, in bytes."""

    weights: int  # frozen weights on the device
    network: int  # its tensors, the gradients of those trained, the state of the optimizer and of the noise scale
    activations: int  # the rest of the peak
    beside: int = 0  # the peak on the second card, which all others leave out

    @property
    def total(self) -> int:
        """The peak on the first card in bytes."""
        return self.weights + self.network + self.activations

    @property
    def gigabytes(self) -> str:
        """The peak as text, such as "6.1 GB"; 1 GB is 10^9 bytes."""
        second = f" and {self.beside / 1e9:.1f} GB on the second card" if self.beside else ""
        return f"{self.total / 1e9:.1f} GB{second}"

    def fits(self, free: float, beside: float, error: float = 0.0) -> bool:
        """Tell whether it fits into the free bytes of both cards, if it is larger than the step by a share `error`."""
        return self.total * (1 - error) <= free and self.beside * (1 - error) <= beside


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """The memory of models that encode pictures and captions while training, in bytes."""

    vae: int  # the autoencoder, and its copy in another precision
    texts: int  # frozen text encoders
    work: int  # of the autoencoder on the run's largest picture

    def beside(self, step: Estimate, *, moves: bool) -> Estimate:
        """Add these models to a step. moves: each is on the device only while it encodes, before the step's passes."""
        if moves:
            return replace(step, activations=max(step.activations, self.vae + self.work, self.texts))
        return replace(step, weights=step.weights + self.vae + self.texts, activations=max(step.activations, self.work))


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all living storages that a `with` block created, on any device.

    Storages from before count only after a call of `count`. block: bytes to which each storage is rounded up. Memory
    that a kernel frees before it returns is not seen. What a dry run computes on a second card counts there alone.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.now_beside = self.peak_beside = 0  # on the second card
        self._block = block
        self._live: dict[int, weakref.ref[Any]] = {}  # by address of the storage, as long as it lives

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch, which else tells its compiler at every operator to stay away: nothing here is compiled."""
        return False

    def count(self, tensors: Iterable[Tensor]) -> int:
        """Count the storages of tensors from now on, each once; return the bytes that this added."""
        before, beside = self.now + self.now_beside, is_beside()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self._live:
                size = -(-storage.nbytes() // self._block) * self._block
                self._live[address] = weakref.ref(storage, functools.partial(self._freed, address, size, beside))
                self._add(size, beside)
        self.peak, self.peak_beside = max(self.peak, self.now), max(self.peak_beside, self.now_beside)
        return self.now + self.now_beside - before

    def _add(self, size: int, beside: bool) -> None:
        self.now += 0 if beside else size
        self.now_beside += size if beside else 0

    def _freed(self, address: int, size: int, beside: bool, _: Any) -> None:
        del self._live[address]
        self._add(-size, beside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator and count the new memory of its results.

        On the meta device each operator runs once for the same shapes, as it is slow Python code there; a run's
        estimates, one for each setting of memory, share what it gave.
        """
        look()
        kwargs = kwargs or {}
        allocates, pure = _memory_of(func)
        if not allocates:  # a view, or in place
            return func(*args, **kwargs)
        taken = _tensors((args, kwargs))
        known = pure and taken and all([t.is_meta for t in taken])
        key = (func, torch.get_default_dtype(), _shapes((args, kwargs))) if known else None
        if key in _results:
            result = _empty(_results[key])
            self.count(_tensors(result))
            return result
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in taken}  # some schemas do not declare views
        found = _tensors(result)
        new = {storage._cdata: t for t in found if (storage := t.untyped_storage())._cdata not in given}
        self.count(new.values())
        whole = all(t.is_meta and t.nbytes == t.untyped_storage().nbytes() for t in found)
        if key is not None and whole and len(new) == len(found):
            if len(_results) >= KNOWN_RESULTS:
                _results.clear()
            _results[key] = _layout(result)
        return result


@functools.cache
def _memory_of(func: Any) -> tuple[bool, bool]:
    """Read from an operator's schema whether it can allocate its results, and whether it has no other effect."""
    arguments = any(value.alias_info for value in func._schema.arguments)
    returns = [bool(value.alias_info) for value in func._schema.returns]
    return not all(returns), not arguments and not any(returns)


def _shapes(value: Any) -> Any:
    """Build a key of all properties of the arguments that decide the shapes of an operator's results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_shapes(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _shapes(item)) for key, item in value.items()])
    return type(value), value  # 1, 1.0 and True are equal but do not give the same dtype


def _layout(result: Any) -> Any:
    """Describe a result so that `_empty` can rebuild it without data."""
    if isinstance(result, Tensor):
        return Tensor, (tuple(result.shape), result.stride(), result.dtype)
    if isinstance(result, list | tuple):
        return type(result), [_layout(item) for item in result]
    return None, result


def _empty(layout: Any) -> Any:
    kind, content = layout
    if kind is Tensor:
        return torch.empty_strided(content[0], content[1], dtype=content[2], device="meta")
    return content if kind is None else kind(_empty(item) for item in content)


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in the arguments or results of an operator."""
    if isinstance(value, Tensor):
        return [value]
    found = []
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            found += _tensors(item)
    return found


@contextmanager
def fused_attention() -> Iterator[None]:
    """Make scaled dot product attention on the meta device allocate as the fused GPU kernels do.

    torch's own version there allocates every attention weight. Other devices are not affected.
    """
    original = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.is_meta:
            return _FusedAttention.apply(query, key, value)
        return original(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


class _FusedAttention(torch.autograd.Function):
    """Allocate as flash attention does (Dao 2023, algorithms 1 and 2); (B, H, L, D) heads, D up to 256."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = _heads(query)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        batch, heads, length, width = query.shape
        rows = math.ceil(length / 128) * 128  # the kernel pads its own buffers to whole tiles
        workspace = [query.new_empty(batch, heads, rows, dtype=torch.float32)]
        if query.element_size() < 4:  # the gradient of q is summed up in float32 and rounded at the end
            workspace += [query.new_empty(batch, rows, heads, math.ceil(width / 32) * 32, dtype=torch.float32)]
        return _heads(query), _heads(key), _heads(value)


def _heads(like: Tensor) -> Tensor:
    """Allocate an empty tensor of the shape (B, H, L, D) in the memory order (B, L, H, D), as the kernels do."""
    return torch.empty_like(like.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestBatch:
    """The largest micro-batch of a run."""

    samples: int
    latents: tuple[int, ...]  # axes of its latents, behind the channels
    tokens: int  # of the conditioning, from `longest_batch`
    caption: str = "a caption"  # one for which every term acts
    masked: bool = False
    accumulates: bool = False  # gradients of an earlier backward pass exist already


class _OfCard:
    """What a step holds of the layers of a card."""

    def __init__(self, parts: Iterable[nn.Module], optimizer: OptimizerConfig | None) -> None:
        self.tensors = [t for part in parts for t in (*part.parameters(), *part.buffers())]
        self.trained = [t for t in self.tensors if t.requires_grad]
        self._state = optimizer_state(self.trained, optimizer or OptimizerConfig())

    def state(self) -> list[Tensor]:
        """Allocate the optimizer's state and a running average."""
        return [torch.empty(size, dtype=dtype, device="meta") for size, dtype in self._state]


def estimate_step(
    base: BaseModel,
    network: Network,
    objective: Objective,
    shape: LargestBatch,
    *,
    optimizer: OptimizerConfig | None = None,
    memory: MemoryConfig | None = None,
    weight_bytes: int | None = None,
    block: int = BLOCK,
) -> Estimate:
    """Estimate the memory of a training step, from the second step on.

    base: models on the meta device in their dtype, prepared as for the run (checkpointing and all else that changes the
    stored activations); they are frozen, otherwise unchanged. Its text encoders, if any, run in each step. network:
    built for them, on the meta device. objective: with the terms of the run. memory: as for the run; attention "math"
    allocates every attention weight. weight_bytes: frozen weights on the device, where the modules hold another number.
    block: bytes of the allocator's blocks.

    Encoding before the run and samples are not included. Validation needs less memory at every layer, as it stores
    nothing for a backward pass.
    """
    models = [base.denoiser.module, *(text.model for text in base.text.encoders)]
    for model in models:
        model.requires_grad_(False)
    if weight_bytes is None:
        weight_bytes = LiveBytes(block).count(t for m in models for t in (*m.parameters(), *m.buffers()))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    near, apart = network.split()
    cards = [_OfCard([*near, network.embeddings], optimizer), _OfCard(apart, optimizer)]
    looked = sum(looked_at(parameters))
    objective.path.at(torch.tensor([0]))  # its tables are made here, where nothing is counted
    live = LiveBytes(block)
    fused = nullcontext() if memory and memory.attention == "math" else fused_attention()
    with live, fused, network.attached():
        # From the second step on the optimizer's state exists. The extra memory of an update that is not fused is not
        # counted: activations, which usually took more, are freed by then.
        gradients = live.count(cards[0].trained)  # as large as their weights
        live.count(cards[0].tensors)  # what is not trained, too
        state = [*cards[0].state(), torch.empty(looked, device="meta")]  # also of the noise scale
        network_bytes = live.now + gradients
        with counted_beside():
            live.count(cards[1].tensors)
            state += cards[1].state()
        if shape.accumulates:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
        network.set_micro_batch(0)
        network.reverse(any(strength < 0 for strength, _ in strengths(objective.terms, NEGATIVE)))
        dry_run(pass_without_data(base, network, objective, shape, memory), objective)
        seen = torch.empty(looked, device="meta")  # of the gradients, for the noise scale
        compare(seen, 1, seen, 1)
        torch.nn.utils.clip_grad_norm_(parameters, math.inf)
        del state
    network.set_micro_batch(None)
    network.reverse(False)
    for parameter in parameters:
        parameter.grad = None
    return Estimate(
        weights=weight_bytes,
        network=network_bytes,
        activations=live.peak - network_bytes,
        beside=live.peak_beside,
    )


def pass_without_data(
    base: BaseModel, network: Network, objective: Objective, shape: LargestBatch, memory: MemoryConfig | None
) -> Pass:
    """Build the pass of a micro-batch on the meta device, with all that its terms may ask of a batch."""
    latents = torch.empty(shape.samples, base.latents.channels, *shape.latents, device="meta")
    each, levels = latents.new_empty(shape.samples), torch.empty(shape.samples, dtype=torch.int64, device="meta")
    affine = objective.path.kind == "affine"
    mix = Mix(objective.path.kind, each, each, each if affine else None, each if affine else None)
    drawn = draws_at(latents, torch.empty_like(latents), levels, mix)
    mask = latents.new_empty(shape.samples, 1, *shape.latents) if shape.masked else None
    drawn = replace(drawn, mask=mask, shares={type(term): each for term in objective.terms})
    conditions = base.conditions.without_data
    assert conditions is not None, "other models are measured"
    return Pass(
        base=base,
        network=network,
        draws=drawn,
        captions=[shape.caption] * shape.samples,
        conditions=lambda *_: conditions(shape.samples, shape.latents, shape.tokens),
        memory=memory,
        index=NEGATIVE.index,
        loss=objective.config.loss,
        space=objective.config.loss_on,
    )


def dry_run(seen: Pass, objective: Objective) -> None:
    """Ask a pass for all that a step asks of it, in the order of train.py, with its backward passes."""
    samples, prediction = len(seen.captions), seen.predict()
    losses = objective.loss(prediction, seen)
    loss = objective.weigh(losses, seen.draws).sum() / samples
    loss.backward()
    for apart in objective.apart(seen):
        more = apart.sum() / samples
        more.backward()


def estimate_encoding(
    base: BaseModel,
    vae: Any,
    texts: Sequence[Any],
    *,
    size: Size,
    dtype: torch.dtype,
    block: int = BLOCK,
) -> Encoding:
    """Estimate the memory of encoding while training. vae, texts: models on the meta device, the first in float32.

    size: (width, height) of the largest picture. dtype: in which it is encoded. Text encoders take little beside their
    weights, and nothing is counted for it.
    """
    weights = weight_bytes(vae) + (weight_bytes(vae) * dtype.itemsize // 4 if dtype != torch.float32 else 0)
    small, live = vae.to(dtype), LiveBytes(block)
    with live, fused_attention():
        base.autoencoder.encode(small, torch.empty(1, 3, *size[::-1], device="meta"))
    return Encoding(vae=weights, texts=sum(map(weight_bytes, texts)), work=live.peak)


def optimizer_state(parameters: Iterable[Tensor], config: OptimizerConfig) -> list[tuple[int, torch.dtype]]:
    """List count and dtype of the tensors of an optimizer's state and of a running average.

    Found by steps of the optimizer itself on one parameter of each shape. bitsandbytes may not run on this CPU; its
    state is two tensors (Lion: one) of 8 bits and their scales.
    """
    shapes: dict[tuple[int, ...], list[tuple[int, torch.dtype]]] = {}
    kept = []
    for parameter in parameters:
        shape, count = tuple(parameter.shape), parameter.numel()
        if shape not in shapes:
            shapes[shape] = _state_of(shape, config)
        kept += shapes[shape]
        if config.ema_decay and config.ema_device == "same":
            kept.append((count, torch.float32))
    return kept


def _state_of(shape: tuple[int, ...], config: OptimizerConfig) -> list[tuple[int, torch.dtype]]:
    """List count and dtype of the tensors of an optimizer's state for one float32 parameter."""
    count, kind = math.prod(shape), OPTIMIZERS[config.name]
    if values := kind.in_8bit:
        if count < SMALLEST_8BIT:
            return [(count, torch.float32)] * values
        return [(count, torch.uint8), (math.ceil(count / ABSMAX_BLOCK), torch.float32)] * values
    if kind.in_32bit and is_matrix(shape):
        return [(count, torch.float32)] * kind.in_32bit
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = build_optimizer(config, [{"params": [parameter], "lr": 1e-4}])
    for _ in range(2):  # some optimizers have no state after their first step
        optimizer.step()
    state = optimizer.state[parameter].values()
    return [(t.untyped_storage().nbytes() // t.itemsize, t.dtype) for t in _tensors(list(state))]
