"""Whole runs on linked models: trained, saved, resumed to the last bit, reused, and nothing left on the MODEL."""

import copy
import math
import os
import shutil
from unittest import mock

import comfy.lora
import comfy.model_management
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy_extras import nodes_model_advanced
from durable import Cut, cut_at, equal
from safetensors.torch import save_file
from tiny_runs import run_with_notes, tiny_config
from train_graph import draw_pictures
from xformers_stand_in import package  # noqa: F401 (a fixture)
from zoo.again import again
from zoo.linked import linked, live_of, source_of
from zoo.passes import run_once
from zoo.test_conditions import make_faulty
from zoo.test_frozen import packed, patched, scaled
from zoo.zoo import OF_EACH_KIND, ZOO, build

from lora_atelier.nodes.comfyui.connected import host, identity, trial
from lora_atelier.nodes.comfyui.connected.architecture import sampling_of
from lora_atelier.nodes.comfyui.connected.denoiser import RawDenoiser
from lora_atelier.nodes.comfyui.connected.layers import units
from lora_atelier.trainer_core.config import BeneathConfig, MemoryConfig, SampleConfig, SavesConfig, TrainConfig
from lora_atelier.trainer_core.models import LatentFormat
from lora_atelier.trainer_core.preflight import measured

PICTURES = LatentFormat(channels=4, pixels=8, step=8, frames=4)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Rows that training cannot follow, or not without other pictures, and what the sentence says.
REFUSED = {
    "cogvideox": "its sampling",
    "wan21_i2v": "makes each picture from a control picture",
    "wan21_vace": "draws from control frames and their masks, which no dataset gives; link Wan 2.1 text to video",
    "cascade_b": "draws from the small picture of stage C, which no dataset gives; link the MODEL of stage C",
}
# Sides of pictures in pixels, where tiny models take none of 64.
LARGE = {"pixart_sigma": 384, "pixart_alpha": 384, "cascade_c": 128, "cascade_b": 128}
# Rows whose runs go a way of their own: each kind of prediction, of size, of latents and of refusal, and an odd one.
OWN_WAYS = (
    *OF_EACH_KIND.values(),
    *("pixart_sigma", "wan21_t2v", "wan21_i2v", "cogvideox"),
    "odd_written",
)
ROWS = [*(name for name in OWN_WAYS if name in ZOO), *again(*(name for name in ZOO if name not in OWN_WAYS))]


def configure(base, pictures, **train):
    return tiny_config(
        base,
        pictures,
        existing={"on_existing": "resume"},
        lora={"preset": "auto"},
        optimizer={"learning_rate": 1e-2},
        train={"steps": 3, "bucket_step": 64, "seed": 5} | train,
        saves={"save_every": 1, "save_unit": "steps"},
    )


def run(config, folder, **callbacks):
    """Train without the passes that measure its memory, and try each kind of MODEL once.

    The first test below measures and tries each architecture.
    """
    with mock.patch.object(host, "try_out", tried):
        return run_unmeasured(config, folder, **callbacks)


def run_unmeasured(config, folder, **callbacks):
    """Train without the passes that measure its memory."""
    nothing = measured.Peak(once=0, sample=0, position=0, latents=PICTURES)
    with mock.patch.object(measured, "measure_peak", lambda *_: nothing):
        return run_measured(config, folder, **callbacks)


def tried(denoiser, inputs, what, layers, modules, text=None):
    """Try a MODEL with gradients, or give what was found of another one of its architecture."""
    blocks, key = units(denoiser.model.diffusion_model), (what, frozenset(layers))
    if key not in _tried:
        found = trial.try_out(denoiser, inputs, what, layers, modules, text)
        _tried[key] = [least for _, least in found.units], found
    levels, found = _tried[key]
    return found._replace(units=[(block, least) for (block, _), least in zip(blocks, levels, strict=False)])


_tried = {}


def run_measured(config, folder, **callbacks):
    return run_with_notes(config, folder, source=source_of(config.base_model), **callbacks)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("concept") / "pictures")


def state_of(patcher):
    model = patcher.model
    modules = [
        (type(m), m.training, sorted(m.__dict__), *map(dict, (getattr(m, h) for h in HOOKS))) for m in model.modules()
    ]
    wired = (
        {key: [each[:3] for each in patches] for key, patches in patcher.patches.items()},
        str(patcher.patches_uuid),
        dict(patcher.object_patches),
        copy.copy(patcher.model_options["transformer_options"]),
    )
    sampling = getattr(model, "model_sampling", None)  # a CLIP's has none
    flags = [p.requires_grad for p in model.parameters()], comfy.model_management.in_training, sampling
    return copy.deepcopy(model.state_dict()), modules, wired, flags


def unchanged(one, other):
    assert equal(one[0], other[0])
    assert one[1:] == other[1:]


@pytest.mark.parametrize("name", ROWS)
def test_a_run_ends_in_a_file_that_comfyui_draws_with_and_leaves_the_model_alone(name, pictures, tmp_path):
    """What the samples show is what ComfyUI's own loader and KSampler make of the file, in the model's own settings."""
    base = linked(name)
    live = live_of(base)
    model = live.model
    side = LARGE.get(name, 64)
    config = configure(base, pictures, steps=2, batch_size=1, resolution=side, save_dtype="float32")
    config = config.replace(
        sample=SampleConfig(prompts=("a mossling --n dull",), width=side, height=side, steps=3, seed=3),
        saves=SavesConfig(save_every=0),
    )
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            run(config, tmp_path)
        return
    comfy.model_management.load_models_gpu([model])  # which ComfyUI marks on every module
    run_once(model.model, name)  # some of ComfyUI's models keep numbers of their last pass
    before = state_of(model)
    result, notes = run_measured(config, tmp_path)
    assert result.finished and len(result.losses) == 2 and all(map(math.isfinite, result.losses))
    assert not any("could not be drawn" in note for note in notes), notes
    unchanged(before, state_of(model))
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    taken = comfy.lora.load_lora(dict(result.tensors), keys, log_missing=False)
    layers = {name.partition(".")[0] for name in result.tensors}
    assert layers and {keys[name] for name in layers} == set(taken)
    assert any(t.any() for name, t in result.tensors.items() if "lora_up" in name)
    own = sampling_of(model)
    settings = {"cfg": own.cfg, "sampler": own.sampler, "scheduler": own.scheduler, "guidance": own.guidance}
    drawn = drawn_with(live, result.tensors, size=(side, side), steps=3, **settings)
    assert (result.samples - drawn).abs().max() <= 1.5 / 255


def test_a_size_that_comfyuis_code_does_not_take_is_named(pictures, tmp_path, caplog):
    where = r"an error in \w+ of comfy/ldm/pixart/\w+\.py, which the log has\. Link the CLIP"
    with pytest.raises(
        ValueError, match=rf"cannot run pixart_sigma with .* on pictures of \d+x\d+ pixels: .*{where}"
    ) as said:
        run(configure(linked("pixart_sigma"), pictures), tmp_path)
    assert "division" not in str(said.value) and "division" in caplog.text


@pytest.mark.parametrize("row", ["flux_dev", *again("qwen_image")])
def test_a_run_resumes_to_the_last_bit_and_is_reused_on_other_patchers_of_the_same_weights(row, pictures, tmp_path):
    whole, _ = run(configure(linked(row), pictures), tmp_path / "whole")
    with pytest.raises(Cut):
        run(configure(linked(row), pictures), tmp_path / "cut", step=cut_at(2))
    result, _ = run(configure(linked(row), pictures), tmp_path / "cut")
    assert "Resumed after step 2" in result.origin
    assert equal(whole.tensors, result.tensors) and whole.losses == result.losses
    again, _ = run(configure(linked(row), pictures), tmp_path / "cut")
    assert "Already trained in" in again.origin and again.run == result.run


@pytest.mark.parametrize("row", ["wan21_t2v", *again("flux_dev", "sd15")])
def test_a_run_that_keeps_no_encodings_is_the_cached_one_to_the_last_bit(row, pictures, tmp_path):
    """With validation and samples, and the MODEL as it was."""
    base = linked(row)
    model = live_of(base).model
    comfy.model_management.load_models_gpu([model])
    before = state_of(model)
    config = configure(base, pictures, validation_share=0.3, validate_every=1)
    config = config.replace(sample=SampleConfig(prompts=("a mossling",), width=64, height=64, steps=2))
    cached, _ = run(config, tmp_path / "cached")
    config = config.replace(memory=MemoryConfig(encodings="none"))
    with pytest.raises(Cut):
        run(config, tmp_path / "live", step=cut_at(2))
    found, notes = run(config, tmp_path / "live")
    assert "Resumed after step 2" in found.origin
    assert found.losses == cached.losses and found.validation == cached.validation and found.validation
    assert equal(found.tensors, cached.tensors) and torch.equal(found.samples, cached.samples)
    assert any("each step also encodes its own" in note for note in notes)
    assert not list((tmp_path / "live").rglob("shard-*"))
    unchanged(before, state_of(model))


@pytest.mark.parametrize("row", ["flux_dev", *again("sd15")])
def test_a_linked_model_attends_by_xformers_where_that_is_chosen(row, pictures, tmp_path, package):  # noqa: F811
    config = configure(linked(row), pictures)
    found, _ = run(config.replace(memory=MemoryConfig(attention="xformers")), tmp_path / "xformers")
    assert any(gradients for _, gradients in package.calls)
    package.calls.clear()
    assert found.losses == pytest.approx(run(config, tmp_path / "torch")[0].losses, rel=1e-3)
    assert not package.calls


def test_other_weights_a_patch_or_another_sampling_are_another_run(pictures, tmp_path):
    def ran(model):
        return run(configure(linked("flux_dev", model), pictures, steps=1), tmp_path)[0].run

    plain = ran(build("flux_dev")[1])
    assert ran(build("flux_dev")[1]) == plain
    patched = build("flux_dev")[1]
    weight = patched.model.state_dict()["diffusion_model.double_blocks.0.img_mlp.0.weight"]
    patched.add_patches(
        {"diffusion_model.double_blocks.0.img_mlp.0.weight": ("diff", (torch.ones_like(weight) * 0.1,))}
    )
    shifted = build("flux_dev")[1].clone()
    sampling = copy.deepcopy(shifted.get_model_object("model_sampling"))
    sampling.set_parameters(shift=2.0)
    shifted.add_object_patch("model_sampling", sampling)
    others = {ran(model) for model in (build("flux_dev", seed=1)[1], patched, shifted)}
    assert len(others) == 3 and plain not in others


def test_what_nodes_set_for_the_passes_of_a_model_is_another_run(pictures, tmp_path):
    def ran(model):
        return run(configure(linked("wan21_t2v", model), pictures, steps=1), tmp_path)[0].run

    plain = build("wan21_t2v")[1]
    roped, valued = plain.clone(), plain.clone()
    roped.model_options["transformer_options"]["rope_options"] = {"scale_x": 2.0, "shift_x": 0.0}
    valued.add_object_patch("diffusion_model.freq_dim", plain.get_model_object("diffusion_model.freq_dim"))
    runs = [ran(model) for model in (plain, roped, valued)]
    assert len(set(runs)) == 3 and ran(plain.clone()) == runs[0]


def test_loaded_patches_count_as_those_that_wait_and_other_precision_is_another_model():
    (waiting,), (loaded,) = ([patched("flux_dev", loaded="wholly")[1]] for _ in range(2))
    digest = identity.digest_of_model(loaded)
    loaded.unpatch_model()
    assert identity.digest_of_model(waiting) == digest == identity.digest_of_model(loaded)
    plain, small = (build("flux_dev", dtype=dtype)[1] for dtype in (torch.float32, torch.bfloat16))
    assert len({digest, identity.digest_of_model(plain), identity.digest_of_model(small)}) == 3


def test_other_settings_or_another_file_of_a_clip_are_another_run_with_its_own_encodings(pictures, tmp_path):
    """Two files of one size, one after the other at one place, and one cache of encodings."""
    file = tmp_path / "clip.safetensors"

    def ran(text, when=0, **settings):
        file.write_text(text, encoding="utf-8")
        os.utime(file, (when, when))
        base = linked("flux_dev")
        clip = live_of(base).clip
        clip.patcher.cached_patcher_init = (None, (str(file), {}))
        own = clip.encode_from_tokens_scheduled
        clip.encode_from_tokens_scheduled = lambda tokens: [[own(tokens)[0][0] * len(set(text)), own(tokens)[0][1]]]
        for name, value in settings.items():
            setattr(clip, name, value)
        result, _ = run(configure(base, pictures, steps=1), tmp_path)
        return result.run, result.losses

    one, other = ran("aaa"), ran("abc", 1)
    assert one[0] != other[0] and one[1] != other[1]
    assert other[1] == run_alone("abc", pictures, tmp_path)
    assert ran("aaa") == one
    settings = [ran("aaa", layer_idx=-2), ran("aaa", tokenizer_options={"t5xxl_min_length": 512})]
    assert len({one[0], other[0], *(found for found, _ in settings)}) == 4


def run_alone(text, pictures, folder):
    """Train with the CLIP of a text and an empty cache; return the losses."""
    base = linked("flux_dev")
    clip = live_of(base).clip
    own = clip.encode_from_tokens_scheduled
    clip.encode_from_tokens_scheduled = lambda tokens: [[own(tokens)[0][0] * len(set(text)), own(tokens)[0][1]]]
    return run(configure(base, pictures, steps=1), folder / "alone")[0].losses


@pytest.mark.parametrize("fault", ["one caption for all", *again("one level for all", "samples mixed a little")])
def test_a_model_whose_batches_are_not_its_samples_is_trained_sample_by_sample(fault, pictures, tmp_path, monkeypatch):
    def base():
        model = build("flux_dev")[1]
        make_faulty(model.model.diffusion_model, fault)
        return linked("flux_dev", model)

    for caption in pictures.glob("*.txt"):
        (copied := tmp_path / "same" / caption.name).parent.mkdir(exist_ok=True)
        copied.write_text("two words", encoding="utf-8")  # so that captions can be joined
        shutil.copy(caption.with_suffix(".png"), copied.with_suffix(".png"))
    found = run(configure(base(), tmp_path / "same", steps=2), tmp_path / "found")[0]
    monkeypatch.setattr(RawDenoiser, "_acts_alike", lambda *_: False)
    singly = run(configure(base(), tmp_path / "same", steps=2), tmp_path / "singly")[0]
    assert found.losses == singly.losses


FORMS_OF_RUNS = {
    "bfloat16": lambda: build("flux_dev", dtype=torch.bfloat16)[1],
    "float8": lambda: build("flux_dev", dtype=torch.float8_e4m3fn, compute=torch.bfloat16)[1],
    "scaled float8": lambda: scaled("flux_dev", exact=False)[1],
    "a custom node's": lambda: packed("flux_dev")[1],
    "patched at use": lambda: patched("flux_dev", loaded="partly")[1],
}


@pytest.mark.parametrize("form", ["scaled float8", *again("patched at use", "a custom node's", "bfloat16", "float8")])
def test_weights_in_any_form_are_trained_drawn_with_and_resumed(form, pictures, tmp_path):
    def config():
        return sampled(linked("flux_dev", FORMS_OF_RUNS[form]()), pictures)

    whole, notes = run(config(), tmp_path / "whole")
    assert not any("could not be drawn" in note for note in notes), notes
    assert all(map(math.isfinite, whole.losses)) and whole.samples.isfinite().all()
    assert any(t.any() for name, t in whole.tensors.items() if "lora_up" in name)
    with pytest.raises(Cut):
        run(config(), tmp_path / "cut", step=cut_at(1))
    result, _ = run(config(), tmp_path / "cut")
    assert whole.losses == result.losses and equal(whole.tensors, result.tensors)


def drawn_with(
    live, tensors, *, size=(64, 64), steps=2, cfg=1.0, seed=3, guidance=3.5, sampler="euler", scheduler="simple"
):
    """Draw the sample of `sampled` through ComfyUI's own loader and sampler, with a LoRA on the model that draws."""
    model, _ = comfy.sd.load_lora_for_models(live.sampled or live.model, None, dict(tensors), 1.0, 0.0)
    wanted = []
    for text in ("a mossling", "dull"):
        ((cross, extra),) = live.clip.encode_from_tokens_scheduled(live.clip.tokenize(text))
        wanted.append([[cross, extra if guidance is None else {**extra, "guidance": guidance}]])
    form = model.model.latent_format
    width, height = (side // form.spacial_downscale_ratio for side in size)
    frames = (1,) if form.latent_dimensions == 3 else ()
    latents = torch.zeros(1, form.latent_channels, *frames, height, width)
    noise, settings = comfy.sample.prepare_noise(latents, seed), (steps, cfg, sampler, scheduler)
    drawn = comfy.sample.sample(model, noise, *settings, *wanted, latents, disable_pbar=True, seed=seed)
    pictures = live.vae.decode(drawn)
    return pictures.reshape(-1, *pictures.shape[-3:])


def sampled(base, pictures):
    return configure(base, pictures).replace(
        sample=SampleConfig(prompts=("a mossling",), width=64, height=64, steps=2, cfg=1.0, seed=3),
        saves=SavesConfig(save_every=0, sample_at_start=True),
        train=TrainConfig(steps=2, resolution=64, seed=5, save_dtype="float32"),
    )


@pytest.mark.parametrize(("row", "node"), [("flux_dev", "ModelSamplingFlux"), *again(("sd3", "ModelSamplingSD3"))])
def test_samples_are_what_the_saved_file_draws_behind_a_node_that_shifts(row, node, pictures, tmp_path):
    settings = (0.3, 0.1, 64, 64) if row == "flux_dev" else (9.0,)
    (shifted,) = getattr(nodes_model_advanced, node)().patch(build(row)[1], *settings)
    drawn = []
    for model in (build(row)[1], shifted):
        base = linked(row, model)
        result, notes = run(sampled(base, pictures), tmp_path / str(len(drawn)))
        assert not any("could not be drawn" in note for note in notes), notes
        drawn.append(drawn_with(live_of(base), result.tensors, scheduler=sampling_of(model).scheduler))
        assert (result.samples - drawn[-1]).abs().max() <= 1.5 / 255
    assert (drawn[0] - drawn[1]).abs().max() > 1.5 / 255


def test_a_line_of_sample_prompts_sets_all_that_comfyui_draws_with(pictures, tmp_path):
    base = linked("flux_dev")
    config = sampled(base, pictures)

    def ask(line):
        return config.replace(sample=config.sample.replace(prompts=(line,)))

    line = "a mossling --n dull --w 96 --s 3 --l 2.5 --d 9 --g 6 --ss euler_a"
    result, notes = run(ask(line), tmp_path)
    assert not any("could not be drawn" in note for note in notes), notes
    own = {"size": (96, 64), "steps": 3, "cfg": 2.5, "seed": 9, "guidance": 6.0, "sampler": "euler_ancestral"}
    assert (result.samples - drawn_with(live_of(base), result.tensors, **own)).abs().max() <= 1.5 / 255
    for name in ("cfg", "guidance", "sampler", "seed", "steps"):
        less = {key: value for key, value in own.items() if key != name}
        assert (result.samples - drawn_with(live_of(base), result.tensors, **less)).abs().max() > 1.5 / 255, name
    with pytest.raises(
        ValueError, match=r"the sampler magic of prompt 1; set --ss in .* to one of euler, .* or another"
    ):
        run(ask("a mossling --ss magic"), tmp_path)
    base = linked("sd15")
    config = sampled(base, pictures)
    with pytest.raises(ValueError, match="Prompt 1 sets --g, but Stable Diffusion 1 takes no distilled guidance"):
        run(ask("a mossling --g 3"), tmp_path)


@pytest.mark.parametrize("partner", ["of its own", *again("of the same weights")])
def test_a_partner_draws_the_samples_and_changes_nothing_else(partner, pictures, tmp_path):
    model = build("flux_dev")[1]
    other = build("flux_dev", seed=1)[1] if partner == "of its own" else model.clone()
    key = "diffusion_model.double_blocks.0.img_mlp.0.weight"
    other.add_patches({key: ("diff", (torch.ones_like(other.model.state_dict()[key]) * 0.1,))})
    base = linked("flux_dev", model, other)
    before = state_of(model), state_of(other)
    result, notes = run(sampled(base, pictures), tmp_path / "partner")
    assert not any("could not be drawn" in note for note in notes), notes
    assert (result.samples - drawn_with(live_of(base), result.tensors)).abs().max() <= 1.5 / 255
    comfy.model_management.unload_all_models()
    unchanged(before[0][:1], state_of(model)[:1])
    unchanged(before[1][:1], state_of(other)[:1])
    alone, _ = run(sampled(linked("flux_dev", model), pictures), tmp_path / "alone")
    assert equal(alone.tensors, result.tensors) and alone.losses == result.losses
    assert (alone.samples - result.samples).abs().max() > 1.5 / 255


@pytest.mark.thorough  # beside the next test, whose wired run is of this kind, and the last one
def test_a_training_adapter_is_in_the_training_alone(pictures, tmp_path):
    """A LoRA on the MODEL, and the same MODEL without it as sample_model: how distilled models keep their speed."""
    plain = build("flux_dev")[1]
    adapted = plain.clone()
    key = "diffusion_model.double_blocks.0.img_mlp.0.weight"
    adapted.add_patches({key: ("diff", (torch.ones_like(plain.model.state_dict()[key]) * 0.1,))})
    base = linked("flux_dev", adapted, plain)
    result, notes = run(sampled(base, pictures), tmp_path / "adapter")
    assert not any("could not be drawn" in note for note in notes), notes
    assert (result.samples - drawn_with(live_of(base), result.tensors)).abs().max() <= 1.5 / 255  # by the plain one
    without, _ = run(sampled(linked("flux_dev", plain), pictures), tmp_path / "without")
    assert result.losses[0] != pytest.approx(without.losses[0], rel=1e-4)
    assert result.tensors.keys() == without.tensors.keys()


def test_an_adapter_of_a_file_is_in_the_training_alone_and_what_else_is_beneath_is_not(pictures, tmp_path):
    """As with a MODEL that both are on, and one with the other alone as sample_model."""
    plain, beneath = build("flux_dev")[1], {}
    for name, block in (("adapter", 0), ("style", 1)):
        layer = f"lora_unet_single_blocks_{block}_linear2"
        rows, columns = plain.model.diffusion_model.single_blocks[block].linear2.weight.shape
        down = torch.randn(4, columns, generator=torch.Generator().manual_seed(block)) / columns**0.5
        beneath[name] = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": down.new_ones(rows, 4)}
        save_file(beneath[name], tmp_path / f"{name}.safetensors")

    def on(model, *names):
        for each in names:
            model = comfy.sd.load_lora_for_models(model, None, beneath[each], 1.0, 0.0)[0]
        return model

    config = sampled(linked("flux_dev", plain), pictures)
    files = [
        BeneathConfig(path=str(tmp_path / f"{name}.safetensors"), training_only=name == "adapter") for name in beneath
    ]
    found, notes = run(config.replace(lora=config.lora.replace(beneath=tuple(files))), tmp_path / "files")
    assert not any("could not be drawn" in note for note in notes), notes
    both = linked("flux_dev", on(plain, "adapter", "style"), on(plain, "style"))
    wired, _ = run(sampled(both, pictures), tmp_path / "wired")
    assert found.losses == pytest.approx(wired.losses, rel=1e-5)
    assert (found.samples - wired.samples).abs().max() <= 1.5 / 255
    always = tuple(each.replace(training_only=False) for each in files)
    other, _ = run(config.replace(lora=config.lora.replace(beneath=always)), tmp_path / "always")
    assert other.losses == found.losses and (other.samples - found.samples).abs().max() > 3 / 255


def test_a_partner_with_other_blocks_is_refused(pictures, tmp_path):
    with pytest.raises(ValueError, match="sample_model linked to Use Connected Model has other blocks"):
        run(configure(linked("flux_dev", sampled=build("chroma")[1]), pictures), tmp_path)
