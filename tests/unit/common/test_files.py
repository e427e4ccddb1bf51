"""Files and folders appear whole, also where another program has them open for a moment."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from lora_atelier.trainer_core.common import files
from lora_atelier.trainer_core.common.disk_errors import describe_disk_error
from lora_atelier.trainer_core.common.files import remove_folder, written_whole
from lora_atelier.trainer_core.common.leftovers import leftovers


class InUse(PermissionError):
    """An error as Windows raises it."""

    winerror = 32


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Refuse as many renames as the list's number says; time passes only where somebody waits."""
    left, now, rename = [0], [0.0], os.replace

    def replace(source, target):
        if left[0]:
            left[0] -= 1
            raise InUse(13, "The process cannot access the file", str(target))
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(files.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return left


def test_a_file_that_is_in_use_for_a_moment_is_replaced_all_the_same(tmp_path: Path, held: list[int]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")
    held[0] = 10
    with written_whole(path) as temporary:
        temporary.write_text("new", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "new" and [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_one_that_stays_in_use_is_named_as_such(tmp_path: Path, held: list[int]) -> None:
    (tmp_path / "run").mkdir()
    held[0] = 1000
    with pytest.raises(PermissionError) as raised:
        remove_folder(tmp_path / "run")
    assert held[0] > 900 and (tmp_path / "run").is_dir()
    assert "Another program has a file there open; close it." in describe_disk_error(raised.value)


def test_what_a_library_writes_under_names_of_its_own_goes_with_what_it_writes(tmp_path: Path) -> None:
    """Whether it ends well, in an error, or with the process, whose leftovers the next one deletes."""
    path = tmp_path / "lora.safetensors"
    for ends_well in (True, False):
        with suppress(KeyError), written_whole(path, apart=True) as temporary:
            temporary.with_name(".tmpAbCdEf").write_bytes(b"half")
            assert [*leftovers(tmp_path)] == [temporary.parent] and temporary.suffix == ".tmp"
            temporary.write_bytes(b"whole")
            if not ends_well:
                raise KeyError
        assert [each.name for each in tmp_path.iterdir()] == [path.name] and path.read_bytes() == b"whole"
