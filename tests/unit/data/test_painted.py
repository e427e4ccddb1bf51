"""Painting a mask: what is read and kept stays bounded, whatever lies in the folder."""

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from lora_atelier.trainer_core.common.access import ANYWHERE
from lora_atelier.trainer_core.data import images, painted


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    place = tmp_path / "pictures" / "a.png"
    place.parent.mkdir()
    Image.new("RGB", (64, 48)).save(place)
    return place


def png(value: int, size: tuple[int, int] = (64, 48)) -> bytes:
    data = io.BytesIO()
    Image.new("L", size, value).save(data, "PNG")
    return data.getvalue()


def test_copies_for_the_editor_do_not_pile_up(tmp_path: Path, picture: Path) -> None:
    copies = tmp_path / "painting"
    for number in range(painted.MOST_COPIES + 3):
        painted.draw_for_painting(picture, copies / f"{number}.png", ANYWHERE)
        os.utime(copies / f"{number}.png", (number, number))
    left = {path.name for path in copies.iterdir()}
    assert len(left) == painted.MOST_COPIES and f"{painted.MOST_COPIES + 2}.png" in left and "0.png" not in left


def test_earlier_masks_do_not_pile_up(tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(painted, "MOST_EARLIER", 2)
    was, earlier = "", tmp_path / "earlier"
    for number in range(4):
        painted.save_painted(picture, png(100 + number), was, earlier / f"{number}.png", ANYWHERE)
        os.utime(earlier / f"{number}.png", (number, number))
        was = painted.state_of_mask(picture, ANYWHERE)
    assert sorted(path.name for path in earlier.iterdir()) == ["2.png", "3.png"]


def test_a_mask_of_another_size_is_refused_before_it_is_decoded(
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(painted, "open_upright", lambda *given, **named: pytest.fail("decoded"))
    large = png(255, (4000, 4000))  # a thousand times its bytes
    with pytest.raises(ValueError, match=r"The mask has 4000x4000 pixels and a\.png 64x48"):
        painted.save_painted(picture, large, "", tmp_path / "earlier.png", ANYWHERE)
    assert images.upright_size(large) == (4000, 4000)


def test_a_huge_mask_is_not_read_and_a_pipe_is_none(picture: Path) -> None:
    mask = painted.mask_place(picture)
    with mask.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="a mask can have 256 at most"):
        painted.state_of_mask(picture, ANYWHERE)
    mask.unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(mask)
        assert painted.state_of_mask(picture, ANYWHERE) == ""
