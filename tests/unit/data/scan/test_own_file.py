"""A folder's own file sets what happens to single pictures; what it cannot mean is refused in one sentence."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scan_folder import draw, read

from lora_atelier.trainer_core.common.access import access_to
from lora_atelier.trainer_core.config import (
    CaptionConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    ObjectiveConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import fingerprint, glance, manifest_digest, manifest_parts, scan
from lora_atelier.trainer_core.data.scan.own_file import (
    LARGEST,
    OWN_FILE,
    Changed,
    OwnSettings,
    own_of,
    read_own,
    write_own,
)
from lora_atelier.trainer_core.objective import check_roles
from lora_atelier.trainer_core.objective.terms.slider import PromptSlider
from lora_atelier.trainer_core.preflight.report import report

NAMES = ("a.png", "b.png", "c.png", "3_sub/d.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        draw(tmp_path / name, (number, 0, 0), size=(128, 64))
    return tmp_path


def write(folder: Path, pictures: Any) -> Path:
    path = folder / OWN_FILE
    path.write_text(json.dumps({"pictures": pictures}), encoding="utf-8")
    return path


def test_what_is_set_for_a_picture_reaches_the_plan(folder: Path) -> None:
    write(
        folder,
        {
            "a.png": {"leave_out": True},
            "b.png": {"role": "validation", "focus": [0, 0.5]},
            "c.png": {"repeats": 2, "focus": [1, 0.5]},
            "3_sub/d.png": {"repeats": 5, "role": "regularisation"},
            "gone.png": {"repeats": 2},
        },
    )
    concept = ConceptConfig(folder=str(folder))
    dataset = DatasetConfig(concepts=(concept,))
    manifest = scan(dataset)
    plan = build_plan(manifest, dataset, TrainConfig(epochs=1, resolution=64, bucket_step=64, batch_size=1))
    assert [(p.name, p.repeats) for p in manifest.pictures] == [("3_sub/d.png", 15), ("b.png", 1), ("c.png", 2)]
    roles = {p.name: each.role for p, each in zip(plan.manifest.pictures, plan.concepts, strict=True)}
    assert roles == {"3_sub/d.png": "regularisation", "b.png": "validation", "c.png": "train"}
    visited = Counter(sample.picture for k in range(plan.steps) for mb in plan.step(k) for sample in mb.samples)
    assert visited == {0: 2, 2: 2}  # regularisation pictures are visited as often as all others together
    assert [(sample.picture, sample.crop.offset) for sample in plan.validation] == [(1, (0, 0))]
    assert [plan.sample(picture, 0).crop.offset for picture in (0, 2)] == [(32, 0), (64, 0)]  # the middle, the focus
    text = report(plan)
    assert f"{OWN_FILE} leaves out 1 picture: a.png." in text and "1 entry of lora_atelier.json names no pic" in text
    assert f"{OWN_FILE} gives 1 picture the role validation: b.png." in text
    assert ("a.png", "left out", f"by {OWN_FILE}") in {(f.name, f.outcome, f.why) for f in manifest.outcomes}
    assert glance(concept) == (3, 0, 0)


def test_a_slider_has_no_roles_of_single_pictures(folder: Path) -> None:
    write(folder, {"a.png": {"role": "regularisation"}})
    pairs = ConceptConfig(folder=str(folder), controls=ControlConfig(folders=("x",), use="slider"))
    train = TrainConfig(epochs=1, resolution=64, bucket_step=64)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    manifest = scan(dataset)
    with pytest.raises(ValueError, match=r"role regularisation: a\.png; both ends of a pair need the role"):
        build_plan(manifest, DatasetConfig(concepts=(pairs,)), train)
    with pytest.raises(ValueError, match=r"roles of single ones have no meaning; remove that of a\.png\."):
        check_roles(
            [PromptSlider(ObjectiveConfig(slider="prompts", slider_positive="old"))],
            build_plan(manifest, dataset, train),
        )


def test_the_file_is_no_caption_of_a_picture_and_no_table(folder: Path) -> None:
    draw(folder / "lora_atelier.png", (9, 9, 9), caption=None)
    draw(folder / "e.png", (8, 9, 9), caption=None)
    write(folder, {})
    both = CaptionConfig(extensions=(".json", ".txt"), missing="empty")
    found = {p.name: p.lines for p in read(folder, captions=both).pictures}
    assert found["lora_atelier.png"] == () and found["a.png"] == ("a cat",)
    with pytest.raises(ValueError, match=r"2 pictures have no \.txt caption in [^,]*: e\.png, lora_atelier\.png;"):
        read(folder)


def test_a_changed_file_is_another_dataset_and_says_so(folder: Path) -> None:
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    prints, digests, parts = [fingerprint(dataset)], [manifest_digest(scan(dataset))], [manifest_parts(scan(dataset))]
    for settings in ({"focus": [0.2, 0.5]}, {"focus": [0.3, 0.5]}, {"role": "validation"}, {"repeats": 2}):
        write(folder, {"a.png": settings})
        prints.append(fingerprint(dataset))
        digests.append(manifest_digest(scan(dataset)))
        parts.append(manifest_parts(scan(dataset)))
    assert len({*prints}) == len({*digests}) == 5
    kinds = [{name for name in {*one, *other} if one.get(name) != other.get(name)} for one, other in pairwise(parts)]
    assert kinds == [{"settings of single pictures"}] * 4
    write(folder, {"a.png": {}})
    assert manifest_digest(scan(dataset)) == digests[0] and manifest_parts(scan(dataset)) == parts[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"lora_atelier\.json cannot be read: not JSON \(line 1, column 2\); repair or delete it\.$"),
        ([], r'lora_atelier\.json has no pictures; write \{"pictures": '),
        ({"pictures": {}, "more": 1}, 'lora_atelier.json: "more" is unknown; use pictures alone'),
        ({"pictures": {"../a.png": {}}}, r'"\.\./a\.png" is no picture inside the folder'),
        ({"pictures": {"/a.png": {}}}, '"/a.png" is no picture inside the folder'),
        ({"pictures": {"C:\\a.png": {}}}, "is no picture inside the folder"),
        ({"pictures": {"sub\\..\\..\\a.png": {}}}, "is no picture inside the folder"),
        ({"pictures": {"a.png": []}}, r'lora_atelier\.json, "a\.png": \[\] is no object'),
        ({"pictures": {"a.png": {"weight": 1}}}, r'"a\.png": "weight" is unknown; use leave_out, role, repeats, '),
        ({"pictures": {"a.png": {"leave_out": 1}}}, "leave_out is 1; set it to true or false"),
        ({"pictures": {"a.png": {"role": "teach"}}}, 'role is "teach"; set it to train, regularisation or validation'),
        ({"pictures": {"a.png": {"role": "prior_prediction"}}}, "prior_prediction needs captions of its own"),
        ({"pictures": {"a.png": {"repeats": 0}}}, "repeats is 0; set it to a whole number from 1 to 1000"),
        ({"pictures": {"a.png": {"repeats": 1.5}}}, "repeats is 1.5; set it"),
        ({"pictures": {"a.png": {"focus": [0.5]}}}, r"focus is \[0\.5\]; set it to two shares from 0 to 1"),
        ({"pictures": {"a.png": {"focus": [0.5, 1.1]}}}, r"focus is \[0\.5, 1\.1\]; set it"),
        ({"pictures": {"a.png": {"focus": [0.5, float("nan")]}}}, r"focus is \[0\.5, NaN\]; set it"),
        (" " * (LARGEST + 1), r"lora_atelier\.json is larger than 8 MiB; remove pictures from it, or delete it\."),
    ],
)  # fmt: skip
def test_what_the_file_cannot_mean_is_refused_by_name(folder: Path, content: Any, words: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / OWN_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read(folder, on_problem="leave_out")


def test_every_picture_left_out_is_said(folder: Path) -> None:
    write(folder, {name: {"leave_out": True} for name in NAMES})
    with pytest.raises(ValueError, match=r"lora_atelier\.json leaves out every picture; let one be trained"):
        read(folder)


def test_a_file_that_a_link_takes_from_elsewhere_is_not_read(folder: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    (folder / OWN_FILE).symlink_to(write(other, {"a.png": {"leave_out": True}}))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    assert len(scan(dataset).pictures) == 3
    with pytest.raises(ValueError, match="1 link leads out of"):
        scan(dataset, access=access_to([folder]))


def test_one_of_a_folder_beneath_is_not_read_and_said(folder: Path) -> None:
    write(folder / "3_sub", {"d.png": {"leave_out": True}})
    manifest = read(folder)
    assert len(manifest.pictures) == 4
    assert any(note.startswith(f"3_sub/{OWN_FILE} of ") for note in manifest.notes)


def test_changes_are_written_whole_and_undone_and_never_over_another_change(folder: Path) -> None:
    before, first = write_own(folder, {"a.png": OwnSettings(repeats=3, focus=(0.25, 1.0))}, "")
    assert before == {"a.png": {}} and read_own(folder) == ({"a.png": OwnSettings(repeats=3, focus=(0.25, 1.0))}, first)
    before, second = write_own(folder, {"a.png": OwnSettings(leave_out=True), "b.png": OwnSettings(repeats=2)}, first)
    assert before == {"a.png": {"focus": [0.25, 1.0], "repeats": 3}, "b.png": {}}
    with pytest.raises(Changed, match=r"lora_atelier\.json was changed meanwhile"):
        write_own(folder, {"a.png": OwnSettings()}, first)
    _, third = write_own(folder, {name: own_of(value, "") for name, value in before.items()}, second)
    assert read_own(folder) == ({"a.png": OwnSettings(repeats=3, focus=(0.25, 1.0))}, third) and third == first
    write_own(folder, {"a.png": OwnSettings()}, third)
    assert not (folder / OWN_FILE).exists() and read_own(folder) == ({}, "")


def test_an_entry_of_another_case_is_changed_unless_it_is_of_another_picture(tmp_path: Path) -> None:
    for name in ("cat.png", "DOG.png", "dog.png"):
        (tmp_path / name).touch()
    _, read = write_own(tmp_path, {name: OwnSettings(repeats=2) for name in ("Cat.png", "DOG.png")}, "")
    before, read = write_own(tmp_path, {"cat.png": OwnSettings(), "dog.png": OwnSettings(leave_out=True)}, read)
    assert before["cat.png"] == {"repeats": 2}
    two_files = len(list(tmp_path.glob("*.png"))) == 3  # where the case of a name tells files apart
    assert read_own(tmp_path)[0] == {
        **({"DOG.png": OwnSettings(repeats=2)} if two_files else {}),
        "dog.png": OwnSettings(leave_out=True),
    }
