"""Every picture gets its mask, or is named."""

import os
from pathlib import Path

import pytest
from PIL import Image
from scan_folder import draw, mask, read

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig
from lora_atelier.trainer_core.data.masks import load_mask
from lora_atelier.trainer_core.data.scan import Index, scan


def test_masks_beside_the_pictures_are_found_and_are_no_pictures(tmp_path: Path) -> None:
    draw(tmp_path / "a.jpg")
    mask(tmp_path / "a-MaskLabel.png")
    (picture,) = read(tmp_path, masks=MaskConfig()).pictures
    assert picture.mask == tmp_path / "a-MaskLabel.png"
    assert len(picture.mask_digest) == 64
    manifest = read(tmp_path)
    assert [p.name for p in manifest.pictures] == ["a.jpg"]
    assert any("1 mask" in note and "Mask Loader" in note for note in manifest.notes)


@pytest.mark.parametrize("ending", [".jpg", ".WEBP", ".tiff", ".bmp"])
def test_masks_of_any_picture_ending_are_found_and_are_no_pictures(tmp_path: Path, ending: str) -> None:
    draw(tmp_path / "0.png")
    mask(tmp_path / f"0-masklabel{ending}")
    (picture,) = read(tmp_path, masks=MaskConfig()).pictures
    assert picture.mask == tmp_path / f"0-masklabel{ending}"
    assert [p.name for p in read(tmp_path).pictures] == ["0.png"]
    (tmp_path / "masks").mkdir()
    (tmp_path / f"0-masklabel{ending}").rename(tmp_path / "masks" / f"0-masklabel{ending}")
    (picture,) = read(tmp_path, masks=MaskConfig(folder="masks")).pictures
    assert picture.mask == tmp_path / "masks" / f"0-masklabel{ending}"


def test_the_mask_with_the_suffix_itself_comes_first(tmp_path: Path) -> None:
    draw(tmp_path / "0.png")
    for ending in (".bmp", ".png", ".jpg"):
        mask(tmp_path / f"0-masklabel{ending}")
    assert read(tmp_path, masks=MaskConfig()).pictures[0].mask == tmp_path / "0-masklabel.png"
    (picture,) = read(tmp_path, masks=MaskConfig(suffixes=("-masklabel.jpg",))).pictures
    assert picture.mask == tmp_path / "0-masklabel.jpg"


def test_a_mask_that_needs_a_package_is_a_problem_of_its_picture(tmp_path: Path) -> None:
    draw(tmp_path / "0.png")
    (tmp_path / "0-masklabel.heic").write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(ValueError, match=r"1 mask of .* cannot be read: 0-masklabel\.heic"):
        read(tmp_path, masks=MaskConfig())
    assert [p.name for p in read(tmp_path).pictures] == ["0.png"]


@pytest.mark.parametrize("place", ["masks/sub/a.png", "masks/a.png"])
def test_masks_may_lie_in_a_folder_of_their_own(tmp_path: Path, place: str) -> None:
    draw(tmp_path / "sub" / "a.png")
    mask(tmp_path / place)
    (picture,) = read(tmp_path, masks=MaskConfig(folder="masks", suffixes=(".png",))).pictures
    assert (picture.name, picture.mask) == ("sub/a.png", tmp_path / place)


def test_alpha_masks_are_the_pictures_themselves(tmp_path: Path) -> None:
    Image.new("RGBA", (24, 16), (1, 2, 3, 99)).save(tmp_path / "a.png")
    draw(tmp_path / "b.png")
    options = {"captions": CaptionConfig(source="none"), "masks": MaskConfig(source="alpha", missing="ones")}
    with_alpha, without = read(tmp_path, **options).pictures
    assert with_alpha.mask == with_alpha.path
    assert with_alpha.mask_digest == with_alpha.digest
    assert (without.mask, without.mask_digest) == (None, "")
    with pytest.raises(ValueError, match=r"1 picture has no alpha channel in .*: b\.png"):
        read(tmp_path, captions=CaptionConfig(source="none"), masks=MaskConfig(source="alpha"))


def test_missing_masks_are_an_error_or_a_note(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"1 picture has no mask \(NAME-masklabel\.png\) in .*: a\.png"):
        read(tmp_path, masks=MaskConfig())
    manifest = read(tmp_path, masks=MaskConfig(missing="ones"))
    assert manifest.pictures[0].mask is None
    assert any("whole area is trained: a.png" in note for note in manifest.notes)


def test_a_mask_of_another_size_a_broken_one_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    mask(tmp_path / "a-masklabel.png", size=(16, 24))
    with pytest.raises(ValueError, match=r"1 mask differs in size .*: a\.png \(24x16, mask 16x24\)"):
        read(tmp_path, masks=MaskConfig())
    (tmp_path / "a-masklabel.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"a-masklabel\.png \(not a picture\)"):
        read(tmp_path, masks=MaskConfig())
    with pytest.raises(ValueError, match=r"mask folder .*gone does not exist"):
        read(tmp_path, masks=MaskConfig(folder="gone"))


def test_black_masks_are_noted_after_inversion(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    mask(tmp_path / "a-masklabel.png", 255)
    assert not any("black" in note for note in read(tmp_path, masks=MaskConfig()).notes)
    assert any("black: a.png" in note for note in read(tmp_path, masks=MaskConfig(invert=True)).notes)


def test_pictures_without_a_mask_can_be_left_out(tmp_path: Path) -> None:
    for i in range(4):
        draw(tmp_path / f"{i}.png", (i, 0, 0))
    mask(tmp_path / "1-masklabel.png")
    manifest = read(tmp_path, masks=MaskConfig(missing="leave_out"))
    assert [p.name for p in manifest.pictures] == ["1.png"]
    assert any(
        note == f"Left out: 3 pictures have no mask (NAME-masklabel.png) in {tmp_path}: 0.png, 2.png, 3.png."
        for note in manifest.notes
    )
    outcomes = {f.name: (f.outcome, f.why) for f in manifest.outcomes}
    assert outcomes["0.png"] == ("left out", "without a mask")
    assert outcomes["1-masklabel.png"] == ("mask", "of 1.png")


def test_the_threshold_is_part_of_what_a_mask_is(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    mask(tmp_path / "a-masklabel.png", 100)
    index = Index()
    for threshold, level in ((0.0, 100), (0.3, 255), (0.5, 0)):
        config = MaskConfig(threshold=threshold)
        dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path), masks=config),))
        manifest = scan(dataset, index)  # one index: each threshold is examined anew
        assert any("completely black: a.png" in note for note in manifest.notes) == (level == 0)
        assert load_mask(manifest.pictures[0].mask, (24, 16), config).getextrema() == (level, level)
    index.close()


def test_of_several_suffixes_each_picture_takes_the_first_it_has(tmp_path: Path) -> None:
    endings = {"a": ("_mask.jpg", "-masklabel.png"), "b": ("-masklabel.png",), "c": ("_mask.jpg",)}
    for i, (name, each) in enumerate(endings.items()):
        draw(tmp_path / f"{name}.png", (i, 0, 0))
        for ending in each:
            mask(tmp_path / f"{name}{ending}")
    manifest = read(tmp_path, masks=MaskConfig(suffixes=("_mask.jpg", "-masklabel.png")))
    assert [p.mask.name for p in manifest.pictures if p.mask] == ["a_mask.jpg", "b-masklabel.png", "c_mask.jpg"]
    assert {f.name: f.outcome for f in manifest.outcomes}["a-masklabel.png"] == "not used"


@pytest.mark.skipif(os.name == "nt", reason="file names have no case there")
def test_masks_of_names_that_differ_in_case_alone_or_in_their_accents(tmp_path: Path) -> None:
    for i, name in enumerate(("A", "a", "\u00e9")):
        draw(tmp_path / f"{name}.png", (i, 0, 0))
    for name in ("A", "a", "e\u0301"):
        mask(tmp_path / f"{name}-masklabel.png", 50)
    if len(list(tmp_path.iterdir())) < 9:
        pytest.skip("this disk folds the case of names")
    manifest = read(tmp_path, masks=MaskConfig())
    found = {p.name: p.mask.name for p in manifest.pictures if p.mask}
    assert found == {
        "A.png": "A-masklabel.png",
        "a.png": "a-masklabel.png",
        "\u00e9.png": "e\u0301-masklabel.png",
    }


def test_every_file_has_its_outcome(tmp_path: Path) -> None:
    for i, name in enumerate(("fine.png", "bare.png", "sub/deep.jpg")):
        draw(tmp_path / name, (i, 0, 0))
    draw(tmp_path / "mute.png", (9, 0, 0), caption=None)
    for name in ("fine", "mute", "sub/deep"):
        mask(tmp_path / f"{name}-masklabel.png")
    for name in (".DS_Store", "notes.md", "raw.cr2", "lonely.txt", "broken.png"):
        (tmp_path / name).write_bytes(b"x")
    draw(tmp_path / "tiny.png", size=(24, 4))
    outcomes = read(tmp_path, masks=MaskConfig(), on_problem="leave_out").outcomes
    assert {file.name: (file.outcome, file.why) for file in outcomes} == {
        ".DS_Store": ("not used", "hidden or a system file"),
        "bare.png": ("left out", "without a mask"),
        "bare.txt": ("caption", "of bare.png"),
        "broken.png": ("left out", "it cannot be read"),
        "fine-masklabel.png": ("mask", "of fine.png"),
        "fine.png": ("picture", ""),
        "fine.txt": ("caption", "of fine.png"),
        "lonely.txt": ("not used", "not a picture"),
        "mute-masklabel.png": ("mask", "of mute.png"),
        "mute.png": ("left out", "without a caption"),
        "notes.md": ("not used", "not a picture"),
        "raw.cr2": ("not used", "this format cannot be read"),
        "sub/deep-masklabel.png": ("mask", "of sub/deep.jpg"),
        "sub/deep.jpg": ("picture", ""),
        "sub/deep.txt": ("caption", "of sub/deep.jpg"),
        "tiny.png": ("left out", "too small"),
        "tiny.txt": ("not used", "not a picture"),
    }


def test_if_nothing_is_left_the_run_stops_with_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "b.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"No picture of .* can be used.* Left out: 2 pictures .*a\.png \(not a pict"):
        read(tmp_path, on_problem="leave_out")
