"""What stands out among pictures is named, with what would be left out, and nothing is found among sound ones."""

from pathlib import Path
from typing import Any

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, TrainConfig
from lora_atelier.trainer_core.data.looks import Look
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import Manifest, Picture
from lora_atelier.trainer_core.preflight.curation import Finding, curate
from lora_atelier.trainer_core.preflight.report import report


def found(*pictures: dict[str, Any], roles: tuple[str, ...] = ("train",), **captions: Any) -> list[Finding]:
    """Curate pictures, each with what it has beyond the usual."""
    made = tuple(
        Picture(
            **{
                **dict(path=Path("x"), name=f"{i}.png", concept=0, width=512, height=512, digest=str(i)),
                **dict(lines=(f"picture {i}",), look=Look(hash=f"{(1 << 8 * i) - 1:016x}")),
                **each,
            }
        )
        for i, each in enumerate(pictures)
    )
    concepts = tuple(ConceptConfig(folder="x", role=r, captions=CaptionConfig(**captions)) for r in roles)  # type: ignore[arg-type]
    plan = build_plan(Manifest(pictures=made), DatasetConfig(concepts=concepts), TrainConfig(steps=4))
    findings = curate(plan)
    assert all(finding.sentence in report(plan) for finding in findings)
    return findings


def test_sound_pictures_give_no_remark() -> None:
    assert found({}, {}, {}) == []


def test_near_duplicates_are_named_with_the_first_one_and_copies_left_to_the_scan() -> None:
    alike = Look(hash="f" * 16)
    (finding,) = found({"look": alike}, {}, {"look": Look(hash="f" * 15 + "e")}, {"look": alike, "digest": "0"})
    assert finding.kind == "near-duplicates" and finding.pictures == (2,)
    assert (
        finding.sentence == "1 picture looks almost like another one, which then counts more often: 2.png (like 0.png)."
    )
    twice = {"look": alike}, {"look": alike, "concept": 1}
    assert found(*twice, roles=("train", "prior_prediction")) == []  # the same pictures on purpose
    assert [finding.pictures for finding in found(*twice, roles=("train", "validation"))] == [(1,)]


def test_blurred_bordered_and_small_pictures_are_named() -> None:
    small = {"width": 200, "height": 200}
    findings = found({}, {"look": Look(blur=0.71)}, {"look": Look(blur=0.7, border=0.25)}, small)
    assert [(f.kind, f.pictures) for f in findings] == [("blurred", (1,)), ("borders", (2,)), ("enlarged", (3,))]
    assert [f.sentence for f in findings] == [
        "1 picture looks blurred: 1.png.",
        "1 picture has borders of one colour, which are learnt, too: 2.png (25%).",
        "1 picture is enlarged more than 1.5x: 3.png (2.6x).",
    ]


def test_marks_in_corners_are_named_and_the_same_one_of_a_folder_once() -> None:
    mark, other = f"{0b1111 << 40:048x}", f"{0b1111 << 80:048x}"
    same = {"look": Look(marks=f",,,{mark}", text="3")}
    findings = found(same, same, same, {"look": Look(marks=f"{other},,,", text="0")})
    assert [(f.kind, f.pictures) for f in findings] == [("marks", ()), ("text", ())]
    assert [f.sentence for f in findings] == [
        "3 pictures have the same mark in the bottom right corner, which is learnt, too: 0.png, 1.png, 2.png; crop or "
        "mask it.",
        "1 picture seems to have text in a corner, which is learnt, too: 3.png (top left); crop or mask it.",
    ]
    assert found(same, same, {**same, "concept": 1}, roles=("train", "train"))[0].kind == "text"  # of two folders


def test_captions_of_several_pictures_are_named_where_each_has_its_own() -> None:
    same = [{"lines": ("a cat",)}, {}, {"lines": ("a cat",)}]
    (finding,) = found(*same)
    assert finding.sentence == "1 caption belongs to several pictures: 0.png, 2.png." and not finding.pictures
    assert found(*same, source="folder_name") == found(*same, missing="class_prompt", class_prompt="a cat") == []
    assert found({"lines": ()}, {"lines": ()}) == []
    assert found({"lines": ("a cat",), "digest": "0"}, {"lines": ("a cat",), "digest": "0", "look": Look()}) == []
