"""Clips that a video model draws during its training are what ComfyUI's own loader and sampler make of the file."""

import errno
import json
from pathlib import Path
from unittest import mock

import comfy.sample
import comfy.sd
import numpy as np
import pytest
import torch
from durable import Cut, cut_at, equal
from PIL import Image
from train_graph import draw_pictures
from zoo.again import again
from zoo.linked import linked, live_of, source_of
from zoo.test_train import configure, run
from zoo.zoo import CLIPS, ZOO

from lora_atelier.trainer_core.common.sample_names import SampleName, sample_name, tag_of
from lora_atelier.trainer_core.config import SampleConfig
from lora_atelier.trainer_core.training.sample_files import PARAMETERS, TOLD, read_pictures, save_clip, texts_in

# What each draws of 20 frames, and at which rate.
LENGTHS = {
    "wan21_t2v": (17, 16),
    "hunyuan_video": (17, 24),
    "ltxv": (17, 25),
    "wan22_5b": (17, 24),
    "hunyuan_video15": (17, 24),
    "mochi": (19, 30),
    "ltxav": (17, 25),
    "cosmos_t2v": (17, 24),
    "kandinsky5_video": (17, 24),
}
STEPS = [row for row in ("wan21_t2v", "ltxv") if row in ZOO or row in CLIPS]  # of four and of eight frames a step
CLIP = SampleConfig(prompts=("a mossling --n dull",), width=64, height=64, steps=2, seed=3, cfg=2.0, frames=20)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return draw_pictures(tmp_path_factory.mktemp("concept") / "pictures")


def drawn_with(live, base, tensors, frames):
    """Draw the clip of a run by ComfyUI's loader and sampler: so many frames in latents of the VAE's own length."""
    model, _ = comfy.sd.load_lora_for_models(live.model, None, dict(tensors), 1.0, 0.0)
    wired = [live.clip.encode_from_tokens_scheduled(live.clip.tokenize(words)) for words in ("a mossling", "dull")]
    if base.sampling.guidance is not None:
        wired = [[[cross, {**extra, "guidance": base.sampling.guidance}]] for ((cross, extra),) in wired]
    length = (frames - 1) // live.vae.time + 1
    empty = torch.zeros(1, base.latents.channels, length, *base.latents.axes((64, 64)))
    noise = comfy.sample.prepare_noise(empty, 3)
    own = base.sampling.sampler, base.sampling.scheduler
    drawn = comfy.sample.sample(model, noise, 2, 2.0, *own, *wired, empty, disable_pbar=True, seed=3)
    (clip,) = live.vae.decode(drawn)
    return clip


@pytest.mark.parametrize(
    "row", [*STEPS, *again(*(row for row in LENGTHS if row not in STEPS and (row in ZOO or row in CLIPS)))]
)
def test_a_clip_of_a_run_is_what_comfyui_draws_with_the_file(row, pictures, tmp_path):
    base, (frames, rate) = linked(row), LENGTHS[row]
    config = configure(base, pictures, steps=2, batch_size=1, save_dtype="float32").replace(sample=CLIP)
    result, notes = run(config, tmp_path)
    assert not any("could not be drawn" in note for note in notes), notes
    live = live_of(base)
    drawn = drawn_with(live, source_of(base).outline(), result.tensors, frames)
    assert len(drawn) == frames and (drawn[0] - drawn[-1]).abs().max() > 1 / 255
    assert result.samples.shape == drawn.shape and (result.samples - drawn).abs().max() <= 0.6 / 255
    (path,) = (result.run / "samples").glob("step-00000002-1-*")
    assert path.name == f"step-00000002-1-{frames}f.webp"
    with Image.open(path) as image:
        texts, length = texts_in(image), 0
        assert image.format == "WEBP" and image.info["loop"] == 0
        for number in range(image.n_frames):
            image.seek(number)
            image.load()
            length += image.info["duration"]
    assert length == round(frames * 1000 / rate)
    assert texts[PARAMETERS].startswith("a mossling\nNegative prompt: dull\nSteps: 2, ")
    assert f"Frames: {frames} at {rate} fps" in texts[PARAMETERS]
    told = json.loads(texts[TOLD])
    assert (told["frames"], told["rate"], told["step"], told["prompt"]) == (frames, rate, 2, "a mossling")


def test_a_run_with_clips_resumes_and_is_reused_with_all_their_frames(pictures, tmp_path):
    config = configure(linked("wan21_t2v"), pictures).replace(sample=CLIP.replace(frames=5, steps=1))
    whole, _ = run(config, tmp_path / "whole")
    with pytest.raises(Cut):
        run(config, tmp_path / "cut", step=cut_at(2))
    resumed, _ = run(config, tmp_path / "cut")
    assert "Resumed after step 2" in resumed.origin and len(resumed.samples) == 5
    assert torch.equal(resumed.samples, whole.samples) and equal(resumed.tensors, whole.tensors)
    reused, _ = run(config, tmp_path / "cut")
    assert "Already trained in" in reused.origin and torch.equal(reused.samples, whole.samples)
    with Image.open(reused.path.with_suffix(".png")) as preview:  # beside the LoRA, for model browsers
        shown = torch.from_numpy(np.array(preview)).float() / 255
        assert torch.equal(shown, whole.samples[0]) and json.loads(texts_in(preview)[TOLD])["frames"] == 5


def test_a_full_disk_at_a_clip_costs_that_clip_alone(pictures, tmp_path):
    """The file that was there stays whole, and the LoRA is saved."""
    config = configure(linked("wan21_t2v"), pictures, steps=2).replace(sample=CLIP.replace(frames=5, steps=1))
    save = Image.Image.save

    def full(image, to, format=None, **more):
        save(image, to, format, **more)
        if format == "WEBP":
            Path(to).write_bytes(Path(to).read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(Image.Image, "save", full):
        result, notes = run(config, tmp_path)
    assert result.finished and result.path.is_file() and len(result.samples) == 0
    (said,) = (note for note in notes if note.startswith("Samples could not be saved after step 2: "))
    assert "disk" in said and not list(result.run.glob("samples/*"))
    again, _ = run(config, tmp_path)
    assert len(again.samples) == 5 and equal(again.tensors, result.tensors)


@pytest.mark.parametrize(("row", "title"), [("qwen_image", "Qwen-Image"), ("cosmos_predict2", "Cosmos-Predict2")])
def test_a_model_of_pictures_draws_no_clip(row, title, pictures, tmp_path):
    """Also where its latents have a time axis."""
    with pytest.raises(ValueError, match=f"Prompt 1 asks for 20 frames, but {title} draws single pictures; set sa"):
        run(configure(linked(row), pictures).replace(sample=CLIP), tmp_path)


def test_frames_that_are_equal_are_read_as_often_as_they_were_drawn(tmp_path):
    frames = (
        torch.tensor([0, 64, 128, 200, 255]).div(255)[[0, 0, 0, 1, 2, 2, 4, 4]].view(-1, 1, 1, 1).expand(-1, 8, 12, 3)
    )
    texts = {PARAMETERS: "\u732b \ud800", TOLD: "{}"}
    for kept, rate in ((frames, 16), (frames, 24), (frames[:3], 25), (frames[:2], 30)):
        path = tmp_path / SampleName(3, 1, "-ema", len(kept)).file
        save_clip(path, kept, rate, texts)
        assert torch.equal(read_pictures([path]), kept)
    with Image.open(path) as image:
        assert texts_in(image) == {PARAMETERS: "\u732b ?", TOLD: "{}"}
    assert sample_name(path.name) == (3, 1, "-ema", 2) and tag_of(path.name) == "1-ema"
