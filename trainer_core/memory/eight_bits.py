"""Products of activations with frozen weights in 8 bits: one scale for each row of a weight, one for each token.

A scale is the largest value of its row, divided by the largest of the number format. Int8 sums are exact, and float8
sums are of float32; the scales multiply them afterwards (LLM.int8, Dettmers et al. 2022, without its outliers).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.devices import kind_of
from ..config import setting
from .products import input_gradient

LARGEST = {"int8": 127.0, "float8": 448.0}  # float8: e4m3
STORED = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
SMALLEST = 1e-12  # of a row's largest value, so that rows of zeros stay zeros
LEAST_TOKENS = 17  # torch._int_mm takes no fewer on a GPU
SIDE = 16  # kernels of GPUs take sides that are multiples of it


class Rounded(NamedTuple):
    """A matrix in 8 bits, values * scale."""

    values: Tensor  # (rows, in) of int8 or float8
    scale: Tensor  # (rows, 1) float32


def check_compute(kind: str, device: torch.device, weights: str) -> None:
    """Raise ValueError if a device does not multiply in this format, or weights are stored in one of 4 bits.

    weights: the setting of that name.
    """
    if kind not in LARGEST:
        return
    if weights == "nf4":
        raise ValueError(
            f"Frozen weights in nf4 are not multiplied in 8 bits; set {setting('memory.compute')} to exact, or "
            f"{setting('base_model.weights')} to auto."
        )
    if not multiplies(kind, device):
        raise ValueError(f"{device.type} does not multiply in {kind}; set {setting('memory.compute')} to exact.")


def chosen_compute(kind: str, device: torch.device, weights: str) -> str:
    """Choose what auto tries: int8 on a CPU whose products are right, where weights have no 4 bits; else exact."""
    if kind != "auto":
        return kind
    return "int8" if device.type == "cpu" and weights != "nf4" and multiplies("int8", device) else "exact"


def multiplies(kind: str, device: torch.device) -> bool:
    """Tell whether a device multiplies in a format, by trying it; a CPU imitates float8."""
    if kind == "float8" and not kind_of(device).float8:
        return False
    # Old processors add int8 products in 16 bits, which these values would overflow.
    ends = torch.tensor([LARGEST[kind], -LARGEST[kind]], device=device)
    x = ends.repeat_interleave(SIDE).repeat(2 * SIDE, 1)
    try:
        own = Rounded(x.to(STORED[kind]), x.new_ones(len(x), 1))
        found = _sums(own, own)
    except (RuntimeError, TypeError):  # TypeError: of MPS
        return False
    return bool((found.float() == found.new_tensor(2 * SIDE * LARGEST[kind] ** 2).float()).all())


def takes_sides(outputs: int, inputs: int) -> bool:
    """Tell whether a weight of these sides can be multiplied in 8 bits."""
    return outputs % SIDE == 0 and inputs % SIDE == 0


def enough_tokens(x: Tensor) -> bool:
    """Tell whether an input (…, in) has as many tokens as a product in 8 bits takes."""
    return x.numel() >= LEAST_TOKENS * x.shape[-1]


def rounded(rows: Tensor, kind: str) -> Rounded:
    """Round each row of a matrix to 8 bits, by its own scale."""
    rows = rows.float()
    scale = rows.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST[kind]
    divided = rows / scale
    return Rounded((divided.round() if kind == "int8" else divided).to(STORED[kind]), scale)


def linear_rounded(x: Tensor, weight: Rounded, bias: Tensor | None, kind: str) -> Tensor:
    """Compute x W^T + b in 8 bits for x (…, in), in x's dtype; without gradients."""
    own = rounded(x.reshape(-1, x.shape[-1]), kind)
    product = _sums(own, weight)
    if bias is not None:
        product = product + bias
    # The view comes last: behind `to`, which may do nothing, torch.compile loses the gradient of a Function's output.
    return product.to(x.dtype).view(*x.shape[:-1], len(weight.values))


def gradient_in_16_bits(gradient: Tensor, weight: Tensor) -> Tensor:
    """Compute g W for g (…, out) and W (out, in), float32 factors rounded to bfloat16; in g's dtype."""
    narrow = torch.bfloat16 if gradient.dtype == torch.float32 else gradient.dtype
    return input_gradient(gradient.to(narrow), weight.to(narrow)).to(gradient.dtype)


def _sums(x: Rounded, weight: Rounded) -> Tensor:
    """Compute x W^T with both scales, in float32 or, of a GPU's float8, in bfloat16."""
    # Nothing is multiplied in place: torch.compile would lose the gradient of a Function's output then, too.
    if x.values.dtype == torch.int8:
        return torch._int_mm(x.values, weight.values.t()).float() * x.scale * weight.scale.t()
    if not kind_of(x.values.device).scaled:  # imitated: their factors and products are exact in float32
        return (x.values.float() @ weight.values.float().t()) * x.scale * weight.scale.t()
    scales: Any = {"scale_a": x.scale, "scale_b": weight.scale.t()}
    # By rows it writes bfloat16 alone.
    return torch._scaled_mm(x.values, weight.values.t(), **scales, out_dtype=torch.bfloat16)
