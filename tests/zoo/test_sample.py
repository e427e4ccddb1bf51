"""Sample draws a picture of every architecture: latents of its format, its own sampler, both ways of a second pass."""

import pytest
import torch
from zoo.linked import DrawnClip, PooledVae
from zoo.zoo import ZOO, build

from lora_atelier.nodes.comfyui import sampling

# Whose stand-ins need pictures of 1024 pixels, latents of another model, own tokens of a caption, or more than noise.
NOT_DRAWN = ("pixart_alpha", "pixart_sigma", "cascade_b", "hidream_o1", "odd_written")


@pytest.mark.parametrize("row", [row for row in ZOO if row not in NOT_DRAWN])
def test_a_picture_is_drawn_and_enlarged(row):
    _, patcher = build(row)
    models = sampling.Models(patcher, DrawnClip(row), PooledVae(row))
    form = patcher.model.latent_format
    side = 16 * form.spacial_downscale_ratio
    latents = sampling.empty_latents(patcher, (side, 2 * side), 2)
    assert latents.shape[:2] == (2, form.latent_channels) and latents.shape[-2:] == (32, 16)
    assert latents.ndim == 2 + form.latent_dimensions
    prompt, first = sampling.Prompt("a red circle", ""), sampling.SamplerPass(3, steps=1)
    for hires, scale in ((None, 1), (sampling.Hires(1.5, first), 1.5), (sampling.Hires(1.5, first, "area", True), 1.5)):
        pictures = sampling.draw(models, prompt, (side, side), 2, first, hires)
        assert pictures.shape[0] == 2 and pictures.shape[-1] == 3 and pictures.isfinite().all()
        assert pictures.shape[1] == pictures.shape[2] > 8 * models.vae.pixels * scale
    assert not torch.equal(pictures[0], pictures[1])
