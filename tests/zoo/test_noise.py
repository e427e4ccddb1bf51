"""Levels and kinds of prediction, read from ComfyUI's samplings: closed forms, ComfyUI's own numbers, its sigmas."""

import importlib
from types import SimpleNamespace

import comfy.model_base
import comfy.model_sampling
import comfy.samplers
import pytest
import torch
from zoo.zoo import OF_EACH_KIND, build, latents

from lora_atelier.nodes.comfyui.connected.architecture import architecture_of
from lora_atelier.nodes.comfyui.connected.noise import noise_model, own_shift, sigmas
from lora_atelier.trainer_core.config import ObjectiveConfig
from lora_atelier.trainer_core.models import LevelDefaults
from lora_atelier.trainer_core.objective import AffinePath, Objective
from lora_atelier.trainer_core.objective.timesteps import between

# After the pack, as importing ComfyUI's own nodes changes where modules are looked for.
sampling_nodes = importlib.import_module("comfy_extras.nodes_model_advanced")
KINDS = {  # of ComfyUI's model types
    "EPS": "epsilon",
    "V_PREDICTION": "v_prediction",
    "V_PREDICTION_EDM": "v_prediction",
    "V_PREDICTION_CONTINUOUS": "v_prediction",
    "STABLE_CASCADE": "epsilon",
    "EDM": "affine",
    "FLOW": "flow",
    "FLUX": "flow",
    "FLOW_COSMOS": "flow",
}
REFUSED = {
    "IMG_TO_IMG": "at full loudness",
    "IMG_TO_IMG_FLOW": "adds no noise",
    "V_PREDICTION_DDPM": "at full loudness",
}
TIMES = torch.arange(1, 1001, dtype=torch.float64) / 1000


def wired(sampling):
    """A MODEL of this sampling."""
    return SimpleNamespace(get_model_object={"model_sampling": sampling}.get)


def sampling_of(kind, **settings):
    config = SimpleNamespace(sampling_settings=settings)
    return comfy.model_base.model_sampling(config, comfy.model_base.ModelType[kind])


def made(sampling, parent):
    """A sampling of one's own, as custom nodes make them."""
    return type("Own", (parent, sampling), {})(SimpleNamespace(sampling_settings={}))


def test_every_model_type_is_known():
    sound = {"FLOW_AV"}  # since 0.33, of a class that is refused by name
    assert {kind.name for kind in comfy.model_base.ModelType} <= KINDS.keys() | REFUSED.keys() | sound


@pytest.mark.parametrize(("kind", "expected"), KINDS.items())
def test_every_model_type_has_its_closed_form(kind, expected):
    data = 0.5 if kind == "EDM" else 1.0
    sampling = sampling_of(kind, sigma_data=data, sigma_max=80.0)
    found, s = noise_model(wired(sampling)), sigmas(wired(sampling))
    assert found.kind == expected and s.dtype == torch.float64 and s.shape == (1000,) and (s.diff() >= 0).all()
    time = kind in ("FLOW", "FLUX")
    assert torch.equal(found.alpha, (1 - s).float() if time else torch.ones(1000))
    assert torch.equal(found.sigma, s.float())
    assert torch.allclose(found.snr, (((1 - s) if time else 1) / s).square().float(), rtol=1e-6)
    if kind == "EDM":  # Karras et al. 2022, table 1, as ComfyUI signs it
        length = (s.square() + data**2).sqrt()
        assert torch.allclose(found.p, (s / (data * length)).float()) and torch.allclose(
            found.q, (-data / length).float()
        )
    else:
        assert found.p is None and found.q is None
    if time:
        assert torch.equal(s, TIMES) and found.snr[-1] == 0
    elif kind == "FLOW_COSMOS":
        assert torch.allclose(s / (1 + s), TIMES.clamp(max=80 / 81)) and s[-1] == sampling.sigma_max
    elif kind != "STABLE_CASCADE":
        assert torch.equal(s, sampling.sigmas.double())
    else:
        assert torch.equal(s, sampling.sigmas.double()[9::10])


HERE = [(kind, why) for kind, why in REFUSED.items() if hasattr(comfy.model_base.ModelType, kind)]


@pytest.mark.parametrize(("kind", "sentence"), HERE)
def test_samplings_that_cannot_be_trained_are_refused(kind, sentence):
    with pytest.raises(ValueError, match=f"{sentence}.*"):
        noise_model(wired(sampling_of(kind)))


class Backwards(comfy.model_sampling.CONST):
    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        return super().noise_scaling(1.001 - sigma, noise, latent_image)


class Crooked(comfy.model_sampling.EPS):
    def calculate_denoised(self, sigma, model_output, model_input):
        return super().calculate_denoised(sigma, model_output.square() + 1, model_input)


class Clamped(comfy.model_sampling.CONST):
    def calculate_denoised(self, sigma, model_output, model_input):
        return super().calculate_denoised(sigma, model_output, model_input).clamp(-20, 20)


class Centred(comfy.model_sampling.CONST):
    def calculate_denoised(self, sigma, model_output, model_input):
        output = model_output - 0.2 * (model_output - model_output.mean((2, 3), keepdim=True))
        return super().calculate_denoised(sigma, output, model_input)


class Mixed(comfy.model_sampling.CONST):
    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        return super().noise_scaling(sigma, noise * noise.abs(), latent_image)


class Silent(comfy.model_sampling.EPS):
    def calculate_denoised(self, sigma, model_output, model_input):
        return model_input


OWN = [
    (Backwards, comfy.model_sampling.ModelSamplingDiscreteFlow, "goes from noise to picture"),
    (Crooked, comfy.model_sampling.ModelSamplingDiscrete, "no weighted sum"),
    (Clamped, comfy.model_sampling.ModelSamplingDiscreteFlow, "no weighted sum"),
    (Centred, comfy.model_sampling.ModelSamplingDiscreteFlow, "no weighted sum"),
    (Mixed, comfy.model_sampling.ModelSamplingDiscreteFlow, "no weighted sum"),
    (Silent, comfy.model_sampling.ModelSamplingDiscrete, "makes nothing of what its network says"),
]


@pytest.mark.parametrize(("sampling", "parent", "sentence"), OWN)
def test_odd_samplings_of_custom_nodes_are_refused(sampling, parent, sentence):
    with pytest.raises(ValueError, match=sentence):
        noise_model(wired(made(sampling, parent)))


def test_a_sampling_without_a_table_of_levels_is_refused():
    sampling = sampling_of("EPS")
    sampling.set_sigmas(sampling.sigmas.flip(0))
    with pytest.raises(ValueError, match="no rising table"):
        noise_model(wired(sampling))
    del sampling.sigmas
    with pytest.raises(ValueError, match="no table"):
        sigmas(wired(sampling))


@pytest.mark.parametrize(("kind", "row"), OF_EACH_KIND.items())
def test_a_model_stands_for_each_kind(kind, row):
    assert noise_model(build(row)[1]).kind == kind
    assert OF_EACH_KIND.keys() == set(KINDS.values())


def test_the_core_mixes_and_unmixes_as_comfyui_does(name):
    """Noised latents are ComfyUI's, clean latents of any output are, and those of the target are the latents."""
    _, patcher = build(name)
    sampling = patcher.get_model_object("model_sampling")
    if name == "cogvideox":
        with pytest.raises(ValueError, match="at full loudness"):
            noise_model(patcher)
        return
    clean = latents(name).flatten(1).view(1, 1, 1, -1).repeat(6, 1, 1, 1)
    noise, output = torch.randn(2, *clean.shape, generator=torch.Generator().manual_seed(1))
    levels = torch.tensor([0, 1, 250, 500, 998, 999])
    mix, sigma = AffinePath(noise_model(patcher)).at(levels), sigmas(patcher)[levels]
    noised = mix.noised(clean, noise)
    expected = sampling.noise_scaling(sigma.view(-1, 1, 1, 1), noise.double(), clean.double())
    assert torch.allclose(noised.double(), expected, rtol=1e-5, atol=1e-6)
    target, size = mix.target(clean, noise), sigma.float().view(-1, 1, 1, 1) + 1
    for ours, theirs in (
        (mix.clean(output, noised), sampling.calculate_denoised(sigma, output.double(), noised.double())),
        (clean, sampling.calculate_denoised(sigma, target.double(), expected)),
    ):
        assert ((ours - theirs).abs() / size).max() < 2e-5


def test_a_level_is_the_timestep_that_the_network_is_told(name):
    _, patcher = build(name)
    if name == "cogvideox":
        return
    sampling, kind = patcher.get_model_object("model_sampling"), noise_model(patcher).kind
    told = sampling.timestep(sigmas(patcher).float()).double()
    if isinstance(sampling, comfy.model_sampling.StableCascadeSampling) or kind == "affine":
        assert (told.diff() >= 0).all()
    elif kind != "flow":
        assert torch.equal(told, torch.arange(1000).double())
    else:
        end = 80 / 81 if isinstance(sampling, comfy.model_sampling.ModelSamplingCosmosRFlow) else 1.0
        assert torch.allclose(told / getattr(sampling, "multiplier", 1.0), TIMES.clamp(max=end), atol=1e-6)


def of(result):
    """The MODEL that a node gives."""
    return result[0]


def test_a_model_counts_as_it_is_wired():
    _, patcher = build("sd15")
    discrete, continuous = sampling_nodes.ModelSamplingDiscrete(), sampling_nodes.ModelSamplingContinuousEDM()
    for kind in ("eps", "v_prediction", "x0"):
        node = of(discrete.patch(patcher, kind, False))
        assert noise_model(node).kind == {"eps": "epsilon"}.get(kind, kind)
    ended = AffinePath(noise_model(of(discrete.patch(patcher, "v_prediction", True))))
    assert ended.ends_in_noise and not AffinePath(noise_model(patcher)).ends_in_noise
    for kind in ("eps", "v_prediction", "edm", "cosmos_rflow"):
        node = of(continuous.patch(patcher, kind, 90.0, 0.01))
        expected = {"eps": "epsilon", "edm": "affine", "cosmos_rflow": "flow"}.get(kind, kind)
        assert noise_model(node).kind == expected and sigmas(node)[-1].item() == pytest.approx(90)
    for kind, sentence in (("lcm", "knows 50 levels"), ("img_to_img", "loudness"), ("img_to_img_flow", "no noise")):
        with pytest.raises(ValueError, match=sentence):
            noise_model(of(discrete.patch(patcher, kind, False)))


def test_a_shift_is_in_no_level():
    _, patcher = build("sd3")
    plain = sigmas(patcher)
    shifted = of(sampling_nodes.ModelSamplingSD3().patch(patcher, 7.5))
    assert torch.equal(sigmas(shifted), plain) and torch.equal(plain, TIMES)
    assert own_shift(patcher) == pytest.approx(3) and own_shift(shifted) == pytest.approx(7.5)
    assert own_shift(build("sd15")[1]) == 1


class Loud(comfy.model_sampling.CONST):
    """Flow with noise of eight times the strength, as a node may make it; the newest ComfyUI has one of its own."""

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        return super().noise_scaling(sigma, noise * 8, latent_image, max_denoise)


def louder():
    own = sampling_of("FLOW", shift=3.0)
    yield made(Loud, comfy.model_sampling.ModelSamplingDiscreteFlow)
    if hasattr(own, "set_noise_scale"):
        own.set_noise_scale(8.0)
        yield own


@pytest.mark.parametrize("sampling", list(louder()))
def test_louder_noise_is_in_the_target(sampling):
    found = noise_model(wired(sampling))
    assert found.kind == "affine" and torch.allclose(found.p, -torch.ones(1000))
    assert torch.allclose(found.q, torch.full((1000,), 8.0)) and found.sigma[-1] == 8 and found.alpha[-1] == 0


def against_sampler(objective, size, sampling):
    """Compare probabilities with the sigmas that ComfyUI's sampler takes: times that are even before the shift."""
    table, steps = objective.probabilities(size), 10
    taken = comfy.samplers.calculate_sigmas(sampling, "simple", steps)[:-1].double()
    even = 1 - torch.arange(steps, dtype=torch.float64) / steps
    assert torch.allclose(between(table, taken), even, atol=2e-4)


SIZES = [(512, 512), (1216, 832), (1440, 1440)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_shift_of_flux_is_that_of_its_sampler_at_every_size(width, height):
    _, patcher = build("flux_dev")
    architecture, config = architecture_of(patcher), ObjectiveConfig(timestep_distribution="uniform")
    node = of(sampling_nodes.ModelSamplingFlux().patch(patcher, 1.15, 0.5, width, height))
    objective = Objective(config, noise_model(patcher), 0, architecture.levels)
    against_sampler(objective, (height // 8, width // 8), node.get_model_object("model_sampling"))
    _, patcher = build("flux2")  # 16 pixels a latent pixel, and a token each: the same number of tokens
    objective = Objective(config, noise_model(patcher), 0, architecture_of(patcher).levels)
    against_sampler(objective, (height // 16, width // 16), node.get_model_object("model_sampling"))


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.0])
def test_a_number_as_shift_is_that_of_the_samplers(shift):
    _, patcher = build("sd3")
    config = ObjectiveConfig(timestep_distribution="uniform", timestep_shift=shift)
    node = of(sampling_nodes.ModelSamplingSD3().patch(patcher, shift))
    objective = Objective(config, noise_model(node), 0, LevelDefaults(shift=9.0))
    for width, height in SIZES:
        against_sampler(objective, (height // 8, width // 8), node.get_model_object("model_sampling"))


def test_families_without_a_trainer_take_the_shift_of_their_sampler():
    for name in ("auraflow", "ltxv", "mochi", "omnigen2", "longcat"):
        _, patcher = build(name)
        config = ObjectiveConfig(timestep_distribution="uniform")
        objective = Objective(config, noise_model(patcher), 0, architecture_of(patcher).levels)
        against_sampler(objective, (64, 64), patcher.get_model_object("model_sampling"))
