"""Files and folders that are whole or not there, and what a run folder takes for a save."""

import errno
import json
import os
import signal
import time
from contextlib import ExitStack
from unittest import mock

import pytest

from lora_atelier.trainer_core.common import files
from lora_atelier.trainer_core.common.files import check_writable, written_folder
from lora_atelier.trainer_core.runs import Keys, folder
from lora_atelier.trainer_core.runs.choose import sound_checkpoint
from lora_atelier.trainer_core.runs.folder import new_run

pytestmark = pytest.mark.usefixtures("as_windows")  # which refuses more than any other system does


class Killed(BaseException):
    """A process that ends here: nothing is tidied up behind it."""


@pytest.fixture
def run(tmp_path):
    return new_run(tmp_path / "runs", Keys(run="a" * 64, course="b" * 64), "name", 9, config={})


def save(run, step, text="weights", *, stays=False):
    def write(place):
        (place / "weights.safetensors").write_text(f"{text} of step {step}", encoding="utf-8")
        (place / "words").mkdir()
        (place / "words" / "one.safetensors").write_text("a word", encoding="utf-8")

    return run.save(step, write, stays=stays)


def steps(run):
    return [checkpoint.step for checkpoint in run.checkpoints()]


@pytest.mark.parametrize("killed_at", range(3))
def test_a_save_that_takes_the_place_of_another_is_there_whenever_the_process_is_killed(run, killed_at):
    save(run, 3, "old")
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == killed_at + 1:
            raise Killed
        real(source, target)

    nothing = mock.patch.object(files.shutil, "rmtree")  # a killed process removes nothing
    with mock.patch.object(os, "replace", replace), nothing:
        if killed_at < 2:
            with pytest.raises(Killed):
                save(run, 3, "new")
        else:
            save(run, 3, "new")
    with run.locked():
        (found,) = run.checkpoints()
        assert found.step == 3 and not found.problem()
        assert (found.path / "weights.safetensors").read_text(encoding="utf-8").endswith("of step 3")
        assert not [*(run.path / "checkpoints").glob(".*")]


def test_a_full_disk_in_the_middle_of_a_save_leaves_the_one_that_was_there(run):
    save(run, 3, "old")
    real = os.replace

    def replace(source, target):
        if str(target).endswith("step-00000003") and "old" not in (source / "weights.safetensors").read_text("utf-8"):
            raise OSError(errno.ENOSPC, "full")
        real(source, target)

    with mock.patch.object(os, "replace", replace), pytest.raises(OSError, match="full"):
        save(run, 3, "new")
    assert not run.checkpoints()[0].problem()
    assert (run.checkpoints()[0].path / "weights.safetensors").read_text("utf-8").startswith("old")


def test_every_change_of_a_file_of_a_save_is_seen(run):
    checkpoint = save(run, 1)
    assert not checkpoint.problem()
    for name in ("weights.safetensors", "words/one.safetensors"):
        path, data = checkpoint.path / name, (checkpoint.path / name).read_bytes()
        for i in range(len(data)):
            path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
            assert checkpoint.problem() == f"{name} is damaged"
        for changed in (b"", data[:-1], data + b"x"):
            path.write_bytes(changed)
            assert checkpoint.problem() == f"{name} is damaged"
        path.unlink()
        assert checkpoint.problem() == f"{name} is missing"
        path.write_bytes(data)
    with mock.patch.object(folder, "file_digest", side_effect=OSError(errno.EIO, "Input/output error")):
        assert checkpoint.problem() == "weights.safetensors cannot be read (Input/output error)"


def test_no_change_of_checkpoint_json_makes_a_save_another_one(run):
    checkpoint = save(run, 1)
    path, data = checkpoint.path / "checkpoint.json", (checkpoint.path / "checkpoint.json").read_bytes()
    kept = {k: v for k, v in json.loads(data).items() if k != "written"}
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        for found in run.checkpoints():
            same = {"step": found.step, "stays": found.stays, "files": found.files}
            assert found.problem() or all(same[k] == kept[k] for k in same), i


def test_saves_that_cannot_be_used_are_set_aside_and_said(run):
    for step in (1, 2, 3):
        save(run, step)
    (run.path / "checkpoints" / "step-00000003" / "checkpoint.json").write_text("{", encoding="utf-8")
    (run.path / "checkpoints" / "step-00000002" / "weights.safetensors").unlink()
    notes = []
    assert sound_checkpoint(run, notes.append).step == 1 and steps(run) == [1] and len(notes) == 2
    assert "weights.safetensors is missing. It is renamed to damaged-step-00000002" in notes[1]
    save(run, 2)
    run.prune(1)
    assert steps(run) == [2]  # not the damaged one of step 3


def test_saves_that_stay_stay_and_what_cannot_be_removed_hinders_nothing(run):
    for step in range(1, 6):
        save(run, step, stays=step == 2)
    with mock.patch.object(folder, "remove_folder", side_effect=OSError(errno.EIO, "no")):
        run.prune(2)
    assert steps(run) == [5, 4, 3, 2, 1]
    run.prune(2)
    assert steps(run) == [5, 4, 2]


def test_the_lock_goes_even_when_the_disk_takes_nothing_any_more(run):
    with pytest.raises(Killed), ExitStack() as away, run.locked():
        away.enter_context(mock.patch.object(os, "unlink", side_effect=OSError(errno.EROFS, "read-only")))
        raise Killed
    with run.locked():
        assert run.busy()
    assert not run.busy()


def test_a_line_that_was_cut_off_does_not_spoil_the_log(run):
    run.log("step", step=1)
    with (run.path / "log.jsonl").open("ab") as file:
        file.write(b'{"event": "st')
    run.log("step", step=2)
    assert [event["step"] for event in run.events()] == [1, 2]


def test_a_folder_that_takes_no_file_is_reported_in_one_sentence(tmp_path):
    check_writable(tmp_path / "new" / "one")
    assert not [*(tmp_path / "new" / "one").iterdir()]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"file.* cannot be read or written"):
        check_writable(tmp_path / "file" / "below")


def test_a_new_folder_is_whole_or_not_there(tmp_path):
    with pytest.raises(OSError), written_folder(tmp_path / "made") as place:
        (place / "one").write_text("", encoding="utf-8")
        raise OSError
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that is stopped here is forked: Unix only")
def test_a_process_that_stands_still_for_an_hour_keeps_its_run(run):
    process = os.fork()
    if process == 0:
        with run.locked():
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(process, os.WUNTRACED)
    hour = time.time() - 3600
    os.utime(run.path / "owner.json", (hour, hour))
    assert run.at_work()
    with pytest.raises(RuntimeError, match=f"is being trained by process {process} "), run.locked():
        pass
    os.kill(process, signal.SIGCONT)
    assert os.waitpid(process, 0)[1] == 0 and not run.at_work()
    with run.locked():
        pass
