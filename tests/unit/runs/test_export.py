"""A run's LoRA under another name and in a zip, its settings, its title, and run folders that strangers made."""

import io
import json
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image
from run_folders import LORA, PLACE, WORD, make_run
from safetensors.torch import save_file
from windows_rules import on_linux

from lora_atelier.trainer_core.common import windows
from lora_atelier.trainer_core.common.files import write_json
from lora_atelier.trainer_core.common.leftovers import TEMPORARY, leftovers
from lora_atelier.trainer_core.runs import clean, describe, folder, open_run, signature, thumbnail_of
from lora_atelier.trainer_core.runs.catalogue import describe_in_detail, run_paths
from lora_atelier.trainer_core.runs.clean import delete_run, delete_saves, saves_of
from lora_atelier.trainer_core.runs.detail import MOST_SETTINGS, settings_of
from lora_atelier.trainer_core.runs.export import export_save, save_to_export, write_archive
from lora_atelier.trainer_core.runs.folder import PARTS, RunFolder, claiming, find_runs

pytestmark = pytest.mark.usefixtures("as_windows")  # which refuses more than any other system does


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return a finished run with two prompts' samples after two steps."""
    run = make_run(tmp_path / "runs", "moss", "a", saves=(2, 4), logged=4, finished=4, steps=4)
    for name in ("step-00000002-1.png", "step-00000004-1.png", "step-00000004-2.png", "step-00000004-1-average.png"):
        (run.path / "samples").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(run.path / "samples" / name)
    return run


def test_a_zip_holds_lora_settings_and_samples_and_no_place_of_the_machine(run):
    (run.path / "samples" / "notes.txt").write_text("private")
    file = io.BytesIO()
    run.rename("été / 1")
    name = write_archive(run, save_to_export(run, None), file)
    assert name == "_t_ _ 1-step-4"
    with zipfile.ZipFile(file) as archive:
        assert sorted(entry.removeprefix(f"{name}/") for entry in archive.namelist()) == [
            f"{name}.safetensors",
            f"embeddings/{name}-moss.safetensors",
            "samples/step-00000002-1.png",
            "samples/step-00000004-1-average.png",
            "samples/step-00000004-1.png",
            "samples/step-00000004-2.png",
            "settings.json",
        ]
        settings = json.loads(archive.read(f"{name}/settings.json"))
        lora = archive.read(f"{name}/{name}.safetensors")
    assert settings == {"steps": 4, "saved after step": 4, "base_model.path": "base.safetensors"}
    assert lora == (run.path / "checkpoints" / "step-00000004" / "lora.safetensors").read_bytes()


def test_settings_are_bounded_and_hold_no_path():
    config = {"a": {"b": [{"path": f"{PLACE}/x"}, "C:\\own\\y", "x" * 10_000], "n": 10**300, "e": []}}
    run = RunFolder(path=Path("none"), about={"config": config | {"many": list(range(10_000))}})
    found = settings_of(run)
    assert len(found) == MOST_SETTINGS
    assert (found["a.b.1.path"], found["a.b.2"], len(found["a.b.3"])) == ("x", "y", 500)
    assert found["a.n"] == str(10**300) and found["a.e"] is None and found["many.1"] == 0


def test_the_thumbnail_is_the_first_prompt_of_the_last_samples(run, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    (run.path / "samples" / "step-00000009-1.png").symlink_to(secret)
    (run.path / "samples" / f"step-{'9' * 30}-1.png").write_bytes(b"")
    found = thumbnail_of(run)
    assert found is not None and found.name == "step-00000004-1.png"
    assert "step-00000009-1.png" not in describe_in_detail(run.path)["samples"]


def test_clips_are_samples_too(run):
    """They are listed, packed, and stand for a run, as pictures do."""
    clip = run.path / "samples" / "step-00000005-1-17f.webp"
    Image.new("RGB", (8, 8)).save(clip)
    for other in ("step-00000006-1.webp", "step-00000006-1-17f.png", "step-00000006-1-17f.webp.txt"):
        (run.path / "samples" / other).write_bytes(b"")
    assert thumbnail_of(run) == clip
    assert describe_in_detail(run.path)["samples"][-1] == clip.name
    name = write_archive(run, save_to_export(run, None), data := io.BytesIO())
    assert f"{name}/samples/{clip.name}" in zipfile.ZipFile(data).namelist()


def test_a_title_is_one_short_line_and_the_folder_keeps_its_name(run):
    before = run.path.name
    run.rename("  My moss  ")
    assert (open_run(run.path).title(), describe(run.path)["title"], run.path.name) == ("My moss", "My moss", before)
    for title in ("x" * 101, "two\nlines", "\ud800"):
        with pytest.raises(ValueError, match="type one line"):
            run.rename(title)
    run.rename("")
    assert run.title() == "" and not (run.path / "title.json").exists()
    for content in ({"title": 5}, [], {"title": "y" * 10**6}):
        write_json(run.path / "title.json", content)
        assert len(run.title()) <= 100


def test_a_workflow_is_kept_and_read_again_if_it_is_one(run):
    assert run.workflow() is None and not describe(run.path)["workflow"]
    run.keep_workflow({"nodes": [{"id": 1}]})
    assert run.workflow() == {"nodes": [{"id": 1}]} and describe(run.path)["workflow"]
    run.keep_workflow({"nodes": ["x" * 2**24]})  # too large: the one before stays
    assert run.workflow() == {"nodes": [{"id": 1}]}
    for text in ("{", "[]", '{"nodes": 5}'):
        (run.path / "workflow.json").write_text(text)
        assert run.workflow() is None


def test_saves_are_deleted_by_their_steps_and_never_of_a_run_at_work(run):
    with pytest.raises(ValueError, match="no save of step 3"):
        saves_of(run, [2, 3])
    with run.locked(), pytest.raises(RuntimeError, match="is being trained"):
        delete_saves(run, [2])
    (run.path / "checkpoints" / "step-00000002" / "checkpoint.json").write_text("{")  # unreadable ones can go, too
    delete_saves(run, [2])
    assert [path.name for path in run.saves()] == ["step-00000004"]


@on_linux
def test_a_run_whose_log_is_open_stays_whole_and_is_deleted_afterwards(run, monkeypatch):
    monkeypatch.setattr(windows, "PATIENCE", 0.0)
    before = sorted(run.path.rglob("*"))
    with (run.path / "log.jsonl").open("rb"), pytest.raises(PermissionError):
        delete_run(run.path)
    assert {*before} <= {*run.path.rglob("*")} and open_run(run.path).about == run.about
    delete_run(run.path)
    assert not list(run.path.parent.glob("[!.]*"))


@pytest.mark.parametrize("name", ["move", "remove"])
def test_a_deletion_that_is_broken_off_leaves_the_whole_run_or_none(run, monkeypatch, name):
    before = sorted(run.path.rglob("*"))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(clean, name, mock.Mock(side_effect=KeyboardInterrupt))
        delete_run(run.path)
    runs = run.path.parent
    if name == "move":
        assert {*before} <= {*run.path.rglob("*")} and open_run(run.path).about == run.about
    else:
        assert find_runs(runs) == run_paths(runs) == [] and leftovers(runs)


@pytest.mark.parametrize("trained", [True, False])
def test_a_run_goes_where_nobody_trains_it_or_is_about_to(run, monkeypatch, trained):
    monkeypatch.setattr(folder, "CLAIM", 0.05)
    with run.locked() if trained else claiming(run.path.parent), pytest.raises(RuntimeError):
        delete_run(run.path)
    assert open_run(run.path).about == run.about


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_a_run_may_be_a_link_to_another_place(run, tmp_path, part):
    """Neither read nor written, locked or emptied, and deleting the run leaves what the link leads to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f".1{TEMPORARY}").write_text("of another program")
    (outside / "file").write_text("secret")
    place = run.path / part
    if place.is_dir():
        place.rename(run.path / "aside")
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(outside if part in ("checkpoints", "samples", "loras") else outside / "file")
    with pytest.raises(ValueError, match=f"{part} of moss-.* is a link to another place"):
        open_run(run.path)
    described = describe_in_detail(run.path)
    assert described["status"] == "unreadable" and "secret" not in json.dumps(described)
    delete_run(run.path)
    assert not run.path.exists()
    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        f".1{TEMPORARY}": "of another program",
        "file": "secret",
    }


def test_no_file_of_a_save_and_no_save_may_be_a_link(run, tmp_path):
    save = run.path / "checkpoints" / "step-00000004"
    (save / "lora.safetensors").rename(tmp_path / "lora.safetensors")
    (save / "lora.safetensors").symlink_to(tmp_path / "lora.safetensors")
    checkpoint = save_to_export(run, 4)
    for export in (
        lambda: export_save(run, checkpoint, tmp_path / "copy.safetensors", tmp_path),
        lambda: write_archive(run, checkpoint, io.BytesIO()),
    ):
        with pytest.raises(ValueError, match=r"lora\.safetensors is a link to another place"):
            export()
    save.rename(tmp_path / "save")
    save.symlink_to(tmp_path / "save")
    assert [path.name for path in run.saves()] == ["step-00000002"]


def test_a_run_that_is_a_link_is_listed_and_not_read(run, tmp_path):
    run.path.rename(tmp_path / "elsewhere")
    run.path.symlink_to(tmp_path / "elsewhere")
    described = describe(run.path)
    assert described["status"] == "unreadable" and described["sentence"].startswith(f"{run.path.name} is a link")


def test_a_signature_changes_with_every_change_that_is_shown(run):
    def add_save() -> None:
        run.save(3, lambda folder: (folder / "weights.safetensors").write_bytes(b"x"), stays=False)

    seen = {signature(run.path)}
    changes = (
        lambda: run.log("step", step=9, loss=1.0),
        lambda: run.rename("new"),
        lambda: run.keep_workflow({"nodes": []}),
        add_save,
        lambda: delete_saves(run, [3]),
        lambda: (run.path / "samples" / "step-00000004-3.png").write_bytes(b""),
        lambda: run.finish({"step": 4, "more": 1}),
    )
    for count, change in enumerate(changes, 2):
        change()
        seen.add(signature(run.path))
        assert len(seen) == count
    with run.locked():
        assert signature(run.path) is None


def save_of(run: RunFolder, token: str, ending: str) -> None:
    """Write a save whose one LoRA has such an ending and such a token."""

    def write(folder: Path) -> None:
        save_file(LORA, folder / f"lora{ending}.safetensors")
        save_file(WORD, folder / "word.safetensors")
        files = {"path": f"lora{ending}.safetensors", "words": {token: "word.safetensors"}, "steps": 2}
        write_json(folder / "files.json", {"files": [files]})

    run.save(2, write, stays=True)


@pytest.mark.parametrize(
    ("title", "token", "ending"),
    [("x" * 100, "moss", ""), ("", "\u6f22" * 60, ""), ("y" * 100, "a" * 100, "-" + "\u00e9" * 40)],
    ids=["title", "token", "all"],
)
def test_every_file_of_a_zip_has_a_name_that_file_systems_take(tmp_path, title, token, ending):
    run = make_run(tmp_path, "z" * 200)
    run.rename(title)
    save_of(run, token, ending)
    with (tmp_path / "x.zip").open("wb") as file:
        write_archive(run, run.checkpoints()[0], file)
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        archive.extractall(tmp_path / "out")
        assert len(archive.namelist()) == 3


def test_names_that_no_file_system_takes_are_refused(tmp_path):
    run = make_run(tmp_path, "long")
    save_of(run, "a" * 120, "-" + "\u00e9" * 60)
    with pytest.raises(ValueError, match="the names of its files are too long"):
        write_archive(run, run.checkpoints()[0], io.BytesIO())
