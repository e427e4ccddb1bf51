"""A scan reads every sort of picture, and names every file it cannot use."""

import errno
import io
import json
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from lora_atelier.trainer_core import encode as encode_module
from lora_atelier.trainer_core import scan as scan_module
from lora_atelier.trainer_core import store as store_module
from lora_atelier.trainer_core import train as train_module
from lora_atelier.trainer_core.callbacks import Callbacks
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.encode import encode_plan
from lora_atelier.trainer_core.images import load_picture
from lora_atelier.trainer_core.masks import load_mask
from lora_atelier.trainer_core.models.family import FAMILIES
from lora_atelier.trainer_core.plan import Plan, build_plan
from lora_atelier.trainer_core.report import report
from lora_atelier.trainer_core.scan import (
    Index,
    Manifest,
    fingerprint,
    folder_repeats,
    manifest_digest,
    names,
    natural_order,
    scan,
)
from lora_atelier.trainer_core.store import Store, StoreError


def draw(
    path: Path, colour: Any = (200, 30, 40), size: tuple[int, int] = (24, 16), caption: str | None = "a cat"
) -> Path:
    """Write a picture and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def read(folder: Path | str, **options: Any) -> Manifest:
    return scan(DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **options),)))


def test_pictures_come_in_natural_order_with_size_caption_and_digest(tmp_path: Path) -> None:
    for name in ("10.png", "2.PNG", "sub/1.jpg", "B.webp", "a.bmp", "größe 猫.png"):
        draw(tmp_path / name, caption=f"caption of {name}")
    manifest = read(tmp_path)
    names = [picture.name for picture in manifest.pictures]
    assert names == ["2.PNG", "10.png", "a.bmp", "B.webp", "größe 猫.png", "sub/1.jpg"]
    assert [picture.lines for picture in manifest.pictures] == [(f"caption of {name}",) for name in names]
    assert {(p.width, p.height) for p in manifest.pictures} == {(24, 16)}
    assert all(len(picture.digest) == 64 for picture in manifest.pictures)
    assert manifest == read(tmp_path)


def test_natural_order_counts_numbers() -> None:
    assert sorted(["a10", "a9", "A1", "b", "10", "9"], key=natural_order) == ["9", "10", "A1", "a9", "a10", "b"]


def test_a_list_of_names_is_one_line_that_every_screen_takes() -> None:
    assert names(["a\nb.png", "\u732b \u00e9.png", "\udcff.png", "\x07"]) == (
        "a\\nb.png, \u732b \u00e9.png, \\udcff.png, \\x07"
    )
    assert names(map(str, range(8))) == "0, 1, 2, 3, 4 and 3 more"
    assert names(["x" * 300]) == "x" * 50 + "..." + "x" * 25


def test_system_and_hidden_files_and_folders_are_ignored(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    for name in (".DS_Store", "Thumbs.db", "._a.png", ".git/x.png", "__MACOSX/a.png", "desktop.ini"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"system")
    assert [picture.name for picture in read(tmp_path).pictures] == ["a.png"]


def test_folders_are_read_only_if_asked(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "sub" / "b.png")
    assert len(read(tmp_path, recursive=False).pictures) == 1
    assert len(read(tmp_path).pictures) == 2


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_links_in_circles_end(tmp_path: Path) -> None:
    draw(tmp_path / "sub" / "a.png")
    (tmp_path / "sub" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "sub" / "self").symlink_to(tmp_path / "sub" / "self")
    assert [picture.name for picture in read(tmp_path).pictures] == ["sub/a.png"]
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"cannot be read: gone\.png \(the file, or what it links to, is missing\)"):
        read(tmp_path, captions=CaptionConfig(missing="empty"))
    fingerprint(DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path)),)))


def test_a_pasted_folder_with_quotes_and_blanks_is_understood(tmp_path: Path) -> None:
    draw(tmp_path / "my pictures" / "a.png")
    assert len(read(f' "{tmp_path}/my pictures" ').pictures) == 1


# --- captions -------------------------------------------------------------------------------------------------


def test_captions_have_their_lines_as_the_concept_says(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption="\n  \n a cat \nsecond line\n")
    manifest = read(tmp_path)
    assert manifest.pictures[0].lines == ("a cat", "second line")
    assert any("several lines" in note and "a.png" in note for note in manifest.notes)
    assert read(tmp_path, captions=CaptionConfig(lines="first")).pictures[0].lines == ("a cat",)
    assert read(tmp_path, captions=CaptionConfig(lines="join")).pictures[0].lines == ("a cat second line",)


def test_caption_sources(tmp_path: Path) -> None:
    draw(tmp_path / "cats" / "red cat.png", caption=None)
    for source, expected in [("file_name", "red cat"), ("folder_name", "cats"), ("none", "")]:
        assert read(tmp_path, captions=CaptionConfig(source=source)).pictures[0].lines == (
            (expected,) if expected else ()
        )


def test_caption_files_match_whatever_the_case(tmp_path: Path) -> None:
    draw(tmp_path / "A.png", caption=None)
    (tmp_path / "a.TXT").write_text("found")
    assert read(tmp_path).pictures[0].lines == ("found",)


def test_missing_captions_are_named_and_counted(tmp_path: Path) -> None:
    for i in range(8):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption=None)
    with pytest.raises(
        ValueError, match=r"8 pictures have no \.txt caption in .*: 0\.png, .*4\.png and 3 more"
    ) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)
    manifest = read(tmp_path, captions=CaptionConfig(missing="empty"))
    assert [picture.lines for picture in manifest.pictures] == [()] * 8
    assert any(
        note.startswith("8 pictures have no caption and train with an empty one: 0.png") for note in manifest.notes
    )


def test_other_text_files_are_pointed_out(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "a.caption").write_text("here")
    with pytest.raises(ValueError, match=r"1 \.caption file.*set the caption extension to \.caption"):
        read(tmp_path)
    assert read(tmp_path, captions=CaptionConfig(extensions=(".caption",))).pictures[0].lines == ("here",)


def test_an_undecodable_caption_is_named(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "a.txt").write_bytes("größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r'a\.txt is not UTF-8 text; as cp1252 .*"größe".*save it as UTF-8'):
        read(tmp_path)


def test_an_empty_caption_file_is_noted(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=" \n")
    assert any("empty caption file: a.png" in note for note in read(tmp_path).notes)


# --- what is wrong is named -----------------------------------------------------------------------------------


def test_a_missing_folder_is_shown_resolved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist") as error:
        read(tmp_path / "x" / ".." / "gone")
    assert str(tmp_path / "gone") in str(error.value)
    with pytest.raises(ValueError, match="no folder"):
        read("  ")
    with pytest.raises(ValueError, match="is a file"):
        read(draw(tmp_path / "a.png"))


def test_a_folder_without_pictures_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing"):
        read(tmp_path)
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("x")
    draw(tmp_path / "one" / "a.png")
    (tmp_path / "two").mkdir()
    with pytest.raises(ValueError, match=r"12 \.txt files, 2 folders; turn on recursive"):
        read(tmp_path, recursive=False)


def png(data: bytes = b"") -> bytes:
    """Return a sound PNG's bytes."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue() + data


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def webp() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(buffer, "WEBP")
    return buffer.getvalue()


BROKEN: dict[str, bytes] = {
    "empty.png": b"",
    "text.png": b"this is a web page, not a picture",
    "html.jpg": b"<!DOCTYPE html><html></html>",
    "zeros.png": b"\0" * 500,
    "signature.png": b"\x89PNG\r\n\x1a\n",
    "truncated.png": png()[:1500],
    "flipped.png": png()[:2000] + bytes([png()[2000] ^ 255]) + png()[2001:],
    "headless.png": png()[40:],
    "huge.png": png()[:16] + struct.pack(">II", 100_000, 100_000) + png()[24:],
    "nosize.png": png()[:16] + struct.pack(">II", 0, 0) + png()[24:],
    "truncated.jpg": jpeg()[:700],
    "soi.jpg": b"\xff\xd8\xff\xe0",
    "lead.jpg": b"\xff\xd8" + b"\xff" * 300,
    "truncated.webp": webp()[:300],
    "riff.webp": b"RIFF\x10\0\0\0WEBPVP8 ",
    "bad.gif": b"GIF89a\x05\0\x05\0",
    "bad.bmp": b"BM" + b"\0" * 60,
    "bad.tif": b"II*\0\x08\0\0\0\xff\xff",
    "bad.tga": b"\1\2\3",
    "bad.avif": b"\0\0\0\x20ftypavif" + b"\0" * 30,
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_picture_is_named(tmp_path: Path, name: str) -> None:
    draw(tmp_path / "fine.png")
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(ValueError, match="cannot be read") as error:
        read(tmp_path, captions=CaptionConfig(missing="empty"))
    assert f"1 picture in {tmp_path} cannot be read: {name} (" in str(error.value)
    assert "replace or remove" in str(error.value)


def test_truncated_pictures_are_named_even_if_the_process_pads_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    (tmp_path / "a.jpg").write_bytes(BROKEN["truncated.jpg"])
    with pytest.raises(ValueError, match=r"a\.jpg"):
        read(tmp_path, captions=CaptionConfig(source="none"))
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_problems_of_all_kinds_and_concepts_come_in_one_error(tmp_path: Path) -> None:
    for name in ("empty.png", "text.png"):
        (tmp_path / name).write_bytes(BROKEN[name])
    draw(tmp_path / "bare.png", caption=None)
    concepts = tuple(ConceptConfig(folder=str(folder)) for folder in (tmp_path, tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"2 pictures .*empty\.png \(an empty file\), text\.png") as error:
        scan(DatasetConfig(concepts=concepts))
    assert "3 pictures" in str(error.value)
    assert "does not exist" in str(error.value)


def test_formats_that_cannot_be_read_and_copies_are_noted(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png")
    (tmp_path / "c.HEIC").write_bytes(b"x")
    notes = read(tmp_path).notes
    assert any("c.HEIC" in note and "convert" in note for note in notes)
    assert any("b.png" in note and "byte for byte" in note for note in notes)


# --- every mode becomes upright RGB ---------------------------------------------------------------------------


def palette(path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(path)


def transparent_palette(path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(path, transparency=1)


def animated(path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((10, 20, 30), (200, 0, 0))]
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)


MODES: dict[str, tuple[str, Callable[[Path], None], tuple[int, int, int]]] = {
    "rgb": ("a.png", lambda p: Image.new("RGB", (4, 4), (10, 20, 30)).save(p), (10, 20, 30)),
    "transparent": ("a.png", lambda p: Image.new("RGBA", (4, 4), (10, 20, 30, 0)).save(p), (255, 255, 255)),
    "half transparent": ("a.png", lambda p: Image.new("RGBA", (4, 4), (0, 0, 0, 128)).save(p), (127, 127, 127)),
    "grey": ("a.png", lambda p: Image.new("L", (4, 4), 77).save(p), (77, 77, 77)),
    "grey alpha": ("a.png", lambda p: Image.new("LA", (4, 4), (77, 0)).save(p), (255, 255, 255)),
    "16-bit grey": ("a.png", lambda p: Image.new("I;16", (4, 4), 128 * 257).save(p), (128, 128, 128)),
    "16-bit tiff": ("a.tif", lambda p: Image.new("I;16", (4, 4), 65535).save(p), (255, 255, 255)),
    "float tiff": ("a.tif", lambda p: Image.new("F", (4, 4), 0.5).save(p), (128, 128, 128)),
    "1-bit": ("a.png", lambda p: Image.new("1", (4, 4), 1).save(p), (255, 255, 255)),
    "cmyk": ("a.jpg", lambda p: Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(p), (255, 0, 0)),
    "palette": ("a.png", palette, (10, 20, 30)),
    "transparent palette": ("a.png", transparent_palette, (255, 255, 255)),
    "animated": ("a.webp", animated, (10, 20, 30)),
    "wrong extension": ("a.jpg", lambda p: Image.new("RGB", (4, 4), (10, 20, 30)).save(p, "PNG"), (10, 20, 30)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    name, write, expected = MODES[mode]
    write(tmp_path / name)
    manifest = read(tmp_path, captions=CaptionConfig(source="none"), min_side=1)
    image = load_picture(manifest.pictures[0].path)
    assert (image.mode, image.size) == ("RGB", (4, 4))
    assert np.abs(np.asarray(image, int) - expected).max() <= 2


def test_sizes_are_those_of_the_upright_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.new("RGB", (40, 24)).save(tmp_path / "a.jpg", exif=exif)
    picture = read(tmp_path, captions=CaptionConfig(source="none")).pictures[0]
    assert (picture.width, picture.height) == load_picture(picture.path).size == (24, 40)


def test_a_tiny_picture_is_named_and_a_strip_can_be_allowed(tmp_path: Path) -> None:
    draw(tmp_path / "strip.png", size=(1, 10_000))
    with pytest.raises(ValueError, match=r"1 picture has a side shorter than 16 pixels .*strip\.png \(1x10000\)"):
        read(tmp_path)
    assert read(tmp_path, min_side=1).pictures[0].height == 10_000


# --- masks ----------------------------------------------------------------------------------------------------


def mask(path: Path, value: int = 255, size: tuple[int, int] = (24, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)


def test_masks_beside_the_pictures_are_found_and_are_no_pictures(tmp_path: Path) -> None:
    draw(tmp_path / "a.jpg")
    mask(tmp_path / "a-MaskLabel.png")
    (picture,) = read(tmp_path, masks=MaskConfig()).pictures
    assert picture.mask == tmp_path / "a-MaskLabel.png"
    assert len(picture.mask_digest) == 64
    manifest = read(tmp_path)
    assert [p.name for p in manifest.pictures] == ["a.jpg"]
    assert any("1 mask" in note and "Mask Loader" in note for note in manifest.notes)


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
    with pytest.raises(ValueError, match=r"1 picture has no mask \(<name>-masklabel\.png\) in .*: a\.png"):
        read(tmp_path, masks=MaskConfig())
    manifest = read(tmp_path, masks=MaskConfig(missing="ones"))
    assert manifest.pictures[0].mask is None
    assert any("whole area trains: a.png" in note for note in manifest.notes)


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


# --- digest and fingerprint -----------------------------------------------------------------------------------


def test_the_digest_is_of_content_not_of_names_and_times(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        draw(tmp_path / folder / "1.png")
        draw(tmp_path / folder / "2.png", (1, 2, 3))
    os.rename(tmp_path / "y" / "2.png", tmp_path / "y" / "3.png")
    os.rename(tmp_path / "y" / "2.txt", tmp_path / "y" / "3.txt")
    os.utime(tmp_path / "y" / "1.png", (5, 5))
    digest = manifest_digest(read(tmp_path / "x"))
    assert manifest_digest(read(tmp_path / "y")) == digest
    (tmp_path / "x" / "1.txt").write_text("another")
    assert manifest_digest(read(tmp_path / "x")) != digest
    draw(tmp_path / "y" / "1.png", (200, 30, 41))
    assert manifest_digest(read(tmp_path / "y")) != digest


def test_the_digest_counts_masks_and_concepts(tmp_path: Path) -> None:
    draw(tmp_path / "x" / "a.png")
    draw(tmp_path / "y" / "a.png")
    mask(tmp_path / "x" / "a-masklabel.png", 100)
    digests = {manifest_digest(read(tmp_path / "x", masks=masks)) for masks in (None, MaskConfig())}
    mask(tmp_path / "x" / "a-masklabel.png", 101)
    digests.add(manifest_digest(read(tmp_path / "x", masks=MaskConfig())))
    both = tuple(ConceptConfig(folder=str(tmp_path / name)) for name in "xy")
    digests.add(manifest_digest(scan(DatasetConfig(concepts=both))))
    assert len(digests) == 4


def test_the_fingerprint_changes_with_whatever_a_scan_reads(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "other.log").write_text("x")
    masks = MaskConfig(folder=str(tmp_path / "m"), missing="ones")
    concept = ConceptConfig(folder=str(tmp_path), masks=masks)

    def now() -> str:
        return fingerprint(DatasetConfig(concepts=(concept,)))

    seen = [now()]
    assert now() == seen[0]
    (tmp_path / "other.log").write_text("changed, but of no concern")
    assert now() == seen[0]
    os.utime(tmp_path / "a.png", (7, 7))  # only touched
    assert now() == seen[0]
    for change in (
        lambda: (tmp_path / "a.txt").write_text("a longer caption"),
        lambda: draw(tmp_path / "b.png"),
        lambda: os.rename(tmp_path / "b.png", tmp_path / "c.png"),
        lambda: mask(tmp_path / "m" / "a-masklabel.png"),
    ):
        change()
        seen.append(now())
    concept = concept.replace(repeats=2)
    seen.append(now())
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_of_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    def now(folder: str) -> str:
        return fingerprint(DatasetConfig(concepts=(ConceptConfig(folder=folder),)))

    missing = now(str(tmp_path / "gone"))
    assert now("") != missing
    draw(tmp_path / "gone" / "a.png")
    assert now(str(tmp_path / "gone")) != missing


# --- roles and repeats ----------------------------------------------------------------------------------------


def test_every_role_is_scanned_alike_and_planned_by_what_it_is_for(tmp_path: Path) -> None:
    folders = {"train": 4, "regularisation": 2, "validation": 3}
    for number, (role, count) in enumerate(folders.items()):
        for i in range(count):
            draw(tmp_path / role / f"{i}.png", (10 * number, i, 0))
    concepts = tuple(ConceptConfig(folder=str(tmp_path / role), role=role) for role in folders)  # type: ignore
    dataset = DatasetConfig(concepts=concepts)
    manifest = scan(dataset)
    assert Counter(p.concept for p in manifest.pictures) == {0: 4, 1: 2, 2: 3}
    assert Counter((f.concept, f.fate) for f in manifest.fates) == {
        (number, fate): count for number, count in enumerate(folders.values()) for fate in ("picture", "caption")
    }
    plan = build_plan(manifest, dataset, TrainConfig(epochs=1, resolution=64))
    visits = Counter(sample.picture for k in range(plan.steps) for mb in plan.step(k) for sample in mb.samples)
    assert visits == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert [sample.picture for sample in plan.validation] == [6, 7, 8]
    with pytest.raises(ValueError, match="No concept has the role train, only regularisation and validation"):
        rest = dataset.replace(concepts=concepts[1:])
        build_plan(scan(rest), rest, TrainConfig())


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("a.png", 1),
        ("10_cat/a.png", 10),
        ("1_cat/a.png", 1),
        ("007_bond/a.png", 7),
        ("3_/a.png", 3),
        ("5_a b_c/a.png", 5),
        ("1000_x/a.png", 1000),
        ("1001_x/a.png", 1),
        ("2023_summer/a.png", 1),
        ("0_x/a.png", 1),
        ("10cat/a.png", 1),
        ("10_cat.png", 1),
        ("cat_10/a.png", 1),
        ("sub/10_cat/a.png", 1),
        ("10_cat/20_dog/a.png", 10),
        ("²_cat/a.png", 1),
        ("-5_cat/a.png", 1),
    ],
)
def test_the_first_folder_states_the_repeats(name: str, repeats: int) -> None:
    assert folder_repeats(name) == repeats


def test_the_folders_of_sd_scripts_repeat_their_pictures_and_say_so(tmp_path: Path) -> None:
    draw(tmp_path / "10_red cat" / "a.png", (1, 0, 0))
    draw(tmp_path / "2_dog" / "b.png", (2, 0, 0))
    draw(tmp_path / "2023_summer" / "c.png", (3, 0, 0))
    draw(tmp_path / "d.png", (4, 0, 0))
    manifest = read(tmp_path)
    assert {p.name: p.repeats for p in manifest.pictures} == {
        "2_dog/b.png": 2,
        "10_red cat/a.png": 10,
        "2023_summer/c.png": 1,
        "d.png": 1,
    }
    assert [note for note in manifest.notes if "repeated" in note] == [
        "The pictures of 2_dog are repeated 2 times, as its name says.",
        "The pictures of 10_red cat are repeated 10 times, as its name says.",
    ]
    plain = read(tmp_path, folder_repeats=False)
    assert {p.repeats for p in plain.pictures} == {1}
    assert not any("repeated" in note for note in plain.notes)
    assert manifest_digest(plain) != manifest_digest(manifest)


@pytest.mark.parametrize("understood", [True, False])
def test_the_name_of_a_folder_is_a_caption_without_its_repeats(tmp_path: Path, understood: bool) -> None:
    for folder in ("10_red cat", "2023_summer", "plain"):
        draw(tmp_path / folder / "a.png", caption=None)
    options: dict[str, Any] = {"captions": CaptionConfig(source="folder_name"), "folder_repeats": understood}
    lines = {p.name.split("/")[0]: p.lines for p in read(tmp_path, **options).pictures}
    assert lines == {
        "10_red cat": ("red cat" if understood else "10_red cat",),
        "2023_summer": ("2023_summer",),  # a year is no number of repeats
        "plain": ("plain",),
    }


# --- caption tables and files ---------------------------------------------------------------------------------

ROWS = {"a.png": "a cat", "sub/b.png": "a dog"}
TABLES = {
    "metadata.jsonl": "".join(json.dumps({"file_name": n, "text": t}) + "\n" for n, t in ROWS.items()),
    "metadata.csv": "file_name,text\n" + "".join(f'{n},"{t}"\n' for n, t in ROWS.items()),
    "captions.tsv": "image\tcaption\n" + "".join(f"{n}\t{t}\n" for n, t in ROWS.items()),
    "captions.json": json.dumps(ROWS),
    "meta_cap.json": json.dumps({name.rsplit(".")[0]: {"caption": text} for name, text in ROWS.items()}),
}


def table_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    draw(folder / "a.png", (1, 0, 0), caption=None)
    draw(folder / "sub" / "b.png", (2, 0, 0), caption=None)
    return folder


@pytest.mark.parametrize("place", ["found", "named", "elsewhere", "above"])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_gives_each_picture_its_caption_wherever_it_lies(tmp_path: Path, name: str, place: str) -> None:
    folder = table_folder(tmp_path)
    at = {"elsewhere": tmp_path / "tables" / name, "above": tmp_path / name}.get(place, folder / name)
    at.parent.mkdir(exist_ok=True)
    at.write_text(TABLES[name], encoding="utf-8")
    file = {"found": "", "named": name, "elsewhere": str(at), "above": f"../{name}"}[place]
    manifest = read(folder, captions=CaptionConfig(source="table", file=file))
    assert {p.name: p.lines for p in manifest.pictures} == {name: (text,) for name, text in ROWS.items()}
    fates = {fate.name: (fate.fate, fate.why) for fate in manifest.fates}
    inside = {name: ("caption", "of all pictures")} if at.parent == folder else {}
    assert fates == {"a.png": ("picture", ""), "sub/b.png": ("picture", ""), **inside}


def test_what_a_table_lacks_and_what_it_names_in_vain_is_told(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    (folder / "metadata.csv").write_text("file_name,text\na.png,a cat\nold/b.png,a dog\ngone.png,x\n")
    captions = CaptionConfig(source="table")
    manifest = read(folder, captions=captions)
    assert [p.lines for p in manifest.pictures] == [("a cat",), ("a dog",)]
    assert "1 entry names no picture in metadata.csv: gone.png." in manifest.notes
    assert "1 picture was found in metadata.csv by the file name alone: sub/b.png." in manifest.notes
    (folder / "metadata.csv").write_text("file_name,text\na.png,a cat\n")
    with pytest.raises(ValueError, match=r"^1 picture has no entry in metadata\.csv: sub/b\.png; write captions"):
        read(folder, captions=captions)
    manifest = read(folder, captions=captions, on_problem="leave_out")
    assert [p.name for p in manifest.pictures] == ["a.png"]
    assert {f.name: (f.fate, f.why) for f in manifest.fates}["sub/b.png"] == ("left out", "without a caption")
    assert any(note.startswith("Left out: 1 picture has no entry in metadata.csv") for note in manifest.notes)
    assert read(folder, captions=captions.replace(missing="empty")).pictures[1].lines == ()


@pytest.mark.parametrize("source", ["one_file", "table"])
def test_a_caption_file_that_cannot_be_used_is_named(tmp_path: Path, source: Any) -> None:
    folder = table_folder(tmp_path)
    if source == "table":
        with pytest.raises(ValueError, match=r"There is no table of captions in .*metadata\.jsonl"):
            read(folder, captions=CaptionConfig(source=source))
    captions = CaptionConfig(source=source, file="captions.csv")
    with pytest.raises(ValueError, match=r"The caption file .*captions\.csv does not exist; check its spelling"):
        read(folder, captions=captions)
    (folder / "captions.csv").mkdir()
    with pytest.raises(ValueError, match=r"The caption file .*captions\.csv does not exist"):
        read(folder, captions=captions)
    (folder / "captions.csv").rmdir()
    (folder / "captions.csv").write_bytes("größe,größe".encode("latin-1"))
    for on_problem in ("stop", "leave_out"):  # all captions are lost: nothing can be left out
        with pytest.raises(ValueError, match=r"captions\.csv is not UTF-8 text"):
            read(folder, captions=captions, on_problem=on_problem)
    (folder / "captions.csv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"captions\.csv (holds no captions|is empty)"):
        read(folder, captions=captions)


def test_one_file_holds_the_lines_of_all_pictures(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    (folder / "all.txt").write_text("a cat\n\na feline\n")
    manifest = read(folder, captions=CaptionConfig(source="one_file", file="all.txt"))
    assert [p.lines for p in manifest.pictures] == [("a cat", "a feline")] * 2
    assert {f.name: f.why for f in manifest.fates}["all.txt"] == "of all pictures"
    assert any("several lines, and each visit takes one in turn: all.txt" in note for note in manifest.notes)


def test_several_endings_are_tried_in_order_and_counted(tmp_path: Path) -> None:
    for i, endings in enumerate([(".txt",), (".txt", ".caption"), (".caption",), (".TXT",)]):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption=None)
        for ending in endings:
            (tmp_path / f"{i}{ending}").write_text(ending)
    manifest = read(tmp_path, captions=CaptionConfig(extensions=(".txt", ".caption")))
    assert [p.lines for p in manifest.pictures] == [(".txt",), (".txt",), (".caption",), (".TXT",)]
    assert "Captions come from 3 .txt files, 1 .caption files." in manifest.notes
    assert {f.name: f.fate for f in manifest.fates}["1.caption"] == "not used"
    turned = read(tmp_path, captions=CaptionConfig(extensions=(".caption", ".txt")))
    assert [p.lines for p in turned.pictures] == [(".txt",), (".caption",), (".caption",), (".TXT",)]


def test_if_all_captions_are_missing_the_sentence_says_so_and_where_they_are(tmp_path: Path) -> None:
    for i in range(3):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption=None)
        (tmp_path / f"{i}.caption").write_text("here")
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    assert str(error.value) == (
        f"None of the 3 pictures has a caption; 3 pictures have no .txt caption in {tmp_path}, although 3 .caption "
        "files lie there (set the caption extension to .caption): 0.png, 1.png, 2.png; write captions, set missing "
        "captions to empty, or set on_problem to leave_out."
    )
    (tmp_path / "1.txt").write_text("one")
    with pytest.raises(ValueError, match=r"^2 pictures have no \.txt caption in .*, although 3 \.caption files lie"):
        read(tmp_path)
    notes = read(tmp_path, captions=CaptionConfig(missing="empty")).notes
    assert any(note.startswith("2 pictures have no caption and train with an empty one, although 3") for note in notes)


def test_braces_are_pointed_out_where_wildcards_are_off(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", (1, 0, 0), caption="a {red|blue} cat")
    draw(tmp_path / "b.png", (2, 0, 0), caption="a {plain} cat")
    sentence = "1 caption contains {a|b}, taken as it stands as wildcards are off: a.png."
    assert sentence in read(tmp_path).notes
    assert sentence not in read(tmp_path, captions=CaptionConfig(wildcards=True)).notes


# --- more on masks --------------------------------------------------------------------------------------------


def test_pictures_without_a_mask_can_be_left_out(tmp_path: Path) -> None:
    for i in range(4):
        draw(tmp_path / f"{i}.png", (i, 0, 0))
    mask(tmp_path / "1-masklabel.png")
    manifest = read(tmp_path, masks=MaskConfig(missing="leave_out"))
    assert [p.name for p in manifest.pictures] == ["1.png"]
    assert any(
        note == f"Left out: 3 pictures have no mask (<name>-masklabel.png) in {tmp_path}: 0.png, 2.png, 3.png."
        for note in manifest.notes
    )
    fates = {f.name: (f.fate, f.why) for f in manifest.fates}
    assert fates["0.png"] == ("left out", "without a mask")
    assert fates["1-masklabel.png"] == ("mask", "of 1.png")


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
    assert {f.name: f.fate for f in manifest.fates}["a-masklabel.png"] == "not used"


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


def test_every_file_has_its_fate(tmp_path: Path) -> None:
    for i, name in enumerate(("fine.png", "bare.png", "sub/deep.jpg")):
        draw(tmp_path / name, (i, 0, 0))
    draw(tmp_path / "mute.png", (9, 0, 0), caption=None)
    for name in ("fine", "mute", "sub/deep"):
        mask(tmp_path / f"{name}-masklabel.png")
    for name in (".DS_Store", "notes.md", "raw.cr2", "lonely.txt", "broken.png"):
        (tmp_path / name).write_bytes(b"x")
    draw(tmp_path / "tiny.png", size=(24, 4))
    fates = read(tmp_path, masks=MaskConfig(), on_problem="leave_out").fates
    assert {fate.name: (fate.fate, fate.why) for fate in fates} == {
        ".DS_Store": ("not used", "hidden, or of the system"),
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


# --- what a fingerprint notices -------------------------------------------------------------------------------


def masked_folder(folder: Path) -> Path:
    """Write four pictures in two folders, with captions and masks."""
    for i, name in enumerate(("1", "2", "sub/3", "sub/4")):
        draw(folder / f"{name}.png", (i, 0, 0), size=(96, 64))
        mask(folder / f"{name}-masklabel.png", 50 + i, size=(96, 64))
    return folder


CHANGES: dict[str, Callable[[Path], object]] = {
    "caption": lambda f: (f / "1.txt").write_text("another"),
    "caption of the same length": lambda f: (f / "1.txt").write_text("a dog"),
    "caption added": lambda f: (f / "new.txt").write_text("a cat"),
    "caption removed": lambda f: (f / "1.txt").unlink(),
    "picture": lambda f: draw(f / "1.png", (99, 0, 0)),
    "picture added": lambda f: draw(f / "5.png"),
    "picture removed": lambda f: (f / "sub" / "4.png").unlink(),
    "picture renamed": lambda f: os.rename(f / "1.png", f / "one.png"),
    "pictures exchanged": lambda f: (
        os.rename(f / "1.png", f / "x"),
        os.rename(f / "2.png", f / "1.png"),
        os.rename(f / "x", f / "2.png"),
    ),
    "folder renamed": lambda f: os.rename(f / "sub", f / "10_sub"),
    "mask": lambda f: mask(f / "1-masklabel.png", 200),
    "mask removed": lambda f: (f / "1-masklabel.png").unlink(),
    "table added": lambda f: (f / "metadata.jsonl").write_text("{}"),
    "a file that cannot be read": lambda f: (f / "a.heic").write_bytes(b"x"),
    "everything": shutil.rmtree,
}


@pytest.mark.parametrize("remembered", [True, False], ids=["with an index", "without"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_fingerprint_notices_every_change(
    tmp_path: Path, change: Callable[[Path], object], remembered: bool
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), masks=MaskConfig()),))
    with Index(tmp_path / "index.sqlite") as file:
        index = file if remembered else None
        before = fingerprint(dataset, index)
        assert fingerprint(dataset, index) == before
        change(folder)
        assert fingerprint(dataset, index) != before


@pytest.mark.parametrize("name", ["other.log", "._1.png", ".DS_Store", "Thumbs.db", ".git/1.png"])
def test_the_fingerprint_does_not_mind_what_no_scan_reads(tmp_path: Path, name: str) -> None:
    folder = masked_folder(tmp_path)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    before = fingerprint(dataset)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert fingerprint(dataset) == before


@pytest.mark.parametrize("source", ["one_file", "table"])
def test_the_fingerprint_notices_a_caption_file_elsewhere(tmp_path: Path, source: Any) -> None:
    folder, table = table_folder(tmp_path), tmp_path / "elsewhere" / "captions.csv"
    captions = CaptionConfig(source=source, file=str(table))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), captions=captions),))
    seen = [fingerprint(dataset)]
    for text in ("a.png,a cat\n", "a.png,a dog\n"):
        table.parent.mkdir(exist_ok=True)
        table.write_text(text)
        seen.append(fingerprint(dataset))
    (table.parent / "other.csv").write_text("x")
    assert fingerprint(dataset) == seen[-1]
    table.unlink()
    assert fingerprint(dataset) not in seen[1:]
    assert len(set(seen)) == 3


class Counting:
    """Count the calls of functions of the scan by the bytes that they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for module, name in ((scan_module.pictures, "examine"), (scan_module.masks, "examine_mask")):
            monkeypatch.setattr(module, name, self.counted(name, getattr(module, name)))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call

    def take(self) -> Counter[str]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, Counter()
        return calls


def test_touching_changes_nothing_and_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    folder = masked_folder(tmp_path / "pictures")
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), masks=MaskConfig()),))
    with Index(tmp_path / "index.sqlite") as index:
        manifest, before = scan(dataset, index), fingerprint(dataset, index)
        assert counting.take() == {"examine": 4, "examine_mask": 4}
        for path in folder.rglob("*.*"):
            os.utime(path, (10**9, 10**9))
        assert fingerprint(dataset, index) == before
        assert scan(dataset, index) == manifest
        os.rename(folder / "1.png", folder / "9.png")
        os.rename(folder / "1.txt", folder / "9.txt")
        os.rename(folder / "1-masklabel.png", folder / "9-masklabel.png")
        assert len(scan(dataset, index).pictures) == 4
        assert not counting.take()
        draw(folder / "2.png", (77, 0, 0), size=(96, 64))
        assert scan(dataset, index) != manifest
        assert counting.take() == {"examine": 1}


def test_reading_can_be_stopped_and_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting, told = Counting(monkeypatch), []
    monkeypatch.setattr(scan_module.index, "CHUNK", 3)
    for i in range(10):
        draw(tmp_path / "pictures" / f"{i}.png", (i, 0, 0))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path / "pictures")),))

    class Stop(BaseException):
        """Stands for ComfyUI's interrupt."""

    def check() -> None:
        if len(told) == 2:
            raise Stop

    with pytest.raises(Stop), Index(tmp_path / "index.sqlite") as index:
        scan(dataset, index, Callbacks(check=check, phase=lambda *phase: told.append(phase)))
    assert told == [("reading files", 3, 10), ("reading files", 6, 10)]
    assert counting.take() == {"examine": 6}
    with Index(tmp_path / "index.sqlite") as index:
        assert len(scan(dataset, index).pictures) == 10
    assert counting.take() == {"examine": 4}


@pytest.mark.parametrize("moment", ["list_files", "examine_pictures", "read_captions", "read_masks"])
@pytest.mark.parametrize("on_problem", ["stop", "leave_out"])
def test_a_folder_that_vanishes_during_the_scan_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, on_problem: Any
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    original = getattr(scan_module, moment)

    def vanish(*arguments: Any) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return original(*arguments)

    monkeypatch.setattr(scan_module, moment, vanish)
    with pytest.raises(ValueError, match=str(folder)) as error:
        read(folder, masks=MaskConfig(), on_problem=on_problem)
    assert type(error.value) is ValueError


# --- between the scan and the store ---------------------------------------------------------------------------


class Halves(torch.nn.Module):
    """An autoencoder that keeps the mean of each 8 x 8 pixels."""

    dtype = torch.float32

    def encode(self, batch: torch.Tensor) -> SimpleNamespace:
        means = torch.nn.functional.avg_pool2d(batch, 8)
        return SimpleNamespace(latents=torch.cat([means, means[:, :1]], dim=1))


BASE: Any = SimpleNamespace(vae=Halves(), identity={"vae": "means"}, name="base", family=FAMILIES["sd1"], texts=())
TRAIN = TrainConfig(
    epochs=1, resolution=64, bucket_step=32, buckets=BucketConfig(resolutions=("64", "96"), resolution_mode="all")
)


def dataset_of(folder: Path) -> DatasetConfig:
    return DatasetConfig(concepts=(ConceptConfig(folder=str(folder), masks=MaskConfig()),))


def planned(folder: Path) -> Plan:
    dataset = dataset_of(folder)
    return build_plan(scan(dataset), dataset, TRAIN)


def encode(plan: Plan, cache: Path, **callbacks: Any) -> dict[str, torch.Tensor]:
    """Encode a plan and return mean and mask of everything that it asks for."""
    with Store(cache) as store:
        encoded = encode_plan(BASE, plan, store, torch.device("cpu"), Callbacks(**callbacks), prompts=None)
        samples = [sample for k in range(plan.steps) for mb in plan.step(k) for sample in mb.samples]
        found = {f"{s.picture} {s.crop}": encoded.latents(s)[0].clone() for s in samples}
        for sample in samples:
            covered = encoded.mask(sample)
            assert covered is not None
            found[f"mask {sample.picture} {sample.crop}"] = covered.clone()
    return found


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a picture is deleted": (lambda f: (f / "2.png").unlink(), r"2\.png has vanished since the scan"),
    "a picture is changed": (lambda f: draw(f / "2.png", (9, 9, 9), (96, 64)), r"2\.png has changed since the scan"),
    "a picture is cut short": (lambda f: (f / "2.png").write_bytes(b""), r"2\.png has changed since the scan"),
    "a mask is deleted": (lambda f: (f / "2-masklabel.png").unlink(), r"2-masklabel\.png has vanished since the scan"),
    "a mask is changed": (
        lambda f: mask(f / "2-masklabel.png", 9, (96, 64)),
        r"2-masklabel\.png has changed since the scan",
    ),
    "the folder vanishes": (shutil.rmtree, r"1\.png has vanished since the scan"),
    "a sub-folder vanishes": (lambda f: shutil.rmtree(f / "sub"), r"sub/3\.png has vanished since the scan"),
}


@pytest.mark.parametrize(("change", "sentence"), GONE.values(), ids=GONE)
def test_what_changes_after_the_scan_is_named_and_never_stored(
    tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    plan, cache = planned(folder), tmp_path / "cache"
    expected = encode(plan, tmp_path / "other cache")
    shutil.copytree(folder, tmp_path / "kept")
    change(folder)
    with pytest.raises(ValueError, match=sentence) as error:
        encode(plan, cache)
    assert str(error.value).count(". ") == 0
    assert str(error.value).endswith(".")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "kept", folder)
    assert equal(encode(plan, cache), expected)  # nothing wrong was stored under the old names


@pytest.mark.parametrize("name", ["a picture is changed", "a mask is changed"])
def test_a_changed_file_never_meets_what_was_stored_of_the_old_one(tmp_path: Path, name: str) -> None:
    folder = masked_folder(tmp_path / "pictures")
    before = encode(planned(folder), tmp_path / "cache")
    GONE[name][0](folder)
    after = encode(planned(folder), tmp_path / "cache")
    assert equal(after, encode(planned(folder), tmp_path / "empty cache"))
    assert {item for item in after if not torch.equal(after[item], before[item])} == {
        item for item in after if item.startswith("mask 1" if "mask" in name else "1 ")
    }


def test_a_run_says_in_one_sentence_what_changed_under_its_feet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    for name in ("check_base_model", "find_tokenizer", "load_tokenizer"):
        monkeypatch.setattr(train_module, name, lambda *_: None)
    monkeypatch.setattr(train_module, "load_base_model", lambda *_: BASE)
    config = RunConfig(base_model=BaseModelConfig(path="x.safetensors"), dataset=dataset_of(folder), train=TRAIN)
    notes: list[str] = []

    def vanish(note: str) -> None:
        """Take the folder away as soon as the scan has told its report."""
        notes.append(note)
        shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(
        ValueError, match=rf"^1\.png has vanished since the scan .*{folder}.*put it back, or start again"
    ):
        train_module.train_lora(
            config, tmp_path / "a.safetensors", tmp_path / "cache", callbacks=Callbacks(note=vanish)
        )
    assert "4 pictures" in notes[0]
    assert not list(tmp_path.glob("*.safetensors"))


def test_nothing_is_ever_written_into_the_folder_of_the_pictures(tmp_path: Path) -> None:
    folder = masked_folder(tmp_path / "pictures")

    def state() -> dict[str, tuple[int, int]]:
        """Return size and time of every file and folder; a file that came and went changes its folder's time."""
        paths = [folder, *folder.rglob("*")]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    before = state()
    with Index(tmp_path / "index.sqlite") as index:
        dataset = dataset_of(folder)
        fingerprint(dataset, index)
        plan = build_plan(scan(dataset, index), dataset, TRAIN)
    encode(plan, tmp_path / "cache")
    report(plan)
    assert state() == before


def test_a_full_disk_is_told_before_anything_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(masked_folder(tmp_path / "pictures"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(encode_module, "load_picture", lambda *_: pytest.fail("a picture was read"))
    with pytest.raises(ValueError, match=r"The cache needs \d+ MB and 0 MB are free in .*cache; make room\."):
        encode(plan, tmp_path / "cache")


def test_what_was_encoded_before_the_disk_was_full_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, cache = planned(masked_folder(tmp_path / "pictures")), tmp_path / "cache"
    expected = encode(plan, tmp_path / "other cache")
    monkeypatch.setattr(store_module, "SHARD_BYTES", 0)  # every entry is written at once
    write, written = store_module._write, []

    def fill(path: Path, data: bytes) -> None:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_write", fill)
        with pytest.raises(StoreError, match=rf"{cache} cannot be written: No space left on device; free space"):
            encode(plan, cache)
    assert sorted(cache.glob("shard-*")) == sorted(written)
    done: list[tuple[str, int, int]] = []
    assert equal(encode(plan, cache, phase=lambda *phase: done.append(phase)), expected)
    assert done[-1] == ("encoding pictures", 8 - 3, 8 - 3)
