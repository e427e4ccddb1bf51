"""A scan reads every sort of picture, and names every file it cannot use."""

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig
from lora_atelier.trainer_core.images import load_picture
from lora_atelier.trainer_core.scan import Manifest, fingerprint, manifest_digest, natural_order, scan


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
    with pytest.raises(ValueError, match=r"cannot be read: gone\.png \(the file it links to is missing\)"):
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
