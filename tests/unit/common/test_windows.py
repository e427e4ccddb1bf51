"""What Windows refuses: done all the same where it lets go in time, else one clear sentence."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from windows_rules import on_linux, refusal

from lora_atelier.trainer_core.common import windows
from lora_atelier.trainer_core.common.disk_errors import describe_disk_error
from lora_atelier.trainer_core.common.files import check_writable, move, remove_folder, written_folder, written_whole
from lora_atelier.trainer_core.common.leftovers import remove, remove_leftovers, unfinished
from lora_atelier.trainer_core.config import SavesConfig
from lora_atelier.trainer_core.runs.publish import Destination

pytestmark = [on_linux, pytest.mark.usefixtures("as_windows")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time pass only where somebody waits: the list's number is the time."""
    now = [0.0]
    monkeypatch.setattr(windows.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(windows.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def opened(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Give `opened(path)`: open a file until somebody has waited for a second."""
    files = []

    def wait(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 1:
            while files:
                files.pop().close()

    monkeypatch.setattr(windows.time, "sleep", wait)
    yield lambda path: files.append(path.open("rb"))
    assert clock[0] > 1 and not files


def write(path: Path, text: str) -> None:
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def test_a_file_that_is_open_for_a_moment_is_replaced(tmp_path, opened):
    write(tmp_path / "a", "old")
    opened(tmp_path / "a")
    write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new" and [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_file_that_is_open_for_a_moment_is_renamed(tmp_path, opened):
    write(tmp_path / "a", "old")
    opened(tmp_path / "a")
    move(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "old"


def test_a_file_that_is_open_for_a_moment_is_deleted(tmp_path, opened):
    write(tmp_path / "a", "old")
    opened(tmp_path / "a")
    remove(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_file_that_is_open_for_a_moment_is_replaced_and_deleted(tmp_path, opened):
    for text in ("old", "new"):
        with written_folder(tmp_path / "run") as folder:
            (folder / "a").write_text(text)
        opened(tmp_path / "run" / "a")
    remove_folder(tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_program_that_keeps_a_file_open_is_named(tmp_path, clock):
    write(tmp_path / "a", "old")
    with (tmp_path / "a").open() as file, subprocess.Popen(["sleep", "60"], stdin=file) as other:
        file.close()
        with pytest.raises(PermissionError) as raised:
            write(tmp_path / "a", "new")
        said = describe_disk_error(raised.value, tmp_path)
        other.kill()
    assert windows.PATIENCE < clock[0] < windows.PATIENCE + 1
    sentence = f"sleep (process {other.pid}) has a file there open; close it."
    assert said == f"{tmp_path} cannot be written (Access is denied). {sentence}"
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_this_program_has_mapped_is_named_as_such(tmp_path, clock):
    write(tmp_path / "run", "mapped")
    mapped = torch.from_file(str(tmp_path / "run"), shared=True, size=6, dtype=torch.uint8)
    with pytest.raises(PermissionError) as raised:
        remove(tmp_path / "run")
    assert "This program itself has a file there open; end it and start it" in describe_disk_error(raised.value)
    assert bytes(mapped.tolist()) == b"mapped"


@pytest.mark.parametrize(
    ("number", "sentence"),
    [(32, "Another program has a file there open; close it."), (5, "or give yourself access to the folder.")],
)
def test_what_no_program_is_seen_to_hold_may_be_held_all_the_same(tmp_path, number, sentence):
    assert describe_disk_error(refusal(number, tmp_path / "a")).endswith(sentence)
    assert sentence not in describe_disk_error(PermissionError(13, "Permission denied", str(tmp_path / "a")))


def test_a_leftover_or_a_probe_that_is_open_keeps_nothing_from_starting(tmp_path, clock, monkeypatch):
    with unfinished(tmp_path / "x") as left:
        left.write_bytes(b"half")
    with left.open("rb"):
        remove_leftovers(tmp_path)
        assert clock[0] == 0 and left.exists()  # nobody waits for what the next start deletes
    files, write_bytes = [], Path.write_bytes

    def scanned(path: Path, data: bytes) -> int:
        written = write_bytes(path, data)
        files.append(path.open("rb"))
        return written

    monkeypatch.setattr(Path, "write_bytes", scanned)
    check_writable(tmp_path)
    files.pop().close()
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_in_a_folder_that_is_read_only_are_not(tmp_path, monkeypatch):
    """As Explorer marks folders that have an icon; Windows lets people write into them."""
    stat = os.stat

    def marked(path, *more, **options):
        found = stat(path, *more, **options)
        return os.stat_result([found.st_mode & 0o40555, *found[1:]]) if path == tmp_path else found

    monkeypatch.setattr(os, "stat", marked)
    write(tmp_path / "a", "new")
    assert (tmp_path / "a").stat().st_mode & 0o200


def test_what_is_read_only_is_replaced_and_deleted(tmp_path):
    for name in ("a", "run/inner/a"):
        write(tmp_path / name, "old")
        (tmp_path / name).chmod(0o444)
    (tmp_path / "run" / "inner").chmod(0o555)
    write(tmp_path / "a", "new")
    remove_folder(tmp_path / "run")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("a", "new")]


def test_a_run_whose_paths_are_too_long_is_refused_before_it_begins(tmp_path):
    def check(name: str) -> None:
        loras = tmp_path / "loras"
        destination = Destination(output=loras / f"{name}.safetensors", embeddings=loras, saves=SavesConfig())
        destination.check_folders(tmp_path / "runs", ["<moss>"])

    check("moss")
    assert not [*(tmp_path / "runs").iterdir(), *(tmp_path / "loras").iterdir()]
    sentence = (
        r"runs cannot be read or written \(a path of \d+ characters, where Windows takes 259\). Choose a shorter name "
        "or folder, or turn on long paths in Windows."
    )
    with pytest.raises(ValueError, match=sentence):
        check("m" * 100)
    assert not list((tmp_path / "runs").iterdir())
