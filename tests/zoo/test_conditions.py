"""Captions of any kind and length: stored, read back, joined where that changes nothing, else run singly."""

import pytest
import torch
from safetensors.torch import load, save
from zoo.again import again
from zoo.linked import DrawnClip
from zoo.trial import apart, network
from zoo.zoo import build, latents

from lora_atelier.nodes.comfyui.connected import gradients, text
from lora_atelier.nodes.comfyui.connected.denoiser import RawDenoiser
from lora_atelier.nodes.comfyui.connected.layers import units
from lora_atelier.nodes.comfyui.connected.vae import without_time
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.memory import copied_before_written, recompute


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def sigmas_of(patcher):
    own = patcher.get_model_object("model_sampling").sigmas.double()
    return own[torch.linspace(0, len(own) - 1, 1000).long()]


def batch(denoiser, name, captions):
    clean = latents(name, len(captions))
    clean = without_time(clean[:, :, :1] if clean.ndim == 5 else clean)
    ratio = denoiser.model.latent_format.spacial_downscale_ratio
    height, width = (int(side * ratio) for side in clean.shape[2:])
    clip = DrawnClip(name)
    stored = [text.encode(clip, caption, weights=False) for caption in captions]
    return clean, denoiser.conditions(
        stored, [Framing.whole((width, height))] * len(captions), clean.shape[1:], torch.device("cpu")
    )


def test_a_caption_is_stored_and_read_back_as_clip_gave_it(name):
    clip = DrawnClip(name)
    ((cross, extra),) = clip.encode_from_tokens_scheduled(clip.tokenize("a mossling"))
    stored = load(save(text.encode(clip, "a mossling", weights=False)))
    again, rest = text.conditioning(stored)
    assert same(again, cross) and same(rest, dict(extra))


def test_a_batch_gives_what_its_samples_give(name):
    """Captions of two lengths, two of them equal: whatever is joined."""
    _, patcher = build(name)
    denoiser = RawDenoiser(patcher, sigmas_of(patcher), None)
    captions = ["a moss", "a sky", "a stone in a wood"]
    noised, conditions = batch(denoiser, name, captions)
    levels = torch.tensor([300, 600, 600])
    with torch.no_grad():
        together = denoiser.predict(noised, levels, conditions, {})
        singles = [
            denoiser.predict(noised[i : i + 1], levels[i : i + 1], conditions.some(slice(i, i + 1)), {})
            for i in range(len(captions))
        ]
    assert together.shape == noised.shape and together.dtype == torch.float32 and together.isfinite().all()
    alone = torch.cat(singles)
    assert (together - alone).abs().max() <= 1e-4 * alone.abs().max()
    assert (alone[0] - alone[1]).abs().max() > 1e-3 * alone.abs().max()


MIXED = {"mixed samples": 0.1, "samples mixed a little": 0.005}  # the share of the others
FAULTS = ("one level for all", "one caption for all", *MIXED)


def make_faulty(denoiser, fault):
    """Let a network compute something else in a batch than sample by sample."""
    own, share = denoiser.forward, MIXED.get(fault, 0)

    def forward(x, timestep, context, *args, **kwargs):
        if fault == "one level for all":
            timestep = timestep[:1].expand(len(timestep))
        if fault == "one caption for all":
            context = context[:1].expand(len(context), -1, -1)
        found = own(x, timestep, context, *args, **kwargs)
        return found + share * (found.flip(0) - found)

    denoiser.forward = forward


@pytest.mark.parametrize("fault", FAULTS)
def test_samples_that_act_on_one_another_run_one_by_one(fault):
    _, patcher = build("flux_dev")
    denoiser = RawDenoiser(patcher, sigmas_of(patcher), None)
    make_faulty(patcher.model.diffusion_model, fault)
    noised, conditions = batch(denoiser, "flux_dev", ["a moss", "a sky"])
    levels = torch.tensor([300, 600])
    with torch.no_grad():
        together = denoiser.predict(noised, levels, conditions, {})
        first = denoiser.predict(noised[:1], levels[:1], conditions.some(slice(1)), {})
    assert denoiser._joins is False
    assert torch.equal(together[:1], first)


@pytest.mark.parametrize("row", ["flux_dev", *again("sd15", "qwen_image")])
def test_samples_have_the_same_dropout_in_a_batch_and_one_by_one(row):
    """Also where the batch is tried against its samples, and in blocks that are recomputed."""
    _, patcher = build(row)
    chances = {"dropout": 0.3, "rank_dropout": 0.4, "module_dropout": 0.4}
    beside, found = network(patcher.model, **chances), []
    captions = ["a moss", "a sky", "the wood"]
    with gradients.session(patcher), beside.attached():
        for joins, level in ((None, "0"), (False, "0"), (False, "full")):
            recompute(units(patcher.model.diffusion_model), level, copies=True)
            denoiser = RawDenoiser(patcher, sigmas_of(patcher), None)
            denoiser._joins = joins
            noised, conditions = batch(denoiser, row, captions)
            beside.set_micro_batch(3)
            beside.zero_grad()
            with copied_before_written():
                predicted = denoiser.predict(noised, torch.tensor([300, 600, 600]), conditions, {})
                predicted.square().mean().backward()
            assert denoiser._joins is (joins is None)
            found.append((predicted.detach(), [p.grad for p in beside.parameters() if p.grad is not None]))
        beside.set_micro_batch(4)
        with torch.no_grad():
            other = denoiser.predict(noised, torch.tensor([300, 600, 600]), conditions, {})
    for predicted, slopes in found[1:]:
        assert (predicted - found[0][0]).abs().max() < 1e-4 * predicted.abs().max()
        assert apart(slopes, found[0][1]) < 1e-4
    assert (other - found[0][0]).abs().max() > 1e-2 * other.abs().max()


def test_the_prediction_is_what_the_network_says():
    """For flow: x0 = x - sigma v, which is what ComfyUI's own apply_model gives."""
    _, patcher = build("flux_dev")
    denoiser = RawDenoiser(patcher, sigmas_of(patcher), None)
    noised, conditions = batch(denoiser, "flux_dev", ["a moss"])
    sigma = denoiser.sigmas[[500]].float()
    ((_, joint),) = conditions.groups(joined=False)
    with torch.no_grad():
        clean = patcher.model.apply_model(noised, sigma, **joint, transformer_options={})
        raw = denoiser.predict(noised, torch.tensor([500]), conditions, {})
    assert torch.allclose(noised - sigma.view(-1, 1, 1, 1) * raw, clean, atol=1e-5)
    assert patcher.model.model_sampling is patcher.get_model_object("model_sampling")


@pytest.mark.parametrize("caption", ["a (cat:1.3)", r"a \(cat\)", "((a)) (b", ":1.2)"])
def test_brackets_are_escaped_for_comfyuis_tokenizer(caption):
    from comfy.sd1_clip import escape_important, token_weights, unescape_important

    parts = token_weights(escape_important(text.escape(caption)), 1.0)
    assert "".join(unescape_important(part) for part, _ in parts) == caption
    assert all(weight == 1.0 for _, weight in parts)


def test_a_linked_clip_gets_weights_on_request_and_captions_of_any_length():
    from comfy.sd1_clip import SD1Tokenizer

    clip = SD1Tokenizer()
    clip.tokenize = clip.tokenize_with_weights
    caption = "a (cat:1.3) " + "many words " * 200
    (plain,), (weighted,) = (text.tokenize(clip, caption, weights=asked).values() for asked in (False, True))
    assert {weight for chunk in plain for _, weight in chunk} == {1.0}
    assert {weight for chunk in weighted for _, weight in chunk} == {1.0, 1.3}
    assert len(weighted) == 6 and text.count_tokens(clip, caption, weights=True) == 6 * 77  # 402 tokens
