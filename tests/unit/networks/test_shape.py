"""The network finds layers and their shapes by their sides: quantized ones have other classes and other bytes."""

import pytest
import torch
from torch import nn

from lora_atelier.trainer_core.networks.layers.shape import is_linear, is_matrix, is_norm, is_spatial, weight_shape


class Packed(nn.Module):
    """A linear layer of another program, whose weight is packed bytes, or not in memory."""

    def __init__(self, weight):
        super().__init__()
        self.in_features, self.out_features = 6, 4
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)


def wrapped():
    """Build a module with sides and layers of its own."""
    module = Packed(None)
    module.inner = nn.Linear(6, 4)
    return module


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 4), (4, 6)),
        (Packed(torch.zeros(12, dtype=torch.uint8)), (4, 6)),
        (Packed(torch.zeros(4, 3, dtype=torch.uint8)), (4, 6)),
        (Packed(None), (4, 6)),
        (nn.Conv1d(3, 8, 5), (8, 3, 5)),
        (nn.Conv2d(3, 8, 3), (8, 3, 3, 3)),
        (nn.Conv3d(3, 8, (1, 2, 3)), (8, 3, 1, 2, 3)),
        (nn.GroupNorm(2, 8), (8,)),
        (nn.Embedding(7, 2), (7, 2)),
    ],
)
def test_shapes_are_those_of_the_layer(module, shape):
    assert weight_shape(module) == shape
    assert is_linear(module) == (shape == (4, 6))
    assert is_matrix(module) == (len(shape) > 2 or shape == (4, 6))
    assert is_norm(module) == (len(shape) == 1)
    assert is_spatial(module) == (len(shape) > 2)


@pytest.mark.parametrize(
    "module",
    [
        Packed(torch.zeros(3, 4, 6)),  # experts in one weight
        wrapped(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 4, 3, groups=2),
        nn.Conv3d(4, 4, 3, padding=1, padding_mode="replicate"),
        nn.ConvTranspose2d(4, 4, 2),
        nn.Bilinear(2, 3, 4),
        nn.Embedding(4, 4),
    ],
)
def test_what_networks_cannot_change_is_no_matrix(module):
    assert not is_matrix(module)


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_a_kernel_of_ones_is_not_spatial(convolution):
    assert is_matrix(convolution(4, 4, 1)) and not is_spatial(convolution(4, 4, 1))
