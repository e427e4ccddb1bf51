"""Sample draws a picture of every architecture: latents of its format, its own sampler, both ways of a second pass."""

import pytest
import torch
from zoo.again import again
from zoo.linked import DrawnClip, PooledVae, linked, live_of, source_of
from zoo.test_drawn_clips import drawn_with
from zoo.zoo import ZOO, build

from lora_atelier.nodes.comfyui import sampling
from lora_atelier.nodes.sample import AtelierSample

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


@pytest.mark.parametrize(("row", "frames"), [("wan21_t2v", 17), *again(("ltxv", 9), ("hunyuan_video", 17))])
def test_a_clip_is_drawn_and_enlarged(row, frames):
    """As ComfyUI's sampler draws it, from the same noise."""
    base = linked(row)
    live, prompt = live_of(base), sampling.Prompt("a mossling", "dull")
    models = sampling.Models(live.model, live.clip, PooledVae(row))
    assert sampling.clip_length(models, frames + 3) == frames
    first = sampling.SamplerPass(3, steps=2, cfg=2.0)
    drawn = sampling.draw(models, prompt, (64, 64), 1, first, None, frames)
    assert torch.equal(drawn, drawn_with(live, source_of(base).outline(), {}, frames))
    for hires in (sampling.Hires(2, first), sampling.Hires(2, first, "area", pixels=True)):
        larger = sampling.draw(models, prompt, (64, 64), 2, first, hires, frames)
        assert larger.shape == (2 * frames, 128, 128, 3) and not torch.equal(larger[:frames], larger[frames:])


def sampled(live, prompt, **more):
    """Run Sample on linked models, two pictures or clips of 64 pixels for each prompt."""
    drawn = {"model": live.model, "clip": live.clip, "vae": live.vae, "prompt": prompt, "negative": "", "seed": 3}
    size = {"width": 64, "height": 64, "batch_size": 2, "hires": {"hires": "off"}, "tiled_vae": False}
    settings = {"steps": 1, "cfg": 1.0, "sampler_name": "auto", "scheduler": "auto", "guidance": -1.0}
    (found,) = AtelierSample.execute(**drawn, **size, **settings, **more).args
    return found


def test_each_prompt_of_sample_draws_as_many_frames_as_it_says():
    live = live_of(linked("wan21_t2v"))
    assert [len(each) for each in sampled(live, "a --f 7\nb --f 1\nc", frames=20)] == [5, 5, 2, 17, 17]
    both = sampled(live, "a --f 5", before_model=live.model)
    assert [tuple(each.shape) for each in both] == [(5, 64, 136, 3)] * 2
    assert torch.equal(both[0][..., :64, :], both[0][..., 72:, :])
    still = live_of(linked("sd15"))
    for prompt, frames, place in (("a", 5, "frames of Sample"), ("a --f 5", 1, "--f in prompt of Sample")):
        with pytest.raises(ValueError, match=f"{place} is 5, and the linked MODEL draws single pictures; set it to 1."):
            sampled(still, prompt, frames=frames)
