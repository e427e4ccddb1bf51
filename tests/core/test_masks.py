"""Masks follow their pictures' geometry and weigh as in maths.md, sections 3 and 5.3."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lora_atelier.trainer_core.buckets import Crop, fit
from lora_atelier.trainer_core.config import MaskConfig
from lora_atelier.trainer_core.masks import (
    cut_mask,
    find_mask,
    is_mask_name,
    latent_mask,
    load_mask,
    loss_mask,
)
from lora_atelier.trainer_core.scan import Picture

M = torch.tensor([[[[1.0, 0.0], [0.5, 0.0]]]])


def picture(path: Path, size: tuple[int, int], mask: Path | None) -> Picture:
    return Picture(
        path=path, name=path.name, concept=0, width=size[0], height=size[1], digest="", caption="", mask=mask
    )


def test_the_vector_of_the_floor() -> None:
    weights = loss_mask(M, torch.tensor([True]), 0.1)
    assert torch.equal(weights, torch.tensor([[[[1.0, 0.1], [0.5, 0.1]]]]))
    assert weights.mean().item() == pytest.approx(0.425)
    elementwise = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert (elementwise * weights).mean().item() == pytest.approx(0.775)
    assert ((elementwise * weights).mean() / weights.mean()).item() == pytest.approx(1.8235294)


def test_samples_without_their_mask_weigh_one_everywhere() -> None:
    weights = loss_mask(M.repeat(2, 1, 1, 1), torch.tensor([False, True]), 0.0)
    assert torch.equal(weights[0], torch.ones(1, 2, 2))
    assert torch.equal(weights[1], M[0])


def test_the_block_mean_preserves_the_covered_area() -> None:
    pixels = np.zeros((16, 24), np.uint8)
    pixels[:8, :8] = 255
    pixels[8:, 8:12] = 255  # half of a block
    weights = latent_mask(Image.fromarray(pixels))
    assert weights.shape == (1, 2, 3)
    assert weights.dtype == torch.float32
    assert torch.equal(weights[0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0]]))
    grey = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    assert latent_mask(Image.fromarray(grey)).mean().item() == pytest.approx(grey.mean() / 255, rel=1e-5)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(300, 200), (200, 300), (40, 30)])
def test_a_mask_goes_where_its_picture_goes(size: tuple[int, int], flip: bool) -> None:
    """The mask of a half-white picture covers the white half after any geometry."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels[:, : size[0] // 4] = 255
    base = fit(size, (128, 128))
    crop = Crop(resized=base.resized, offset=base.offset, bucket=base.bucket, flip=flip)
    mask = np.asarray(cut_mask(Image.fromarray(pixels), crop), np.float64) / 255
    left, _, right, _ = crop.source_box(size)
    share = max(0.0, size[0] // 4 - left) / (right - left)
    assert mask.shape == (128, 128)
    assert mask.mean() == pytest.approx(share, abs=0.01)
    halves = mask[:, :64].mean(), mask[:, 64:].mean()
    if share:
        assert halves[flip] > halves[not flip]


def test_a_mask_of_the_bucket_size_is_not_resampled() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    assert np.array_equal(np.asarray(cut_mask(Image.fromarray(pixels), fit((64, 64), (64, 64)))), pixels)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 80, 80),
        ("1", 1, 255),
        ("RGB", (80, 1, 2), 80),
        ("RGBA", (80, 1, 2, 0), 80),
        ("P", 3, None),
        ("I;16", 128 * 257, 128),
        ("LA", (80, 3), 80),
    ],
)
def test_the_first_channel_counts_in_every_mode(tmp_path: Path, mode, colour, expected) -> None:
    path = tmp_path / "m.png"
    image = Image.new(mode, (6, 4), colour)
    if mode == "P":
        image.putpalette([9, 9, 9] * 3 + [77, 5, 5])
        expected = 77
    image.save(path)
    shown = picture(tmp_path / "a.png", (6, 4), path)
    assert load_mask(shown, MaskConfig()).getextrema() == (expected, expected)
    assert load_mask(shown, MaskConfig(invert=True)).getextrema() == (255 - expected, 255 - expected)


def test_the_alpha_channel_can_be_the_mask(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (6, 4), (1, 2, 3, 60)).save(path)
    mask = load_mask(picture(path, (6, 4), path), MaskConfig(source="alpha"))
    assert (mask.mode, mask.size, mask.getextrema()) == ("L", (6, 4), (60, 60))


def test_a_picture_without_a_mask_is_white_even_inverted(tmp_path: Path) -> None:
    mask = load_mask(picture(tmp_path / "a.png", (6, 4), None), MaskConfig(invert=True))
    assert (mask.mode, mask.size, mask.getextrema()) == ("L", (6, 4), (255, 255))


def test_masks_are_found_beside_their_pictures_whatever_the_case() -> None:
    masks = {"sub/a-masklabel.png": Path("beside"), "b-masklabel.png": Path("flat")}
    assert find_mask("sub/A.JPG", masks, MaskConfig()) == Path("beside")
    assert find_mask("sub/b.png", masks, MaskConfig()) is None
    assert find_mask("sub/b.png", masks, MaskConfig(folder="masks")) == Path("flat")


def test_a_bare_extension_marks_masks_only_beside_the_pictures() -> None:
    assert is_mask_name("a.png", MaskConfig(suffix=".png"))
    assert not is_mask_name("a.png", MaskConfig(suffix=".png", folder="masks"))
    assert is_mask_name("a-MASKLABEL.png", MaskConfig(folder="masks"))
    assert is_mask_name("a-masklabel.png", None)
    assert not is_mask_name("a.png", None)
