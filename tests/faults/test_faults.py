"""What goes wrong around a run: what was learned stays, the person reads a sentence, and the next queue goes on."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import sessions
import torch
from durable import Cut, cut_at
from prepared import NeverLoaded, Ready
from safetensors import SafetensorError
from safetensors.torch import load_file
from sessions import essence
from tiny_runs import change, run
from windows_rules import on_linux, rules

from lora_atelier.trainer_core import train as training
from lora_atelier.trainer_core.common import windows
from lora_atelier.trainer_core.common.tensor_tree import load_state, save_state
from lora_atelier.trainer_core.config import ExistingConfig, RunConfig
from lora_atelier.trainer_core.data.cache import CacheError
from lora_atelier.trainer_core.models.sd.denoiser import UNet
from lora_atelier.trainer_core.objective import objective
from lora_atelier.trainer_core.runs import find_runs, open_run
from lora_atelier.trainer_core.runs import folder as run_folder
from lora_atelier.trainer_core.training import prepare, sample, sample_files, saving, validate
from lora_atelier.trainer_core.training import step as step_module


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[RunConfig]:
    config = sessions.make_scene(tmp_path_factory.mktemp("faults") / "scene")
    with sessions.prepared_once():
        yield config


@pytest.fixture(scope="module")
def small(scene) -> RunConfig:
    """Give a run with as little beside its steps as can be: for faults that are tried in many places."""
    parts = {"optimizer": {"ema_decay": 0.0}, "saves": {"sample_every": 0, "publish": False, "keep_every": 0}}
    parts["dataset"] = {"concepts": scene.dataset.concepts[:1]}
    return change(scene, train={"steps": 3, "accumulate": 1, "validate_every": 0, "keep_best": False}, **parts)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[RunConfig], dict]:
    """Give what a run comes to that nothing happens to."""
    known = {}

    def of(config: RunConfig) -> dict:
        if (key := config.digest()) not in known:
            known[key] = essence(sessions.session(config, tmp_path_factory.mktemp("whole")))
        return known[key]

    return of


def the_run(folder: Path):
    (run,) = find_runs(folder / "loras" / "runs")
    return run


def begun(config: RunConfig, folder: Path, step: int) -> Path:
    """Let a run be cut off after a step."""
    with pytest.raises(Cut):
        sessions.session(config, folder, step=cut_at(step))
    return folder


def moments_of(config: RunConfig, folder: Path) -> list[tuple[str, str, str]]:
    """Return the moments of a whole session: operation, part, kind of file."""
    seen = []
    moments = sessions.Moments(lambda _, operation, part, file, when: seen.append((operation, part, file, when)))
    with moments.watched(folder):
        sessions.session(config, folder, **callbacks(moments))
    return [(operation, part, kind_of(file)) for operation, part, file, when in seen if when == "before"]


def callbacks(moments: sessions.Moments) -> dict:
    names = ("check", "step", "phase", "validation", "samples")
    return {name: lambda *_, name=name: moments.at(name, "", lambda: None) for name in names}


def kind_of(file: str) -> str:
    return re.sub(r"[0-9a-f]{32}|step-\d+|-\d+", "*", Path(file).name)


# Cancel

TELLING = ("check", "step", "phase", "validation", "samples")  # callbacks that may raise it
PHASES = ("scanning", "encoding", "a step", "validation", "samples", "the last samples")


def test_cancel_in_any_phase_keeps_the_lora_so_far_and_says_where(scene, uninterrupted, tmp_path, pytestconfig):
    whole = uninterrupted(scene)
    kinds = moments_of(scene, tmp_path / "count")
    places = {place[:2]: number for number, place in enumerate(kinds)}  # the last of each
    # Else only where the core asks in these phases: other phases, and reports between them, may raise it, too.
    asked = {(operation, part) for operation, part in places if operation in TELLING}
    if not pytestconfig.getoption("thorough"):
        asked = {("check", part) for part in PHASES}
    assert asked <= places.keys()
    for operation, part in sorted(asked):
        number = places[operation, part]
        folder, notes, steps = tmp_path / str(number), [], []

        def act(at: int, *_: str, number: int = number) -> None:
            if at == number:
                raise Cut

        moments = sessions.Moments(act)
        with moments.watched(folder), pytest.raises(Cut):
            sessions.session(scene, folder, notes, **callbacks(moments))
        found = find_runs(folder / "loras" / "runs")
        reached = found[0].checkpoints()[0].step if found else 0
        assert reached == sum(kind[0] == "step" for kind in kinds[: number + 1]), (operation, part)
        if reached:
            assert not found[0].checkpoints()[0].problem(), part
            assert str(found[0].path) in notes[-1] and "press Run again" in notes[-1], part
        resumed = sessions.session(scene, folder, step=steps.append)
        assert essence(resumed) == whole, part
        assert len(steps) == 4 - reached, part
        shutil.rmtree(folder)


def test_cancel_at_each_step_resumes_at_the_next(scene, uninterrupted, tmp_path):
    seldom = change(scene, saves={"save_every": 0})  # nothing is saved but what Cancel saves
    for step in (1, 3):
        notes, steps = [], []
        with pytest.raises(Cut):
            sessions.session(seldom, tmp_path, notes, step=cut_at(step))
        assert f"Stopped after step {step} of 4" in notes[-1] and f"lora-stopped-at-{step}.safetensors" in notes[-1]
        assert (tmp_path / "loras" / f"lora-stopped-at-{step}.safetensors").is_file()
    result = sessions.session(seldom, tmp_path, step=lambda report: steps.append(report.step))
    assert steps == [4] and essence(result) == uninterrupted(scene)


# The disk


WRITES = ("open", "save_file", "fsync", "replace", "mkdir")


def full_disk(operation: str) -> Exception:
    if operation == "save_file":
        return SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_disk_that_is_full_at_any_write(small, uninterrupted, tmp_path, lasting, pytestconfig):
    small = change(small, train={"steps": 2})
    whole = uninterrupted(small)
    kinds = moments_of(small, tmp_path / "count")
    # The last of each kind; what follows fails in the same way whichever file of a part it begins with.
    places = {kind[: 2 if lasting else 3]: number for number, kind in enumerate(kinds) if kind[0] in WRITES}
    assert len(places) > (20 if lasting else 40)
    # Else every twelfth one: test_io_errors.py lets each operation fail.
    tried = list(places.items())[:: 1 if pytestconfig.getoption("thorough") else 12]
    ended = set()
    for kind, number in tried:
        folder, notes = tmp_path / str(number), []

        def act(at: int, operation: str, part: str, file: str, when: str, number: int = number) -> None:
            if when == "before" and operation in WRITES and (at == number or (lasting and at > number)):
                raise full_disk(operation)

        moments = sessions.Moments(act)
        result = None
        try:
            with moments.watched(folder):
                result = sessions.session(small, folder, notes, **callbacks(moments))
        except (RuntimeError, ValueError, CacheError) as error:
            ended.add(kind)
            text = str(error)
            assert "cannot be written (No space left on device)" in text and " are free" in text, (kind, text)
            assert str(folder) in text and text.count(". ") <= 1 and text.endswith("."), (kind, text)
        for found in find_runs(folder / "loras" / "runs"):
            assert not any(checkpoint.problem() for checkpoint in found.checkpoints()), kind
        if result is None or lasting or not len(result.samples):  # queued again
            assert result is None or len(result.samples) or "Samples could not be saved" in notes[-1], kind
            result = sessions.session(small, folder)
        assert essence(result) == whole, kind
        assert not [*folder.glob("loras/**/.*.tmp")], kind
        shutil.rmtree(folder)
    assert len(ended) < len(tried) if lasting else len(ended) < len(tried) / 2


def test_a_file_that_cannot_be_read(small, uninterrupted, tmp_path):
    error = OSError(errno.EIO, os.strerror(errno.EIO))

    def refusing(function: Callable, wanted: str) -> Callable:
        def read(path, *args, **options):
            if wanted in str(path):
                raise error
            return function(path, *args, **options)

        return read

    notes: list[str] = []
    with (
        mock.patch("lora_atelier.trainer_core.training.pixels.Path.read_bytes", refusing(Path.read_bytes, "0.png")),
        pytest.raises(ValueError, match=r"0\.png.*Input/output error"),
    ):
        sessions.session(small, tmp_path / "picture", notes)
    unread = mock.patch.object(Ready, "digest", side_effect=error)
    with unread, pytest.raises(ValueError, match=r"tiny\.safetensors cannot be read"):
        sessions.session(small, tmp_path / "model")
    folder = begun(small, tmp_path / "save", 2)
    with mock.patch.object(run_folder, "file_digest", refusing(run_folder.file_digest, "step-00000002/weights")):
        result = sessions.session(small, folder, notes)
    assert "weights.safetensors cannot be read (Input/output error)" in "".join(notes)
    assert essence(result) == uninterrupted(small) and "after step 1" in result.origin


def test_a_damaged_save_gives_way_to_the_one_before(small, uninterrupted, tmp_path, pytestconfig):
    folder = begun(small, tmp_path / "cut", 2)
    names = sorted(file.name for file in the_run(folder).checkpoints()[0].path.iterdir())
    assert names == sorted(
        [f"{name}.safetensors" for name in ("weights", "optimizer", "history", "lora")]
        + ["files.json", "checkpoint.json"]
    )
    for number, name in list(enumerate(names))[:: 1 if pytestconfig.getoption("thorough") else 2]:
        copy, notes = tmp_path / name, []
        shutil.copytree(folder, copy)
        damage(the_run(copy).checkpoints()[0].path / name, sorted(REGIONS)[number])
        result = sessions.session(small, copy, notes)
        assert "after step 1 of 3" in result.origin and essence(result) == uninterrupted(small), name
        assert re.search(r"step-00000002 of .* cannot be resumed: .*renamed to damaged-step-00000002", "".join(notes))
        shutil.rmtree(copy)
    for lost, said in (
        ("optimizer", "The optimizer state is reset"),
        ("history", "Losses and measurements so far are"),
    ):
        copy, notes = tmp_path / lost, []
        shutil.copytree(folder, copy)
        for checkpoint in the_run(copy).checkpoints():
            (checkpoint.path / f"{lost}.safetensors").unlink()
        result = sessions.session(small, copy, notes)
        assert "after step 2 of 3" in result.origin and any(note.startswith(said) for note in notes)
        assert result.finished and (lost == "optimizer") != math.isnan(result.losses[0])
        shutil.rmtree(copy)
    for checkpoint in the_run(folder).checkpoints():
        damage(checkpoint.path / "weights.safetensors", "the middle")
    result = sessions.session(small, folder)
    assert result.origin.startswith("New run: ") and essence(result) == uninterrupted(small)


def test_an_optimizers_state_of_other_shapes_is_named_before_the_first_step(small, tmp_path):
    """Somebody's run folder, whose files are whole."""
    folder = begun(small, tmp_path, 2)
    save = the_run(folder).checkpoints()[0]
    file = save.path / "optimizer.safetensors"
    state = load_state(file)
    values = next(iter(state["optimizer"]["state"].values()))
    values["exp_avg"] = torch.zeros(3, 3)
    save_state(file, state)
    about = json.loads((save.path / "checkpoint.json").read_text(encoding="utf-8"))
    about["files"][file.name] = {"size": file.stat().st_size, "sha256": run_folder.file_digest(file)}
    (save.path / "checkpoint.json").write_text(json.dumps(about), encoding="utf-8")
    steps = []
    with pytest.raises(ValueError, match=f"The save {re.escape(str(save.path))} does not hold the state of a run; del"):
        sessions.session(small, folder, step=steps.append)
    assert not steps


REGIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "a length": lambda data: bytes([data[0] ^ 0xFF]) + data[1:],
    "the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "the middle": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "the last byte": lambda data: data[:-2] + bytes([data[-2] ^ 0xFF, data[-1] ^ 0xFF]),
    "its end is cut": lambda data: data[:-7],
    "empty": lambda data: b"",
    "missing": lambda data: None,
}


def damage(file: Path, region: str) -> None:
    data = REGIONS[region](file.read_bytes())
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)


def test_damaged_files_beside_the_saves(small, uninterrupted, tmp_path, pytestconfig):
    folder = tmp_path / "finished"
    assert essence(sessions.session(small, folder)) == uninterrupted(small)
    names = ("run.json", "result.json", "published.json", "log.jsonl")
    regions = [region for region in REGIONS if region not in ("a length", "the last byte")]  # of files of numbers
    step = 1 if pytestconfig.getoption("thorough") else 6  # else each file at another one of the regions
    for name, region in list(itertools.product(names, regions))[::step]:
        copy = tmp_path / f"{name} {region}"
        shutil.copytree(folder, copy)
        damage(the_run(copy).path / name, region)
        steps: list[int] = []
        result = sessions.session(small, copy, step=steps.append)
        assert essence(result) == uninterrupted(small), (name, region)
        assert result.path.is_file() and (name == "run.json" or not steps), (name, region)
        shutil.rmtree(copy)


@pytest.mark.parametrize("place", ["loras", "loras/runs"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_reported_before_a_model_is_loaded(small, tmp_path, place, code):
    def act(_: int, operation: str, part: str, file: str, when: str) -> None:
        if operation in WRITES and file.startswith(str(tmp_path / place)) and file != str(tmp_path / "loras"):
            raise OSError(code, os.strerror(code), file)

    with (
        sessions.Moments(act).watched(tmp_path),
        pytest.raises(ValueError, match=re.escape(os.strerror(code))),
    ):
        sessions.session(small, tmp_path, source=NeverLoaded(small.base_model))


def test_a_folder_that_is_deleted_during_the_run_is_there_at_its_end(small, uninterrupted, tmp_path):
    def delete(report) -> None:
        if report.step == 2:
            shutil.rmtree(tmp_path / "loras")

    result = sessions.session(small, tmp_path, step=delete)
    assert essence(result) == uninterrupted(small) and result.path.is_file()
    assert the_run(tmp_path).checkpoints()[0].step == 3 and essence(sessions.session(small, tmp_path))


@on_linux
def test_where_windows_keeps_what_a_program_holds_the_run_ends_all_the_same(
    small, uninterrupted, tmp_path, monkeypatch
):
    """A node has mapped the LoRA of the stop, and somebody a file that a killed process left; the run maps nothing."""
    monkeypatch.setattr(windows, "PATIENCE", 0.0)
    with rules():
        (stopped,) = begun(small, tmp_path, 1).glob("loras/*-stopped-at-1.safetensors")
        saves = the_run(tmp_path).path / "checkpoints"
        left = saves / ".00000000-1-0123456789abcdef.tmp"
        left.mkdir()
        shutil.copyfile(stopped, left / "lora.safetensors")
        held = [torch.from_file(str(path), True, 8, dtype=torch.uint8) for path in (stopped, *left.iterdir())]
        told: list[str] = []
        result = sessions.session(small, tmp_path, told)
        assert essence(result) == uninterrupted(small) and result.path.is_file() and stopped.is_file()
        assert [text for text in told if "is open elsewhere" in text]
        # The save that it went on from is deleted in its turn.
        assert {each.name for each in saves.iterdir()} == {left.name, "step-00000002", "step-00000003"}
        del held
        with the_run(tmp_path).locked():
            assert not left.exists()


# Names, clocks, processes


@pytest.mark.parametrize(
    "name",
    [
        *("名" * 53, "Ünïcode (ж) 名.前", "m" * 250, "a\u0000b", "名" * 60),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("m" * 100, "é" * 80)),
    ],
)
def test_names_work_to_the_end_or_are_refused_before_anything_heavy(small, tmp_path, name):
    output = tmp_path / "loras" / f"{name}.safetensors"
    if len(name) > 100 or len(name.encode()) > 160 or "\0" in name:
        with mock.patch.object(prepare, "scan") as scan, pytest.raises(ValueError, match="name"):
            run(small, tmp_path, output=output)
        assert not scan.called
        return
    seldom = change(small, saves={"save_every": 0}, existing={"on_existing": "train again"})
    for _ in range(2):  # the second one has to take another number
        with pytest.raises(Cut):
            run(seldom, tmp_path, output=output, step=cut_at(1))
    assert len([*output.parent.glob("*-stopped-at-1*.safetensors")]) == 2
    assert len(f"{name}-stopped-at-1000000-last-2.safetensors".encode()) < 250


def test_a_machine_that_slept_saves_soon_and_continues(small, uninterrupted, tmp_path):
    minutes = change(small, saves={"save_every": 5, "save_unit": "minutes"})
    jumps = iter(range(0, 10**9, 10_000))  # seconds from one look at the clock to the next
    with mock.patch.object(training, "Saving", lambda run: saving.Saving(run, clock=lambda: next(jumps))):
        result = sessions.session(minutes, tmp_path)
    assert essence(result) == uninterrupted(small)
    saved = [event["step"] for event in the_run(tmp_path).events() if event["event"] == "saved"]
    assert saved == [1, 2, 3]  # a save that took hours by the clock is no reason to wait for days


def test_two_processes_do_not_work_on_one_run(small, uninterrupted, tmp_path):
    folder = begun(small, tmp_path, 2)
    run, pipes = the_run(folder), (os.pipe(), os.pipe())
    process = os.fork() if hasattr(os, "fork") else pytest.skip("the other process is forked: Unix only")
    if process == 0:
        with run.locked():
            os.write(pipes[0][1], b"!")
            os.read(pipes[1][0], 1)
        os._exit(0)
    os.read(pipes[0][0], 1)
    with pytest.raises(RuntimeError, match=f"is being trained by process {process} on .* since"):
        sessions.session(small, folder)
    os.kill(process, 9)
    os.waitpid(process, 0)
    result = sessions.session(small, folder)
    assert f"(process {process} on " in result.origin and essence(result) == uninterrupted(small)


def test_runs_of_other_formats_are_named_or_made_anew(small, uninterrupted, tmp_path):
    folder = begun(small, tmp_path, 2)
    run = the_run(folder)
    for number, said in ((0, "an older format"), (2, "a newer format")):
        text = (run.path / "run.json").read_text(encoding="utf-8")
        (run.path / "run.json").write_text(re.sub(r'"format": \d', f'"format": {number}', text), encoding="utf-8")
        fork = small.replace(existing=ExistingConfig(on_existing="fork", fork_run=run.path.name))
        with pytest.raises(ValueError, match=said):
            sessions.session(fork, folder)
        with pytest.raises(ValueError, match=said):
            open_run(run.path)
    (run.path / "run.json").write_text(re.sub(r'"format": \d', '"format": 1', text), encoding="utf-8")
    newest, notes = run.checkpoints()[0].path / "checkpoint.json", []
    newest.write_text(newest.read_text(encoding="utf-8").replace('"format": 1', '"format": 2'), encoding="utf-8")
    result = sessions.session(small, folder, notes)
    assert "of another version" in "".join(notes) and "after step 1" in result.origin
    assert essence(result) == uninterrupted(small)


# The card


def test_a_gpu_that_is_lost_leaves_the_last_save(small, uninterrupted, tmp_path):
    lost = RuntimeError("CUDA error: unspecified launch failure")

    def predict(*_: object) -> None:
        for name in ("isfinite", "to", "cpu"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, side_effect=lost))
        raise lost

    def at_two(report) -> None:
        if report.step == 2:
            stack.enter_context(mock.patch.object(UNet, "predict", predict))

    notes: list[str] = []
    with sessions.ExitStack() as stack, pytest.raises(RuntimeError, match="unspecified launch failure"):
        sessions.session(small, tmp_path, notes, step=at_two)
    assert "Stopped after step 2 of 3" in notes[-1] and "step-00000002" in notes[-1]
    result = sessions.session(small, tmp_path)
    assert "after step 2 of 3" in result.origin and essence(result) == uninterrupted(small)


def out_of_memory(place, name: str, *calls: int, within: bool = False, by: ModuleType | None = None) -> mock._patch:
    """Let memory run out at some calls of a function, the first is 1; within: when its work is done.

    by: the module whose calls count; of any by default.
    """
    real, count = getattr(place, name), itertools.count(1)

    def work(*args, **options):
        callers = (frame.f_globals for frame, _ in traceback.walk_stack(sys._getframe(1)))
        counts = by is None or any(each is vars(by) for each in callers)
        failing = counts and next(count) in calls
        result = real(*args, **options) if within or not failing else None
        if failing:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return result

    return mock.patch.object(place, name, work)


# where memory runs out -> (place, function, its calls at which it does, before or after its work); what comes of it
UNDONE = {
    "the gradients of a step": (step_module.Passes, "total", 2, False),
    "their norm at the first step": (training, "limit_gradients", 1, True),
    "the first update": (torch.amp.GradScaler, "step", 1, True),
    "a validation": (UNet, "predict", 3, False, validate),
    "a sample": (UNet, "predict", 1, False, sample),
}
ENDING = {
    "the gradients, twice": ((step_module.Passes, "total", 2, 3), "Out of memory at step 2 with"),
    "a later update": ((torch.amp.GradScaler, "step", 3), "Out of memory at step 3 with"),
    "the norm at a later step": ((training, "limit_gradients", 3), "Out of memory at step 3 with"),
    "a validation, each picture alone": ((UNet, "predict", 5, 6), "Out of memory after step 2 with"),
    "the UNet": ((prepare, "prepare", 1), "Out of memory before the first step with"),
}


@pytest.fixture(scope="module")
def watched(scene) -> RunConfig:
    """Give a run that measures and draws."""
    train = {"steps": 4, "batch_size": 2, "validate_every": 2, "keep_best": False}
    return change(scene, train=train, saves={"sample_every": 0})


# Where else memory runs out at the same part of a step.
AGAIN = ("their norm at the first step", "the norm at a later step")


def in_every_run(names):
    """Leave the places of AGAIN to --thorough."""
    return [pytest.param(name, marks=pytest.mark.thorough if name in AGAIN else ()) for name in names]


@pytest.mark.parametrize("place", in_every_run(UNDONE))
def test_where_memory_runs_out_once_the_run_continues_with_less(watched, uninterrupted, tmp_path, place, monkeypatch):
    module, name, call, within, *by = UNDONE[place]
    notes, ladder = [], [watched.memory.replace(checkpointing=level) for level in ("0", "1")]
    monkeypatch.setattr(prepare, "fit_memory", lambda *_: (ladder, "enough"))
    with out_of_memory(module, name, call, within=within, by=by[0] if by else None):
        found, whole = essence(sessions.session(watched, tmp_path, notes)), uninterrupted(watched)
    assert found["tensors"] == whole["tensors"] and found["course"][:40] == whole["course"][:40]
    again = [
        note for note in notes if "Out of memory at step" in note and "repeated with gradient checkpointing 1" in note
    ]
    assert len(again) == (not by)


@pytest.mark.parametrize("place", in_every_run(ENDING))
def test_where_it_runs_out_again_the_run_ends_and_says_what_to_lower(watched, tmp_path, place):
    (module, name, *calls), sentence = ENDING[place]
    notes = []
    by = validate if module is UNet else None
    with out_of_memory(module, name, *calls, by=by), pytest.raises(RuntimeError, match=sentence) as caught:
        sessions.session(watched, tmp_path, notes)
    assert "Lower batch_size" in str(caught.value)
    begun = "before" not in sentence
    assert ("Stopped after step" in notes[-1]) == begun or "Nothing of this run is saved yet" in notes[-1]


def test_memory_that_runs_out_leaves_the_lora_so_far(small, uninterrupted, tmp_path):
    seldom, notes = change(small, saves={"save_every": 0}), []
    out = out_of_memory(step_module.Passes, "total", 3, 4)
    with out, pytest.raises(RuntimeError, match="Out of memory at step 3"):
        sessions.session(seldom, tmp_path, notes)
    assert "Stopped after step 2 of 3" in notes[-1]
    assert essence(sessions.session(seldom, tmp_path)) == uninterrupted(small)


@pytest.mark.parametrize("what", ["nan", "gradient", pytest.param("inf", marks=pytest.mark.thorough)])
def test_a_step_that_is_not_finite_is_left_out_and_many_end_the_run(small, tmp_path, what):
    config = change(small, train={"steps": 10})
    real = objective.sample_losses

    def losses_from(steps: set[int]) -> Callable:
        def losses(*args):
            found = real(*args)
            if reached[0] in steps:
                # sqrt has an infinite slope at 0, where its value is finite
                return found + (found * 0).sqrt() if what == "gradient" else found * math.inf * (what == "inf")
            return found

        return losses

    def step(report) -> None:
        reached[0] = report.step
        updated.append(report.updated)

    reached, updated = [0], []
    with mock.patch.object(objective, "sample_losses", losses_from({4})):
        result = sessions.session(config, tmp_path / "once", step=step)
    assert updated == [True] * 4 + [False] + [True] * 5 and result.finished
    assert [math.isnan(loss) for loss in result.losses] == [not each for each in updated]
    reached[0], notes = 0, []
    many = mock.patch.object(objective, "sample_losses", losses_from({4, 5, 6, 7, 8}))
    with many, pytest.raises(RuntimeError, match=r"5 times in a row.*went back to step 4") as caught:
        sessions.session(config, tmp_path / "many", notes, step=step)
    for said in (r"step 5 \(loss", r"step 9 \(loss", "gradient norm (nan|inf)", r"\d\.png"):
        assert re.search(said, str(caught.value)), said
    assert "step-0000000" in notes[-1]
    run = the_run(tmp_path / "many")
    weights = [load_state(c.path / "weights.safetensors")["network"] for c in run.checkpoints()]
    assert all(bool(tensor.isfinite().all()) for each in weights for tensor in each.values())


def test_weights_that_are_not_finite_are_not_saved_over_good_ones(small, uninterrupted, tmp_path):
    seldom, notes = change(small, saves={"save_every": 2}), []
    caught = []

    def spoil(report) -> None:
        if report.step == 3:
            (run,) = caught
            next(iter(run.network.parameters())).data.fill_(math.nan)
            raise Cut

    real = training.apply_memory

    def set_up(run, *args) -> None:
        caught.append(run)
        real(run, *args)

    with mock.patch.object(training, "apply_memory", set_up), pytest.raises(Cut):
        sessions.session(seldom, tmp_path, notes, step=spoil)
    assert "Step 3 could not be saved: the weights are not finite. Stopped after step 2" in notes[-1]
    assert essence(sessions.session(seldom, tmp_path)) == uninterrupted(small)


def test_an_update_that_makes_weights_not_finite_ends_the_run_at_the_state_before(small, tmp_path):
    """Without eps, AdamW divides the gradients of 0 that half of a fresh LoRA has by 0."""
    broken, notes = change(small, optimizer={"options": {"eps": 0.0}}), []
    sentence = r"Step 1 made weights that are not finite, .* went back to step 0 .* set eps of Optimizer to 1e-08\.$"
    with pytest.raises(RuntimeError, match=sentence):
        sessions.session(broken, tmp_path / "first", notes)
    assert "Stopped before the first step" in notes[-1]
    assert not list((tmp_path / "first" / "loras").rglob("*.safetensors"))


def test_a_later_update_that_makes_weights_not_finite_leaves_the_last_save(small, uninterrupted, tmp_path):
    seldom, notes = change(small, saves={"save_every": 2}), []
    real = torch.amp.GradScaler.step

    def spoil(scaler, optimizer) -> None:
        real(scaler, optimizer)
        done.append(scaler)
        if len(done) == 3:
            optimizer.param_groups[-1]["params"][-1].data.view(-1)[0] = math.inf

    done: list[object] = []
    sentence = r"Step 3 made weights that are not finite, .* stopped before that step was saved; set learning_rate of"
    with mock.patch.object(torch.amp.GradScaler, "step", spoil), pytest.raises(RuntimeError, match=sentence):
        sessions.session(seldom, tmp_path, notes)
    assert "Stopped after step 2 of 3. The LoRA so far is saved as" in notes[-1]
    saved = [pair for file in tmp_path.rglob("*.safetensors") for pair in load_file(file).items()]
    # A picture that was not looked at has no median yet.
    assert saved and [name for name, t in saved if not t.isfinite().all() and not name.endswith("medians")] == []
    assert essence(sessions.session(seldom, tmp_path)) == uninterrupted(small)


def test_samples_and_logs_that_fail_are_reported_once_and_stop_nothing(small, uninterrupted, tmp_path):
    often = change(small, saves={"sample_every": 1}, train={"log": "csv"})
    notes: list[str] = []
    with mock.patch.object(sample_files, "sample_images", side_effect=RuntimeError("no room for the VAE")):
        result = sessions.session(often.replace(train=small.train), tmp_path / "samples", notes)
    assert result.finished and len([note for note in notes if "no room for the VAE" in note]) == 1
    assert result.tensors and sessions.left_behind(result)["tensors"] == uninterrupted(small)["tensors"]

    for name, where in (("log.jsonl", "runs"), ("log.csv", "logs")):

        def act(_: int, operation: str, part: str, file: str, when: str, name: str = name) -> None:
            if operation == "open" and file.endswith(name):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        folder, notes = tmp_path / name, []
        with sessions.Moments(act).watched(folder):
            result = sessions.session(change(small, train={"log": "csv"}), folder, notes, logs=folder / "logs")
        assert result.finished and len([note for note in notes if where in note and "cannot be written" in note]) == 1
        assert essence(result) == uninterrupted(small)


def test_a_clock_that_jumps_back_changes_nothing(small, uninterrupted, tmp_path):
    begun(small, tmp_path, 2)
    now = time.time()
    with mock.patch.object(time, "time", lambda: now - 36 * 3600):
        result = sessions.session(small, tmp_path)
        assert "after step 2" in result.origin and essence(result) == uninterrupted(small)
        assert "Already trained in" in sessions.session(small, tmp_path).origin


def test_the_table_of_faults_names_tests_that_exist():
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), (file, test)
