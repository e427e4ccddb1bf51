"""Architectures: every architecture has its row, every row is whole, and a sentence refuses other models."""

import dataclasses
import re
import typing
from contextlib import nullcontext
from types import SimpleNamespace

import comfy.model_base
import comfy.model_sampling
import comfy.samplers
import comfy.supported_models
import comfy.text_encoders.flux
import comfy.text_encoders.sd3_clip
import pytest
import torch
from safetensors.torch import save_file
from zoo.linked import linked, source_of
from zoo.zoo import ODD, ROWS, ZOO, build

from lora_atelier.nodes.comfyui.connected.architecture import (
    architecture_of,
    architecture_of_file,
    defaults_of,
    describe,
    name_of,
    remarks,
    sampling_of,
)
from lora_atelier.nodes.comfyui.connected.check import check_distilled
from lora_atelier.nodes.comfyui.connected.layers import list_layers
from lora_atelier.trainer_core.config import ConnectedConfig, Defaults
from lora_atelier.trainer_core.config.objective import Distribution
from lora_atelier.trainer_core.models.architectures import ARCHITECTURES, OTHER_KINDS
from lora_atelier.trainer_core.networks.layers.shape import is_matrix

# Classes of ComfyUI for which nothing better is known than the generic row; CogVideoX is refused for its sampling.
GENERIC = ["SDXLRefiner", "PixelDiTT2I", "HiDreamO1", "MageFlow"]
GENERIC += ["CogVideoX_T2V", "CogVideoX_I2V", "CogVideoX_Inpaint"]


def told(patcher, name):
    """The MODEL as if it were loaded from a file of this name."""
    patcher.cached_patcher_init = (None, (f"/models/{name}", {}))
    return patcher


def test_every_class_of_comfyui_has_a_row_or_a_reason():
    listed = {name for known in ARCHITECTURES for name in known.classes} | OTHER_KINDS.keys()
    for kind in comfy.supported_models.models:
        ancestors = {each.__name__ for each in kind.__mro__}
        assert ancestors & listed or kind.__name__ in GENERIC, f"{kind.__name__}: give it a row in architectures.py"
        assert not (ancestors & listed and kind.__name__ in GENERIC), (
            f"{kind.__name__} has a row: remove it from GENERIC"
        )


def test_every_row_is_whole():
    assert len({(known.kind, *known.where.values()) for known in ARCHITECTURES}) == len(ARCHITECTURES)
    assert not {name for known in ARCHITECTURES for name in known.classes} & OTHER_KINDS.keys()
    for known in ARCHITECTURES:
        levels, sampling = known.levels, known.sampling
        assert known.title and known.classes and levels.source, known.kind
        assert levels.distribution in typing.get_args(Distribution) and levels.shift >= 0
        assert sampling.sampler in comfy.samplers.KSampler.SAMPLERS, known.kind
        assert sampling.scheduler in comfy.samplers.KSampler.SCHEDULERS, known.kind
        assert sampling.steps > 0 and sampling.cfg >= 1 and (known.guidance is None) == (sampling.guidance is None)
        assert 4 <= known.rank <= 64 and 1e-5 <= known.learning_rate <= 1e-3 and 0 <= known.caption_dropout < 1
        assert ("trainer's values" in levels.source) <= known.untried, known.kind


def test_every_model_of_the_zoo_finds_its_row(name, caplog):
    _, patcher = build(name)
    if not ZOO[name].kind:
        return
    known = architecture_of(patcher)
    assert (known.kind, known.step) == (ZOO[name].kind, ZOO[name].step) and known.levels.shift > 0
    assert known.modelspec and known.base_version
    if known.classes and "a relative of" not in known.title:
        rows = [row for row in ARCHITECTURES if row.kind == known.kind]
        assert known in [dataclasses.replace(known, **same(row, known)) for row in rows]
    sentences = describe(patcher)
    assert "float32" in sentences[0] and "_" not in sentences[0].replace("v_prediction", "")
    assert all(sentence.endswith(".") and "None" not in sentence for sentence in sentences)
    assert set(remarks(patcher)) <= set(sentences) and any("untried" in each for each in sentences) == known.untried
    remarks(patcher, SimpleNamespace(tokenizer=object()))
    assert "fix your code" not in caplog.text  # as ComfyUI says of names that its configurations lack


@pytest.mark.parametrize(("row", "step", "guidance"), [("flux_dev", 64, 1.0), ("z_image", 64, None)])
def test_what_a_run_leaves_open_is_the_architectures(row, step, guidance):
    base, known = source_of(linked(row)).outline(), architecture_of(build(row)[1])
    assert base.defaults == Defaults(
        rank=known.rank,
        learning_rate=known.learning_rate,
        resolution=known.resolution,
        step=step,
        caption_dropout=known.caption_dropout,
        guidance=guidance,
    )


def test_a_network_without_attention_and_mlp_is_trained_whole():
    assert source_of(linked("odd_convolutions")).outline().defaults.preset == "full"
    (chosen,) = (each for each in describe(build("odd_convolutions")[1]) if each.startswith("The preset auto"))
    assert "full: all layers, since none of this architecture is called attention or MLP" in chosen


def same(row, known):
    """What a row says itself, so that all else of the architecture must be what the MODEL fills in."""
    filled = ("levels", "step", "modelspec", "base_version", "guidance", "sampling")
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(known) if field.name not in filled}


def test_the_zoo_is_known_here():
    assert {name for name, row in (ROWS | ODD).items() if not row.kind} == {"cogvideox"}


def test_an_architecture_without_a_row_gets_the_generic_one():
    own_shift = {"sd3": ("logit_normal", 3), "flux_dev": ("logit_normal", 3.158193), "sd15": ("uniform", 1)}
    for name, (distribution, shift) in own_shift.items():
        model, patcher = build(name)
        model.model_config = SimpleNamespace(unet_config={})  # as a custom node's own
        model.__class__ = type("Novel", (type(model),), {})
        known = architecture_of(patcher)
        assert known.untried and known.kind == "simplenamespace" and known.guidance is None
        assert known.levels.distribution == distribution and known.levels.shift == pytest.approx(shift, rel=1e-5)
        assert known.step == (8 if name == "sd15" else 16)
        assert any("untried" in sentence for sentence in describe(patcher))


class Loud(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        return super().noise_scaling(sigma, noise * 8, latent_image, max_denoise)


class Flow(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    pass


def test_a_flow_with_louder_noise_is_a_flow():
    model, patcher = build("sd3")
    model.model_config = SimpleNamespace(unet_config={})
    model.__class__ = type("Novel", (type(model),), {})
    patcher.add_object_patch("model_sampling", Loud(build("sd3")[0].model_config))
    levels = architecture_of(patcher).levels
    assert levels.distribution == "logit_normal" and levels.shift == pytest.approx(3)


def test_a_relative_is_a_guess_and_says_so():
    model, patcher = build("z_image")
    model.model_config.__class__ = type("ZImageNext", (type(model.model_config),), {})
    known = architecture_of(patcher)
    assert known.kind == "z_image" and known.untried and known.title == "ZImageNext, a relative of Z-Image"


def test_a_class_made_of_a_listed_one_is_a_relative_also_where_it_builds_the_same_network():
    model, patcher = build("flux_dev")
    model.model_config.__class__ = type("FluxNext", (comfy.supported_models.Flux,), {})
    known = architecture_of(patcher)
    assert known.kind == "flux" and known.untried and known.title == "FluxNext, a relative of FLUX.1 dev"


def test_kandinsky_6_is_no_relative_of_5_and_has_its_own_shift():
    model, patcher = build("kandinsky5_image")
    model.model_config.__class__ = type("Kandinsky6", (type(model.model_config),), {})
    patcher.add_object_patch("model_sampling", Flow(model.model_config))
    patcher.get_model_object("model_sampling").set_parameters(shift=7.0)
    known = architecture_of(patcher)
    assert (known.kind, known.title) == ("kandinsky6", "Kandinsky 6") and known.levels.shift == pytest.approx(7)
    name = "lora_unet_visual_blocks_3_videoT_self_attention_to_query"
    assert [row.kind for row in ARCHITECTURES if any(re.search(each, name) for each in row.in_loras)] == ["kandinsky6"]


def test_a_clip_of_another_kind_is_told():
    class Clip:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

    def of(kind):
        return Clip(kind.__new__(kind))

    _, patcher = build("flux_dev")
    own, other = comfy.text_encoders.flux.FluxTokenizer, comfy.text_encoders.sd3_clip.SD3Tokenizer
    assert not any("linked CLIP" in sentence for sentence in describe(patcher, clip=of(own)))
    (said,) = (sentence for sentence in remarks(patcher, of(other)) if "linked CLIP" in sentence)
    assert said.startswith("The linked CLIP is of the kind sd3_clip, and ComfyUI loads flux for this MODEL.")


def test_samples_are_told_of_the_model_that_draws_them():
    (said,) = (each for each in describe(build("flux_dev")[1], sampled=build("flux_schnell")[1]) if "Samples:" in each)
    assert said.startswith("Samples: 4 steps, cfg 1,")


@pytest.mark.parametrize(
    ("row", "file", "expected"),
    [
        ("z_image", "z_image_turbo_bf16.safetensors", (8, 1, "res_multistep", "simple", None)),
        ("z_image", "z_image_bf16.safetensors", (25, 4, "res_multistep", "simple", None)),
        ("flux2_klein", "flux-2-klein-4b.safetensors", (4, 1, "euler", "simple", None)),
        ("flux2_klein", "flux-2-klein-base-4b.safetensors", (20, 5, "euler", "simple", None)),
        ("flux_dev", "flux1-dev-turbo-4steps.safetensors", (4, 1, "euler", "simple", 3.5)),
        ("flux_dev", "flux1-dev-turbo-12000-steps.safetensors", (8, 1, "euler", "simple", 3.5)),
        ("flux_schnell", "flux1-schnell.safetensors", (4, 1, "euler", "simple", None)),
        ("hidream", "hidream_i1_dev_bf16.safetensors", (28, 1, "lcm", "normal", None)),
    ],
)
def test_a_model_that_is_distilled_by_its_name_draws_in_few_steps(row, file, expected):
    """Its own samples, and those of a model that it draws for."""
    patcher = told(build(row)[1], file)
    own = sampling_of(patcher)
    assert (own.steps, own.cfg, own.sampler, own.scheduler, own.guidance) == expected
    (said,) = (each for each in describe(build("flux_dev")[1], sampled=patcher) if "Samples:" in each)
    assert said.startswith(f"Samples: {own.steps} steps, cfg {own.cfg:g}, sampler {own.sampler},")


def test_guidance_is_none_where_the_network_takes_none():
    assert architecture_of(build("flux_dev")[1]).guidance == 1 and architecture_of(build("chroma")[1]).guidance == 0
    model, patcher = build("hunyuan_video")
    assert architecture_of(patcher).guidance == 1 and architecture_of(patcher).sampling.guidance == 6
    model.diffusion_model.params.guidance_embed = False
    assert architecture_of(patcher).guidance is None and architecture_of(patcher).sampling.guidance is None
    assert not any("guidance" in sentence for sentence in describe(patcher))
    chosen = ConnectedConfig(guidance=3.5)
    assert any("takes no distilled guidance, so set guidance of" in sentence for sentence in describe(patcher, chosen))
    told = [sentence for sentence in describe(build("flux_dev")[1], chosen) if "Distilled guidance" in sentence]
    assert told == ["Distilled guidance is 3.5 in training, as you set it (by default 1) and 3.5 in samples."]


def test_the_kleins_are_told_apart():
    model, patcher = build("flux2_klein")
    assert architecture_of(patcher).base_version == "flux_2_klein_4b"
    model.model_config.unet_config["hidden_size"] = 4096
    assert architecture_of(patcher).base_version == "flux_2_klein_9b"
    assert architecture_of(build("flux2")[1]).base_version == "flux_2_dev"


FEW_STEPS = [  # row, file, the word that tells
    ("z_image", "z_image_turbo_bf16.safetensors", "turbo"),
    ("z_image", "z_image_de_turbo_v1.safetensors", ""),
    ("z_image", "z_image_bf16.safetensors", ""),
    ("flux2_klein", "flux-2-klein-4b.safetensors", "klein without base"),
    ("flux2_klein", "flux-2-klein-base-4b.safetensors", ""),
    ("hidream", "hidream_i1_fast.safetensors", "fast"),
    ("hidream", "hidream_i1_dev_bf16.safetensors", "dev"),
    ("hidream", "hidream_i1_full.safetensors", ""),
    ("sd15", "sdxl_lightning_4step.safetensors", "lightning"),
    ("sd15", "Hyper-SD15.safetensors", "hyper"),
    ("sd15", "hyperrealism_v3.safetensors", ""),
    ("flux_dev", "flux1-dev.safetensors", ""),
    ("flux_dev", "flux-dev-de-distill.safetensors", ""),
    ("flux_dev", "undistilled_flux.safetensors", ""),
]


@pytest.mark.parametrize(("row", "file", "word"), FEW_STEPS)
def test_a_model_that_is_distilled_by_its_name_is_refused_unless_confirmed(row, file, word):
    patcher = told(build(row)[1], file)
    found = [sentence for sentence in remarks(patcher) if "distilled to a few steps" in sentence]
    assert name_of(patcher) == file and not architecture_of(patcher).distilled
    assert len(found) == bool(word) and all(f"({word}) {file}" in sentence for sentence in found)
    adapter = ("Train on Z-Image,", "zimage_turbo_training_adapter_v2", "training_only to true")
    offers = {"z_image": adapter, "flux2_klein": ("Train on FLUX.2 Klein base,",)}
    assert all(offer in sentence for sentence in found for offer in offers.get(row, ("Train on its base,",)))
    check_distilled(patcher, confirmed=True)
    with pytest.raises(ValueError, match="set train_distilled of Use Connected Model") if word else nullcontext():
        check_distilled(patcher, confirmed=False)


def test_schnell_is_told_by_its_class_and_no_name_is_no_guess():
    _, schnell = build("flux_schnell")
    assert name_of(schnell) == "FLUX.1 schnell"
    (said,) = remarks(schnell)
    assert said.startswith(architecture_of(schnell).distilled) and "train on FLUX.1 dev" in said
    assert "its training adapter (FLUX.1-schnell-training-adapter)" in said
    with pytest.raises(ValueError, match=r"train on FLUX\.1 dev"):
        check_distilled(schnell, confirmed=False)
    assert remarks(build("flux2_klein")[1]) == []


@pytest.mark.parametrize(("row", "layers"), [("flux_dev", "20 layers in 4 blocks"), ("z_image", ""), ("sd15", "")])
def test_the_node_says_which_layers_a_run_takes_and_whose_its_defaults_are(row, layers):
    _, patcher = build(row)
    known, found = architecture_of(patcher), list_layers(patcher.model)
    trained = [layer for layer in found if Defaults().preset in layer.presets and is_matrix(layer.module)]
    (chosen,) = (sentence for sentence in describe(patcher) if sentence.startswith("The preset auto is attn-mlp"))
    blocks = len({layer.block for layer in trained})
    assert f"{len(trained)} layers in {blocks} block" in chosen and layers in chosen
    assert source_of(linked(row)).outline().defaults.preset == "attn-mlp"
    (opened,) = (sentence for sentence in describe(patcher) if sentence.startswith("What you leave open"))
    assert f"rank {known.rank}," in opened and known.source in opened


def test_experts_of_wan_are_told_their_range():
    high, whole = "wan2.2_t2v_high_noise_14B.safetensors", "wan2.1.gguf"
    for file, chosen, said in ((high, "all", 1), (high, "low", 1), (high, "high", 0), (whole, "all", 0)):
        found = [each for each in remarks(told(build("wan21_t2v")[1], file), None, chosen) if "expert" in each]
        assert len(found) == said and all("noise_range of Use Connected Model to high" in each for each in found)


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ("wan21_t2v", {}, "(source)"),
        ("wan21_t2v", {"noise_range": "high"}, "timesteps 874 to 999 alone"),  # of 0 to 999: the time 0.875 is 874
        ("wan21_t2v", {"noise_range": "low"}, "timesteps 0 to 873 alone"),
        ("wan21_i2v", {"noise_range": "high"}, "timesteps 899 to 999 alone"),
        ("wan22_i2v", {"noise_range": "high"}, "timesteps 899 to 999 alone"),
        ("wan21_i2v", {"noise_range": "low", "boundary": 0.5}, "timesteps 0 to 498 alone"),
        ("flux_dev", {"noise_range": "high", "boundary": 0.5}, "timesteps 499 to 999 alone"),
    ],
)
def test_an_expert_alone_names_its_timesteps(row, settings, expected):
    (said,) = (each for each in describe(build(row)[1], ConnectedConfig(**settings)) if "Timesteps are drawn" in each)
    assert expected in said if settings else "alone" not in said


def test_an_expert_of_an_architecture_without_two_is_refused():
    with pytest.raises(ValueError, match="set noise_range of Use Connected Model to all, or boundary"):
        source_of(linked("flux_dev", noise_range="high")).outline()


def test_a_node_that_drops_the_strength_of_noise_is_told():
    _, patcher = build("sd3")
    assert not any("how strong" in sentence for sentence in remarks(patcher))
    wired = patcher.clone()
    wired.add_object_patch("model_sampling", build("sd3")[0].model_sampling)
    patcher.model.model_sampling.noise_scale = 8.0
    assert any("how strong" in sentence for sentence in remarks(wired))


def test_what_is_no_model_of_pictures_from_captions_is_refused():
    model, patcher = build("sd15")
    for name in (name for name in OTHER_KINDS if hasattr(comfy.supported_models, name)):
        kind = getattr(comfy.supported_models, name)
        model.model_config = kind.__new__(kind)
        with pytest.raises(ValueError, match=OTHER_KINDS[name]):
            architecture_of(patcher)
    model, patcher = build("sd15")
    model.__class__ = type("Own", (comfy.model_base.SD21UNCLIP,), {})
    with pytest.raises(ValueError, match="noise of its own"):
        architecture_of(patcher)
    model, patcher = build("hunyuan_image21")
    model.diffusion_model.time_r_in = torch.nn.Identity()
    with pytest.raises(ValueError, match="two times at once"):
        architecture_of(patcher)


def test_precision_is_of_the_weights():
    _, patcher = build("flux_dev")
    patcher.model.diffusion_model.double_blocks.to(torch.bfloat16)
    first = describe(patcher)[0]
    assert "bfloat16 and float32" in first or "float32 and bfloat16" in first
    assert "qwen_image" in ZOO


@pytest.mark.parametrize("row", [row for row in ("flux_dev", "krea2") if row in ZOO])
def test_a_model_file_tells_its_family_by_its_header(row, tmp_path):
    denoiser, file = build(row)[1].model.diffusion_model, tmp_path / "model.safetensors"
    tensors = {f"model.diffusion_model.{name}": tensor.clone() for name, tensor in denoiser.state_dict().items()}
    save_file(tensors, file)
    assert architecture_of_file(file).kind == ZOO[row].kind
    assert defaults_of(architecture_of_file(file)).rank == architecture_of(build(row)[1]).rank
    save_file({"somebody.weight": torch.ones(2, 2)}, file)
    with pytest.raises(ValueError, match=r"model.safetensors is of no architecture whose usual settings are known"):
        architecture_of_file(file)
