"""Frozen layers of ComfyUI's models: their weights in any precision, of which the backward pass keeps nothing.

A layer casts, dequantizes and patches its weight at each use, and autograd would keep each of these copies. Here the
backward pass asks the layer for its weight again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.ops
import torch
import torch.nn.functional as F
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn
from torch.nn.grad import conv1d_input, conv2d_input, conv3d_input

from ....trainer_core.common.axes import convolve
from ....trainer_core.memory import (
    HOLDS,
    MULTIPLIES_IN,
    enough_tokens,
    gradient_in_16_bits,
    linear_rounded,
    multiply_in,
    rounded,
)
from ....trainer_core.memory.products import input_gradient, linear
from ....trainer_core.networks.layers.dora import frozen_weight
from ....trainer_core.networks.layers.product import add_low_rank
from ....trainer_core.networks.layers.shape import geometry_of, is_complex, is_linear, weight_shape
from ....trainer_core.networks.network import WithDelta


def _transposed(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give the gradient of a transposed convolution's input, which is a convolution."""
    return lambda _, weight, gradient, *geometry: convolve(gradient, weight, None, *geometry)


CONVOLUTIONS: dict[type, Callable[..., Tensor]] = {  # and the gradient of their inputs
    nn.Conv1d: conv1d_input,
    nn.Conv2d: conv2d_input,
    nn.Conv3d: conv3d_input,
    nn.ConvTranspose1d: _transposed(F.conv1d),
    nn.ConvTranspose2d: _transposed(F.conv2d),
    nn.ConvTranspose3d: _transposed(F.conv3d),
}
ALL = tuple(CONVOLUTIONS)
KNOWN = ("comfy.ops", nn.Linear.__module__, nn.Conv2d.__module__)  # where methods come from whose mathematics are known
UNLIKE = 0.05  # of the norm of a product: rounding in half precision stays below it
LAYOUTS = {"int8": "TensorWiseINT8Layout", "float8": "TensorCoreFP8E4M3Layout"}  # of weights that are in 8 bits already
COMPILED = "_atelier_compiled"  # attribute of layers whose weights compiled code reads as they are
METHODS = ("forward", "forward_comfy_cast_weights", "_forward", "_conv_forward")


@contextmanager
def frozen_layers(model: nn.Module) -> Iterator[None]:
    """Keep nothing of a model's linear layers and convolutions for the backward pass, inside a `with` block."""
    found = (m for m in model.modules() if is_linear(m) or (isinstance(m, ALL) and not is_complex(m)))
    frozen = {m: _frozen(type(m)) for m in found}
    try:
        with of_classes(frozen):
            yield
    finally:
        multiply_in("", frozen)


@contextmanager
def of_classes(kinds: Mapping[nn.Module, type]) -> Iterator[None]:
    """Give modules other classes inside a `with` block.

    A class, no wrapper: names, hooks and weights of a module stay where ComfyUI looks for them, and recomputed blocks
    run the same code again.
    """
    own = {module: type(module) for module in kinds}
    for module, kind in kinds.items():
        module.__class__ = kind
    try:
        yield
    finally:
        for module, kind in own.items():
            module.__class__ = kind


class FrozenLayer(nn.Module):
    """Base class added to a frozen layer while gradients pass through it."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output; in training from the exact weight, where the layer would round its input."""
        if torch.compiler.is_compiling() and self.__dict__.get(COMPILED):  # the compiler saves no copies of weights
            return super().forward(*args, **kwargs)
        x = args[0] if args else None
        exact = isinstance(x, Tensor) and _exactly(self, x)
        forward = functools.partial(_output, self) if exact else super().forward
        if isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad:
            # The weight is no argument, so autograd does not save it.
            return _Frozen.apply(x, self, forward, args[1:], kwargs)
        return forward(*args, **kwargs)

    def forward_with(self, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Compute the layer's output plus scale * up(down(x)), and both gradients of x in one tensor."""
        compiled = torch.compiler.is_compiling() and self.__dict__.get(COMPILED)
        if not compiled and torch.is_grad_enabled() and _exactly(self, x):
            return _FrozenWith.apply(x, down, up, scale, self)
        # By name: self.forward is that of an attached network, which comes back to here.
        return add_low_rank(x, FrozenLayer.forward(self, x), down, up, scale, {})


@functools.cache
def _frozen(kind: type) -> type:
    return type(f"{kind.__name__}Frozen", (FrozenLayer, kind), {})


class _Frozen(torch.autograd.Function):
    """A frozen layer's output, whose backward pass reads the weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, forward: Any, args: tuple, kwargs: dict) -> Tensor:
        """Run the layer's own forward."""
        ctx.layer, ctx.shape, ctx.dtype = layer, x.shape, x.dtype
        ctx.again = None if is_known(layer) and not args and not kwargs else (forward, args, kwargs)
        if ctx.again:
            ctx.save_for_backward(x)
        output = forward(x, *args, **kwargs)
        return _no_view(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Compute the input's gradient."""
        if ctx.again is None:
            found = _input_gradient(ctx.layer, gradient, ctx.shape)
        else:
            found = _by_repeating(ctx.layer, gradient, ctx.saved_tensors[0], *ctx.again)
        return found.to(ctx.dtype), None, None, None, None


class _FrozenWith(torch.autograd.Function):
    """A frozen linear layer's output, to which a product of thin matrices is added in place, as to x's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, scale: float, layer: Any) -> Tensor:
        """Compute W x + b + scale * up(down(x)); the rank is the row count of thin matrices, as in `add_low_rank`."""
        ctx.layer, ctx.scale = layer, scale
        hidden = down @ _rows(x).t()  # (rank, tokens)
        ctx.save_for_backward(x, down, up, hidden)
        output = _output(layer, x).contiguous()  # so that its rows are a view of it
        _rows(output).addmm_(hidden.t(), up.t(), alpha=scale)
        return _no_view(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Compute the gradients of x, down and up."""
        x, down, up, hidden = ctx.saved_tensors
        above = _rows(gradient)
        inner = ctx.scale * (up.t() @ above.t())
        of_up = ctx.scale * (hidden @ above).t() if ctx.needs_input_grad[2] else None
        of_down = inner @ _rows(x) if ctx.needs_input_grad[1] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _input_gradient(ctx.layer, gradient, x.shape).contiguous()
            _rows(of_x).addmm_(inner.t(), down)
        return of_x, of_down, of_up, None, None


def _no_view(output: Tensor) -> Tensor:
    """Give an output that a model may write into: autograd refuses that for views, such as those of a linear layer."""
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


def _rows(x: Tensor) -> Tensor:
    """View (…, n) as a matrix; a copy where it is not contiguous."""
    return x.reshape(-1, x.shape[-1])


def is_known(layer: Any) -> bool:
    """Tell whether a layer is linear in its input by its weight alone, as torch's and ComfyUI's own classes are."""
    if "forward" in layer.__dict__ or not _computes_as_known(own_class(layer)):
        return False
    if isinstance(layer, ALL):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return hasattr(layer, "weight")


@functools.cache
def _computes_as_known(kind: type) -> bool:
    methods = [method for name in METHODS if (method := getattr(kind, name, None)) is not None]
    return all(method.__module__ in KNOWN for method in methods)


def own_class(layer: nn.Module) -> type:
    """Find a layer's class beneath those that training adds."""
    return next(kind for kind in type(layer).__mro__ if not issubclass(kind, (FrozenLayer, WithDelta)))


def _exactly(layer: Any, x: Tensor) -> bool:
    """Tell whether a layer is a known linear one, in training; under autocast it computes in another dtype than x's."""
    if not comfy.model_management.in_training or isinstance(layer, ALL) or not is_known(layer):
        return False
    return not torch.is_autocast_enabled(x.device.type)


@torch.no_grad()
def is_product(layer: Any) -> bool:
    """Tell whether a layer's output changes with its weight by a product of its input, as a LoRA assumes.

    A layer of an unknown class with plain weights is tried, on other weights for a moment.
    """
    weight = getattr(layer, "weight", None)
    if is_known(layer) or not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter):
        return True
    if not weight.is_floating_point():
        return True
    shape, draws = weight_shape(layer), torch.Generator().manual_seed(0)
    if tuple(weight.shape) != shape:
        return False
    side = (2,) if len(shape) == 2 else (1,)
    around = (8,) * (len(shape) - 2)
    x = torch.randn(*side, shape[1], *around, generator=draws).to(weight)
    change = torch.randn(shape, generator=draws).div(weight[0].numel() ** 0.5).to(weight)
    own = layer._parameters.get("weight")
    if own is None:  # computed from other tensors
        return True
    try:
        before = layer(x)
        layer._parameters["weight"] = nn.Parameter(weight + change, requires_grad=False)
        after = layer(x)
    finally:
        layer._parameters["weight"] = own
    expected = F.linear(x, change) if len(shape) == 2 else convolve(x, change, **geometry_of(layer))
    if not isinstance(after, Tensor) or after.shape != expected.shape:
        return False
    return bool((after - before - expected).float().norm() < UNLIKE * expected.float().norm())


def _output(layer: Any, x: Tensor) -> Tensor:
    """Compute a linear layer as the run asks: exactly, or in 8 bits where its input has tokens enough."""
    kind = layer.__dict__.get(MULTIPLIES_IN)
    if not kind or not enough_tokens(x):
        return _exact(layer, x)
    if _is_in(layer, kind):
        with torch.no_grad():  # ComfyUI's own forward in sampling, by the kernels of comfy-kitchen
            return own_class(layer).forward(layer, x.detach())
    scale = _input_scale(layer, x)
    x = x if scale is None else x * scale
    held = layer.__dict__.get(HOLDS)
    made_of = None if held is None else _made_of(layer, x)
    if held and made_of in held:
        return linear_rounded(x, held[made_of], None if layer.bias is None else layer.bias.to(x), kind)
    with _weights(layer, x.dtype, x.device) as (weight, bias):
        own = rounded(weight, kind)
        if held is not None and made_of is not None:
            held.clear()
            held[made_of] = own
        return linear_rounded(x, own, bias, kind)


def _made_of(layer: Any, x: Tensor) -> tuple[Any, ...] | None:
    """Tell a layer's weight from what a patch or a move makes of it; None where it may change unseen."""
    weight = layer.weight
    if getattr(layer, "weight_function", ()) or getattr(layer, "bias_function", ()) or weight.is_inference():
        return None
    return weight.data_ptr(), weight._version, weight.device, x.dtype, x.device


def _is_in(layer: Any, kind: str) -> bool:
    """Tell whether ComfyUI multiplies a layer's weight in this format, bit by bit as it is in its file."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, QuantizedTensor) or getattr(weight, "_layout_cls", "") != LAYOUTS[kind]:
        return False
    patched = getattr(layer, "weight_function", ()) or getattr(layer, "bias_function", ())
    return not (patched or layer._full_precision_mm or getattr(layer, "comfy_force_cast_weights", False))


def _exact(layer: Any, x: Tensor) -> Tensor:
    """Compute a linear layer from its exact weight, and its input as it is."""
    scale = _input_scale(layer, x)
    x = x if scale is None else x * scale
    with _weights(layer, x.dtype, x.device) as (weight, bias):
        return linear(x, weight, bias)


def _input_gradient(layer: Any, gradient: Tensor, shape: torch.Size) -> Tensor:
    """Compute the gradient of the input of a known layer."""
    with torch.no_grad(), _weights(layer, gradient.dtype, gradient.device) as (weight, _):
        for kind, of_input in CONVOLUTIONS.items():
            if isinstance(layer, kind):
                geometry = layer.stride, layer.padding, layer.dilation, layer.groups
                return of_input(shape, weight, gradient, *geometry)
        narrow = layer.__dict__.get(MULTIPLIES_IN) and enough_tokens(gradient)
        found = (gradient_in_16_bits if narrow else input_gradient)(gradient, weight)
        scale = _input_scale(layer, found)
        return found if scale is None else found * scale


def _input_scale(layer: Any, x: Tensor) -> Tensor | None:
    """Read the scale of each input that some quantized layers have."""
    scale = getattr(layer, "pre_quant_scale", None)
    return None if scale is None else scale.to(x)


def _by_repeating(layer: Any, gradient: Tensor, x: Tensor, forward: Any, args: tuple, kwargs: dict) -> Tensor:
    """Compute the gradient of the input of a layer of a custom node, whose forward runs once more for it."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        output = forward(x, *args, **kwargs)
    if not output.requires_grad:
        raise ValueError(
            f"Layers of the class {own_class(layer).__name__} in this MODEL give no gradients. Load the model from a "
            "file in bfloat16 or float8, by Load Diffusion Model."
        )
    return torch.autograd.grad(output, x, gradient)[0]


@contextmanager
def _weights(layer: Any, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Give a known layer's weight and bias as it computes with them: patched, dequantized, cast, on a device."""
    if _casts_itself(layer):
        yield layer.cast_bias_weight(dtype=dtype, device=device, bias_dtype=dtype)
        return
    if not isinstance(layer, comfy.ops.CastWeightBiasOp):
        bias = None if layer.bias is None else layer.bias.to(device, dtype)
        yield layer.weight.to(device, dtype), bias
        return
    weight, bias, stream = comfy.ops.cast_bias_weight(
        layer, dtype=dtype, device=device, bias_dtype=dtype, offloadable=True
    )
    try:
        yield weight.dequantize().to(dtype) if isinstance(weight, QuantizedTensor) else weight, bias
    finally:
        comfy.ops.uncast_bias_weight(layer, weight, bias, stream)


@frozen_weight.register(comfy.ops.CastWeightBiasOp)
@torch.no_grad()
def weight_of(layer: Any, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Read the weight of a layer of ComfyUI as the layer computes with it; device: by default the weight's own."""
    to: torch.device = device or layer.weight.device
    if not is_known(layer) and not _casts_itself(layer) and hasattr(layer, "in_features"):
        return _by_identity(layer, dtype, to)
    with _weights(layer, dtype, to) as (weight, _):
        scale = _input_scale(layer, weight)
        if scale is not None:
            return weight * scale
        borrowed = hasattr(layer, "_v") or to != layer.weight.device  # in a buffer that the next layer overwrites
        return weight.clone() if borrowed else weight


def _casts_itself(layer: Any) -> bool:
    """Tell whether a layer's own method casts its weight, as loaders of GGUF dequantize and patch theirs."""
    return callable(getattr(own_class(layer), "cast_bias_weight", None))


def _by_identity(layer: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Find the weight of a linear layer of a custom node from what it makes of unit vectors."""
    forward = own_class(layer).forward
    units = torch.eye(layer.in_features, dtype=dtype, device=device)
    return (forward(layer, units) - forward(layer, torch.zeros_like(units[:1]))).t()
