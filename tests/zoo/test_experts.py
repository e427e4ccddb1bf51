"""A model of two files, each an expert for its side of the noise: trained in one run, one at a time."""

import math
from unittest import mock

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import pytest
import torch
from durable import Cut, cut_at, equal
from second_device import NAME, device_is  # noqa: F401 (a fixture)
from train_graph import draw_pictures
from zoo.again import again
from zoo.linked import linked, live_of, source_of
from zoo.test_train import configure, run, run_measured, state_of, unchanged
from zoo.zoo import build

from lora_atelier.nodes.comfyui.connected import trial, wired
from lora_atelier.nodes.comfyui.connected.denoiser import RawDenoiser
from lora_atelier.nodes.comfyui.connected.experts import named_high
from lora_atelier.nodes.comfyui.connected.layers import list_layers
from lora_atelier.trainer_core.common.rng import sample_uniform
from lora_atelier.trainer_core.config import BeneathConfig, LoraConfig, SampleConfig
from lora_atelier.trainer_core.lora_files.lora import Lora

ROW = "wan21_t2v"
NOTHING = trial.Found(frozenset(), [], False, [])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("concept") / "pictures")


def both(**settings):
    return linked(ROW, build(ROW, seed=1)[1], None, build(ROW, seed=2)[1], **settings)


def seed_with(high):
    """Find a seed whose first step is of this expert, under the distribution of levels that Wan has."""
    return next(seed for seed in range(100) if (sample_uniform(seed, "expert", 0) > 0.85) is high)


class Computed:
    """Which model computes at which levels, pass by pass."""

    def __init__(self):
        self.passes = []

    def __enter__(self):
        own = RawDenoiser._run

        def seen(denoiser, noised, sigmas, numbers, *rest):
            if torch.is_grad_enabled():
                self.passes.append((denoiser.model, sigmas[numbers].tolist()))
            return own(denoiser, noised, sigmas, numbers, *rest)

        self.patch = mock.patch.object(RawDenoiser, "_run", seen)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


def drawn(live, result, boundary, steps):
    """Draw as two KSampler (Advanced) in a row do, each with its file by ComfyUI's loader."""
    low, high = (
        comfy.sd.load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]
        for model, tensors in ((live.model, result.tensors), (live.high, result.high[1]))
    )
    wanted = []
    for text in ("a mossling", "dull"):
        ((cross, extra),) = live.clip.encode_from_tokens_scheduled(live.clip.tokenize(text))
        wanted.append([[cross, extra]])
    latents = torch.zeros(1, low.model.latent_format.latent_channels, 1, 8, 8)
    noise, settings = comfy.sample.prepare_noise(latents, 3), (steps, 1.0, "euler", "simple", *wanted)
    times = comfy.samplers.calculate_sigmas(low.get_model_object("model_sampling"), "simple", steps).tolist()
    border = next(number for number, time in enumerate(times) if time < boundary)
    assert 0 < border < steps
    half = comfy.sample.sample(
        high, noise, *settings, latents, disable_pbar=True, seed=3, start_step=0, last_step=border
    )
    rest = torch.zeros_like(noise)
    found = comfy.sample.sample(
        low, rest, *settings, half, disable_pbar=True, seed=3, disable_noise=True, start_step=border
    )
    picture = live.vae.decode(found)
    return picture.reshape(-1, *picture.shape[-3:])


def test_both_experts_train_in_one_run_and_their_two_files_draw_what_training_drew(pictures, tmp_path):
    base = both(switch_every=2)
    live = live_of(base)
    comfy.model_management.load_models_gpu([live.model, live.high])
    before = state_of(live.model), state_of(live.high)
    config = configure(base, pictures, steps=4, batch_size=2, save_dtype="float32", validation_share=0.3)
    # With 28 steps, one step begins less than a level below the boundary.
    sample = SampleConfig(prompts=("a mossling --n dull",), width=64, height=64, steps=28, cfg=1.0, seed=3)
    computed = {}
    with Computed() as found:

        def after(report):
            computed[report.step] = list(found.passes)
            found.passes.clear()

        result, notes = run_measured(config.replace(sample=sample), tmp_path, step=after)
    assert result.finished and all(map(math.isfinite, result.losses)) and result.validation
    assert not any("could not be drawn" in note for note in notes), notes
    for now, was in zip((state_of(live.model), state_of(live.high)), before, strict=True):
        unchanged(was, now)
    # By turns of two steps; the first one also has the trial and what is measured before it.
    whose = {step: {model for model, _ in passes} for step, passes in computed.items() if step > 1}
    assert whose == {2: {live.model.model}, 3: {live.high.model}, 4: {live.high.model}}
    for step, passes in computed.items():
        if step > 1:
            times = [time for _, each in passes for time in each]
            assert times and all((time >= 0.875) is (step > 2) for time in times)
    names = [result.path.stem, result.high[0].stem]
    assert [name.rpartition("-")[2] for name in names] == ["low", "high"]
    assert not result.others and result.tensors.keys() == result.high[1].keys()
    for lora, timesteps in ((result.tensors, "0,873"), (result.high[1], "874,999")):
        assert isinstance(lora, Lora) and lora.metadata["modelspec.timestep_range"] == timesteps
        assert any(tensor.any() for name, tensor in lora.items() if "lora_up" in name)
    picture = drawn(live, result, 0.875, 28)
    assert (result.samples - picture).abs().max() <= 1.5 / 255


@pytest.mark.parametrize("high", [True, *again(False)])
def test_a_step_of_an_expert_is_to_the_last_bit_one_of_a_run_of_it_alone(high, pictures, tmp_path):
    """Where the draw says whose it is; the other one has no part in it, and its weights stay."""
    seed = seed_with(high)
    models = [build(ROW, seed=1)[1], build(ROW, seed=2)[1]]
    own = (lambda model: [x._replace(name=named_high(x.name)) for x in list_layers(model)]) if high else list_layers
    alone = linked(ROW, models[high], noise_range="high" if high else "low")
    # ComfyUI's loader, which a trial asks, does not know the names that tell the experts apart in one network.
    with mock.patch("zoo.test_train.tried", lambda *_: NOTHING):
        together, _ = run(configure(both(), pictures, steps=1, seed=seed), tmp_path / "both")
        with mock.patch.object(wired, "list_layers", own):
            single, _ = run(configure(alone, pictures, steps=1, seed=seed), tmp_path / "alone")
    trained, idle = (together.high[1], together.tensors) if high else (together.tensors, together.high[1])
    expected = {name.replace("_high_noise", ""): tensor for name, tensor in single.tensors.items()}
    assert together.losses == single.losses and equal(dict(trained), expected)
    assert not any(tensor.any() for name, tensor in idle.items() if "lora_up" in name)
    assert any(tensor.any() for name, tensor in trained.items() if "lora_up" in name)


@pytest.mark.parametrize("settings", [{"switch_every": 1}, *again({})], ids=["by turns", "as drawn"])
def test_a_run_of_both_experts_resumes_to_the_last_bit(settings, pictures, tmp_path):
    def of_both():
        return configure(both(**settings), pictures, steps=4, seed=seed_with(high=True))

    whole, _ = run(of_both(), tmp_path / "whole")
    with pytest.raises(Cut):
        run(of_both(), tmp_path / "cut", step=cut_at(3))  # amid the turns
    result, _ = run(of_both(), tmp_path / "cut")
    assert "Resumed after step 3" in result.origin
    assert whole.losses == result.losses
    assert equal(dict(whole.tensors), dict(result.tensors)) and equal(dict(whole.high[1]), dict(result.high[1]))
    again, _ = run(of_both(), tmp_path / "cut")
    assert "Already trained in" in again.origin and equal(dict(again.high[1]), dict(whole.high[1]))


def test_the_idle_expert_waits_in_ram_where_both_do_not_fit(device_is, monkeypatch):  # noqa: F811
    """On a pretended device with room for one, in a session: each turn moves both, and no weight changes."""
    device, base = device_is("card"), both()
    experts = (live_of(base).model, live_of(base).high)
    before = [{name: tensor.clone() for name, tensor in each.model.state_dict().items()} for each in experts]
    for each in experts:
        each.load_device = device

    def on(patcher):
        return {weight.device.type for weight in patcher.model.diffusion_model.parameters()}

    def free(_, torch_free_too=False):
        room = 1 << (20 if any(NAME in on(each) for each in experts) else 40)
        return (room, room) if torch_free_too else room

    monkeypatch.setattr(comfy.model_management, "get_free_memory", free)
    model = source_of(base).outline()
    low, high = model.wired.denoisers
    with model.host.session(device):
        for turn, active, idle in ((low, *experts), (high, *experts[::-1]), (high, *experts[::-1]), (low, *experts)):
            model.wired.take(turn)
            assert on(active) == {NAME} and on(idle) == {"cpu"}
    for each, was in zip(experts, before, strict=True):
        each.detach()
        assert equal(each.model.state_dict(), was)


def test_what_two_experts_cannot_have_is_refused_in_a_sentence(pictures, tmp_path):
    other, (_, flux) = build(ROW, seed=2)[1], build("flux_dev")
    shifted = other.clone()
    sampling = build(ROW)[0].model_sampling
    sampling.set_parameters(shift=2.0)
    shifted.add_object_patch("model_sampling", sampling)
    beneath = LoraConfig(beneath=(BeneathConfig(path="any.safetensors"),))
    cases = (
        (linked(ROW, high=flux), {}, "model_high linked to Use Connected Model has other layers than its model; link"),
        (linked(ROW, high=shifted), {}, "are sampled differently; put the same ModelSamplingSD3 on both, or none"),
        (linked(ROW, sampled=other, high=other), {}, "unlink sample_model of Use Connected Model"),
        (linked(ROW, high=other, noise_range="low"), {}, "noise_range is low; set noise_range of Use Connected Model"),
        (linked("flux_dev", high=build("flux_dev")[1]), {}, "No two experts are known of this MODEL's architecture"),
        (linked(ROW, high=other), {"lora": beneath}, "remove Existing LoRA, or load it with ComfyUI's Load LoRA"),
        (linked(ROW, high=other), {"lora": LoraConfig(init="eva")}, "set init of LoRA Config to default"),
    )
    for base, changes, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            source_of(base).check()
            run(configure(base, pictures).replace(**changes), tmp_path)
