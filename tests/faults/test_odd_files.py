"""Every odd file has the outcome that it must have, alone and among all others, and none is lost."""

import csv
import io
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import odd_files
import pytest
from odd_files import COMPANION, GREEN, MASKS, SIZE, TEXTS, Odd
from PIL import Image
from scan_folder import read

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig, TrainConfig
from lora_atelier.trainer_core.data.images import load_picture
from lora_atelier.trainer_core.data.masks import read_mask
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import FileOutcome, Index, Manifest, Picture, fingerprint, scan
from lora_atelier.trainer_core.preflight.report import manifest_table, report

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns of some, before it refuses them

ROWS = odd_files.rows()


def options_of(row: Odd) -> dict[str, Any]:
    return {"captions": row.captions, "masks": row.masks, "min_side": row.min_side, "background": row.background}


def on_disk(folder: Path) -> set[str]:
    """Return the names of all files of a folder, links not followed."""
    return {
        (Path(place).relative_to(folder) / name).as_posix() for place, _, names in os.walk(folder) for name in names
    }


def outcomes_of(manifest: Manifest) -> dict[str, FileOutcome]:
    assert len({(file.concept, file.name) for file in manifest.outcomes}) == len(manifest.outcomes)
    return {file.name: file for file in manifest.outcomes}


def sentence_of(folder: Path, **options: Any) -> str:
    """Return the one sentence, or several, with which a scan stops."""
    with pytest.raises(ValueError) as error:
        read(folder, **options)
    assert type(error.value) is ValueError
    return str(error.value)


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    labels = [row.label for row in ROWS]
    assert len(labels) == len(set(labels)) > 200
    assert Counter(row.outcome for row in ROWS)["left out"] > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_an_odd_file_has_the_outcome_it_must_have(row: Odd, tmp_path: Path) -> None:
    if not row.possible:
        pytest.skip("this system has no such files")
    folder = tmp_path / "set" / "row"
    odd_files.write_row(row, folder)
    odd_files.write_companion(folder)
    before = fingerprint(DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **options_of(row)),)))
    assert len(before) == 64

    if row.outcome == "left out":
        assert re.search(row.why, sentence_of(folder, **options_of(row)))
    manifest = read(folder, on_problem="leave_out", **options_of(row))
    outcomes = outcomes_of(manifest)
    links = {name for name in outcomes if any((folder / above).is_symlink() for above in Path(name).parents)}
    assert outcomes.keys() - links == on_disk(folder)
    if row.outcome:
        assert outcomes[row.name].outcome == row.outcome
    else:
        assert row.name not in outcomes
    assert {name: outcomes[name].outcome for name in row.others} == row.others
    assert not row.note or any(re.search(row.note, note) for note in manifest.notes)
    if row.outcome == "left out":
        assert any(note.startswith("Left out: ") and re.search(row.why, note) for note in manifest.notes)
    if row.outcome == "not used":
        assert row.why in outcomes[row.name].why
    pictures = {picture.name: picture for picture in manifest.pictures}
    assert pictures.keys() == {name for name, file in outcomes.items() if file.outcome == "picture"}
    assert COMPANION in pictures
    if row.outcome == "picture":
        check_picture(pictures[row.name], row)
    "".join((*manifest.notes, str(tmp_path))).encode()  # can be shown and sent everywhere


def check_picture(picture: Picture, row: Odd) -> None:
    image = load_picture(picture.path, row.background)
    assert (picture.width, picture.height) == image.size == row.size
    if row.colour is not None:
        assert image.getpixel((image.width // 2, image.height // 2)) == pytest.approx(row.colour, abs=3)
    assert row.lines is None or picture.lines == row.lines
    if row.mask is not None:
        assert picture.mask is not None
        assert row.masks is not None
        mask = read_mask(picture.mask, row.masks)
        assert mask is not None
        assert mask.size == image.size
        assert mask.getpixel((mask.width // 2, mask.height // 2)) == pytest.approx(row.mask, abs=1)


# --- all of them together -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder that holds every odd file, each row in a folder of its own."""
    folder = tmp_path_factory.mktemp("odd") / "everything"
    for number, row in enumerate(row for row in ROWS if row.possible):
        odd_files.write_row(row, folder / f"row {number}")
    odd_files.write_companion(folder)
    return folder


CONFIGS: dict[str, dict[str, Any]] = {
    "captions in no file": {"captions": CaptionConfig(source="none")},
    "captions that may be missing": {"captions": CaptionConfig(missing="empty")},
    "captions and masks": {"captions": TEXTS, "masks": MASKS},
    "masks that may be missing": {"captions": CaptionConfig(source="file_name"), "masks": MaskConfig(missing="ones")},
    "masks in the alpha channel": {"captions": TEXTS, "masks": MaskConfig(source="alpha", missing="leave_out")},
    "tiny ones too": {"captions": CaptionConfig(source="folder_name"), "min_side": 1},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_all_of_them_together_are_accounted_for(everything: Path, options: dict[str, Any]) -> None:
    manifest = read(everything, on_problem="leave_out", **options)
    outcomes, files = outcomes_of(manifest), on_disk(everything)
    through_links = outcomes.keys() - files
    assert files <= outcomes.keys()
    assert all(any((everything / above).is_symlink() for above in Path(name).parents) for name in through_links)
    assert len(through_links) == (os.name == "posix")
    assert {file.outcome for file in outcomes.values()} <= {"picture", "caption", "mask", "left out", "not used"}
    assert {p.name for p in manifest.pictures} == {name for name, file in outcomes.items() if file.outcome == "picture"}
    assert all(file.why for file in outcomes.values() if file.outcome != "picture")
    assert all("/" not in name or name.split("/")[0].startswith("row ") for name in outcomes)


def test_the_run_stops_with_one_error_that_counts_them(everything: Path) -> None:
    options: dict[str, Any] = {"captions": CaptionConfig(source="none"), "masks": None}
    left = Counter(
        f.why for f in read(everything, on_problem="leave_out", **options).outcomes if f.outcome == "left out"
    )
    assert set(left) == {"it cannot be read", "too small", "its package is not installed"}
    sentence = sentence_of(everything, **options)
    assert f"{left['its package is not installed']} pictures need the Python package " in sentence
    assert f"{left['it cannot be read']} pictures in {everything} cannot be read: " in sentence
    assert f"{left['too small']} pictures have a side shorter than 16 pixels in {everything}: " in sentence
    assert f" and {left['it cannot be read'] - 5} more; replace or remove them, or set on_problem of" in sentence


def test_what_is_left_can_be_planned_and_reported(everything: Path, tmp_path: Path) -> None:
    concept = ConceptConfig(folder=str(everything), on_problem="leave_out", captions=CaptionConfig(missing="empty"))
    dataset = DatasetConfig(concepts=(concept,))
    with Index(tmp_path / "index") as index:
        manifest = scan(dataset, index)
        assert scan(dataset, index) == manifest
        assert fingerprint(dataset, index) == fingerprint(dataset)
    plan = build_plan(manifest, dataset, TrainConfig(epochs=1, resolution=64, bucket_step=8, batch_size=4))
    visited = Counter(sample.picture for k in range(plan.steps) for mb in plan.step(k) for sample in mb.samples)
    assert visited == dict.fromkeys(range(len(manifest.pictures)), 1)
    text = report(plan) + manifest_table(plan)
    assert len(text.encode()) > 10_000
    table = list(csv.DictReader(io.StringIO(manifest_table(plan), newline="")))
    assert len(table) == len(manifest.outcomes)
    assert Counter(row["outcome"] for row in table) == Counter(file.outcome for file in manifest.outcomes)


# --- where files lie ------------------------------------------------------------------------------------------


def paint(path: Path, level: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", SIZE, (level, *GREEN[1:])).save(path)


def scan_folders(*folders: Path, **options: Any) -> Manifest:
    concepts = (ConceptConfig(folder=str(f), captions=CaptionConfig(source="folder_name"), **options) for f in folders)
    return scan(DatasetConfig(concepts=tuple(concepts)))


def test_the_same_name_in_two_folders_is_two_pictures(tmp_path: Path) -> None:
    paint(tmp_path / "cats" / "1.png", 1)
    paint(tmp_path / "dogs" / "1.png", 2)
    manifest = scan_folders(tmp_path)
    assert [(p.name, p.lines) for p in manifest.pictures] == [("cats/1.png", ("cats",)), ("dogs/1.png", ("dogs",))]
    assert len({p.digest for p in manifest.pictures}) == 2
    manifest = scan_folders(tmp_path / "cats", tmp_path / "dogs")
    assert [(p.concept, p.name) for p in manifest.pictures] == [(0, "1.png"), (1, "1.png")]
    assert [(f.concept, f.name, f.outcome) for f in manifest.outcomes] == [
        (0, "1.png", "picture"),
        (1, "1.png", "picture"),
    ]


def test_the_same_folder_as_two_concepts_is_trained_twice_and_said(tmp_path: Path) -> None:
    paint(tmp_path / "1.png", 1)
    paint(tmp_path / "2.png", 2)
    manifest = scan_folders(tmp_path, tmp_path)
    assert [(p.concept, p.name) for p in manifest.pictures] == [(0, "1.png"), (0, "2.png"), (1, "1.png"), (1, "2.png")]
    assert "2 pictures repeat another one exactly: 1.png, 2.png." in manifest.notes
    assert len(manifest.outcomes) == 4


def test_a_concept_inside_the_folder_of_another_is_in_both_and_said(tmp_path: Path) -> None:
    paint(tmp_path / "1.png", 1)
    paint(tmp_path / "sub" / "2.png", 2)
    manifest = scan_folders(tmp_path, tmp_path / "sub")
    assert [(p.concept, p.name) for p in manifest.pictures] == [(0, "1.png"), (0, "sub/2.png"), (1, "2.png")]
    assert "1 picture repeats another one exactly: 2.png." in manifest.notes
    assert [p.name for p in scan_folders(tmp_path, tmp_path / "sub", recursive=False).pictures] == ["1.png", "2.png"]


@pytest.mark.parametrize("part", ["a.png", "a.txt", "a-masklabel.png"])
def test_a_file_without_permission_is_named(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read everything, as root, is refused here in root's stead."""
    odd_files.write_companion(tmp_path)
    paint(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a cat")
    Image.new("L", SIZE, 9).save(tmp_path / "a-masklabel.png")
    original = Path.open

    def refuse(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == part:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", lambda self: refuse(self, "rb").read())
    options: dict[str, Any] = {"captions": TEXTS, "masks": MASKS}
    sentence = sentence_of(tmp_path, **options)
    assert "no permission" in sentence or "Permission denied" in sentence
    assert f"{part} (no permission)" in sentence or f"{tmp_path / part}" in sentence
    manifest = read(tmp_path, on_problem="leave_out", **options)
    assert [p.name for p in manifest.pictures] == [COMPANION]
    assert outcomes_of(manifest)["a.png"].outcome == "left out"
    fingerprint(DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path), **options),)))


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd_files.write_companion(tmp_path)
    (tmp_path / "locked").mkdir()
    original = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"{tmp_path / 'locked'} cannot be listed (Permission denied); check its path and permissions" in sentence_of(
        tmp_path
    )
    masks = MaskConfig(folder="locked", suffixes=(".png",))
    sentence = sentence_of(tmp_path, recursive=False, masks=masks)
    assert f"{tmp_path / 'locked'} cannot be listed (Permission denied); check its path and permissions" in sentence
    concept = ConceptConfig(folder=str(tmp_path), masks=masks)
    assert len(fingerprint(DatasetConfig(concepts=(concept,)))) == 64


FOLDERS = {
    "a name of 300 letters": "x" * 300,
    "a path of 9000 letters": "x/" * 4500,
    "the home of nobody": "~no_such_person/pictures",
    "a line feed": "a\nb",
    "bytes that are no text": "caf\udce9",
}


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_cannot_be_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = sentence_of(Path(folder))
    assert "does not exist; check folder of" in sentence
    sentence.encode()


@pytest.mark.skipif(os.name != "posix", reason="needs symbolic links")
def test_a_folder_that_links_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop", target_is_directory=True)
    concept = ConceptConfig(folder=str(tmp_path / "loop"))
    assert "loop does not exist" in sentence_of(tmp_path / "loop")
    assert len(fingerprint(DatasetConfig(concepts=(concept,)))) == 64
