"""Samples with switches of their own, before the first step, and what their files and TensorBoard tell of them."""

import errno
import json
import os

import pytest
import torch
from durable import Cut, cut_at, equal
from PIL import Image
from prepared import NeverLoaded, Ready
from run_folders import make_run
from safetensors.torch import load_file
from tiny_runs import change, run, run_with_notes, tiny_config

from lora_atelier.trainer_core.config import MOST_LORAS, ExistingConfig, SampleConfig
from lora_atelier.trainer_core.runs import RunFolder, find_runs, open_run
from lora_atelier.trainer_core.runs.catalogue import describe_in_detail
from lora_atelier.trainer_core.runs.clean import delete_saves
from lora_atelier.trainer_core.runs.export import lora_of_each_save
from lora_atelier.trainer_core.training import encode, sample_files
from lora_atelier.trainer_core.training.sample_files import read_pictures, save_clip, save_picture

PROMPTS = "sample_prompts of Saves & Samples"
pytestmark = pytest.mark.usefixtures("no_estimates")
PLAIN = SampleConfig(prompts=("thing",), negative="dull", width=32, height=32, steps=2, cfg=2, seed=5)


@pytest.fixture
def config(checkpoint, pictures):
    config = tiny_config(
        checkpoint,
        pictures,
        optimizer={"learning_rate": 1e-2},
        train={"steps": 2, "batch_size": 1},
        saves={"save_every": 1, "save_unit": "steps"},
    )
    return config.replace(sample=PLAIN)


def drawn(config, folder, cache, *prompts, **values):
    """Train, draw prompts, and return the pictures as they lie on the disk."""
    result = run(config.replace(sample=PLAIN.replace(prompts=prompts, **values)), folder, cache)
    return [read_pictures([path])[0] for path in samples_of(result)]


def samples_of(result):
    return sorted((result.run / "samples").iterdir())


def test_each_switch_does_what_the_nodes_setting_does(config, tmp_path, cache):
    whole = {"negative": "number", "width": 64, "height": 72, "steps": 3, "cfg": 4.0, "seed": 9}
    (wanted,) = drawn(config, tmp_path, cache, "thing", **whole)
    line = "thing --n number --w 71 --h 72 --s 3 --l 4 --d 9 --ss k_euler"
    plain, own, after = drawn(config, tmp_path, cache, "thing", line, "thing")
    assert wanted.shape == (72, 64, 3) and torch.equal(own, wanted)
    assert plain.shape == after.shape == (32, 32, 3)
    seeded = (f"thing --d {seed}" for seed in ("5", "7", "9", "5 --n number", "5 --s 3", "5 --l 4"))
    first, third, *others = drawn(config, tmp_path, cache, *seeded)
    assert torch.equal(plain, first) and torch.equal(after, third)  # the third: the seed and two
    assert not any(torch.equal(plain, other) for other in others)


def test_run_keys_and_encoded_texts_know_the_prompt_alone(config, tmp_path, cache, monkeypatch):
    encoded = []
    texts = encode.encode_texts
    monkeypatch.setattr(encode, "encode_texts", lambda work, given: encoded.append(given) or texts(work, given))
    config = config.replace(existing=ExistingConfig())
    first = run(config, tmp_path, cache)
    config = config.replace(sample=PLAIN.replace(prompts=("a sky --s 1 --n", "thing --n number --s 1")))
    second = run(config, tmp_path, cache)
    assert second.run == first.run and len(second.samples) == 2  # the same run, with its samples drawn anew
    assert {"a sky", "thing", "number", "", "dull"} <= encoded[-1] and not any("--" in text for text in encoded[-1])
    assert describe_in_detail(second.run)["prompts"] == ["thing"]  # those that the run began with
    detail = describe_in_detail(
        run(config.replace(existing=ExistingConfig(on_existing="train again")), tmp_path, cache).run
    )
    assert detail["prompts"] == ["a sky", "thing"] and detail["settings"]["sample.prompts.1"] == "a sky --s 1 --n"
    about = json.loads((second.run / "run.json").read_text(encoding="utf-8"))
    about["config"]["sample"]["prompts"] = ["an older --prompt", "#2"]
    (second.run / "run.json").write_text(json.dumps(about), encoding="utf-8")
    assert describe_in_detail(second.run)["prompts"] == ["an older --prompt", "#2"]


def test_a_prompt_that_asks_for_a_caption_draws_that_of_the_first_picture(config, tmp_path, cache):
    (wanted,) = drawn(config, tmp_path, cache, "thing, number 0 --s 1")
    (asked,) = drawn(config, tmp_path, cache, "{caption} --s 1")
    assert torch.equal(asked, wanted)
    result = run(config.replace(sample=PLAIN.replace(prompts=("{caption} --s 1",))), tmp_path / "anew", cache)
    assert describe_in_detail(result.run)["prompts"] == ["thing, number 0"]
    assert "sample.prompts.1" not in json.loads((result.run / "run.json").read_text(encoding="utf-8"))["open"]


def test_smaller_pictures_get_black_edges_in_the_batch(config, tmp_path, cache):
    prompts = ("thing --w 64 --h 96", "thing --w 96 --h 64", "thing")
    result = run(config.replace(sample=PLAIN.replace(prompts=prompts)), tmp_path, cache)
    assert result.samples.shape == (3, 96, 96, 3)
    for batch, path, (height, width) in zip(
        result.samples, samples_of(result), [(96, 64), (64, 96), (32, 32)], strict=True
    ):
        top, left = (96 - height) // 2, (96 - width) // 2
        inside = batch[top : top + height, left : left + width]
        assert torch.equal(inside, read_pictures([path])[0])
        assert batch.sum() == pytest.approx(inside.sum())
    again = run(config.replace(sample=PLAIN.replace(prompts=prompts), existing=ExistingConfig()), tmp_path, cache)
    assert "Already trained" in again.origin and torch.equal(again.samples, result.samples)


def test_odd_edges_are_one_pixel_wider_at_the_far_side(tmp_path):
    paths = [tmp_path / "0.png", tmp_path / "1.png"]
    save_picture(paths[0], torch.ones(2, 3, 3))
    save_picture(paths[1], torch.ones(5, 6, 3))
    first, second = read_pictures(paths)
    assert second.min() == 1 and first.shape == (5, 6, 3) and first.sum() == 2 * 3 * 3
    assert first[1:3, 1:4].min() == 1


def test_a_file_says_what_its_picture_was_drawn_with(config, tmp_path, cache):
    prompts = ("a cat, 猫 --n --s 1 --d 18446744073709551615", "thing --l 2.5 --w 72")
    result = run(config.replace(sample=PLAIN.replace(prompts=prompts)), tmp_path, cache)
    first, second = (Image.open(path).info for path in samples_of(result))
    assert first["parameters"] == (
        "a cat, 猫\nSteps: 1, Sampler: euler, Schedule type: normal, CFG scale: 2, Seed: 18446744073709551615, "
        "Size: 32x32, Training step: 2, Run: lora"
    )
    assert second["parameters"].split("\n")[:2] == ["thing", "Negative prompt: dull"]
    assert json.loads(second["atelier_sample"]) == {
        "prompt": "thing",
        "negative": "dull",
        "step": 2,
        "seed": 6,
        "width": 72,
        "height": 32,
        "steps": 2,
        "cfg": 2.5,
        "sampler": "euler",
        "scheduler": "normal",
        "guidance": None,
        "run": "lora",
    }
    for path in (*samples_of(result), tmp_path / "lora.png"):
        assert str(tmp_path).encode() not in path.read_bytes()
    preview = Image.open(tmp_path / "lora.png").info
    assert preview["parameters"] == first["parameters"] and len(preview["atelier_run"]) == 64
    # What is left open is written as it was drawn; half a character cannot be written.
    pictures = SampleConfig(prompts=("a\ud800",)).pictures(Ready(config.base_model).outline().sampling)
    texts = sample_files.texts_of(pictures[0], torch.zeros(8, 16, 3), 1, "lora")
    save_picture(tmp_path / "half.png", torch.zeros(8, 16, 3), texts)
    assert (
        Image.open(tmp_path / "half.png")
        .info["parameters"]
        .startswith("a?\nSteps: 20, Sampler: euler, Schedule type: normal, CFG")
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"ema_decay": 0.5},
        pytest.param(
            {"name": "prodigy_plus_schedule_free", "learning_rate": 1.0, "options": {"d0": 1e-3}},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["plain", "average", "schedule-free"],
)
def test_samples_at_the_start_are_drawn_once_and_change_nothing(config, tmp_path, cache, optimizer):
    config = config.replace(optimizer=config.optimizer.replace(**optimizer), existing=ExistingConfig())
    late = run(config, tmp_path / "late", cache)
    told, notes = [], []
    config = change(config, saves={"sample_at_start": True})
    tell = {"samples": lambda step, paths: told.append((step, len(paths))), "note": notes.append}
    with pytest.raises(Cut):
        run(config, tmp_path / "early", cache, **tell, step=cut_at(1))
    versions = 2 if "ema_decay" in optimizer else 1
    assert told == [(0, versions)], notes
    early = run(config, tmp_path / "early", cache, **tell)
    assert told == [(0, versions), (2, versions)] and "Resumed after step 1" in early.origin
    assert equal(early.tensors, late.tensors) and torch.equal(early.samples, late.samples)
    first, *_, last = samples_of(early)
    assert (
        first.name.startswith("step-00000000-1") and json.loads(Image.open(first).info["atelier_sample"])["step"] == 0
    )
    assert not torch.equal(
        read_pictures([first]), read_pictures([last])
    )  # a new LoRA changes nothing, a trained one does
    assert not any(path.name.startswith("step-00000000") for path in samples_of(late))


def test_each_sampled_step_keeps_the_lora_that_drew_it(config, tmp_path, cache):
    """Beside one save of the whole run; the run resumes from that save, and never from what holds a LoRA alone."""
    saves = {"save_every": 2, "keep_last": 1, "sample_every": 1}
    config = change(config, train={"steps": 5}, saves=saves, existing={"on_existing": "resume"})
    there = []

    def samples(step, paths):  # a page shows them now, and looks once for what there is
        there.append((step, find_runs(tmp_path / "runs")[0].loras()[0].step))

    with pytest.raises(Cut):
        run(config, tmp_path, cache, step=cut_at(4), samples=samples)
    assert there == [(1, 1), (2, 2), (3, 3)]
    (found,) = find_runs(tmp_path / "runs")
    assert [save.step for save in found.checkpoints()] == [4] and found.result() is None
    assert [each.step for each in found.sampled()] == [3, 2, 1]
    assert [each.step for each in found.loras()] == [4, 3, 2, 1]
    result = run(config, tmp_path, cache)
    assert len(result.losses) == 5 and [each.step for each in found.loras()] == [5, 3, 2, 1]  # 4 drew none

    # Each is that step's LoRA, as its save holds it.
    every = change(config, saves={"save_every": 1, "keep_last": 9, "sample_every": 0})
    saved = run(every, tmp_path / "every", cache)
    known = dict(lora_of_each_save(open_run(saved.run)))
    kept = dict(lora_of_each_save(found))
    assert kept.keys() == {1, 2, 3, 5}
    assert all(equal(load_file(kept[step]), load_file(known[step])) for step in kept)
    assert {kept[step].parts[-3] for step in (1, 2, 3)} == {"loras"}

    # They are listed with the saves, and can be deleted as those can.
    told = {save["step"]: (save["lora"], save["resumes"]) for save in describe_in_detail(found.path)["saves"]}
    assert told == {1: (True, False), 2: (True, False), 3: (True, False), 5: (True, True)}
    delete_saves(found, [2, 3])
    assert [each.step for each in found.loras()] == [5, 1]


def test_the_loras_of_the_newest_sampled_steps_are_kept(tmp_path):
    found = make_run(tmp_path, "moss", saves=(2,))
    for step in range(1, MOST_LORAS + 3):
        found.save_lora(step, lambda folder: (folder / "files.json").write_text('{"files": []}'))
    steps = [each.step for each in found.sampled()]
    assert steps == list(range(MOST_LORAS + 2, 2, -1))
    assert [each.step for each in found.loras()] == [*steps, 2]


def test_a_lora_that_cannot_be_kept_is_told_once_and_the_run_goes_on(config, tmp_path, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "save_lora", full)
    config = change(config, train={"steps": 3}, saves={"save_every": 0, "sample_every": 1})
    result, notes = run_with_notes(config, tmp_path, cache)
    told = [note for note in notes if note.startswith("The LoRA of the samples of step")]
    assert len(told) == 1 and "step 1 could not be kept" in told[0] and result.finished


def test_tensorboard_shows_the_samples_with_their_step(config, tmp_path, cache):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config.replace(
        sample=PLAIN.replace(prompts=("thing", "number --w 64")),
        saves=config.saves.replace(sample_every=1, sample_at_start=True),
        optimizer=config.optimizer.replace(ema_decay=0.5),
    )
    for log in ("tensorboard", "csv"):
        config = change(config, train={"log": log})
        result = run(config, tmp_path / log, cache, logs=tmp_path / f"{log}s")
        assert len(samples_of(result)) == 3 * 4
        read = EventAccumulator(str(result.log), size_guidance={"images": 0}).Reload()
        shown = {tag: read.Images(tag) for tag in read.Tags()["images"]}
        if log == "csv":
            assert not shown
            continue
        assert set(shown) == {"samples/1", "samples/2", "samples/1-ema", "samples/2-ema"}
        assert all([image.step for image in images] == [0, 1, 2] for images in shown.values())
        assert {(image.width, image.height) for image in shown["samples/2"]} == {(64, 32)}


def test_what_cannot_be_drawn_is_refused_before_a_model_is_loaded(config, tmp_path, cache):
    never = NeverLoaded(config.base_model)
    for line, sentence in {
        "thing --ss deis": f"not drawn by the sampler deis of prompt 2; set --ss in {PROMPTS} to one",
        "thing --g 3": "Prompt 2 sets --g, but random-tiny takes no distilled guidance",
        "thing --x 3": f"--x in prompt 2 of {PROMPTS} is none of --n, --w, --h, --d, --s, --l, --g, --ss, --f, --ci",
    }.items():
        with pytest.raises(ValueError) as refusal:
            run(config.replace(sample=PLAIN.replace(prompts=("thing", line))), tmp_path, cache, source=never)
        assert sentence in str(refusal.value)


def test_clips_that_are_too_large_together_give_their_first_frames(tmp_path, monkeypatch):
    frames = torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, 16, 24, 3)
    paths = [tmp_path / f"step-00000001-{number}-5f.webp" for number in (1, 2)]
    for path in paths:
        save_clip(path, frames, 8, {sample_files.PARAMETERS: "", sample_files.TOLD: "{}"})
    assert len(read_pictures(paths)) == 10
    monkeypatch.setattr(sample_files, "MOST_NUMBERS", 9 * 16 * 24 * 3)
    found = read_pictures(paths)
    assert found.shape == (2, 16, 24, 3) and not found.any()
