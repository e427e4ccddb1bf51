"""The list of a dataset's pictures for its page: what it costs is counted, and captions are read within bounds."""

import os
import random
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image
from scan_folder import draw

from lora_atelier.trainer_core.common.access import ANYWHERE, access_to
from lora_atelier.trainer_core.config import ConceptConfig, DatasetConfig, TrainConfig
from lora_atelier.trainer_core.data import plan as plan_module
from lora_atelier.trainer_core.data.fit import KIND, Fit
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import Index, scan
from lora_atelier.trainer_core.preflight import shown_pictures
from lora_atelier.trainer_core.preflight.shown_pictures import caption_files, list_shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").touch()
        (tmp_path / f"{name}.txt").write_text(name)
    return tmp_path


def test_a_pipe_and_a_huge_file_stop_no_other_caption(folder: Path) -> None:
    (folder / "a.txt").unlink()
    os.mkfifo(folder / "a.txt") if hasattr(os, "mkfifo") else (folder / "a.txt").mkdir()
    with (folder / "b.txt").open("wb") as file:
        file.truncate(2**40)
    found = caption_files(ConceptConfig(folder=str(folder)), ANYWHERE)
    assert found["c.png"].text == "c" and "b.png" not in found
    assert "a.png" not in found or found["a.png"].seen == ""  # the list of files knows no pipes


def test_a_link_to_a_text_elsewhere_is_not_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    secret.write_text("swordfish")
    (folder / "a.txt").unlink()
    (folder / "a.txt").symlink_to(secret)
    found = caption_files(ConceptConfig(folder=str(folder)), access_to([folder]))
    assert {name: file.text for name, file in found.items()} == {"b.png": "b", "c.png": "c"}


def test_only_the_captions_that_are_asked_for_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = shown_pictures.content_of
    monkeypatch.setattr(shown_pictures, "content_of", lambda path: (read.append(path), whole(path))[1])
    concept = ConceptConfig(folder=str(folder))
    assert [*caption_files(concept, ANYWHERE, lambda _, path: path == folder / "b.txt")] == ["b.png"]
    assert read == [folder / "b.txt"]


def test_captions_that_are_too_long_for_a_page_are_not_gathered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_pictures, "LARGEST_ENTRY", 2)
    with pytest.raises(ValueError, match="The captions of this folder are too long to be shown"):
        caption_files(ConceptConfig(folder=str(folder)), ANYWHERE)


def test_pictures_are_listed_once_and_a_size_gets_its_shape_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    for i in range(8):
        caption = "a cat" if i else None
        draw(folder / f"{i}.png", (i, 0, 0), size=(48, 32) if i % 2 else (32, 48), caption=caption)
    listed, shaped = [], []
    scandir, shape_of = os.scandir, plan_module.shape_of
    monkeypatch.setattr(os, "scandir", lambda place: listed.append(Path(place)) or scandir(place))
    monkeypatch.setattr(plan_module, "shape_of", lambda *all_of: shaped.append(all_of[0]) or shape_of(*all_of))
    concept = ConceptConfig(folder=str(folder))
    dataset = DatasetConfig(concepts=(concept.replace(captions=concept.captions.replace(missing="empty")),))
    watched = Fit(ratio=2.0, sure=0.0, visits=32, residual=0.5, trend=0.25, odd=True, easy=False, weight=0.5)
    with Index() as index:
        plan = build_plan(scan(dataset, index), dataset, TrainConfig(epochs=1, resolution=64))
        index.keep(plan.manifest.pictures[1].digest, KIND, asdict(watched))
        shown = list_shown(plan, index, (0,), {})
    assert listed == [folder] and sorted(shaped) == [(32, 48), (48, 32)]
    assert [(each["file"], each["text"], bool(each["seen"])) for each in shown[:2]] == [
        ("0.txt", "", False),
        ("1.txt", "a cat", True),
    ]
    assert shown[0]["fit"] is None and shown[1]["fit"] == [2.0, 0.25, 0.5]
    assert set(shown[1]["marks"]) - set(shown[0]["marks"]) == {"fit", "odd", "rising", "easy"}


def test_both_of_a_pair_of_near_duplicates_are_marked(tmp_path: Path) -> None:
    shapes = Image.frombytes("L", (8, 8), random.Random(0).randbytes(64)).resize((256, 256))
    for name, picture in (("a", shapes), ("b", shapes.resize((200, 200))), ("c", shapes.rotate(90))):
        picture.convert("RGB").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(name)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path)),))
    with Index(None) as index:
        plan = build_plan(scan(dataset, index), dataset, TrainConfig(steps=1))
        shown = list_shown(plan, index, (0,), {})
    assert ["near-duplicates" in each["marks"] for each in shown] == [True, True, False]
