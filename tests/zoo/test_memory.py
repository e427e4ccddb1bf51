"""The estimate from small passes against counted bytes of a large one, at every way of keeping activations."""

from contextlib import suppress
from types import SimpleNamespace

import comfy.model_management
import pytest
import torch
from zoo.again import again
from zoo.linked import linked, source_of
from zoo.test_train import tried
from zoo.trial import Trial
from zoo.zoo import ZOO

from lora_atelier.nodes.comfyui.connected import gradients, host
from lora_atelier.nodes.comfyui.connected.host import ComfyUIHost
from lora_atelier.nodes.comfyui.connected.layers import feed_forward
from lora_atelier.nodes.comfyui.connected.trial import bytes_kept
from lora_atelier.trainer_core.config import (
    ConceptConfig,
    DatasetConfig,
    LoraConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
)
from lora_atelier.trainer_core.memory import PARTS, SEGMENTS, keep_activations, recompute
from lora_atelier.trainer_core.models import LatentFormat
from lora_atelier.trainer_core.models.base import Shown
from lora_atelier.trainer_core.networks.of_model import build_network, learning_rates
from lora_atelier.trainer_core.networks.rounded import rounding_layers
from lora_atelier.trainer_core.objective import Objective
from lora_atelier.trainer_core.preflight import measured

CPU = torch.device("cpu")
PICTURES = LatentFormat(channels=4, pixels=8, step=8)


LEVELS = ("0", "2", "full")
ESTIMATED = [("flux_dev", 0, "2"), ("flux_dev", 1, "full")]
OTHERS = [("flux_dev", 0), ("flux_dev", 1), *((row, 0) for row in ("z_image", "qwen_image", "wan21_t2v", "chroma"))]
AGAIN = [(*other, level) for other in OTHERS for level in LEVELS if (*other, level) not in ESTIMATED]


@pytest.mark.parametrize(("row", "references", "level"), [*ESTIMATED, *again(*AGAIN)])
def test_the_estimate_is_within_15_percent_of_what_a_large_batch_takes(row, references, level):
    found, counted = estimated_and_counted(row, references, level, (384, 256))
    assert abs(found - counted) <= 0.15 * counted, (found, counted)


OF_CLIPS = [row for row in ("wan21_t2v", "wan22_5b", "hunyuan_video", "hunyuan_video15", "ltxv", "mochi") if row in ZOO]
ALL_LEVELS = (*LEVELS, PARTS, *SEGMENTS)
BUCKETS = [(row, level, frames) for row in OF_CLIPS for level in ALL_LEVELS for frames in (9, 33)]
FIRST = [("wan21_t2v", "segments of 2", 33), ("ltxv", "0", 9)]


@pytest.mark.parametrize(("row", "level", "frames"), [*FIRST, *again(*(each for each in BUCKETS if each not in FIRST))])
def test_the_estimate_of_each_bucket_of_frames_is_within_15_percent_of_what_its_batch_takes(row, level, frames):
    found, counted = estimated_and_counted(row, 0, level, (256, 192, frames))
    assert abs(found - counted) <= 0.15 * counted, (found, counted)


def estimated_and_counted(row, references, level, largest):
    """Estimate the bytes of a batch of three from small passes, and count those that it takes."""
    config = RunConfig(base_model=linked(row), dataset={"concepts": ()}, lora=LoraConfig(rank=4))
    base = source_of(config.base_model).load(torch.float32)
    network = build_network(base, config, learning_rates(OptimizerConfig(), base))
    caption = base.text.encode("a mossling on a stone", CPU)
    shown = Shown(references)
    with base.host.session(CPU), network.attached():
        units = base.denoiser.units()
        recompute([*units, *feed_forward(units)], level, copies=base.denoiser.written is not None)
        found = measured.measure_peak(base, network, caption, largest, CPU, shown).at(3, largest)
        goal = Objective(ObjectiveConfig(), base.noise, 0)
        counted = measured._pass_bytes(base, network, goal, lambda: caption, 3, "", largest, CPU, shown)
    return found, counted


@pytest.mark.thorough  # beside the estimates above, which are what is counted at each level
def test_more_recomputed_blocks_take_less():
    config = RunConfig(base_model=linked("flux_dev"), dataset={"concepts": ()}, lora=LoraConfig(rank=4))
    base = source_of(config.base_model).load(torch.float32)
    network = build_network(base, config, learning_rates(OptimizerConfig(), base))
    caption = base.text.encode("a mossling", CPU)
    peaks = []
    with base.host.session(CPU), network.attached():
        for level in ("0", "2", "full"):
            recompute(base.denoiser.units(), level, copies=base.denoiser.written is not None)
            peaks.append(measured.measure_peak(base, network, caption, (256, 256), CPU).at(2, (256, 256)))
    assert peaks[0] > 1.1 * peaks[1] > 1.2 * peaks[2]


def fitted(monkeypatch, free, peak, keep_free=0, memory=None):
    """Choose the settings of a run with so many bytes free; peak: gives the measurement at the level that is set."""
    config = RunConfig(
        base_model=linked("flux_dev"),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder="x"),)),
        lora=LoraConfig(rank=4),
        memory=memory or MemoryConfig(checkpointing="auto", keep_free=keep_free),
    )
    base = source_of(config.base_model).load(torch.float32)
    shapes = SimpleNamespace(
        fullest_batches=lambda: {(256, 256): 2},
        captions=lambda: {"a mossling"},
        manifest=SimpleNamespace(pictures=[None]),
        first_crops=lambda _: [None],
        references=lambda *_: (),
    )
    if config.memory.checkpointing != PARTS:  # blocks are tried once for all, but not their parts
        monkeypatch.setattr(host, "try_out", tried)
    monkeypatch.setattr(measured, "free_bytes", lambda _: free)
    monkeypatch.setattr(measured, "measure_peak", lambda base, *_: peak(sum(recomputed(base))))
    return measured.fit_measured(config, shapes, base, base.host, CPU, torch.float32)


def recomputed(base):
    return ["forward" in vars(unit) for unit, _ in base.denoiser.units()]


def test_the_fastest_settings_that_fit_are_taken_and_told_as_an_estimate(monkeypatch):
    ladder, said = fitted(
        monkeypatch,
        10**9,
        lambda blocks: measured.Peak(once=0, sample=(5 - blocks) * 2e8, position=0, latents=PICTURES),
    )
    assert [memory.checkpointing for memory in ladder] == ["3", "4", "full", *SEGMENTS]
    assert said.startswith("Memory: about 0.8 GB beside the model's weights, 1.0 GB are free, with gradient")


def test_what_other_programs_keep_is_asked_of_comfyui_too(monkeypatch):
    asked = []
    monkeypatch.setattr(ComfyUIHost, "reserve", lambda _, size: asked.append(size))

    def peak(blocks):
        return measured.Peak(once=0, sample=(5 - blocks) * 2e8, position=0, latents=PICTURES)

    ladder, said = fitted(monkeypatch, 3 * 10**9, peak, keep_free=2)
    assert [memory.checkpointing for memory in ladder] == ["3", "4", "full", *SEGMENTS]
    assert "1.0 GB are free beside the 2 GB of keep_free of Memory, with" in said
    assert 2.7e9 < asked[-1] < 3e9
    with pytest.raises(ValueError, match=r"0\.0 GB are free beside the 3 GB of keep_free of Memory; lower keep_free"):
        fitted(monkeypatch, 3 * 10**9, peak, keep_free=3)


def test_feed_forward_parts_alone_are_taken_where_they_are_asked_for(monkeypatch):
    asked = MemoryConfig(checkpointing="feed-forward")
    nothing = measured.Peak(once=0, sample=0, position=0, latents=PICTURES)
    ladder, said = fitted(monkeypatch, 10**9, lambda parts: nothing if parts == 4 else None, memory=asked)
    assert [memory.checkpointing for memory in ladder] == ["feed-forward"] * len(ladder)
    assert "with gradient checkpointing feed-forward" in said
    monkeypatch.setattr("lora_atelier.nodes.comfyui.connected.trial.feed_forward", lambda _: [])
    with pytest.raises(ValueError, match=r"no feed-forward parts .*; set checkpointing of Memory to auto"):
        fitted(monkeypatch, 10**9, lambda _: nothing, memory=asked)


def test_rounded_weights_are_held_where_there_is_room_for_all_else(monkeypatch):
    asked, held, count = [], [], measured._held
    monkeypatch.setattr(measured, "_held", lambda *given: held.append(count(*given)) or held[-1])
    monkeypatch.setattr(ComfyUIHost, "reserve", lambda _, size: asked.append(size))
    needs = measured.Peak(once=0, sample=2e8, position=0, latents=PICTURES)
    sizes = {}
    for compute in ("exact", "int8"):
        memory = MemoryConfig(checkpointing="0", compute=compute)
        for free in (4 * 10**9, 10**8):
            with suppress(ValueError):
                fitted(monkeypatch, free, lambda _: needs, memory=memory)
            sizes[compute, free] = held[-1], asked[-1]
    base = source_of(linked("flux_dev")).load(torch.float32)
    layers = [layer for each in rounding_layers(base).values() for layer in each]
    counted = sum(layer.weight.numel() + 4 * len(layer.weight) for layer in layers)
    # ComfyUI is asked for no room for them: held, they would be missing and asked for at once.
    (some, beside), (nothing, alone) = sizes["int8", 4 * 10**9], sizes["exact", 4 * 10**9]
    assert some == counted > 0 == nothing and beside == alone
    assert sizes["int8", 10**8] == sizes["exact", 10**8]


def test_what_each_block_keeps_is_counted():
    """Flux's two streams keep more than one; all of it is what a pass keeps beside the few layers around."""
    trial = Trial("flux_dev")
    with gradients.session(trial.patcher), trial.network.attached():
        kept = bytes_kept(trial.loss, trial.units)
        whole = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: whole.append(t.nbytes) or t, lambda t: t):
            trial.loss()
    assert len(kept) == 4 and kept[0] == kept[1] > 1.3 * kept[2] and kept[2] == kept[3]
    assert 0.4 * sum(whole) < sum(kept) < sum(whole)


def test_a_run_that_does_not_fit_is_refused_with_what_it_needs(monkeypatch):
    with pytest.raises(
        ValueError, match=r"about 2\.0 GB .* with gradient checkpointing segments of 4, and 1\.0 GB are free; lower"
    ):
        fitted(monkeypatch, 10**9, lambda _: measured.Peak(once=0, sample=1e9, position=0, latents=PICTURES))


def test_settings_whose_measurement_does_not_fit_are_skipped(monkeypatch):
    """On a card; here the device is only called one."""

    def peak(base, *_):
        if not any(recomputed(base)):
            raise torch.OutOfMemoryError
        return measured.Peak(once=0, sample=0, position=0, latents=PICTURES)

    monkeypatch.setattr(measured, "measure_peak", peak)
    monkeypatch.setattr(measured, "empty_cache", lambda _: None)
    base = source_of(linked("flux_dev")).load(torch.float32)
    card = SimpleNamespace(type="cuda")
    assert measured._peak(base, None, {}, (64, 64), card, 0, None, "") is None
    recompute(base.denoiser.units(), "full", copies=True)
    assert measured._peak(base, None, {}, (64, 64), card, 0, None, "") is not None
    with pytest.raises(torch.OutOfMemoryError):
        keep_activations(unit for unit, _ in base.denoiser.units())
        measured._peak(base, None, {}, (64, 64), CPU, 0, None, "")


def test_comfyui_is_asked_to_leave_room_for_a_step(monkeypatch):
    asked = []
    load = comfy.model_management.load_models_gpu
    monkeypatch.setattr(
        comfy.model_management, "load_models_gpu", lambda models, **given: asked.append(given) or load(models, **given)
    )
    base = source_of(linked("flux_dev")).load(torch.float32)
    base.host.reserve(123_000_000)
    with base.host.session(CPU):
        pass
    assert [given["memory_required"] for given in asked] == [0, 123_000_000]
