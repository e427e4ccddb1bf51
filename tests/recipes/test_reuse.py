"""What is taken of runs that are there already, what makes a run another one, and what goes where it is looked for."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import torch
from durable import Cut, cut_at, equal, state_files
from lora_runs import metadata_in
from PIL import Image
from prepared import NeverLoaded, Ready
from safetensors.torch import load_file, save_file
from tiny_runs import change, run, run_with_notes, tiny_config
from windows_rules import on_linux, rules

from lora_atelier.trainer_core.common import windows
from lora_atelier.trainer_core.config import (
    BeneathConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    ExistingConfig,
    MaskConfig,
    OptimizerConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.data.scan import Index, manifest_digest, scan
from lora_atelier.trainer_core.models import source_of
from lora_atelier.trainer_core.preflight import disk
from lora_atelier.trainer_core.runs import build_keys, find_runs, model_digests, open_run
from lora_atelier.trainer_core.training import prepare
from lora_atelier.trainer_core.training.effect import describe_effect
from lora_atelier.trainer_core.training.result import describe_result


@pytest.fixture(autouse=True)
def no_dry_run(monkeypatch):
    """Leave out the dry run before each run, which has tests of its own."""
    monkeypatch.setattr(prepare, "fit_memory", lambda config, *_: ([config.memory], "Memory enough."))


@pytest.fixture
def config(checkpoint, pictures):
    return tiny_config(
        checkpoint,
        ConceptConfig(folder=str(pictures), captions=CaptionConfig(dropout=0.2), masks=MaskConfig(missing="ones")),
        existing={"on_existing": "resume"},
        lora={"dropout": 0.1},
        optimizer={"learning_rate": 1e-2},
        train={"steps": 2, "batch_size": 1, "seed": 5},
        saves={"save_every": 1, "save_unit": "steps", "keep_last": 9},
    )


def nothing_loads(monkeypatch):
    monkeypatch.setattr(Ready, "load", NeverLoaded.load)


def no_steps(report):
    pytest.fail("a step was taken")


def stop_at(step):
    """Return callbacks that ask for the end after a step, as a person does."""
    asked = set()
    return {"step": lambda report: asked.update({"stop"} if report.step == step else ()), "asked": lambda: asked}


def test_a_finished_run_is_taken_at_once_and_its_file_copied_only_where_it_is_not_there(
    config, tmp_path, cache, monkeypatch
):
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    first = run(config, tmp_path, own)
    nothing_loads(monkeypatch)
    shutil.rmtree(own)  # also what the scan knows of the files
    phases = []
    again, notes = run_with_notes(config, tmp_path, own, step=no_steps, phase=lambda phase, *_: phases.append(phase))
    assert set(phases) == {"reading files"}
    assert again.path == first.path and equal(again.tensors, first.tensors) and again.losses == first.losses
    assert re.fullmatch(
        r"Already trained in lora-\w{12}, finished [\d-]+ [\d:]+; "
        r"its result is reused\.",
        again.origin,
    )
    assert again.origin in notes and len(list(tmp_path.glob("*.safetensors"))) == 1
    # What changes neither weights nor files: intervals, memory, the log.
    other = change(
        config,
        saves={"save_every": 7, "sample_every": 3},
        memory={"checkpointing": "full"},
        train={"log": "csv", "validate_every": 1},
    )
    assert run(other, tmp_path, own, logs=tmp_path).path == first.path
    first.path.unlink()
    assert run(config, tmp_path, own).path == first.path  # copied again
    first.path.write_bytes(b"somebody's own")
    second = run(config, tmp_path, own)
    assert second.path.name == "lora-2.safetensors" and first.path.read_bytes() == b"somebody's own"
    second.path.unlink()
    over = change(config, saves={"overwrite": True})
    assert run(over, tmp_path, own).path.name == "lora-2.safetensors"  # what is not ours is not replaced
    ours = {"atelier.version": "0", "modelspec.title": "another one of ours"}
    for key, taken in (("0" * 64, "lora-2"), (open_run(first.run).keys.run, "lora")):  # of another run, of this one
        save_file(first.tensors, first.path, {**ours, "atelier.run": key})
        before = first.path.read_bytes()
        again = run(over, tmp_path, own)
        assert again.path.stem == taken and (again.path == first.path) == (first.path.read_bytes() != before)
        (tmp_path / "lora-2.safetensors").unlink(missing_ok=True)
    assert equal(load_file(first.path), first.tensors)
    dated = run(change(config, saves={"file_name": "{name} {date} e{epoch} s{step}"}), tmp_path, own)
    assert re.fullmatch(r"lora \d{4}-\d\d-\d\d e0000 s000002\.safetensors", dated.path.name)


@on_linux
def test_loras_that_a_node_has_mapped_stay_and_the_run_ends_all_the_same(config, tmp_path, cache, monkeypatch):
    """As Windows keeps them: the LoRA of a stop, and the one that `overwrite` would replace."""
    monkeypatch.setattr(windows, "PATIENCE", 0.0)
    over = change(config, saves={"overwrite": True})
    with rules():
        stopped = run(over, tmp_path, cache, **stop_at(1))
        mapped = {stopped.path: load_file(stopped.path)}
        first, notes = run_with_notes(over, tmp_path, cache)
        assert first.finished and first.path.name == "lora.safetensors"
        assert any(f"{stopped.path.name} of an earlier stop is open elsewhere" in note for note in notes)
        mapped[first.path] = load_file(first.path)
        anew = change(over, existing={"on_existing": "train again"})
        again, notes = run_with_notes(anew, tmp_path, cache)
        assert again.path.name == "lora-2.safetensors" and equal(again.tensors, first.tensors)
        assert any("The earlier LoRA of this name stays, and the new one gets a number." in note for note in notes)
        assert all(equal(load_file(path), tensors) for path, tensors in mapped.items())
        mapped.clear()
        assert run(anew, tmp_path, cache).path == first.path  # it has been let go


def test_what_makes_a_run_another_one_and_what_does_not(config, checkpoint, pictures, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(pictures, here)
    model, beneath = tmp_path / "model.safetensors", tmp_path / "beneath.safetensors"
    shutil.copy(checkpoint, model)
    save_file({"x": torch.zeros(1)}, beneath)
    (concept,) = config.dataset.concepts
    plain = config.replace(
        dataset=DatasetConfig(concepts=(concept.replace(folder=str(here)),)),
        base_model=config.base_model.replace(path=str(model)),
    )
    config = change(plain, lora={"beneath": (BeneathConfig(path=str(beneath)),)})

    def key(config):
        with Index(tmp_path / "index") as index:
            digest = manifest_digest(scan(config.dataset, index))
            return build_keys(config, model_digests(config, source_of(config.base_model), index), digest)

    first = key(config)
    moved = tmp_path / "moved"
    shutil.copytree(here, moved)
    elsewhere = config.replace(
        dataset=DatasetConfig(concepts=(config.dataset.concepts[0].replace(folder=str(moved)),)),
        sample=SampleConfig(prompts=("a",)),
    )
    for same in (
        elsewhere,
        change(config, train={"log": "csv"}),
        change(config, train={"validate_every": 3}),
        change(config, memory={"checkpointing": "full"}),
        change(config, saves={"save_every": 9, "folder": "x", "file_name": "y"}),
        change(config, existing={"on_existing": "reuse"}),
    ):
        assert key(same) == first
    for longer in (
        change(config, train={"steps": 9}),
        change(config, train={"epochs": 2}),
        change(config, train={"save_dtype": "float32"}),
        change(config, lora={"names": "peft"}),
    ):
        assert key(longer).run != first.run and key(longer).course == first.course
    captions = config.dataset.concepts[0].captions.replace(shuffle=True)
    others = [
        plain,
        change(config, train={"seed": 6}),
        change(config, train={"batch_size": 2}),
        change(config, optimizer={"learning_rate": 2e-2}),
        change(config, scheduler={"warmup": 1}) if hasattr(config.scheduler, "warmup") else plain,
        change(config, lora={"rank": 4}),
        change(config, lora={"beneath": (BeneathConfig(path=str(beneath), strength=0.5),)}),
        change(config, objective={"noise_offset": 0.1}),
        config.replace(dataset=DatasetConfig(concepts=(config.dataset.concepts[0].replace(captions=captions),))),
    ]
    assert all(key(other).course != first.course for other in others)
    assert key(change(config, train={"validate_every": 3, "keep_best": True})) != key(
        change(config, train={"validate_every": 4, "keep_best": True})
    )

    for picture in sorted(here.glob("?.png")):  # one pixel of one of them
        before = picture.read_bytes()
        image = Image.open(picture).convert("RGB")
        image.putpixel((3, 3), tuple(255 - c for c in image.getpixel((3, 3))))
        image.save(picture)
        assert key(config).course != first.course, picture
        picture.write_bytes(before)
    for path, content in (
        (here / "4.txt", b"another thing"),
        (here / "2-masklabel.png", (here / "0-masklabel.png").read_bytes()),
        (model, model.read_bytes()[:-4] + b"\0\0\0\1"),
        (beneath, beneath.read_bytes()[:-1] + b"\1"),
    ):
        before = path.read_bytes()
        path.write_bytes(content)
        assert key(config).course != first.course, path
        path.write_bytes(before)
    assert key(config) == first


def test_samples_and_the_form_of_the_file_are_made_anew_without_training(config, tmp_path, cache):
    first = run(config, tmp_path, cache)
    drawn = config.replace(sample=SampleConfig(prompts=("a thing",), steps=1, width=32, height=32))
    with_samples = run(drawn, tmp_path, cache, step=no_steps)
    assert with_samples.samples.shape == (1, 32, 32, 3) and with_samples.path == first.path
    assert state_files(with_samples) == state_files(first)
    (picture,) = (with_samples.run / "samples").glob("*.png")
    picture.write_bytes(picture.read_bytes()[:-40])  # a damaged one is drawn again
    assert torch.equal(run(drawn, tmp_path, cache, step=no_steps).samples, with_samples.samples)
    peft = run(change(config, lora={"names": "peft"}), tmp_path / "peft", cache)
    assert {name.split(".lora_")[1] for name in peft.tensors} == {"A.weight", "B.weight"}
    assert len(peft.tensors) == 2 * sum(name.endswith(".alpha") for name in first.tensors)
    other = run(change(config, train={"save_dtype": "float32"}), tmp_path, cache, step=no_steps)
    assert other.path.name == "lora-2.safetensors" and {t.dtype for t in other.tensors.values()} == {torch.float32}
    assert all(torch.equal(other.tensors[k].half(), t) for k, t in first.tensors.items() if t.dtype == torch.float16)
    assert other.finished and "Resumed after step 2" in other.origin
    assert metadata_in(other.path)["atelier.run"] == open_run(other.run).keys.run


def test_a_run_becomes_longer_and_shorter(config, tmp_path, cache):
    """By steps to the last bit where the schedule allows it, else with a word; by epochs; back to a save."""
    straight = run(change(config, train={"steps": 4}), tmp_path / "straight", cache)
    run(config, tmp_path, cache)
    seen = []
    longer, notes = run_with_notes(
        change(config, train={"steps": 4}), tmp_path, cache, step=lambda r: seen.append(r.step)
    )
    assert seen == [3, 4] and equal(longer.tensors, straight.tensors) and longer.losses == straight.losses
    assert state_files(longer) == state_files(straight)
    name = next(run.path.name for run in find_runs(tmp_path / "runs") if run.steps == 2)
    assert longer.origin == f"Resumed after step 2 of the run {name}, to step 4." and longer.origin in notes
    shorter = run(change(config, train={"steps": 3}), tmp_path, cache, step=no_steps)
    assert len(shorter.losses) == 3 and shorter.losses == straight.losses[:3]
    epochs = run(change(config, train={"epochs": 1}), tmp_path, cache, step=seen.append)
    assert len(epochs.losses) == 6 and epochs.losses[:4] == straight.losses


def rates_of(config, tmp_path, cache):
    """Train; return the result, the factors on the learning rate by step, and the notes."""
    seen = {}

    def step(report):
        (rate,) = report.learning_rates.values()
        seen[report.step] = rate / config.optimizer.learning_rate

    result, notes = run_with_notes(config, tmp_path, cache, step=step)
    return result, seen, notes


def test_an_extended_run_goes_on_from_its_end_and_its_rate_does_not_rise(config, tmp_path, cache):
    curved = change(config, scheduler={"name": "cosine"}, train={"steps": 4})
    first, seen, _ = rates_of(curved, tmp_path, cache)
    last = seen[4]
    assert last == pytest.approx(0.5 * (1 + math.cos(math.pi * 3 / 4)))
    longer = change(curved, train={"steps": 6})
    with pytest.raises(Cut):
        run(longer, tmp_path, cache, step=cut_at(5))
    more, seen, _ = rates_of(longer, tmp_path, cache)  # it keeps its curve when it is resumed, too
    assert seen == {6: last} and more.losses[:4] == first.losses
    more, seen, notes = rates_of(change(longer, train={"steps": 7}), tmp_path, cache)
    assert seen == {7: last} and len(more.losses) == 7
    assert more.origin.endswith(
        ", to step 7. Its curve of 4 steps stays: later steps have 0.15 of the full learning rate. For a curve over "
        "all 7 steps, set planned_steps of Scheduler to 7."
    )
    assert more.origin in notes
    # The same end in another form of the file is that of the extended run.
    other, seen, _ = rates_of(change(longer, train={"steps": 7, "save_dtype": "float32"}), tmp_path, cache)
    assert not seen and other.losses == more.losses


def test_the_first_note_names_a_run_of_another_name_or_what_differs(config, pictures, tmp_path, cache):
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    (concept,) = config.dataset.concepts
    config = config.replace(dataset=DatasetConfig(concepts=(concept.replace(folder=str(folder)),)))

    def first_note(config, name="mine"):
        """Begin a run, and end it with its first note."""
        notes = []

        def note(text):
            notes.append(text)
            raise Cut

        with pytest.raises(Cut):
            run(config, tmp_path, cache, output=tmp_path / f"{name}.safetensors", note=note)
        return notes[0]

    assert "name" not in first_note(config)
    run(config, tmp_path, cache, output=tmp_path / "mine.safetensors")
    assert first_note(config).startswith("Already trained in mine-")
    sentence = first_note(config, "another")
    assert re.fullmatch(
        r"The run mine-\w{12} has the same settings, pictures and captions under the name 'mine', so its result is "
        r"reused\. For a run of its own under the name 'another', set on_existing of Train LoRA to train again\.",
        sentence,
    )
    longer = change(config, train={"steps": 3})
    assert "under the name 'mine', so it is resumed." in first_note(longer, "another")
    anew = "Trained anew, as this differs from the newest run of this name, mine-"
    sentence = first_note(change(config, optimizer={"learning_rate": 1e-3}, lora={"rank": 4}))
    assert sentence.startswith(anew) and sentence.endswith(": rank of LoRA Config, learning_rate of Optimizer.")
    own = folder / "lora_atelier.json"
    own.write_text('{"pictures": {"1.png": {"repeats": 2}}}', encoding="utf-8")
    sentence = first_note(config)
    assert sentence.startswith(anew) and sentence.endswith(": settings of single pictures.")
    own.unlink()
    (folder / "4.txt").write_text("another thing", encoding="utf-8")
    sentence = first_note(config)
    assert sentence.startswith(anew) and sentence.endswith(": captions.")
    image = Image.open(folder / "0.png").convert("RGB")
    image.putpixel((3, 3), (1, 2, 3))
    image.save(folder / "0.png")
    sentence = first_note(config)  # other pictures have other captions
    assert sentence.startswith(anew) and sentence.endswith(": pictures.")
    again = change(config, existing={"on_existing": "train again"})
    assert not first_note(again).startswith("Trained anew")  # as it was asked for


def test_planned_steps_do_not_make_an_extended_run_begin_anew(config, tmp_path, cache):
    curved = change(config, scheduler={"name": "cosine", "min_lr_ratio": 0.1}, train={"steps": 4})
    first, *_ = rates_of(curved, tmp_path, cache)
    kept = change(curved, scheduler={"planned_steps": 4}, train={"steps": 6})
    more, seen, _ = rates_of(kept, tmp_path, cache)
    assert seen == {5: 0.1, 6: 0.1} and more.losses[:4] == first.losses
    assert more.origin.endswith(", to step 6.")  # as such a run from its first step
    straight, *_ = rates_of(kept, tmp_path / "straight", cache)
    assert straight.losses == more.losses and equal(straight.tensors, more.tensors)
    asked = change(curved, scheduler={"planned_steps": 8}, train={"steps": 8})
    more, seen, _ = rates_of(asked, tmp_path / "straight", cache)
    assert list(seen) == [7, 8] and seen[7] > 0.1 and "and then that of planned_steps, 8." in more.origin
    anew, seen, _ = rates_of(change(curved, scheduler={"planned_steps": 9}), tmp_path, cache)
    assert list(seen) == [2, 3, 4], anew.origin  # all such curves begin with the same step; the others are its own


def test_a_run_whose_rate_ended_at_0_is_not_extended_for_nothing(config, tmp_path, cache):
    ended = change(config, scheduler={"name": "points", "points": "0:1, 0.5:0"})
    run(ended, tmp_path, cache)
    sentence = r"ended at 0, so later steps would train nothing\. For a curve over all 3 steps, set planned_steps of"
    with pytest.raises(ValueError, match=sentence):
        run(change(ended, train={"steps": 3}), tmp_path, cache, step=no_steps)
    run(change(ended, train={"steps": 3}, scheduler={"planned_steps": 3}), tmp_path, cache)


def test_a_measurement_at_an_end_that_a_longer_run_has_not_is_reported(config, pictures, tmp_path, cache):
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("0.png", "0.txt"):
        shutil.copy(pictures / name, kept)
    concepts = (*config.dataset.concepts, ConceptConfig(folder=str(kept), role="validation"))
    config = config.replace(dataset=DatasetConfig(concepts=concepts))
    config = change(config, train={"validate_every": 2, "keep_best": True, "steps": 3})
    run(config, tmp_path, cache)
    longer = run(change(config, train={"steps": 4}), tmp_path, cache)
    assert longer.origin.endswith("It was measured once more, at its end, and these weights count among the best.")


def test_what_is_done_with_runs_that_are_there_is_chosen(config, tmp_path, cache):
    first = run(config, tmp_path, cache)
    name = first.run.name
    again = run(change(config, existing={"on_existing": "train again"}), tmp_path, cache)
    assert again.run != first.run and equal(again.tensors, first.tensors) and again.path.name == "lora-2.safetensors"
    with pytest.raises(Cut):
        run(change(config, train={"steps": 3}), tmp_path, cache, step=cut_at(3))
    anew = run(change(config, train={"steps": 3}, existing={"on_existing": "reuse"}), tmp_path, cache)
    assert anew.origin.startswith("New run: ")

    def fork(config=config, **settings):
        return config.replace(existing=ExistingConfig(on_existing="fork", fork_run=name, **settings))

    seen = []
    faster = change(config, optimizer={"learning_rate": 3e-2}, train={"steps": 3})
    forked = run(fork(faster, fork_step=1), tmp_path, cache, step=seen.append)
    assert [report.step for report in seen] == [2, 3] and forked.origin == f"Forked from step 1 of the run {name}."
    assert list(seen[0].learning_rates.values()) == [3e-2] and forked.losses[0] == first.losses[0]
    # Weights and moments are those of the save: the second step's loss is the first run's, its update is not.
    assert forked.losses[1] == first.losses[1] and not equal(forked.tensors, first.tensors)
    averaged = change(faster, optimizer={"ema_decay": 0.5, "ema_output": "plain", "learning_rate": 1e-9})
    result = run(fork(averaged), tmp_path, cache)  # an average that begins with the fork, with its weights
    average = load_file(result.others[0])
    assert all(torch.allclose(average[k], t, atol=1e-3) for k, t in result.tensors.items())
    for wrong, sentence in (
        (fork(change(faster, lora={"rank": 4, "alpha": 4})), "is of another network .* set LoRA Config as it was then"),
        (fork(fork_step=7), f"The run {name} has no save of step 7; set step of Train LoRA to one of: 1, 2"),
        (
            config.replace(existing=ExistingConfig(on_existing="fork", fork_run="nobody")),
            f"There is no run nobody; set run of Train LoRA to one of the newest: .*{name}",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(wrong, tmp_path, cache)


def test_what_is_asked_for_on_the_way_and_saves_that_stay(config, tmp_path, cache):
    config = change(config, train={"steps": 4}, saves={"save_every": 0, "keep_last": 1})
    config = config.replace(sample=SampleConfig(prompts=("a",), steps=1, width=32, height=32))
    wishes = {1: {"save", "sample"}, 2: {"stop"}}
    done = []
    asking = {"step": lambda report: done.append(report.step), "asked": lambda: wishes.get(done[-1], ())}
    drawn = []
    stopped, notes = run_with_notes(
        config, tmp_path, cache, **asking, samples=lambda at, paths: drawn.append((at, len(paths)))
    )
    assert not stopped.finished and stopped.path.name == "lora-stopped-at-2.safetensors" and stopped.path.is_file()
    assert drawn == [(1, 1), (2, 1)] and stopped.samples.shape[0] == 1 and len(stopped.losses) == 2
    assert any(note.startswith("Saved after step 1 in ") for note in notes)
    assert any(note == "Stopped and kept after step 2 of 4; press Run again to resume." for note in notes)
    result = run(config, tmp_path, cache, step=lambda report: done.append(report.step))
    assert result.finished and done == [1, 2, 3, 4] and result.path.name == "lora.safetensors"
    straight = run(config, tmp_path / "straight", cache)
    assert equal(result.tensors, straight.tensors) and result.losses == straight.losses

    often = {"save_every": 1, "keep_every": 2, "publish": True, "file_name": "{name}-{step}"}
    kept = run(change(config, saves=often), tmp_path / "kept", cache)
    assert [save.step for save in open_run(kept.run).checkpoints()] == [4, 2]
    names = sorted(path.name for path in (tmp_path / "kept").glob("*.safetensors"))
    assert names == ["lora-000002-step-000002.safetensors", "lora-000004.safetensors"]


SIZED = (  # LoRA, optimizer, the rest
    pytest.param({}, {}, {}, marks=pytest.mark.thorough),
    pytest.param(
        {"dtype": "bfloat16"},
        {"name": "prodigy_plus_schedule_free", "learning_rate": 1.0},
        {},
        marks=pytest.mark.thorough,
    ),
    pytest.param({"algorithm": "loha"}, {"name": "came", "ema_decay": 0.9}, {}, marks=pytest.mark.thorough),
    ({"algorithm": "full"}, {"name": "adamw8bit"}, {"save_dtype": "float32"}),
    ({"init": "pissa"}, {"name": "sgd", "ema_decay": 0.9}, {"validate_every": 1, "keep_best": True}),
)


@pytest.mark.parametrize(("lora", "optimizer", "train"), SIZED, ids=lambda value: ",".join(map(str, value.values())))
def test_the_size_of_a_save_is_estimated(lora, optimizer, train, config, pictures, tmp_path, cache, monkeypatch):
    config = change(config, lora={"rank": 32, "alpha": 4, "dropout": 0.0, "preset": "attn-mlp", **lora}, train=train)
    config = config.replace(optimizer=OptimizerConfig(**{"learning_rate": 1e-3, **optimizer}))
    if train.get("keep_best"):
        concepts = (*config.dataset.concepts, ConceptConfig(folder=str(pictures), role="validation"))
        config = config.replace(dataset=DatasetConfig(concepts=concepts))
    estimated = []
    original = disk.save_bytes
    monkeypatch.setattr(disk, "save_bytes", lambda *a: estimated.append(original(*a)) or estimated[-1])
    with pytest.raises(Cut):  # a save on the way, with the best weights beside the last
        run(config, tmp_path, cache, step=cut_at(2))
    (found,) = find_runs(tmp_path / "runs")
    truth = max(save.size for save in found.checkpoints())
    assert 0.85 * truth <= estimated[0] <= 1.3 * truth, (estimated[0] / truth, truth)


def test_a_run_whose_saves_cannot_fit_is_refused_before_anything_is_loaded(config, tmp_path, cache, monkeypatch):
    nothing_loads(monkeypatch)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
    config = change(config, lora={"rank": 512}, saves={"keep_last": 3})
    sentence = r"The saves of this run need [\d,]+ MB \(4 of [\d,]+ MB each\) and 1 MB are free in .*; make room, or"
    with pytest.raises(ValueError, match=sentence):
        run(config, tmp_path, cache)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("saves", "count"),
    [
        ({"sample_every": 2}, 4),  # of 9 steps; the end is saved anyway
        ({"sample_every": 3}, 2),
        ({"sample_every": 1, "sample_unit": "minutes"}, 1),
        ({}, 0),
    ],
)
def test_the_disk_must_have_room_for_the_loras_of_sampled_steps(config, tmp_path, cache, monkeypatch, saves, count):
    config = change(config, lora={"rank": 512}, train={"steps": 9}, saves=saves)
    config = config.replace(sample=SampleConfig(prompts=("thing",), width=32, height=32, steps=1))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="The saves of this run need") as refused:
        patch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000_000}))
        run(config, tmp_path, cache)
    told = re.search(r"([\d,]+) MB for the LoRAs of (\d+) sampled steps", str(refused.value))
    assert (int(told[2]) if told else 0) == count
    assert ("sample_every of Saves & Samples higher" in str(refused.value)) == bool(count)
    if count == 2:
        one = run(change(config, train={"steps": 1}, saves={"sample_every": 0}), tmp_path, cache)
        assert 0.9 <= int(told[1].replace(",", "")) * 1e6 / (count * one.path.stat().st_size) <= 1.1


def test_a_finished_run_says_what_it_has_changed(config, tmp_path, cache):
    text = {"text_encoder_learning_rate": 1e-2}
    first = run(change(config, optimizer=text), tmp_path, cache)
    changed = r"The LoRA changes a prediction by ([\d.]+)%\. "
    found = re.fullmatch(changed + r"Norm of its changes: UNet ([\d.]+), text encoder CLIP-L ([\d.]+)\.", first.effect)
    assert found and all(float(number) > 0 for number in found.groups()), first.effect
    again = run(change(config, optimizer=text), tmp_path, cache)
    assert again.effect == first.effect and again.advice == first.advice == []  # also of a run that is reused
    none = {"learning_rate": 1e-5, "text_encoder_learning_rate": 1e-30}
    weak = run(change(config, optimizer=none), tmp_path, cache)
    assert len(weak.advice) == 1 and "set learning_rate of Optimizer about 3 times higher" in weak.advice[0]
    assert "To try next: The LoRA changes" in describe_result(weak, 1.0)
    assert weak.effect.endswith(
        "Nothing was learned by text encoder CLIP-L; set its learning rate in Optimizer higher."
    )
    none = describe_effect({"prediction": 0.0, "norms": {"UNet": 0.0}})
    assert none.startswith("The LoRA has no effect: a prediction is the same without it.")
    shorter = run(change(config, optimizer={"learning_rate": 2e-2}), tmp_path, cache, **stop_at(1))
    assert shorter.effect == "" and not shorter.finished
