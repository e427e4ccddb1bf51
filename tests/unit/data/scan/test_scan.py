"""A scan reads every sort of picture, and names every file it cannot use."""

import io
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from scan_folder import draw, read
from windows_rules import on_linux, rules

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, TrainConfig
from lora_atelier.trainer_core.data.images import load_picture
from lora_atelier.trainer_core.data.looks import look_at
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import fingerprint, folder_repeats, manifest_digest, names, natural_order, scan


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


@on_linux
def test_what_windows_cannot_open_is_named_with_the_reason(tmp_path: Path) -> None:
    deep = "/".join("d" * 70 for _ in range(4))
    for i, name in enumerate(("a.png", f"{deep}/b.png", "dotted./c.png", f"{'e' * 90}/{'f' * 150}.png")):
        draw(tmp_path / name, (i, 0, 0), caption=None)
    none = CaptionConfig(source="none")
    with rules(), pytest.raises(ValueError, match=r"2 folders in .* cannot be opened: ") as raised:
        read(tmp_path, captions=none)
    assert "d, dotted.; its path is too long, or its name ends in a dot or a space; rename it" in str(raised.value)
    assert "1 picture in" in str(raised.value) and "(its path is too long); replace" in str(raised.value)
    with rules():
        left = read(tmp_path, captions=none, on_problem="leave_out")
    assert [picture.name for picture in left.pictures] == ["a.png"] and len(left.notes) == 2
    assert len(read(tmp_path, captions=none).pictures) == 4


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


def test_a_missing_folder_is_shown_resolved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist") as error:
        read(tmp_path / "x" / ".." / "gone")
    assert str(tmp_path / "gone") in str(error.value)
    with pytest.raises(ValueError, match="no folder"):
        read("  ")
    with pytest.raises(ValueError, match="is a file"):
        read(draw(tmp_path / "a.png"))


def test_a_folder_without_pictures_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty; put pictures"):
        read(tmp_path)
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("x")
    draw(tmp_path / "one" / "a.png")
    (tmp_path / "two").mkdir()
    with pytest.raises(ValueError, match=r"12 \.txt files, 2 folders; set recursive of"):
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
    (tmp_path / "c.CR2").write_bytes(b"x")
    notes = read(tmp_path).notes
    assert any("c.CR2" in note and "convert" in note for note in notes)
    assert any("b.png" in note and "repeats another one exactly" in note for note in notes)


def test_trained_pictures_among_those_of_validation_are_named(tmp_path: Path) -> None:
    draw(tmp_path / "train" / "a.png", (1, 0, 0))
    draw(tmp_path / "held" / "x.png", (1, 0, 0))
    draw(tmp_path / "held" / "y.png", (2, 0, 0))
    concepts = [
        ConceptConfig(folder=str(tmp_path / "train")),
        ConceptConfig(folder=str(tmp_path / "held"), role="validation"),
    ]
    for order in (concepts, concepts[::-1]):
        notes = scan(DatasetConfig(concepts=tuple(order))).notes
        assert [
            note
            for note in notes
            if "1 validation picture is trained, too" in note and "x.png (trained as a.png)" in note
        ]
    (tmp_path / "held" / "x.png").unlink()
    assert not any("validation" in note for note in scan(DatasetConfig(concepts=tuple(concepts))).notes)


def test_pictures_that_need_a_package_stop_the_run_and_name_it(tmp_path: Path) -> None:
    (tmp_path / "c.HEIC").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"^1 picture needs the Python package pillow-heif .*c\.HEIC; install it"
    ) as error:
        read(tmp_path)
    assert "no picture" not in str(error.value)
    draw(tmp_path / "a.png")
    (tmp_path / "d.jxl").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"2 pictures need .* pillow-heif and pillow-jxl-plugin .*: c\.HEIC, d\.jxl"):
        read(tmp_path)
    manifest = read(tmp_path, on_problem="leave_out")
    assert [picture.name for picture in manifest.pictures] == ["a.png"]
    assert any(note.startswith("Left out: 2 pictures need") for note in manifest.notes)


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


def test_every_role_is_scanned_alike_and_planned_by_what_it_is_for(tmp_path: Path) -> None:
    folders = {"train": 4, "regularisation": 2, "validation": 3, "prior_prediction": 1}
    for number, (role, count) in enumerate(folders.items()):
        for i in range(count):
            draw(tmp_path / role / f"{i}.png", (10 * number, i, 0))
    concepts = tuple(ConceptConfig(folder=str(tmp_path / role), role=role) for role in folders)  # type: ignore
    dataset = DatasetConfig(concepts=concepts)
    manifest = scan(dataset)
    assert Counter(p.concept for p in manifest.pictures) == {0: 4, 1: 2, 2: 3, 3: 1}
    assert Counter((f.concept, f.outcome) for f in manifest.outcomes) == {
        (number, outcome): count for number, count in enumerate(folders.values()) for outcome in ("picture", "caption")
    }
    plan = build_plan(manifest, dataset, TrainConfig(epochs=1, resolution=64))
    visits = Counter(sample.picture for k in range(plan.steps) for mb in plan.step(k) for sample in mb.samples)
    assert visits == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 9: 1}
    assert [sample.picture for sample in plan.validation] == [6, 7, 8]
    with pytest.raises(ValueError, match="role train, only prior_prediction and regularisation and validation"):
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


def test_a_scan_measures_what_each_picture_looks_like(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    pixels[:8] = pixels[-8:] = 0
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a cat")
    (picture,) = read(tmp_path).pictures
    assert picture.look == look_at(Image.fromarray(pixels)) and picture.look.border == 0.25


@pytest.mark.parametrize(
    ("leave_out", "left"),
    [
        ((), ["a, b.png", "a.png", "b[1].png", "sub/a.png"]),
        (("a.png",), ["a, b.png", "b[1].png", "sub/a.png"]),
        (("SUB/A.PNG", "B[1].png"), ["a, b.png", "a.png"]),
        (("*a.png",), ["a, b.png", "b[1].png"]),
        (("a? b.png", "sub/*"), ["a.png", "b[1].png"]),
    ],
)
def test_pictures_are_left_out_by_name(tmp_path: Path, leave_out: tuple[str, ...], left: list[str]) -> None:
    for name in ("a.png", "a, b.png", "b[1].png", "sub/a.png"):
        draw(tmp_path / name)
    (tmp_path / "b[1].png").with_suffix(".txt").unlink()  # what is left out may be without a caption
    if not any("[1]" in entry for entry in leave_out):
        (tmp_path / "b[1].txt").write_text("a cat")
    manifest = read(tmp_path, leave_out=leave_out)
    assert [picture.name for picture in manifest.pictures] == left
    outcomes = {file.name: (file.outcome, file.why) for file in manifest.outcomes if file.name.endswith(".png")}
    gone = {name for name, outcome in outcomes.items() if outcome == ("left out", "by leave_out of Concept Dataset")}
    assert gone == outcomes.keys() - set(left) and not any("leave_out" in note for note in manifest.notes)


def test_what_leave_out_names_and_nobody_has_is_noted(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (note,) = read(tmp_path, leave_out=("b.png", "c*")).notes
    assert note == f"2 entries of leave_out name no file in {tmp_path}: b.png, c*."
    with pytest.raises(ValueError, match="has no picture"):
        read(tmp_path, leave_out=("*",))


def test_a_folder_of_encoded_pictures_asks_for_the_pictures(tmp_path: Path) -> None:
    (tmp_path / "shard_0000.pkl").write_bytes(b"")
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(ValueError, match="these are latents that another node encoded; choose the folder of their"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["train-00000.parquet", "shard.tar", "pictures.ZIP"])
def test_a_folder_of_packed_pictures_asks_to_unpack_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    kind = Path(name).suffix.lower()
    with pytest.raises(ValueError, match=rf"but 1 \{kind} file; unpack the \{kind} files"):
        read(tmp_path)
