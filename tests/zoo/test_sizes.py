"""Sizes of pictures: at each step of their sides the latents are as many as the mask's, and the network takes them."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from zoo.linked import linked, source_of
from zoo.zoo import ZOO

from lora_atelier.nodes.comfyui.connected.vae import with_time, without_time
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.data.masks import latent_mask

CPU = torch.device("cpu")


def encoded(base, width, height):
    """Encode a picture, and check that there are as many latents as the mask has."""
    pixels = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found, _ = base.autoencoder.encode(base.autoencoder.module, pixels)
    mask = latent_mask(Image.new("L", (width, height), 255), base.latents.pixels)
    assert found.shape[1] == base.latents.channels and mask.eq(1).all()
    assert found.shape[2:] == mask.shape[1:] == (height // base.latents.pixels, width // base.latents.pixels)
    return found


@pytest.mark.parametrize("name", [name for name in ZOO if name != "cogvideox"])  # which is refused
def test_pictures_that_are_a_step_larger_are_taken(name):
    base = source_of(linked(name)).load(torch.float32)
    pixels, step = base.latents.pixels, base.latents.step
    width, height = (-(-int(side * pixels) // step) * step + step for side in reversed(ZOO[name].latents[-2:]))
    latents = encoded(base, width, height)
    framings = [Framing.whole((width, height))]
    conditions = base.conditions.batch([base.text.encode("a mossling on a stone", CPU)], framings, CPU)
    with torch.no_grad():
        predicted = base.denoiser.predict(latents, torch.tensor([500]), conditions)
    assert predicted.shape == latents.shape and predicted.isfinite().all()


def test_latents_of_stable_cascade_are_three_for_128_pixels_at_every_size():
    base = source_of(linked("cascade_c")).load(torch.float32)
    for count in (2, 8, 20, 21, 24):  # from 21 on, 42 pixels each would be one more
        assert encoded(base, 128 * count, 128).shape[2:] == (3, 3 * count)


def test_a_mask_of_parts_of_pixels_is_their_mean():
    base = source_of(linked("cascade_c")).load(torch.float32)
    mask = Image.new("L", (128, 128), 0)
    mask.paste(255, (0, 0, 64, 128))
    assert torch.allclose(latent_mask(mask, base.latents.pixels)[0], torch.tensor([1.0, 0.5, 0.0]).repeat(3, 1))


@pytest.mark.parametrize(("dimensions", "axes"), [(1, (9,)), (2, (4, 6)), (3, (4, 6)), (3, (5, 4, 6))])
def test_only_latents_of_pictures_get_and_lose_the_axis_of_frames(dimensions, axes):
    model = SimpleNamespace(latent_format=SimpleNamespace(latent_dimensions=dimensions))
    latents = torch.rand(2, 3, *axes)
    given = with_time(model, latents)
    assert given.shape == (2, 3, *((1,) if (dimensions, len(axes)) == (3, 2) else ()), *axes)
    assert torch.equal(without_time(given), latents)
