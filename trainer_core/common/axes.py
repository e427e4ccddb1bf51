"""Tensors of any number of axes: (B, C, *axes), whether these are a picture's, a clip's or a sound's."""

from __future__ import annotations

from torch import Tensor


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """Give (B,) or (B, C) values the axes of a tensor, each of length 1 behind their own."""
    return values.reshape(*values.shape, *(1,) * (tensor.dim() - values.dim()))


def mean_of_samples(tensor: Tensor) -> Tensor:
    """Average all axes of each sample, (B, …) -> (B,)."""
    return tensor.mean(dim=tuple(range(1, tensor.dim())))
