"""Tensors of any number of axes: (B, C, *axes), whether these are a picture's, a clip's or a sound's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]  # width and height of a picture, in pixels
Shape = tuple[int, ...]  # of what is trained: a picture's Size, or width, height and frames of a clip
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # by the number of axes


def size_text(size: Shape) -> str:
    """Write a size as people do: 832x480, and 832x480x33 for a clip of 33 frames."""
    return "x".join(map(str, size))


class Framing(NamedTuple):
    """What is trained of a picture: its size, the corner of the cut in the resized picture, and the size of the cut.

    Models of the kind of Stable Diffusion XL read these beside the picture.
    """

    original: Size
    left: int
    top: int
    size: Shape

    @classmethod
    def whole(cls, size: Shape) -> Framing:
        """Frame an uncropped picture or clip, as ComfyUI does at inference."""
        return cls((size[0], size[1]), 0, 0, size)

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Original height and width, top and left of the cut, trained height and width: the order that models read."""
        return self.original[1], self.original[0], self.top, self.left, self.size[1], self.size[0]


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """Give (B,) or (B, C) values the axes of a tensor, each of length 1 behind their own."""
    return values.reshape(*values.shape, *(1,) * (tensor.dim() - values.dim()))


def mean_of_samples(tensor: Tensor) -> Tensor:
    """Average all axes of each sample, (B, …) -> (B,)."""
    return tensor.mean(dim=tuple(range(1, tensor.dim())))


def picture_axes(axes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Split axes into those before, such as a clip's frames, and a picture's own: the last two, height and width.

    The one axis of a sound stands for a picture's.
    """
    return axes[:-2], axes[-2:]


def spread(mask: Tensor, axes: Sequence[int]) -> Tensor:
    """Repeat a mask of the last axes over those before: (1, H, W) is the same in each frame of (1, T, H, W).

    A mask (1, T, H, W) is of a clip, and stays.
    """
    frames = (1,) * (len(axes) - mask.dim() + 1)
    return mask.view(1, *frames, *mask.shape[1:]).expand(1, *axes)


def convolve(x: Tensor, kernel: Tensor, bias: Tensor | None = None, **geometry: Any) -> Tensor:
    """Convolve (B, in, *axes) with a kernel (out, in, *sizes), along as many axes as it has sizes."""
    return CONVOLVE[kernel.dim() - 2](x, kernel, bias, **geometry)
