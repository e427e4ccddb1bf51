"""Every picture gets its control pictures, or is named; what they are counts for the run's key."""

import json
import os
from pathlib import Path

import pytest
from scan_folder import draw, read

from lora_atelier.trainer_core.common.access import access_to
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, ControlConfig, DatasetConfig
from lora_atelier.trainer_core.data.scan import fingerprint, manifest_digest, manifest_parts, scan


def pair(tmp_path: Path, *folders: str, names: tuple[str, ...] = ("a", "sub/b")) -> Path:
    """Write pictures, and a control picture of each in each folder."""
    for number, name in enumerate(names):
        draw(tmp_path / "pictures" / f"{name}.png", (number, 0, 0))
        for folder in folders:
            draw(tmp_path / folder / f"{name}.jpg", (0, number, 9), caption=None)
    return tmp_path / "pictures"


def controls(tmp_path: Path, *folders: str, **options) -> ControlConfig:
    return ControlConfig(folders=tuple(str(tmp_path / folder) for folder in folders), **options)


def test_control_pictures_are_found_by_name_in_the_order_of_their_folders(tmp_path: Path) -> None:
    folder = pair(tmp_path, "before", "other")
    first, second = read(folder, controls=controls(tmp_path, "other", "before")).pictures
    assert [each.path for each in first.controls] == [tmp_path / "other" / "a.jpg", tmp_path / "before" / "a.jpg"]
    assert [each.name for each in second.controls] == ["sub/b.jpg", "sub/b.jpg"]
    assert {(each.width, each.height, len(each.digest)) for each in second.controls} == {(24, 16, 64)}


def test_the_same_ending_comes_first_and_a_sub_folder_is_not_needed(tmp_path: Path) -> None:
    folder = pair(tmp_path, "before", names=("a",))
    draw(tmp_path / "before" / "a.png", caption=None)
    draw(folder / "sub" / "B.png")
    draw(tmp_path / "before" / "b.webp", caption=None)
    first, second = read(folder, controls=controls(tmp_path, "before")).pictures
    assert (first.controls[0].name, second.controls[0].name) == ("a.png", "b.webp")


@pytest.mark.skipif(os.name == "nt", reason="file names have no case there")
def test_of_names_that_differ_in_case_alone_each_picture_takes_that_of_its_spelling(tmp_path: Path) -> None:
    for i, name in enumerate(("A.png", "a.png", "b.png")):
        draw(tmp_path / "pictures" / name, (i, 0, 0))
        draw(tmp_path / "before" / name.replace("b", "B"), (0, i, 0), caption=None)
    if len(list((tmp_path / "pictures").iterdir())) < 6:
        pytest.skip("this disk folds the case of names")
    manifest = read(tmp_path / "pictures", controls=controls(tmp_path, "before"))
    assert [(p.name, p.controls[0].name) for p in manifest.pictures] == [
        ("A.png", "A.png"),
        ("a.png", "a.png"),
        ("b.png", "B.png"),
    ]


def test_a_folder_inside_the_pictures_holds_no_pictures(tmp_path: Path) -> None:
    folder = pair(tmp_path, "pictures/before", names=("a", "b"))
    manifest = read(folder, controls=ControlConfig(folders=("before",)))
    assert [p.name for p in manifest.pictures] == ["a.png", "b.png"]
    outcomes = {file.name: (file.outcome, file.why) for file in manifest.outcomes}
    assert outcomes["before/a.jpg"] == ("control picture", "of a.png")


def test_missing_broken_and_misfitting_control_pictures_are_all_named(tmp_path: Path) -> None:
    folder = pair(tmp_path, "before", names=("a", "b", "c", "d"))
    (tmp_path / "before" / "a.jpg").unlink()
    (tmp_path / "before" / "b.jpg").write_bytes(b"no picture")
    draw(tmp_path / "before" / "c.jpg", size=(24, 24), caption=None)
    config = controls(tmp_path, "before")
    with pytest.raises(ValueError) as error:
        read(folder, controls=config)
    assert f"1 picture has no control picture of the same name in {tmp_path / 'before'}: a.png" in str(error.value)
    assert "1 control picture of" in str(error.value) and "cannot be read: b.jpg (not a picture)" in str(error.value)
    assert "another shape than the picture" in str(error.value) and "c.jpg (24x24, picture 24x16)" in str(error.value)
    assert "set fit of Control Pictures to whole" in str(error.value)
    manifest = read(folder, controls=config, on_problem="leave_out")
    assert [p.name for p in manifest.pictures] == ["d.png"] and len(manifest.notes) == 3
    whole = read(folder, controls=config.replace(fit="whole"), on_problem="leave_out")
    assert [p.name for p in whole.pictures] == ["c.png", "d.png"]


def test_a_wrong_folder_gets_one_sentence(tmp_path: Path) -> None:
    folder = pair(tmp_path, "before", names=("a",))
    with pytest.raises(ValueError, match=r"The folder of control pictures .*none does not exist; check folder of Con"):
        read(folder, controls=controls(tmp_path, "none"))
    with pytest.raises(ValueError, match="holds the pictures, so it cannot hold their control pictures"):
        read(folder, controls=controls(tmp_path, "pictures"))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), controls=controls(tmp_path, "before")),))
    with pytest.raises(ValueError, match="before lies outside the folders that may be read; set folder of Control"):
        scan(dataset, access=access_to([folder]))
    with pytest.raises(ValueError, match="There are 4 folders of control pictures; set 1 to 3"):
        controls(tmp_path, "a", "b", "c", "d")


def test_the_content_of_control_pictures_counts_and_their_place_does_not(tmp_path: Path) -> None:
    folder = pair(tmp_path, "before", "moved", "other")
    draw(tmp_path / "other" / "a.jpg", (99, 99, 99), caption=None)

    def of(name: str):
        config = controls(tmp_path, name)
        manifest = read(folder, controls=config)
        dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), controls=config),))
        return manifest_digest(manifest), manifest_parts(manifest), fingerprint(dataset)

    before, moved, other = of("before"), of("moved"), of("other")
    assert before[:2] == moved[:2] and before[0] != other[0]
    assert [part for part in before[1] if before[1][part] != other[1][part]] == ["control pictures"]
    assert "control pictures" not in manifest_parts(read(folder))
    draw(tmp_path / "before" / "a.jpg", (1, 2, 3), caption=None)
    assert of("before")[2] != before[2]


def test_the_other_end_of_a_slider_is_found_as_control_pictures_are(tmp_path: Path) -> None:
    folder = pair(tmp_path, "less")
    seen, other = controls(tmp_path, "less"), controls(tmp_path, "less", use="slider")
    first, second = read(folder, controls=other).pictures
    assert [first.other_end, second.other_end] == [p.controls[0] for p in read(folder, controls=seen).pictures]
    assert not first.controls and manifest_digest(read(folder, controls=other)) != manifest_digest(read(folder))
    draw(tmp_path / "less" / "a.jpg", size=(24, 24), caption=None)
    with pytest.raises(ValueError, match=r"another shape than the picture in .*; cut them alike, or set on_pro"):
        read(folder, controls=other)
    (tmp_path / "less" / "a.jpg").unlink()
    with pytest.raises(ValueError, match="1 picture has no control picture of the same name in"):
        read(folder, controls=other)


def test_a_slider_has_one_other_end_which_is_cut_alike(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 2 folders; leave folder_2 and folder_3 of Control Pictures empty"):
        controls(tmp_path, "a", "b", use="slider")
    with pytest.raises(ValueError, match="cut alike; set fit of Control Pictures to as_picture"):
        controls(tmp_path, "a", use="slider", fit="whole")


def tabled(folder: Path, **changes: str) -> dict[str, object]:
    """Write pictures with control pictures beside and elsewhere, and a table of musubi-tuner; give the settings."""
    for name in ("a", "b"):
        draw(folder / f"{name}.png", (1, ord(name), 0), caption=None)
        draw(folder / f"{name} before.png", (2, ord(name), 0), caption=None)
        draw(folder.parent / "elsewhere" / f"{name}.png", (3, ord(name), 0), caption=None)
    rows = [
        {
            "image_path": f"{folder}/{name}.png",
            "control_path_0": f"{name} before.png",
            "control_path_1": f"{folder.parent}/elsewhere/{name}.png",
            "caption": f"a {name}",
            **changes,
        }
        for name in ("a", "b")
    ]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {"captions": CaptionConfig(source="table"), "controls": ControlConfig(folders=("control_path_0",))}


def test_a_table_names_the_control_pictures_of_each_picture(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    settings = tabled(folder)
    both = settings | {"controls": ControlConfig(folders=("control_path_1", "control_path_0"))}
    manifest = read(folder, **both)
    assert [(each.name, [c.path for c in each.controls]) for each in manifest.pictures] == [
        (f"{name}.png", [tmp_path / "elsewhere" / f"{name}.png", folder / f"{name} before.png"]) for name in "ab"
    ]
    assert {each.outcome for each in manifest.outcomes if "before" in each.name} == {"control picture"}
    assert manifest.notes == ()

    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **both),))
    before = fingerprint(dataset)
    draw(tmp_path / "elsewhere" / "b.png", (9, 9, 9), caption=None)
    assert fingerprint(dataset) != before
    with pytest.raises(ValueError, match=r"elsewhere.a\.png lies outside the folders that may be read"):
        scan(dataset, access=access_to([folder]))
    linked = settings | {"controls": ControlConfig(folders=(str(tmp_path / "elsewhere"),))}
    notes = [note for note in read(folder, on_problem="leave_out", **linked).notes if "control pictures, too" in note]
    assert len(notes) == 1 and "elsewhere count. Set folder of Control Pictures to control_path" in notes[0]


def test_what_a_table_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    settings = tabled(folder, control_path_0="gone.png")
    with pytest.raises(ValueError, match="4 pictures have no control picture in control_path_0 of the table: a before"):
        read(folder, **settings)
    with pytest.raises(ValueError, match="control_path_0 is a column of a caption table, and captions come from text"):
        read(folder, controls=settings["controls"], captions=CaptionConfig(missing="empty"))
