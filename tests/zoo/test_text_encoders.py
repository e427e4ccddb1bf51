"""Text encoders of a linked CLIP, trained: gradients, files, samples, and what cannot be trained."""

from pathlib import Path
from types import SimpleNamespace

import comfy.sample
import comfy.sd
import comfy.sd1_clip
import pytest
import torch
from durable import Cut, cut_at, equal
from tiny_runs import change, run_with_notes, tiny_config
from train_graph import draw_pictures
from zoo.again import again
from zoo.clips import clip_of, linked_with
from zoo.comfy_here import VERSION
from zoo.linked import linked, live_of, source_of
from zoo.test_gradients import direction_of, in_float64  # noqa: F401 (a fixture)
from zoo.test_train import sampled, state_of, unchanged
from zoo.zoo import build

from lora_atelier.dev import OLDEST
from lora_atelier.nodes.comfyui.connected.architecture import sampling_of
from lora_atelier.nodes.comfyui.connected.layers import units
from lora_atelier.nodes.comfyui.connected.live import LinkedModels
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.config import BeneathConfig, ObjectiveConfig
from lora_atelier.trainer_core.memory import copied_before_written, recompute
from lora_atelier.trainer_core.networks.of_model import build_network
from lora_atelier.trainer_core.objective import Objective
from lora_atelier.trainer_core.preflight import measured

CPU = torch.device("cpu")
# The oldest ComfyUI's loader has no names for Anima's text encoder.
OTHERS = ("sd3",) if VERSION == OLDEST else ("sd3", "anima")
EACH = ["flux", *again(*OTHERS)]
SIZE = (64, 96)


class Passes:
    """Passes of a tiny model with its CLIP, on one noised picture, with layers of a network on all of both."""

    def __init__(self, kind, dtype=torch.float32, preset="full-lin"):
        model = linked_with(kind, dtype=dtype)
        self.base = base = source_of(model).outline()
        own = base.wired.model.model.extra_conds
        # Some MODELs put captions through layers of their own here.
        base.wired.model.model.extra_conds = lambda **given: own(**given | {"cross_attn": given["cross_attn"] * 1.5})
        config = tiny_config(model, Path("none"), lora={"rank": 4, "alpha": 4.0, "preset": preset})
        self.network = build_network(base, config, {part.prefix: 1e-3 for part in base.parts})
        draws = torch.Generator().manual_seed(3)
        for name, parameter in self.network.named_parameters():
            if name.endswith("up"):
                torch.nn.init.normal_(parameter, std=0.05, generator=draws)
        self.network.to(dtype=dtype)
        form = base.latents
        self.noised = torch.randn(1, form.channels, *form.axes(SIZE), generator=draws).to(dtype)
        self.text = [p for t in self.network.chosen if t.part != "lora_unet" for p in self._of(t.name)]

    def _of(self, name):
        return list(self.network._layers[name].parameters())

    def loss(self):
        caption = self.base.text.encode("a small mossling on a stone", CPU)
        conditions = self.base.conditions.batch([caption], [Framing.whole(SIZE)], CPU)
        level = torch.full((1,), len(self.base.noise.alpha) // 3)
        return self.base.denoiser.predict(self.noised, level, conditions).square().mean()

    def gradients(self):
        self.network.zero_grad(set_to_none=True)
        with copied_before_written():
            self.loss().backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.text]

    @torch.no_grad()
    def slope(self, direction, step):
        losses = []
        for move in (step, -2 * step, step):
            for parameter, each in zip(self.text, direction, strict=True):
                parameter.add_(each, alpha=move)
            losses.append(self.loss().item())
        return (losses[0] - losses[1]) / (2 * step)


@pytest.fixture
def double(monkeypatch):
    """Let ComfyUI's text encoders compute in float64, which they know nothing of."""
    own = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else own(x))
    monkeypatch.setattr(comfy.sd1_clip, "torch", SimpleNamespace(**vars(torch) | {"float32": torch.float64}))


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.usefixtures("double")
def test_gradients_are_central_differences(kind):
    passes = Passes(kind, torch.float64)
    with passes.base.host.session(CPU, texts=True), passes.network.attached():
        found = passes.gradients()
        direction = direction_of(found)
        expected = sum((gradient * each).sum() for gradient, each in zip(found, direction, strict=True))
        assert float(expected) == pytest.approx(passes.slope(direction, 1e-3), rel=1e-4)
        clip = passes.base.wired.clip.cond_stage_model
        recompute([*units(passes.base.denoiser.module), *units(clip)], "full", copies=True)
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(passes.gradients(), found, strict=True))


@pytest.mark.parametrize("kind", again("flux", *OTHERS[1:]))
def test_the_estimate_counts_what_text_encoders_keep(kind):
    passes, largest = Passes(kind), (384, 256)
    base, network = passes.base, passes.network

    def live():
        return base.text.encode("a mossling on a stone", CPU)

    with base.host.session(CPU, texts=True), network.attached():
        with torch.no_grad():
            caption = live()
        found = measured.measure_peak(base, network, caption, largest, CPU, live=live).at(3, largest)
        goal = Objective(ObjectiveConfig(), base.noise, 0)
        counted, alone = (
            measured._pass_bytes(base, network, goal, read, 3, "", largest, CPU, 0) for read in (live, lambda: caption)
        )
    assert abs(found - counted) <= 0.15 * counted and counted > 1.005 * alone


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("concept") / "pictures")


def configured(base, pictures, rates=(1e-3, 0.1, 0.0), **parts):
    names = ("learning_rate", "text_encoder_learning_rate", "text_encoder_2_learning_rate")
    config = sampled(base, pictures)
    return change(config, optimizer=dict(zip(names, rates, strict=True)), **parts)


def train(config, folder, **callbacks):
    return run_with_notes(config, folder, source=source_of(config.base_model), **callbacks)


def drawn_with(live, tensors):
    """Draw the sample of `sampled` through ComfyUI's own loader and sampler, with a LoRA on MODEL and CLIP."""
    model, clip = comfy.sd.load_lora_for_models(live.sampled or live.model, live.clip, dict(tensors), 1.0, 1.0)
    own, wanted = sampling_of(model), []
    for text in ("a mossling", "dull"):
        ((cross, extra),) = clip.encode_from_tokens_scheduled(clip.tokenize(text))
        wanted.append([[cross, extra if own.guidance is None else {**extra, "guidance": own.guidance}]])
    form = model.model.latent_format
    frames = (1,) if form.latent_dimensions == 3 else ()
    latents = torch.zeros(1, form.latent_channels, *frames, *(64 // form.spacial_downscale_ratio for _ in range(2)))
    noise = comfy.sample.prepare_noise(latents, 3)
    settings = (2, 1.0, own.sampler, own.scheduler, *wanted, latents)
    drawn = comfy.sample.sample(model, noise, *settings, disable_pbar=True, seed=3)
    pictures = live.vae.decode(drawn)
    return pictures.reshape(-1, *pictures.shape[-3:])


@pytest.mark.parametrize("kind", EACH)
def test_the_file_draws_what_training_drew_and_the_clip_stays_what_it_was(kind, pictures, tmp_path):
    base = linked_with(kind)
    live = live_of(base)
    patchers = [live.model, live.clip.patcher]
    drawn_with(live, {})  # what ComfyUI loads it marks, and some models keep numbers of their last pass
    before = [state_of(patcher) for patcher in patchers]
    result, notes = train(configured(base, pictures), tmp_path / "whole")
    for one, patcher in zip(before, patchers, strict=True):
        unchanged(one, state_of(patcher))
    assert not any("could not be drawn" in note for note in notes), notes
    trained = {
        name.partition("_")[2].partition("_")[0] for name, t in result.tensors.items() if "up" in name and t.any()
    }
    assert trained == {"unet", {"anima": "te"}.get(kind, "te1")}
    drawn = drawn_with(live, result.tensors)
    assert (result.samples - drawn).abs().max() <= 1.5 / 255
    alone = {name: tensor for name, tensor in result.tensors.items() if name.startswith("lora_unet")}
    assert (drawn - drawn_with(live, alone)).abs().max() > 1.5 / 255


@pytest.mark.parametrize("kind", again("flux", *OTHERS))
def test_a_run_that_was_cut_ends_as_the_whole_one(kind, pictures, tmp_path):
    def config():
        return change(configured(linked_with(kind), pictures), sample={"prompts": ()})

    whole, _ = train(config(), tmp_path / "whole")
    with pytest.raises(Cut):
        train(config(), tmp_path / "cut", step=cut_at(1))
    cut, _ = train(config(), tmp_path / "cut")
    assert "Resumed after step 1" in cut.origin
    assert cut.losses == whole.losses and equal(cut.tensors, whole.tensors)


@pytest.mark.parametrize("rate", again(0.0, 1e-3), ids=["text alone", "both"])
def test_the_second_text_encoder_has_its_own_rate_and_all_of_both_may_be_recomputed(rate, pictures, tmp_path):
    config = change(configured(linked_with("flux"), pictures, (rate, 0.0, 0.1)), sample={"prompts": ()})
    found, _ = train(config, tmp_path / "kept")
    assert {name.partition("_encoder_")[0] for name in found.tensors if "lora_te" in name} == {"lora_te3"}
    assert any(name.startswith("lora_unet") for name in found.tensors) == (rate > 0)
    less, notes = train(change(config, memory={"checkpointing": "full"}), tmp_path / "full")
    assert any("with gradient checkpointing full" in note for note in notes)
    assert less.losses == pytest.approx(found.losses, rel=1e-5)
    assert all(torch.allclose(t, less.tensors[name], atol=1e-4) for name, t in found.tensors.items())


@pytest.mark.thorough
def test_a_run_that_keeps_no_encodings_trains_the_same(pictures, tmp_path):
    config = configured(linked_with("flux"), pictures)
    kept, _ = train(config, tmp_path / "kept")
    live, _ = train(change(config, memory={"encodings": "none"}), tmp_path / "live")
    assert live.losses == kept.losses and equal(live.tensors, kept.tensors) and torch.equal(live.samples, kept.samples)


@pytest.mark.parametrize("kind", again("flux"))
def test_a_partner_draws_with_the_trained_text_encoders(kind, pictures, tmp_path):
    base = linked_with(kind, sampled=build("flux_dev", seed=1)[1])
    result, notes = train(configured(base, pictures), tmp_path)
    assert not any("could not be drawn" in note for note in notes), notes
    assert (result.samples - drawn_with(live_of(base), result.tensors)).abs().max() <= 1.5 / 255


@pytest.mark.parametrize("use", again("start", "beneath"))
def test_a_file_with_text_encoders_is_continued_or_put_beneath(use, pictures, tmp_path):
    first, _ = train(configured(linked_with("flux"), pictures), tmp_path / "first")
    text = {name: tensor for name, tensor in first.tensors.items() if name.startswith("lora_te")}
    base = linked_with("flux")
    lora = {"start": str(first.path)} if use == "start" else {"beneath": (BeneathConfig(path=str(first.path)),)}
    result, notes = train(configured(base, pictures, (1e-3, 0.0, 0.0), lora=lora), tmp_path / "second")
    assert not any("could not be drawn" in note for note in notes), notes
    kept = {name: tensor for name, tensor in result.tensors.items() if name.startswith("lora_te")}
    assert equal(kept, text if use == "start" else {})
    plain, _ = train(configured(linked_with("flux"), pictures, (1e-3, 0.0, 0.0)), tmp_path / "plain")
    assert plain.losses[0] != pytest.approx(result.losses[0], rel=1e-5)
    live = live_of(base)
    if use == "beneath":
        model, clip = comfy.sd.load_lora_for_models(live.model, live.clip, dict(first.tensors), 1.0, 1.0)
        live = LinkedModels(model, clip, live.vae)
    assert (result.samples - drawn_with(live, result.tensors)).abs().max() <= 1.5 / 255


def test_what_cannot_be_trained_is_said(pictures):
    def refused(base, rates, match):
        with pytest.raises(ValueError, match=match):
            source_of(base).outline().host.check(configured(base, pictures, rates))

    first, second = (1e-3, 1e-3, 0.0), (1e-3, 0.0, 1e-3)
    none = "^ComfyUI's loader knows names for LoRAs on no text encoder of the linked CLIP; set text_encoder_learning_"
    refused(linked("flux_dev"), first, none)
    clip = clip_of("flux")
    base = linked_with("flux", clip)
    source_of(base).outline().host.check(configured(base, pictures, first))
    wired = source_of(base).outline().wired
    assert [encoder.prefix for encoder in wired.encoders] == ["lora_te1", "lora_te3"]
    for encoder in wired.encoders:  # T5 calls its attention SelfAttention, and its MLP DenseReluDense
        kinds = {layer.path.split(".")[-2]: layer.kind for layer in encoder.layers if layer.trainable}
        assert set(kinds.values()) == {"attention", "mlp"} and "attention" in {
            kinds.get(n) for n in ("self_attn", "SelfAttention")
        }
    clip.patcher.load_device = torch.device("meta")
    refused(
        base, first, "^The linked CLIP computes on meta, and the MODEL on cpu, so its text encoders are not trained; "
    )
    lone = clip_of("flux")
    del lone.cond_stage_model.t5xxl
    refused(
        linked_with("flux", lone), second, "on only CLIP-L of the linked CLIP; set text_encoder_2_learning_rate of "
    )
