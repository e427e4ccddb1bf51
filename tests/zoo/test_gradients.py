"""Gradients of every architecture: against central differences in float64, and the same with blocks recomputed."""

import contextlib

import comfy.ops
import numpy as np
import pytest
import torch
from zoo import trial
from zoo.again import again
from zoo.trial import Trial, apart
from zoo.zoo import CLIPS, ZOO

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.layers import feed_forward
from lora_atelier.trainer_core.memory import activations_in_ram, copied_before_written, recompute
from lora_atelier.trainer_core.memory.gradient_checkpointing import FULL, LEVELS, PARTS, SEGMENTS

PADDED = ("auraflow", "anima", "hunyuan_dit")  # their text encoders make every caption equally long


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """Let ComfyUI's operators compute in float64, which they have no need for."""
    norm = torch.linalg.vector_norm

    def vector_norm(x, *args, dtype=None, **kwargs):
        return norm(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", vector_norm)
    with contextlib.suppress(ImportError):
        import comfy_kitchen.backends.eager.rope as rope

        monkeypatch.setattr(rope.registry, "get_implementation", lambda name, **_: getattr(rope, name))


def direction_of(found):
    """Draw a direction in which the loss changes: each layer's gradient times a number of its own, and noise."""
    draws = torch.Generator().manual_seed(9)
    steep = [g * (0.5 + torch.rand((), generator=draws, dtype=g.dtype)) for g in found]
    noise = [torch.randn(g.shape, generator=draws, dtype=g.dtype) for g in found]
    one, other = length(steep), length(noise)
    return [s / one + n / other for s, n in zip(steep, noise, strict=True)]


def length(tensors):
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def check(trial, found):
    """Assert that gradients are what the loss does along a direction."""
    direction = direction_of(found)
    slope = sum((gradient * change).sum() for gradient, change in zip(found, direction, strict=True))
    assert float(slope) == pytest.approx(trial.slope(direction, 1e-3), rel=1e-4)


def test_gradients_are_central_differences(name):
    trial = Trial(name, dtype=torch.float64)
    with gradients.session(trial.patcher), trial.network.attached():
        found = trial.gradients()
        check(trial, found)
        recompute(trial.units, "full", copies=True)
        assert apart(trial.gradients(), found) < 1e-9


@pytest.mark.parametrize("name", again(*CLIPS))
def test_gradients_of_clips_are_central_differences(name):
    """Of models that the rows above try on pictures alone; the others of video have two steps in time there."""
    test_gradients_are_central_differences(name)


@pytest.mark.parametrize("name", ["wan22_5b", *again("ltxv", "ltxav", "cosmos_predict2_video")])
def test_gradients_behind_a_kept_frame_are_central_differences(name, monkeypatch):
    """Each frame has a level of its own there."""
    plain, axes = trial.conditioning, trial.latents(name).shape[1:]

    def conditioning(name, seed=1, tokens=0):
        ((cross, values),) = plain(name, seed, tokens)
        mask = torch.ones(1, *axes, dtype=torch.float64)
        mask[:, :, 0] = 0
        return [[cross, values | {"denoise_mask": mask}]]

    monkeypatch.setattr(trial, "conditioning", conditioning)
    kept = Trial(name, dtype=torch.float64)
    assert all("denoise_mask" in sample for sample in kept.samples)
    with gradients.session(kept.patcher), kept.network.attached():
        found = kept.gradients()
        check(kept, found)
        recompute(kept.units, "full", copies=True)
        assert apart(kept.gradients(), found) < 1e-9


def test_gradients_with_references_are_central_differences(monkeypatch):
    plain = trial.conditioning

    def conditioning(name, seed=1, tokens=0):
        draws = torch.Generator().manual_seed(seed)
        ((cross, values),) = plain(name, seed, tokens)
        shapes = ((1, 16, 8, 8), (1, 16, 4, 6))
        return [[cross, values | {"reference_latents": [torch.randn(s, generator=draws).double() for s in shapes]}]]

    monkeypatch.setattr(trial, "conditioning", conditioning)
    edited = Trial("flux_dev", dtype=torch.float64)
    with gradients.session(edited.patcher), edited.network.attached():
        found = edited.gradients()
        check(edited, found)
        recompute(edited.units, "full", copies=True)
        assert apart(edited.gradients(), found) < 1e-9


MORE_CLIPS = [row for row in ("wan22_5b", "ltxv", "ltxav", "mochi", *CLIPS) if row in ZOO or row in CLIPS]


@pytest.mark.parametrize(
    "name", ["flux_dev", *again("wan21_t2v", "sd15", "z_image", "hunyuan_video", "hunyuan_video15", *MORE_CLIPS)]
)
def test_every_level_of_checkpointing_gives_the_gradients_of_none(name):
    trial = Trial(name, dtype=torch.float64)
    with gradients.session(trial.patcher), trial.network.attached():
        expected, parts = trial.gradients(), feed_forward(trial.units)
        for level in (*LEVELS[1:], *SEGMENTS):
            recompute([*trial.units, *parts], level, copies=True)
            again = [unit for unit, _ in trial.units if "forward" in vars(unit)]
            highest = LEVELS.index(FULL if level in SEGMENTS else level)
            assert len(again) == sum(least <= highest for _, least in trial.units)
            alone = [part for part, _ in parts if "forward" in vars(part)]
            assert len(alone) == (len(parts) if level == PARTS else 0) and (again or alone)
            assert apart(trial.gradients(), expected) < 1e-9, level


ONE_BUFFER = ("flux_dev", "wan21_t2v", "odd_convolutions")  # whose norms keep their weights, each another class


@pytest.mark.parametrize("name", [*ONE_BUFFER, *again(*(name for name in ZOO if name not in ONE_BUFFER))])
def test_gradients_are_right_where_weights_pass_through_buffers(name, monkeypatch):
    """As ComfyUI streams weights to a card: the next layer's overwrite those of the last, and torch knows nothing."""
    trial = Trial(name)
    with gradients.session(trial.patcher), trial.network.attached():
        expected = trial.gradients()
    layers = [module for module in trial.model.modules() if isinstance(module, comfy.ops.CastWeightBiasOp)]
    largest = max(weights_of(layer) for layer in layers)
    free = []

    def cast(layer, input=None, dtype=None, device=None, bias_dtype=None, offloadable=False, **_):
        buffer = free.pop() if free and offloadable else np.empty(largest, np.float32)
        at, found = 0, []
        for own in (layer.weight, layer.bias):
            if own is not None:
                end = at + own.numel()
                buffer[at:end] = own.detach().float().numpy().ravel()
                own = torch.from_numpy(buffer)[at:end].view(own.shape).to(dtype or getattr(input, "dtype", own.dtype))
                at = end
            found.append(own)
        return (*found, buffer) if offloadable else tuple(found)

    def uncast(_, weight, bias, buffer):
        if buffer is not None:  # norms without weights have none
            buffer.fill(np.nan)
            free.append(buffer)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", cast)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", uncast)
    for layer in layers:
        layer.comfy_cast_weights = True
    with gradients.session(trial.patcher), trial.network.attached():
        assert apart(trial.gradients(), expected) < 1e-5
        recompute(trial.units, "full", copies=True)
        assert apart(trial.gradients(), expected) < 1e-5
    assert len(free) < 5


def weights_of(layer):
    return sum(own.numel() for own in (layer.weight, layer.bias) if own is not None)


ALL, LARGE = 0, 1 << 20  # bytes
KEPT = [("flux_dev", ALL), ("odd_written", ALL), ("wan21_t2v", LARGE)]
BLOCKS = ("flux_dev", "odd_written", "wan21_t2v", "chroma", "hunyuan_video", *MORE_CLIPS)
KEPT_AS_OTHERS = [(name, least) for name in BLOCKS for least in (ALL, LARGE) if (name, least) not in KEPT]


@pytest.mark.parametrize(("name", "least"), [*KEPT, *again(*KEPT_AS_OTHERS)])
def test_activations_in_ram_give_the_gradients_of_those_on_the_device(name, least):
    """Tensors of fewer bytes than `least` stay, and are copied before a block writes into them."""
    trial = Trial(name)

    def found():
        trial.network.zero_grad(set_to_none=True)
        with copied_before_written():
            with activations_in_ram(torch.device("cpu"), [trial.model.diffusion_model], least, written=True):
                loss = trial.loss()
            loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in trial.network.parameters()]

    with gradients.session(trial.patcher), trial.network.attached():
        expected = trial.gradients()
        for level in ("0", "2", "full", *SEGMENTS, PARTS):
            recompute([*trial.units, *feed_forward(trial.units)], level, copies=True)
            assert apart(found(), expected) < 1e-5, level


def test_a_write_that_nothing_watches_is_an_error_with_activations_in_ram_too():
    trial = Trial("flux_dev")
    with gradients.session(trial.patcher), trial.network.attached():
        with activations_in_ram(torch.device("cpu"), [trial.model.diffusion_model], written=True):
            loss = trial.loss()
        with pytest.raises(RuntimeError, match="wrote into a tensor that its backward pass needs"):
            loss.backward()


ATTENTIONS = ("flux_dev", "z_image", "ltxv")  # joint, of padded captions, across and of masked ones


@pytest.mark.parametrize("name", [*ATTENTIONS, *again(*(name for name in ZOO if name not in (*PADDED, *ATTENTIONS)))])
def test_gradients_of_unequal_captions_are_central_differences(name):
    trial = Trial(name, dtype=torch.float64, tokens=(8, 5))
    with gradients.session(trial.patcher), trial.network.attached():
        recompute(trial.units, "full", copies=True)
        check(trial, trial.gradients())
