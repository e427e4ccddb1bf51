"""Values, masks and kernels on latents of any number of axes."""

from itertools import product

import pytest
import torch

from lora_atelier.trainer_core.common.axes import convolve, like, picture_axes, spread

AXES = [(24,), (4, 6), (3, 4, 6)]


@pytest.mark.parametrize("axes", AXES)
def test_values_of_samples_and_channels_meet_all_their_elements(axes):
    latents, values = torch.ones(2, 5, *axes), torch.arange(10.0).view(2, 5)
    assert torch.equal((like(values, latents) * latents).flatten(2).mean(2), values)
    assert torch.equal((like(values[:, 0], latents) * latents).flatten(1).mean(1), values[:, 0])


def test_height_and_width_are_the_last_axes():
    assert picture_axes((24,)) == ((), (24,))
    assert picture_axes((4, 6)) == ((), (4, 6))
    assert picture_axes((3, 4, 6)) == ((3,), (4, 6))


def test_a_mask_of_a_picture_is_that_of_each_frame_and_a_mask_of_a_clip_is_its_own():
    picture, clip, sound = torch.rand(1, 4, 6), torch.rand(1, 3, 4, 6), torch.rand(1, 24)
    frames = spread(picture, (3, 4, 6))
    assert frames.shape == (1, 3, 4, 6) and all(torch.equal(frame, picture[0]) for frame in frames[0])
    for mask in (picture, clip, sound):
        assert torch.equal(spread(mask, mask.shape[1:]), mask)


@pytest.mark.parametrize("axes", [(7,), (5, 6), (3, 4, 5)])
def test_a_convolution_is_its_sum(axes):
    """Each output is the sum of all inputs beneath the kernel, worked out one by one."""
    draws = torch.Generator().manual_seed(0)
    sides = (3, 2, 2)[: len(axes)]
    x, kernel = (torch.randn(2, 3, *a, generator=draws, dtype=torch.float64) for a in (axes, sides))
    bias = torch.tensor([0.5, -1.0], dtype=torch.float64)
    found = convolve(x, kernel, bias, stride=2)
    places = [range(0, axis - side + 1, 2) for axis, side in zip(axes, sides, strict=True)]
    assert found.shape == (2, 2, *map(len, places))
    for place in product(*places):
        beneath = [slice(start, start + side) for start, side in zip(place, sides, strict=True)]
        part = x[(slice(None), slice(None), *beneath)]
        wanted = torch.einsum("bif,oif->bo", part.flatten(2), kernel.flatten(2)) + bias
        torch.testing.assert_close(found[(slice(None), slice(None), *(start // 2 for start in place))], wanted)
