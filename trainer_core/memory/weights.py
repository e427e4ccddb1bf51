"""Frozen weights in a smaller stored format (float8, int8, nf4), on the device or in RAM until they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from ..common.devices import kind_of
from ..config import setting
from .device import DTYPES
from .eight_bits import Rounded, enough_tokens, gradient_in_16_bits, linear_rounded, rounded
from .stream import Stream

NF4_BLOCK = 64  # values per scale
NEEDS_BITSANDBYTES = ("int8", "nf4")
QUANTIZED = ("float8", *NEEDS_BITSANDBYTES)
MULTIPLIES_IN = "multiplies_in"  # attribute of layers that another program holds
HOLDS = "holds_rounded"  # attribute of such layers: their rounded weight, by what it was made of
LIES_ON = "lies_on"  # attribute of modules that lie on another device than their model
IN_FILE = "file"  # of offload_weights: the weights of matrices stay in the model's file
SHARES = {"none": 0.0, "half": 0.5, "all": 1.0, IN_FILE: 1.0}


def check_weights(kind: str, name: str, device: torch.device) -> None:
    """Raise ValueError if the device or a missing package rules this stored format out; name: of the setting."""
    if kind == "float8" and not kind_of(device).float8:
        raise ValueError(
            f"{name} is float8, which {device.type} cannot store; set {setting(f'base_model.{name}')} to int8."
        )
    if kind in NEEDS_BITSANDBYTES:
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"{name} {kind} needs the package bitsandbytes; install it with ComfyUI's Python, or choose float8."
            ) from error


class Readable(Protocol):
    """A tensor in a file."""

    def read(self) -> Tensor:
        """Read it as it is stored, into new memory."""
        ...


class Kept:
    """One frozen weight in its stored format; it is unpacked to the dtype of the computation at each use.

    pack: float8 has one scale per row, int8 one per row (bitsandbytes' LLM.int8 form), nf4 one per 64 values (Dettmers
    et al. 2023, QLoRA); a plain dtype has none. compute: the format of 8 bits in which it is multiplied, "" for none;
    its numbers are then those of that format, wherever it is read.
    stored: the weight's tensor in a file, if it stays there; `weight` and its parts are then shapes alone.
    """

    def __init__(self, weight: Tensor, kind: str, stored: Readable | None = None) -> None:
        self.kind, self.shape, self.stored = kind, weight.shape, stored
        self.parts = _pack(weight, kind)
        self.memory_format = torch.contiguous_format  # that it takes when it is read from its file
        self.stream: Stream | None = None  # fetches the parts from RAM; None: they are on the device
        self.compute = ""
        self.rounding: list[float] | None = None  # gets the seconds of each rounding that `pack` would spare

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Unpack the weight in its own shape, on the device of the computation."""
        if self.compute in ("", self.kind):
            return _unpack(self._fetched(), self.kind, self.shape, dtype)
        values, scale = self.rounded()
        return values.to(dtype).mul_(scale)

    def rounded(self) -> Rounded:
        """Round the weight of a linear layer to the format that it is multiplied in."""
        parts = self._fetched()
        if self.kind == self.compute:
            values, scale = parts
            return Rounded(values, scale if self.kind == "float8" else (scale / 127)[:, None])
        began = time.perf_counter()
        found = rounded(_unpack(parts, self.kind, self.shape, torch.float32), self.compute)
        if self.rounding is not None:
            self.rounding.append(time.perf_counter() - began)
        return found

    def pack(self) -> None:
        """Store the weight in the format that it is multiplied in, for good; one in a file stays as it is."""
        if self.compute in ("", self.kind) or self.stored is not None:
            return
        values, scale = self.rounded()
        parts = (values, scale if self.compute == "float8" else (127 * scale).flatten())
        self.kind = self.compute
        if self.stream is None:
            self.parts = parts
        else:
            self.stream.replace(self, parts)

    def placed(self, read: Tensor) -> Tensor:
        """Give a tensor that was read from the file the shape and the dtype of this weight."""
        return read.reshape(self.shape).to(self.parts[0].dtype, memory_format=self.memory_format)

    def _fetched(self) -> tuple[Tensor, ...]:
        if self.stream is not None:
            return self.stream.fetch(self)  # pyright: ignore[reportAttributeAccessIssue]
        return self.parts if self.stored is None else (self.placed(self.stored.read()),)

    @property
    def size(self) -> int:
        """Count the stored bytes."""
        return sum(part.nbytes for part in self.parts)


def _pack(weight: Tensor, kind: str) -> tuple[Tensor, ...]:
    if kind in DTYPES:
        return (weight.to(DTYPES[kind]),)
    rows = weight.flatten(1).float()
    if kind == "float8":
        return rounded(rows, kind)
    count = weight.numel()
    if weight.is_meta:  # sizes alone, for estimates
        if kind == "int8":
            return rows.to(torch.int8), rows.new_empty(len(rows))
        return rows.new_empty(-(-count // 2), dtype=torch.uint8), rows.new_empty(-(-count // NF4_BLOCK))
    import bitsandbytes.functional as bitsandbytes

    if kind == "int8":
        values, scale, _ = bitsandbytes.int8_vectorwise_quant(rows if rows.device.type == "cpu" else rows.half())
        return values, scale
    values, state = bitsandbytes.quantize_4bit(rows, blocksize=NF4_BLOCK, quant_type="nf4")
    return values, cast(Tensor, state.absmax)


def _unpack(parts: tuple[Tensor, ...], kind: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if kind in DTYPES:
        return parts[0].to(dtype)
    values, scale = parts
    # The scale stays float32: rounded to dtype it would shift a whole row, and small ones would be 0 in float16.
    if kind == "float8":
        return values.to(dtype).mul_(scale).view(shape)
    if values.is_meta:
        return values.new_empty(shape, dtype=dtype)
    if kind == "int8":
        return values.to(dtype).mul_((scale / 127)[:, None]).view(shape)
    import bitsandbytes.functional as bitsandbytes

    # As one row of even length: for other shapes (3x3 convolutions) bitsandbytes compiles a CPU program each.
    row = torch.Size((1, 2 * values.numel()))
    state = bitsandbytes.QuantState(absmax=scale, shape=row, dtype=dtype, blocksize=NF4_BLOCK, quant_type="nf4")
    return bitsandbytes.dequantize_4bit(values, state).flatten()[: shape.numel()].view(shape)


class _Linear(torch.autograd.Function):
    """x W^T + b, whose backward pass unpacks W again instead of holding it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept, bias: Tensor | None) -> Tensor:
        ctx.kept = kept
        return F.linear(x, kept.weight(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grads[0] @ ctx.kept.weight(grads[0].dtype), None, None


class _Rounded(torch.autograd.Function):
    """x W^T + b in 8 bits; its gradient takes W as it was rounded, and 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept, bias: Tensor | None) -> Tensor:
        ctx.kept = kept
        return linear_rounded(x, kept.rounded(), bias, kept.compute)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        narrow = torch.bfloat16 if grads[0].dtype == torch.float32 else grads[0].dtype
        return gradient_in_16_bits(grads[0], ctx.kept.weight(narrow)), None, None


class _Conv2d(torch.autograd.Function):
    """A convolution whose backward pass unpacks its weight again instead of holding it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
        ctx.kept, ctx.geometry, ctx.shape = kept, geometry, x.shape
        return F.conv2d(x, kept.weight(x.dtype), bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        weight = ctx.kept.weight(grads[0].dtype)
        return conv2d_input(ctx.shape, weight, grads[0], *ctx.geometry), None, None, None


class _KeptLayer(nn.Module):
    """A layer with a `Kept` weight, which moves with the layer and never changes its dtype."""

    kept: Kept

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        if self.kept.stream is None and self.kept.stored is None:
            device = fn(torch.empty(0, device=self.kept.parts[0].device)).device
            self.kept.parts = tuple(part.to(device) for part in self.kept.parts)
        return self


class KeptLinear(_KeptLayer, nn.Linear):
    """A frozen linear layer with its weight in `kept`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute x W^T + b."""
        in_eight = self.kept.compute and enough_tokens(input)
        return cast(Tensor, (_Rounded if in_eight else _Linear).apply(input, self.kept, self.bias))


class KeptConv2d(_KeptLayer, nn.Conv2d):
    """A frozen convolution with its weight in `kept`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the convolution of x."""
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        return cast(Tensor, _Conv2d.apply(input, self.kept, self.bias, geometry))


def keep_weights(
    model: nn.Module,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    share: float = 0.0,
    stream: Stream | None = None,
    unquantized: tuple[str, ...] = (),
    linear: bool = False,
) -> None:
    """Move a frozen model to its devices, its weights stored as `kind`, a share of their bytes (0..1) in RAM.

    Everything but the weights of linear layers and convolutions is moved in `dtype`. May be called again with a larger
    share. stream: fetches the weights in RAM, and those that stay in a file. unquantized: prefixes of layers that no
    quantized format may hold. linear: keep every linear layer so that `multiply_in` can reach it. One layer is moved at
    a time.
    """
    kind = next(name for name, d in DTYPES.items() if d == dtype) if kind == "auto" else kind
    seen = away = 0.0
    for name, module in model.named_modules():
        plain = isinstance(module, (nn.Linear, nn.Conv2d)) and not isinstance(module, _KeptLayer)
        wanted = share or DTYPES.get(kind) != dtype or (linear and isinstance(module, nn.Linear))
        if plain and wanted and not (kind in QUANTIZED and name.startswith(unquantized)):
            _keep(module, kind, device_of(module, device))
        if isinstance(module, _KeptLayer):
            kept = module.kept
            if kept.stored is not None:
                kept.stream = stream
                continue
            seen += kept.size
            # layers in RAM alternate with others, so that copies overlap with computation
            if stream is not None and seen * share - away >= kept.size / 2:
                away += kept.size
                kept.parts = kept.parts if kept.stream else stream.host(kept.parts)
                kept.stream = stream
            elif kept.stream is None:
                kept.parts = tuple(part.to(device_of(module, device)) for part in kept.parts)
    to_devices(model, device, dtype)


def device_of(module: nn.Module, device: torch.device) -> torch.device:
    """Find where a module lies whose model is on `device`."""
    return module.__dict__.get(LIES_ON, device)


def to_devices(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move a model to `device`, what lies elsewhere to its own, and its numbers to a dtype.

    Not by the model's own `to`, which those of diffusers replace.
    """
    for module in model.modules():
        own = device_of(module, device)
        module._apply(lambda t, own=own: t.to(own, dtype if t.is_floating_point() else None), recurse=False)


def leave_in_file(model: nn.Module) -> list[Kept]:
    """Let every layer whose `stored` reads its weight from a file keep it there; list these weights."""
    left = []
    for layer in model.modules():
        if (stored := layer.__dict__.pop("stored", None)) is not None:
            kind = next(name for name, dtype in DTYPES.items() if dtype == layer.weight.dtype)
            left.append(_keep(layer, kind, torch.device("meta"), stored))
    return left


def multiply_in(kind: str, layers: Iterable[nn.Module]) -> None:
    """Let frozen linear layers multiply in a format of 8 bits from now on; "": exactly."""
    for layer in layers:
        if isinstance(layer, _KeptLayer):
            layer.kept.compute = kind
            continue
        release_rounded([layer])
        if kind:  # of another program, which holds its weight
            layer.__dict__[MULTIPLIES_IN] = kind
        else:
            layer.__dict__.pop(MULTIPLIES_IN, None)


def rounded_bytes(layer: Any) -> int:
    """Count what a layer of another program would hold of its weight, rounded; 0 where that is in 8 bits already."""
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, _KeptLayer) or type(weight) not in (Tensor, nn.Parameter) or weight.element_size() == 1:
        return 0
    return weight.numel() + len(weight) * torch.float32.itemsize


def hold_rounded(layers: Iterable[nn.Module], room: int) -> int:
    """Let layers that multiply in 8 bits hold their rounded weights, as many as so many bytes take; count the bytes.

    Others round their weight anew at each use, which gives the same bits.
    """
    held = 0
    for layer in layers:
        size = rounded_bytes(layer)
        if size and MULTIPLIES_IN in layer.__dict__ and held + size <= room:
            layer.__dict__[HOLDS] = {}
            held += size
    return held


def release_rounded(layers: Iterable[nn.Module]) -> None:
    """Let layers hold no rounded weights any more."""
    for layer in layers:
        layer.__dict__.pop(HOLDS, None)


@contextmanager
def releasing_rounded(model: nn.Module) -> Iterator[None]:
    """Let a model's layers hold no rounded weights inside a `with` block, and hold them anew after it."""
    holding = [layer for layer in model.modules() if HOLDS in layer.__dict__]
    release_rounded(holding)
    try:
        yield
    finally:
        for layer in holding:
            layer.__dict__[HOLDS] = {}


@contextmanager
def timing_rounding(layers: Iterable[nn.Module]) -> Iterator[list[float]]:
    """Yield a list that gets the seconds in which a CPU rounds weights that `pack` would round for good."""
    seconds: list[float] = []
    timed = [layer.kept for layer in layers if isinstance(layer, _KeptLayer)]
    for kept in timed:
        kept.rounding = seconds
    try:
        yield seconds
    finally:
        for kept in timed:
            kept.rounding = None


def pack(layers: Iterable[nn.Module]) -> None:
    """Store the weights of layers that this run holds in the format that they are multiplied in."""
    for layer in layers:
        if isinstance(layer, _KeptLayer):
            layer.kept.pack()


def kept_layers(model: nn.Module) -> list[Kept]:
    """List the `Kept` weights of a model, in the order of its layers."""
    return [m.kept for m in model.modules() if isinstance(m, _KeptLayer)]


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's parameters, buffers and kept weights on the device, without those in RAM."""
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return own + sum(kept.size for kept in kept_layers(model) if kept.stream is None)


def _keep(module: nn.Module, kind: str, device: torch.device, stored: Readable | None = None) -> Kept:
    """Replace a layer's weight by a `Kept` one; quantized formats are packed on `device`, which is faster."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    kept = Kept(weight if kind in DTYPES else weight.to(device), kind, stored)
    module.__class__ = KeptLinear if isinstance(module, nn.Linear) else KeptConv2d  # type: ignore[assignment]
    del module.weight
    module.__dict__["kept"] = kept
    return kept
