"""What killed processes leave is deleted; what running processes write, and what is of others, never."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest

from lora_atelier.trainer_core.common import leftovers
from lora_atelier.trainer_core.common.files import check_writable, written_whole
from lora_atelier.trainer_core.common.leftovers import OLD, sweep


def unfinished(folder: Path, number: int) -> Path:
    """Make an unfinished file of a process by its number."""
    with mock.patch.object(os, "getpid", lambda: number), leftovers.unfinished(folder / "x") as path:
        path.write_bytes(b"half")
    return path


def ended_process() -> int:
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_files_of_a_process_that_ended_go_and_those_of_one_that_runs_stay(tmp_path):
    gone, _, other = (unfinished(tmp_path, number) for number in (ended_process(), os.getpid(), os.getppid()))
    folder = gone.with_name(gone.name.replace(gone.name[-20:], "0" * 16 + ".tmp"))
    folder.mkdir()
    (folder / "inside").write_bytes(b"half")
    sweep([tmp_path, tmp_path / "missing"])
    assert list(tmp_path.iterdir()) == [other]
    with written_whole(tmp_path / "whole") as temporary:
        temporary.write_bytes(b"whole")
        sweep([tmp_path])
    assert (tmp_path / "whole").read_bytes() == b"whole"


def test_a_later_process_of_the_same_number_does_not_keep_a_file(tmp_path):
    mine = unfinished(tmp_path, os.getppid())
    began = psutil.Process(os.getppid()).create_time()
    os.utime(mine, (began - 1, began - 1))  # the clocks of files and of processes differ a little
    sweep([tmp_path])
    assert mine.exists()
    os.utime(mine, (began - 60, began - 60))
    sweep([tmp_path])
    assert not mine.exists()


def test_a_process_that_may_not_be_looked_at_is_taken_for_running(tmp_path):
    path = unfinished(tmp_path, ended_process())
    with mock.patch.object(psutil, "Process", side_effect=psutil.AccessDenied):
        sweep([tmp_path])
    assert path.exists()


def test_files_of_another_machine_stay_for_a_day(tmp_path):
    with mock.patch.object(leftovers, "_machine", lambda: "0" * 8):
        path = unfinished(tmp_path, ended_process())
    for age, stays in ((OLD - 60, True), (OLD + 60, False)):
        os.utime(path, (time.time() - age, time.time() - age))
        sweep([tmp_path])
        assert path.exists() == stays


@pytest.mark.parametrize("name", [".x.tmp", "{}.safetensors", "x{}", "{}.tmp", ".0123456789abcdef0123456789abcdef.tmp"])
def test_names_that_are_not_ours_stay_however_old_they_are(tmp_path, name):
    path = tmp_path / name.format(unfinished(tmp_path, os.getppid()).name)
    path.write_bytes(b"of another program")
    os.utime(path, (0, 0))
    sweep([tmp_path])
    assert path.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows makes links for administrators only")
def test_links_are_not_followed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    swept = tmp_path / "swept"
    swept.mkdir()
    path = unfinished(swept, ended_process())
    path.unlink()
    path.symlink_to(tmp_path / "kept")
    sweep([swept])
    leftovers.remove_leftovers(swept)
    assert (tmp_path / "kept" / "file").exists() and not path.is_symlink()


def test_a_probe_goes_although_it_could_not_be_written(tmp_path):
    def full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    with mock.patch.object(Path, "write_bytes", full), pytest.raises(ValueError, match="cannot be written"):
        check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
