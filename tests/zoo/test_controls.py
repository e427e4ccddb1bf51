"""Control pictures reach a model as ComfyUI's ReferenceLatent hands them over: in training, in samples, to the text."""

import json

import comfy.sample
import comfy.sd
import numpy as np
import pytest
import torch
from comfy_extras.nodes_edit_model import ReferenceLatent
from comfy_extras.nodes_qwen import TextEncodeQwenImageEdit, TextEncodeQwenImageEditPlus
from durable import Cut, cut_at, equal
from PIL import Image
from safetensors import safe_open
from train_graph import draw_pictures
from zoo.again import again
from zoo.linked import DrawnClip, PooledVae, linked, live_of
from zoo.test_train import configure, run, sampled

from lora_atelier.nodes.comfyui.connected import text
from lora_atelier.nodes.comfyui.connected.model import ConnectedModel
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.config import (
    CaptionConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    MaskConfig,
    MemoryConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.data.controls import whole_crop
from lora_atelier.trainer_core.data.images import cut, load_picture

EDITED = ("flux_dev", "flux2", "flux2_klein", "qwen_image", "omnigen2")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Draw pictures, and two control pictures of each."""
    folder = tmp_path_factory.mktemp("pairs")
    draw_pictures(folder / "after")
    for number, name in enumerate(("before", "pose")):
        (folder / name).mkdir()
        for path in (folder / "after").glob("*.png"):
            image = Image.open(path).convert("RGB")
            Image.fromarray(np.roll(np.asarray(image), 3 + number, axis=1)).save(folder / name / path.name)
    return folder


def paired(base, pairs, *names, **changes):
    config = configure(base, pairs / "after")
    controls = ControlConfig(folders=tuple(str(pairs / name) for name in names))
    concept = ConceptConfig(folder=str(pairs / "after"), controls=controls, **changes)
    return config.replace(dataset=DatasetConfig(concepts=(concept,)))


def pixels(seed, size=64):
    """Draw pixels of a picture, (1, 3, H, W) in -1..1."""
    return torch.rand(1, 3, size, size + 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def recorded(patcher, monkeypatch):
    """Keep what a model is called with, without ComfyUI's options and the noised latents."""
    calls, own = [], patcher.model.apply_model

    def apply_model(x, t, **given):
        calls.append({name: value for name, value in given.items() if name not in ("transformer_options", "control")})
        return own(x, t, **given)

    monkeypatch.setattr(patcher.model, "apply_model", apply_model)
    return calls


def same(one, other):
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("row", EDITED)
def test_training_calls_the_model_as_comfyuis_nodes_and_sampler_do(row, monkeypatch):
    config = linked(row)
    live = live_of(config)
    base = ConnectedModel(config, live)
    calls = recorded(live.model, monkeypatch)
    form, shown = base.latents, [pixels(seed) for seed in (1, 2)]
    references = [base.controls.encode(base.autoencoder.module, each)[0] for each in shown]
    framings = [Framing.whole((64, 64))]
    shape = (1, form.channels, 64 // form.pixels, 64 // form.pixels)
    noised, level = torch.randn(shape), torch.tensor([500])
    caption = base.text.encode("a mossling", CPU)
    with torch.no_grad():
        with_both = base.denoiser.predict(
            noised, level, base.conditions.batch([caption], framings, CPU, None, [references])
        )
        swapped = base.denoiser.predict(
            noised, level, base.conditions.batch([caption], framings, CPU, None, [references[::-1]])
        )
        alone = base.denoiser.predict(noised, level, base.conditions.batch([caption], framings, CPU))
    assert (with_both - alone).abs().max() > 1e-3 * alone.abs().max()
    assert (with_both - swapped).abs().max() > 1e-5 * alone.abs().max()

    given = {} if base.architecture.guidance is None else {"guidance": base.architecture.guidance}
    ((cross, extra),) = live.clip.encode_from_tokens_scheduled(live.clip.tokenize("a mossling"))
    wired = [[cross, {**extra, **given}]]
    for each in shown:
        latents = live.vae.encode(((each + 1) / 2).movedim(1, -1))
        wired = ReferenceLatent.execute(wired, {"samples": latents}).result[0]
    empty = torch.zeros(shape[:2] + ((1,) if live.vae.latent_dim == 3 else ()) + shape[2:])
    trained = calls[0]
    calls.clear()
    comfy.sample.sample(live.model, empty, 1, 1.0, "euler", "simple", wired, wired, empty, disable_pbar=True, seed=1)
    assert trained.keys() == calls[0].keys() and "ref_latents" in trained
    assert all(same(trained[name], calls[0][name]) for name in trained)


@pytest.mark.parametrize(("row", "names"), [("flux_dev", ("before", "pose")), *again(("qwen_image", ("before",)))])
def test_a_run_with_control_pictures_and_masks_trains_resumes_and_is_known_by_them(row, names, pairs, tmp_path):
    for path in (pairs / "after").glob("[0-9].png"):
        Image.new("L", Image.open(path).size, 99).save(path.with_name(f"{path.stem}-masklabel.png"))
    base = linked(row)
    config = paired(base, pairs, *names, masks=MaskConfig(), flip=True)
    result, notes = run(config, tmp_path)
    assert result.finished and any("controls" in note for note in notes)
    with safe_open(result.path, "pt") as file:
        (concept,) = json.loads(file.metadata()["atelier.config"])["dataset"]["concepts"]
    assert concept["controls"]["folders"] == list(names)  # and no path of this machine
    assert "Already trained in" in run(config, tmp_path)[0].origin
    with pytest.raises(Cut):
        run(config, tmp_path / "cut", step=cut_at(2))
    resumed, _ = run(config, tmp_path / "cut")
    assert "Resumed after step 2" in resumed.origin and equal(resumed.tensors, result.tensors)
    plain = config.replace(dataset=DatasetConfig(concepts=(config.dataset.concepts[0].replace(controls=None),)))
    other, _ = run(plain, tmp_path)
    assert other.run != result.run and other.losses != result.losses
    turned = paired(base, pairs, *reversed(("before", "pose")[: len(names)]), masks=MaskConfig(), flip=True)
    if len(names) > 1:
        assert run(turned, tmp_path)[0].run != result.run


@pytest.mark.parametrize("row", ["qwen_image", *again("sd3", "sd15", "z_image")])
def test_a_slider_of_pairs_is_trained_on_any_model(row, pairs, tmp_path):
    """Also on one that takes no control pictures, and on one that would see them; it resumes to the last bit."""
    base = linked(row)
    config = paired(base, pairs, "before", flip=True)
    (concept,) = config.dataset.concepts
    other = concept.replace(controls=concept.controls.replace(use="slider"))
    untold = CaptionConfig(missing="empty")
    kept = ConceptConfig(folder=str(pairs / "pose"), role="regularisation", captions=untold)
    train = config.train.replace(validation_share=0.3, validate_every=1)
    config = config.replace(dataset=DatasetConfig(concepts=(other, kept)), train=train)
    result, notes = run(config, tmp_path)
    assert result.finished and torch.tensor(result.losses).isfinite().all()
    assert any("other end" in note for note in notes)
    with pytest.raises(Cut):
        run(config, tmp_path / "cut", step=cut_at(2))
    resumed, _ = run(config, tmp_path / "cut")
    assert "Resumed after step 2" in resumed.origin and equal(resumed.tensors, result.tensors)
    plain = run(config.replace(dataset=DatasetConfig(concepts=(concept.replace(controls=None), kept))), tmp_path)[0]
    assert not equal(plain.tensors, result.tensors)


@pytest.mark.parametrize("row", ["qwen_image", *again("flux_dev")])
def test_control_pictures_are_encoded_while_training_as_for_the_cache(row, pairs, tmp_path):
    """Also those that Qwen's text encoder sees with each caption, and those of samples."""
    base = linked(row)
    config = paired(base, pairs, "before", "pose", flip=True, captions=CaptionConfig(dropout=0.3))
    line = f"a mossling --ci {next((pairs / 'before').glob('*.png'))}"
    config = config.replace(sample=SampleConfig(prompts=(line,), width=64, height=64, steps=2))
    cached, _ = run(config, tmp_path / "cached")
    found, _ = run(config.replace(memory=MemoryConfig(encodings="none")), tmp_path / "live")
    assert found.losses == cached.losses and equal(found.tensors, cached.tensors)
    assert torch.equal(found.samples, cached.samples) and len(found.samples) == 1


@pytest.mark.parametrize("row", ["omnigen2", *again("qwen_image", "flux2")])
def test_concepts_with_and_without_control_pictures_train_together(row, pairs, tmp_path):
    """In one batch, too: one sample has two, the other none."""
    base = linked(row)
    config = paired(base, pairs, "before", "pose")
    both = (ConceptConfig(folder=str(pairs / "after"), role="regularisation"), *config.dataset.concepts)
    train = config.train.replace(steps=6)
    result, _ = run(config.replace(dataset=DatasetConfig(concepts=both), train=train), tmp_path)
    assert result.finished and torch.tensor(result.losses).isfinite().all()


def test_a_model_without_references_refuses_control_pictures(pairs, tmp_path):
    for row in ("chroma", "sd15"):
        with pytest.raises(
            ValueError, match="takes no control pictures; remove folder of Control Pictures, or train on an edit"
        ):
            run(paired(linked(row), pairs, "before"), tmp_path)
    config = sampled(linked("sd15"), pairs / "after")
    line = config.replace(sample=config.sample.replace(prompts=("a mossling --ci /x.png",)))
    with pytest.raises(ValueError, match="takes no control pictures; remove --ci of prompt 1 in sample_prompts"):
        run(line, tmp_path)
    with pytest.raises(
        ValueError, match="Qwen-Image takes 1 control picture with edit_text single; set folder of Control Pict"
    ):
        run(paired(linked("qwen_image", edit_text="single"), pairs, "before", "pose"), tmp_path)


def test_a_sample_is_drawn_with_the_control_picture_that_its_line_names(pairs, tmp_path):
    base = linked("flux_dev")
    config = sampled(base, pairs / "after").replace(dataset=paired(base, pairs, "before").dataset)
    name = next((pairs / "before").iterdir()).name

    def drawn(*prompts):
        sample = config.sample.replace(prompts=prompts)
        result, notes = run(config.replace(sample=sample), tmp_path / str(len(prompts)) / prompts[0].replace("/", "_"))
        assert not any("could not be drawn" in note for note in notes), notes
        return result

    result = drawn(f"a mossling --ci {name}")
    live = live_of(base)
    image = load_picture(pairs / "before" / name)
    seen = np.array(cut(image, whole_crop(image.size, (64, 64), 16)))
    latents = live.vae.encode(torch.from_numpy(seen)[None] / 255)
    model, _ = comfy.sd.load_lora_for_models(live.model, None, dict(result.tensors), 1.0, 0.0)
    wired = []
    for words in ("a mossling", ""):
        ((cross, extra),) = live.clip.encode_from_tokens_scheduled(live.clip.tokenize(words))
        wired.append(ReferenceLatent.execute([[cross, {**extra, "guidance": 3.5}]], {"samples": latents}).result[0])
    empty = torch.zeros(1, 16, 8, 8)
    noise = comfy.sample.prepare_noise(empty, 3)
    wanted = comfy.sample.sample(model, noise, 2, 1.0, "euler", "simple", *wired, empty, disable_pbar=True, seed=3)
    assert (result.samples - live.vae.decode(wanted)).abs().max() <= 1.5 / 255
    assert equal(drawn("a mossling").tensors, result.tensors)  # samples change nothing
    assert (drawn("a mossling").samples - result.samples).abs().max() > 1.5 / 255
    with pytest.raises(ValueError, match=r"There is no file .*none\.png; set --ci in sample_prompts"):
        drawn("a mossling --ci none.png")


@pytest.mark.parametrize("how", ["plus", "single"])
def test_qwens_text_encoder_sees_the_control_pictures_of_each_sample(how, pairs, tmp_path):
    base = linked("qwen_image", edit_text=how)
    encoded, own = [], text.encode_seen

    def encode_seen(clip, caption, pictures, **options):
        made = own(clip, caption, pictures, **options)
        encoded.append((caption, pictures, made))
        return made

    line = f"turn it blue --ci {next((pairs / 'before').iterdir()).name}"
    sample = SampleConfig(prompts=(line,), width=64, height=64, steps=1, cfg=2.0)
    config = paired(base, pairs, "before").replace(sample=sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "encode_seen", encode_seen)
        result, notes = run(config, tmp_path)
    assert not any("could not be drawn" in note for note in notes), notes
    assert {caption for caption, _, _ in encoded} >= {"turn it blue", ""}  # the prompt, and the negative one
    trained = [each for each in encoded if each[0] not in ("turn it blue", "") and each[1][0].any()]
    assert result.finished and len(trained) == len(list((pairs / "before").iterdir()))
    clip = DrawnClip("qwen_image")
    for caption, (picture,), made in trained:
        image = ((picture + 1) / 2).movedim(0, -1)[None]
        wanted = (
            TextEncodeQwenImageEdit.execute(clip, caption, image=image)
            if how == "single"
            else TextEncodeQwenImageEditPlus.execute(clip, caption, image1=image)
        ).result[0]
        assert equal(made, text._stored(wanted))
    again, _ = run(config.replace(sample=sample.replace(prompts=("turn it blue",))), tmp_path / "other")
    assert again.losses == result.losses and not torch.equal(again.samples, result.samples)


def test_a_reference_is_what_vae_encode_gives():
    for row in EDITED:
        config = linked(row)
        base, vae = ConnectedModel(config, live_of(config)), PooledVae(row)
        wanted = vae.encode(((pixels(4) + 1) / 2).movedim(1, -1))
        found = base.controls.encode(base.autoencoder.module, pixels(4))
        assert found.ndim == 4 and torch.equal(found.reshape(wanted.shape), wanted)
