"""Clips in a folder: found, captioned, cut to parts and accounted for; or left, by name."""

import sys

import numpy as np
import pytest
from films import SIZE, animated, film, turned
from PIL import Image
from scan_folder import draw

from lora_atelier.trainer_core.config import (
    CaptionConfig,
    ClipConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    Defaults,
    MaskConfig,
    fill_dataset,
)
from lora_atelier.trainer_core.data.films import FILM_EXTENSIONS
from lora_atelier.trainer_core.data.masks import read_mask, read_mask_frames
from lora_atelier.trainer_core.data.scan import Index, fingerprint, glance, manifest_digest, pictures, scan

OF_CLIPS = Defaults(clip_step=4, clip_rate=24.0)


@pytest.fixture
def folder(tmp_path):
    """A picture, films of 10 and of 30 frames, an animated GIF of 6, one of a single frame, and captions."""
    place = tmp_path / "pictures"
    place.mkdir()
    files = {"b.mp4": film(10, sound=True), "c.webm": film(30, format="webm", codec="libvpx-vp9")}
    files |= {"d.gif": animated(6), "e.mkv": film(1, format="matroska", codec="mpeg4")}
    Image.new("RGB", (64, 48)).save(place / "a.png")
    for name, content in files.items():
        (place / name).write_bytes(content)
    for stem in "abcde":
        (place / f"{stem}.txt").write_text(f"words of {stem}", encoding="utf-8")
    return place


def dataset(folder, *, defaults=OF_CLIPS, **settings):
    return fill_dataset(DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **settings),)), defaults)


def outcomes(manifest):
    return {file.name: (file.outcome, file.why) for file in manifest.outcomes if not file.name.endswith(".txt")}


def test_clips_lie_beside_pictures_with_captions_and_every_fate_is_told(folder):
    manifest = scan(dataset(folder, clips=ClipConfig(frames=(9, 17), take="chunk", rate=0.0)))
    found = {picture.name: picture for picture in manifest.pictures}
    assert list(found) == ["a.png", "b.mp4", "c.webm", "d.gif", "e.mkv"]
    assert [picture.lines for picture in found.values()] == [(f"words of {stem}",) for stem in "abcde"]
    assert found["a.png"].clip is None
    assert [(clip.clip.length, clip.clip.starts) for name, clip in found.items() if name != "a.png"] == [
        (9, (0,)),
        (17, (0,)),
        (5, (0,)),
        (1, (0,)),
    ]
    assert outcomes(manifest) == {
        "a.png": ("picture", ""),
        "b.mp4": ("clip", "frames 0 to 8, 9 of them; 1 not used"),
        "c.webm": ("clip", "frames 0 to 16, 17 of them; 13 not used"),
        "d.gif": ("clip", "frames 0 to 4, 5 of them; 1 not used; too short for 9"),
        "e.mkv": ("clip", "frame 0, as a picture; too short for 9"),
    }
    notes = " ".join(manifest.notes)
    assert "2 clips have fewer frames than 9" in notes and "d.gif (5 frames), e.mkv (1, as a picture)" in notes
    assert "b.mp4 (9 of 10), c.webm (17 of 30) frames" in notes
    assert "1 clip has sound, which is not trained: b.mp4" in notes


def test_the_rate_is_the_models_where_it_is_left_open(folder):
    manifest = scan(dataset(folder, clips=ClipConfig(take="full", most_frames=25)))
    frames = {picture.name: picture.clip.frames for picture in manifest.pictures if picture.clip}
    assert frames["b.mp4"] == tuple(range(10))  # 24 per second, as the model
    assert len(frames["d.gif"]) == 14 and frames["d.gif"][:6] == (0, 0, 0, 1, 1, 2)  # 0.6 s at 10 per second


def test_a_model_of_pictures_leaves_clips_by_name_and_sees_first_frames_of_gifs(folder):
    for settings in ({"defaults": Defaults()}, {"defaults": Defaults(), "clips": ClipConfig(step=4)}):
        manifest = scan(dataset(folder, **settings))
        assert [picture.name for picture in manifest.pictures] == ["a.png", "d.gif"]
        assert not any(picture.clip for picture in manifest.pictures)
        notes = " ".join(manifest.notes)
        assert "3 clips are not trained" in notes and "as no base model of clips, such as Wan, is linked" in notes
        assert "b.mp4, c.webm, e.mkv" in notes and "only the first is used: d.gif" in notes
    (folder / "a.png").unlink(), (folder / "d.gif").unlink()
    with pytest.raises(ValueError, match="clips are trained with a base model of clips"):
        scan(dataset(folder, defaults=Defaults()))


def test_broken_clips_are_a_problem_like_any_other(folder):
    (folder / "b.mp4").write_bytes((folder / "b.mp4").read_bytes()[:400])
    (folder / "f.mov").write_bytes(b"no film")
    Image.new("RGB", (8, 8)).save(folder / "g.mp4", "PNG")
    captions = CaptionConfig(missing="empty")
    with pytest.raises(ValueError, match=r"3 clips in .* cannot be read: b.mp4 .*, f.mov .not a video.*g.mp4"):
        scan(dataset(folder, captions=captions))
    manifest = scan(dataset(folder, captions=captions, on_problem="leave_out"))
    assert [picture.name for picture in manifest.pictures] == ["a.png", "c.webm", "d.gif", "e.mkv"]
    assert {outcomes(manifest)[name][0] for name in ("b.mp4", "f.mov", "g.mp4")} == {"left out"}


# content -> its frames, width and height where it is read, and why it is not
ODD = {
    "4K": (lambda: film(2, size=(3840, 2160), codec="mpeg4"), (2, 3840, 2160), ""),
    "a variable rate": (lambda: film(5, rate=10, times=[0, 1, 5, 6, 9]), (5, 64, 48), ""),
    "turned": (lambda: turned(film(5), 90), (5, 48, 64), ""),
    "one frame": (lambda: film(1), (1, 64, 48), ""),
    "alpha": (lambda: film(5, format="webm", codec="libvpx-vp9", pixels="yuva420p"), (5, 64, 48), ""),
    "mkv by another name": (lambda: film(5, format="matroska", codec="mpeg4"), (5, 64, 48), ""),
    "gif by another name": (lambda: animated(5), (5, 64, 48), ""),
    "truncated": (lambda: film(30)[:-900], None, "it is damaged"),
    "three hours": (lambda: film(4, times=(0, 1, 2, 24 * 3 * 3600)), None, "longer than an hour; cut it"),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_clip_is_read_as_it_is_or_left_in_one_sentence(odd, tmp_path):
    build, shape, why = ODD[odd]
    Image.new("RGB", (64, 48)).save(tmp_path / "a.png")
    (tmp_path / "odd.mp4").write_bytes(build())
    clips, captions = ClipConfig(frames=(1,), take="full", rate=0.0), CaptionConfig(missing="empty")
    manifest = scan(dataset(tmp_path, clips=clips, captions=captions, on_problem="leave_out"))
    found = [(len(each.clip.frames), each.width, each.height) for each in manifest.pictures if each.clip]
    assert found == ([shape] if shape else [])
    assert outcomes(manifest)["odd.mp4"][0] == ("clip" if shape else "left out")
    told = [note for note in manifest.notes if "odd.mp4" in note and "cannot be read" in note]
    assert len(told) == (not shape) and all(why in note for note in told), manifest.notes


def masked(number):
    """Draw a mask whose left half is white in odd frames."""
    levels = np.zeros((48, 64, 3), np.uint8)
    levels[:, :32] = 255 * (number % 2)
    return levels


def mask_film(frames, size=SIZE, draw=masked):
    return film(frames, format="matroska", codec="ffv1", pixels="bgr0", size=size, draw=draw)


def test_the_mask_of_a_clip_is_a_picture_or_a_clip_of_as_many_frames(folder):
    (folder / "b-masklabel.mkv").write_bytes(mask_film(10))
    (folder / "c-masklabel.gif").write_bytes(animated(30))
    Image.new("L", SIZE, 200).save(folder / "d-masklabel.png")
    (folder / "e-masklabel.webm").write_bytes(film(1, format="webm", codec="libvpx-vp9"))
    manifest = scan(dataset(folder, masks=MaskConfig(missing="ones")))
    assert {each.name: (each.mask and each.mask.name, each.mask_moves) for each in manifest.pictures} == {
        "a.png": (None, False),
        "b.mp4": ("b-masklabel.mkv", True),
        "c.webm": ("c-masklabel.gif", True),
        "d.gif": ("d-masklabel.png", False),
        "e.mkv": ("e-masklabel.webm", False),
    }
    assert outcomes(manifest)["b-masklabel.mkv"] == ("mask", "of b.mp4")
    bare = scan(dataset(folder))
    assert len(bare.pictures) == 5 and any("4 masks are not used" in note for note in bare.notes)
    assert read_mask(folder / "b-masklabel.mkv", MaskConfig(invert=True)).getextrema() == (255, 255)


def test_a_clip_of_masks_that_does_not_fit_is_a_problem_in_one_sentence(folder):
    Image.new("L", SIZE, 200).save(folder / "a-masklabel.png")
    wrong = {"b": mask_film(9), "c": mask_film(30, (32, 24), lambda n: masked(n)[::2, ::2]), "d": b"no film"}
    for stem, content in wrong.items():
        (folder / f"{stem}-masklabel.mkv").write_bytes(content)
    (folder / "e-masklabel.mkv").write_bytes(mask_film(1, draw=lambda _: np.zeros((48, 64, 3), np.uint8)))
    manifest = scan(dataset(folder, masks=MaskConfig(), on_problem="leave_out"))
    assert [each.name for each in manifest.pictures] == ["a.png", "e.mkv"]
    told = " ".join(manifest.notes)
    assert "1 mask differs in frames from what it covers" in told and "b.mp4 (10, mask 9)" in told
    assert "c.webm (64x48, mask 32x24)" in told and "d-masklabel.mkv (not a video" in told
    assert "1 mask is completely black: e.mkv" in told
    (folder / "a-masklabel.png").unlink()
    (folder / "a-masklabel.mkv").write_bytes(mask_film(3))
    with pytest.raises(ValueError, match=r"2 masks differ in frames .* a.png \(1, mask 3\), b.mp4 \(10, mask 9\)"):
        scan(dataset(folder, masks=MaskConfig()))


def test_the_alpha_of_a_clip_is_its_mask_frame_for_frame(folder):
    for path in folder.iterdir():
        path.unlink()
    Image.new("RGBA", SIZE, (1, 2, 3, 90)).save(folder / "a.png")
    (folder / "b.webm").write_bytes(film(5, format="webm", codec="libvpx-vp9", pixels="yuva420p", draw=veiled))
    (folder / "c.mp4").write_bytes(film(5))
    given = {"masks": MaskConfig(source="alpha", missing="ones"), "captions": CaptionConfig(missing="empty")}
    found = {each.name: each for each in scan(dataset(folder, **given)).pictures}
    assert {name: (bool(each.mask), each.mask_moves) for name, each in found.items()} == {
        "a.png": (True, False),
        "b.webm": (True, True),
        "c.mp4": (False, False),
    }
    with (folder / "b.webm").open("rb") as file:
        masks = dict(read_mask_frames(file, (1, 3), MaskConfig(source="alpha")))
    assert [mask.getpixel((3, 3)) for mask in masks.values()] == [pytest.approx(50, abs=3), pytest.approx(150, abs=3)]


def veiled(number):
    """Draw a grey frame that is less transparent than the one before."""
    return np.full((48, 64, 4), (90, 90, 90, 50 * number), np.uint8)


def test_without_pyav_clips_are_refused_in_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"3 clips need the Python package av to be read in .*; install av"):
        scan(dataset(folder))


def test_clips_have_no_control_pictures(folder, tmp_path):
    (tmp_path / "controls").mkdir()
    for stem in "abcde":
        Image.new("RGB", (64, 48)).save(tmp_path / "controls" / f"{stem}.png")
    controls = ControlConfig(folders=(str(tmp_path / "controls"),))
    with pytest.raises(ValueError, match="4 clips have no control picture"):
        scan(dataset(folder, controls=controls))


def test_a_known_clip_is_not_decoded_again_and_a_changed_one_is_another_dataset(folder, tmp_path, monkeypatch):
    given = dataset(folder)
    with Index(tmp_path / "kept" / "index") as index:
        first = scan(given, index)
        before = fingerprint(given, index)
    monkeypatch.setattr("lora_atelier.trainer_core.data.scan.pictures.examine_film", None)
    with Index(tmp_path / "kept" / "index") as index:
        assert scan(given, index) == first
    monkeypatch.undo()
    (folder / "b.mp4").write_bytes(film(12))
    assert fingerprint(given) != before and manifest_digest(scan(given)) != manifest_digest(first)


def test_a_glance_counts_clips_before_any_model_is_known(folder):
    (folder / "c.txt").unlink()
    films = sum(path.suffix in FILM_EXTENSIONS for path in folder.iterdir())
    assert films and glance(ConceptConfig(folder=str(folder))) == (5 - films, films, 1)


def test_a_glance_for_a_model_of_pictures_counts_captions_of_these_alone(folder, tmp_path):
    of = ConceptConfig(folder=str(folder))
    for path in folder.iterdir():
        if path.suffix in FILM_EXTENSIONS:
            path.with_suffix(".txt").unlink()
    taken, left = glance(of), glance(of, takes_films=False)
    assert (taken.pictures, taken.films) == (left.pictures, left.films) and taken.films
    assert taken.uncaptioned - left.uncaptioned == taken.films
    alone = tmp_path / "films"
    alone.mkdir()
    (alone / "b.mp4").write_bytes(b"never decoded")
    assert glance(of.replace(folder=str(alone))) == (0, 1, 1)
    with pytest.raises(ValueError, match=r"film|clip"):
        glance(of.replace(folder=str(alone)), takes_films=False)


def test_a_large_folder_is_sorted_in_one_turn(tmp_path, monkeypatch):
    counted = []
    usable = pictures._usable
    monkeypatch.setattr(pictures, "_usable", lambda *of: counted.append(1) or usable(*of))
    for number in range(5):
        draw(tmp_path / f"{number}.png", (number, 0, 0))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path), min_side=1),))
    assert len(scan(dataset).pictures) == 5 and counted == [1]
