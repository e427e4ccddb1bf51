"""Copies of a run's LoRA files in other folders: those of earlier stops give way, all others stay."""

import json
from pathlib import Path

import pytest
import torch
from run_folders import make_run
from safetensors.torch import save_file
from windows_rules import on_linux

from lora_atelier.trainer_core.common import windows
from lora_atelier.trainer_core.common.files import file_digest, write_json
from lora_atelier.trainer_core.config import SavesConfig
from lora_atelier.trainer_core.runs import RunFolder
from lora_atelier.trainer_core.runs.publish import Destination, Saved, remember_copies


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return a run with saves after steps 2, 4 and 8."""
    return make_run(tmp_path / "runs", "moss", "a", saves=(2, 4, 8))


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    """Return the folder that LoRAs are copied to."""
    (tmp_path / "loras").mkdir()
    return tmp_path / "loras"


def publish(run: RunFolder, loras: Path, step: int, kind: str) -> list[str]:
    """Copy the files of a save; list what the folder of LoRAs holds then."""
    save = run.path / "checkpoints" / f"step-{step:08}"
    saved = Saved(
        path=save / "lora.safetensors", embeddings={"moss": save / "words" / "lora-moss.safetensors"}, steps=step
    )
    destination = Destination(output=loras / "moss.safetensors", embeddings=loras, saves=SavesConfig())
    destination.publish(run, [saved], step, 1.0, kind)
    return sorted(path.name for path in loras.iterdir())


def named(*stems: str) -> list[str]:
    return sorted(f"{stem}{ending}.safetensors" for stem in stems for ending in ("", "-moss"))


def test_copies_of_earlier_stops_are_replaced(run, loras):
    assert publish(run, loras, 2, "-stopped-at-2") == named("moss-stopped-at-2")
    assert publish(run, loras, 2, "-stopped-at-2") == named("moss-stopped-at-2")  # stopped again before a step
    assert publish(run, loras, 4, "-step-000004") == named("moss-stopped-at-2", "moss-step-000004")
    assert publish(run, loras, 4, "-stopped-at-4") == named("moss-step-000004", "moss-stopped-at-4")
    assert publish(run, loras, 8, "") == named("moss-step-000004", "moss")
    known = json.loads((run.path / "published.json").read_text())
    assert {Path(path).name for files in known.values() for path, _ in files} == set(named("moss-step-000004", "moss"))


def test_a_copy_that_another_program_holds_ends_no_run(run, loras, monkeypatch):
    """As Windows does it, where a node has mapped the file."""
    publish(run, loras, 2, "-stopped-at-2")
    held = loras / "moss-stopped-at-2.safetensors"
    unlink = Path.unlink

    def refuse(path, missing_ok=False):
        if path == held:
            raise PermissionError(13, "Access is denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    save, told = run.path / "checkpoints" / "step-00000008", []
    saved = Saved(path=save / "lora.safetensors", embeddings={}, steps=8)
    destination = Destination(output=loras / "moss.safetensors", embeddings=loras, saves=SavesConfig())
    destination.publish(run, [saved], 8, 1.0, "", told.append)
    assert held.is_file() and (loras / "moss.safetensors").is_file()
    assert len(told) == 1 and told[0].startswith("moss-stopped-at-2.safetensors of an earlier stop is open elsewhere")


@on_linux
def test_a_mapped_lora_is_not_replaced_and_the_new_one_gets_a_number(run, loras, as_windows, monkeypatch):
    monkeypatch.setattr(windows, "PATIENCE", 0.0)
    destination = Destination(output=loras / "moss.safetensors", embeddings=loras, saves=SavesConfig(overwrite=True))

    def publish_step(step: int) -> tuple[list[str], list[str]]:
        path, told = run.path / "checkpoints" / f"step-{step:08}" / "lora.safetensors", []
        destination.publish(run, [Saved(path=path, embeddings={}, steps=step)], step, 1.0, "", told.append)
        return sorted(each.name for each in loras.iterdir()), told

    assert publish_step(2) == (["moss.safetensors"], [])
    mapped = torch.from_file(str(loras / "moss.safetensors"), shared=True, size=8, dtype=torch.uint8)
    names, told = publish_step(4)
    assert names == ["moss-2.safetensors", "moss.safetensors"] and len(told) == 1
    assert told[0].endswith("gets a number. This program itself has a file there open; end it and start it again.")
    del mapped
    assert publish_step(8) == (names, [])  # it is replaced, as asked


def test_a_copy_that_somebody_changed_or_that_is_of_another_run_stays(run, loras):
    publish(run, loras, 2, "-stopped-at-2")
    changed = loras / "moss-stopped-at-2-moss.safetensors"
    changed.write_bytes(changed.read_bytes() + b" ")
    assert publish(run, loras, 4, "-stopped-at-4") == sorted([changed.name, *named("moss-stopped-at-4")])


@pytest.mark.parametrize("where", ["elsewhere", "another name", "another run"])
def test_a_stranger_s_list_deletes_no_other_file(run, loras, tmp_path, where):
    """A run's folder may come from anybody, and so may the list of its copies."""
    folder = tmp_path / "private" if where == "elsewhere" else loras
    folder.mkdir(exist_ok=True)
    file = folder / ("mine.safetensors" if where == "another name" else "mine-stopped-at-2.safetensors")
    key = "b" if where == "another run" else "a"
    save_file({}, file, {"atelier.run": key * 64})
    write_json(run.path / "published.json", {"x|{name}|2-stopped-at-2": [[str(file), file_digest(file)]]})
    publish(run, loras, 4, "-stopped-at-4")
    assert file.is_file()


def test_copies_made_by_hand_are_listed_and_stay(run, loras):
    copy = loras / "mine-stopped-at-2.safetensors"
    save_file({}, copy, {"atelier.run": "a" * 64})
    remember_copies(run, [copy])
    assert json.dumps(str(copy))[1:-1] in (run.path / "published.json").read_text(encoding="utf-8")
    assert copy.name in publish(run, loras, 4, "-stopped-at-4")
