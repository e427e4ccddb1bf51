"""Compare forms of a LoRA layer on every linear and convolution shape of Stable Diffusion 1.5 at 256 px.

Only the LoRA's own work is timed: a layer that hands out ready tensors replaces the frozen one, and its time is
subtracted. `LoraLayer` is the form in use; the others are here so that the comparison can be repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from lora_atelier.bench.bases import matrices_of
from lora_atelier.trainer_core.networks.layers.lora import LoraLayer

RANK = 8
KINDS = ("linear", "1x1", "3x3", "3x3, stride 2")

Form = Callable[[LoraLayer, Tensor, Tensor], Tensor]  # (layer, x, base output) -> output


def kept(layer: LoraLayer, x: Tensor, y: Tensor) -> Tensor:
    """Compute the shipped layer."""
    return layer(x, y)


def out_of_place(layer: LoraLayer, x: Tensor, y: Tensor) -> Tensor:
    """Add up(down(x)) as peft does."""
    if layer.geometry:
        return y + F.conv2d(F.conv2d(x, layer.down, **layer.geometry), layer.up) * layer.scale
    return y + F.linear(F.linear(x, layer.down), layer.up) * layer.scale


def into_view(layer: LoraLayer, x: Tensor, y: Tensor) -> Tensor:
    """Write into the linear layer's output through a view; `up` of a convolution as a matrix product."""
    if layer.geometry:
        hidden = F.conv2d(x, layer.down, **layer.geometry).flatten(2)
        up = layer.up.flatten(1)[None].expand(len(x), -1, -1)
        return torch.baddbmm(y.flatten(2), up, hidden, alpha=layer.scale).view_as(y)
    hidden = F.linear(x, layer.down).view(-1, layer.rank)
    y.view(-1, y.shape[-1]).addmm_(hidden, layer.up.t(), alpha=layer.scale)
    return y


def taps(layer: LoraLayer, x: Tensor, y: Tensor) -> Tensor:
    """Compute a 3x3 `down` as one product to 9 x rank channels, then fold these onto each other; stride 1 only."""
    if not layer.geometry or layer.down.shape[2] == 1 or layer.geometry["stride"] != (1, 1):
        return layer(x, y)
    side = layer.down.shape[2]
    rows = layer.down.flip(2, 3).permute(0, 2, 3, 1).reshape(1, -1, layer.down.shape[1]).expand(len(x), -1, -1)
    hidden = F.fold(torch.bmm(rows, x.flatten(2)), x.shape[2:], side, padding=side // 2)
    return y.add_(F.conv2d(hidden, layer.up), alpha=layer.scale)


class ThinRows(torch.autograd.Function):
    """The products of a linear LoRA by hand, forward and backward, written into the base output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Add scale * up @ down @ x."""
        rows = x.reshape(-1, x.shape[-1])
        hidden = down @ rows.t()
        ctx.save_for_backward(rows, hidden, down, up)
        ctx.scale, ctx.shape = scale, x.shape
        y = y.detach()  # not a view to autograd any more, still the same memory
        y.view(-1, y.shape[-1]).addmm_(hidden.t(), up.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of base output, x, down and up."""
        rows, hidden, down, up = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        grad_hidden = (up.t().contiguous() @ flat.t()).mul_(ctx.scale)
        grad_x = (grad_hidden.t() @ down).view(ctx.shape) if ctx.needs_input_grad[1] else None
        return grad, grad_x, grad_hidden @ rows, (hidden @ flat).t() * ctx.scale, None


def by_hand(layer: LoraLayer, x: Tensor, y: Tensor) -> Tensor:
    """Use a hand-written autograd function for linear layers."""
    return layer(x, y) if layer.geometry else ThinRows.apply(y, x, layer.down, layer.up, layer.scale)  # type: ignore


FORMS: dict[str, Form] = {
    "kept: `LoraLayer`": kept,
    "out of place, as peft": out_of_place,
    "linear: in place on the view; convolutions: `up` by baddbmm": into_view,
    "linear: hand-written autograd function": by_hand,
    "3x3: one product to 9 x rank channels, folded": taps,
}


class Ready(torch.autograd.Function):
    """A layer that copies a ready output, and a ready gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, grad_x: Tensor) -> Tensor:
        """Copy y."""
        ctx.save_for_backward(grad_x)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Copy the ready gradient."""
        return ctx.saved_tensors[0].clone(), None, None


def layer_shapes() -> Counter[tuple[bool, tuple[int, ...], tuple[int, ...], int, int]]:
    """Count (is linear, input shape, output shape, kernel, stride) over the UNet's layers."""
    found: Counter[tuple[bool, tuple[int, ...], tuple[int, ...], int, int]] = Counter()

    def look(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        linear = isinstance(module, nn.Linear)
        kernel, stride = (1, 1) if linear else (module.kernel_size[0], module.stride[0])
        found[linear, tuple(inputs[0].shape), tuple(output.shape), kernel, stride] += 1

    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
        for module in matrices_of(unet, "full").values():
            module.register_forward_hook(look)
        unet(torch.empty(1, 4, 32, 32), torch.tensor([1]), encoder_hidden_states=torch.empty(1, 77, 768))
    return found


def time_shape(linear: bool, inner: tuple[int, ...], outer: tuple[int, ...], kernel: int, stride: int, rounds: int):
    """Time each form on one shape, forward and backward, interleaved; return median milliseconds."""
    if linear:
        base: Any = nn.Linear(inner[-1], outer[-1])
    else:
        base = nn.Conv2d(inner[1], outer[1], kernel, stride, kernel // 2)
    layer = LoraLayer(base, RANK, RANK, name="bench", seed=0)
    nn.init.normal_(layer.up)
    x, y, grad_x, grad = (torch.randn(shape) for shape in (inner, outer, inner, outer))
    x.requires_grad_()
    if linear:
        y = y.flatten(0, -2)
    names: dict[str, Form | None] = {"": None, **FORMS}
    timings: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name, form in names.items():
            began = time.perf_counter()
            output = Ready.apply(x, y, grad_x).view(outer) if linear else Ready.apply(x, y, grad_x)  # as nn.Linear's
            if form is None:
                torch.autograd.grad(output, [x], grad)
            else:
                torch.autograd.grad(form(layer, x, output), [x, layer.down, layer.up], grad)
            timings[name].append(time.perf_counter() - began)
    middle = {name: 1000 * median(values[1:]) for name, values in timings.items()}
    return {name: middle[name] - middle[""] for name in FORMS}


def main() -> None:
    """Time all forms on all shapes and write a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    total = {name: dict.fromkeys(KINDS, 0.0) for name in FORMS}
    for (linear, inner, outer, kernel, stride), count in layer_shapes().items():
        kind = "linear" if linear else f"{kernel}x{kernel}" + (", stride 2" if stride == 2 else "")
        for name, milliseconds in time_shape(linear, inner, outer, kernel, stride, options.rounds).items():
            total[name][kind] += count * milliseconds
    rows = [f"| ms per step, all LoRA layers | {' | '.join(KINDS)} | sum |", "|---" * (len(KINDS) + 2) + "|"]
    for name, kinds in total.items():
        cells = [f"{kinds[kind]:.0f}" for kind in KINDS]
        rows.append(f"| {name} | {' | '.join(cells)} | {sum(kinds.values()):.0f} |")
    options.out.write_text(json.dumps({"table": "\n".join(rows) + "\n", "ms": total}))


if __name__ == "__main__":
    main()
