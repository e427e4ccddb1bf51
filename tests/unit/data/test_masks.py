"""Masks follow their pictures' geometry and weigh as worked out by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from odd_files import saved
from PIL import Image, ImageCms

from lora_atelier.trainer_core.config import AugmentConfig, MaskConfig
from lora_atelier.trainer_core.data.buckets import bucket_list
from lora_atelier.trainer_core.data.crops import fit, variant
from lora_atelier.trainer_core.data.images import cut, load_picture
from lora_atelier.trainer_core.data.masks import (
    cut_mask,
    examine_mask,
    find_mask,
    is_mask_name,
    latent_mask,
    latent_masks,
    load_mask,
    loss_mask,
    read_mask,
)

M = torch.tensor([[[[1.0, 0.0], [0.5, 0.0]]]])


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
    weights = latent_mask(Image.fromarray(pixels), 8)
    assert weights.shape == (1, 2, 3)
    assert weights.dtype == torch.float32
    assert torch.equal(weights[0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0]]))
    grey = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    assert latent_mask(Image.fromarray(grey), 8).mean().item() == pytest.approx(grey.mean() / 255, rel=1e-5)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(300, 200), (200, 300), (40, 30)])
def test_a_mask_goes_where_its_picture_goes(size: tuple[int, int], flip: bool) -> None:
    """The mask of a half-white picture covers the white half after any geometry."""
    pixels = np.zeros((size[1], size[0]), np.uint8)
    pixels[:, : size[0] // 4] = 255
    crop = fit(size, (128, 128), flip=flip)
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
    assert load_mask(path, (6, 4), MaskConfig()).getextrema() == (expected, expected)
    assert load_mask(path, (6, 4), MaskConfig(invert=True)).getextrema() == (255 - expected, 255 - expected)
    assert examine_mask(path.read_bytes(), MaskConfig()) == ((6, 4), expected)


@pytest.mark.parametrize("colour", [(1, 2, 3, 60), (200, 0, 0, 60)])
def test_the_alpha_channel_can_be_the_mask(colour: tuple[int, ...]) -> None:
    config = MaskConfig(source="alpha")
    data = saved(Image.new("RGBA", (6, 4), colour))
    mask = load_mask(data, (6, 4), config)
    assert (mask.mode, mask.size, mask.getextrema()) == ("L", (6, 4), (60, 60))
    assert examine_mask(data, config) == ((6, 4), 60)
    assert load_mask(saved(Image.new("LA", (6, 4), (9, 60))), (6, 4), config).getextrema() == (60, 60)


def test_without_an_alpha_channel_there_is_no_mask() -> None:
    config = MaskConfig(source="alpha", invert=True, threshold=0.5)
    data = saved(Image.new("RGB", (6, 4)))
    assert read_mask(data, config) is None
    assert examine_mask(data, config) is None
    assert load_mask(data, (6, 4), config).getextrema() == (255, 255)


def test_a_picture_without_a_mask_is_white_even_inverted() -> None:
    mask = load_mask(None, (6, 4), MaskConfig(invert=True, threshold=1))
    assert (mask.mode, mask.size, mask.getextrema()) == ("L", (6, 4), (255, 255))


LEVELS = Image.fromarray(np.arange(256, dtype=np.uint8)[None])


@pytest.mark.parametrize("threshold", [0.001, 0.2, 0.5, 0.502, 1.0])
@pytest.mark.parametrize("invert", [False, True])
def test_a_threshold_makes_levels_of_at_least_it_white_after_inverting(threshold: float, invert: bool) -> None:
    mask = read_mask(saved(LEVELS), MaskConfig(threshold=threshold, invert=invert))
    levels = np.arange(256)[:: -1 if invert else 1] / 255
    assert np.array_equal(np.asarray(mask)[0], np.where(levels >= threshold, 255, 0))


def test_without_a_threshold_grey_levels_stay() -> None:
    assert np.array_equal(np.asarray(read_mask(saved(LEVELS), MaskConfig())), np.asarray(LEVELS))
    sixteen = Image.fromarray(np.arange(256, dtype=np.uint16)[None] * 257)
    assert np.array_equal(np.asarray(read_mask(saved(sixteen), MaskConfig())), np.asarray(LEVELS))


def test_a_colour_profile_does_not_bend_a_mask() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = profile.replace(b"rXYZ", b"....").replace(b"gXYZ", b"rXYZ").replace(b"....", b"gXYZ")  # red is green
    data = saved(Image.new("RGB", (4, 4), (80, 10, 10)), icc_profile=swapped)
    assert load_picture(data).getpixel((0, 0))[0] < 20
    assert load_mask(data, (4, 4), MaskConfig()).getextrema() == (80, 80)


def test_a_mask_stands_upright_as_its_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12), dtype=np.uint8)
    mask = read_mask(saved(Image.fromarray(pixels), exif=exif), MaskConfig())
    assert np.array_equal(np.asarray(mask), np.rot90(pixels, -1))


def waves(size: tuple[int, int]) -> Image.Image:
    """Return grey levels that change slowly, a different slope at every place."""
    y, x = np.mgrid[: size[1], : size[0]]
    values = np.sin(2 * np.pi * (x / size[0] + 0.3 * y / size[1])) + np.cos(2.5 * y / size[1] + x / size[0])
    return Image.fromarray((127.5 + 60 * values).astype(np.uint8))


@given(
    st.tuples(st.integers(60, 200), st.integers(60, 200)),
    st.sampled_from(bucket_list((96, 96), 16)),
    st.integers(0, 10_000),
    st.booleans(),
    st.booleans(),
)
@examples(100)
def test_a_mask_and_the_picture_it_is_drawn_on_are_cut_alike(size, bucket, index: int, flip: bool, turn: bool) -> None:
    amounts = AugmentConfig(crop_jitter=1, zoom=0.5, rotation=30 * turn)
    crop = dataclasses.replace(variant(size, bucket, amounts, seed=1, picture=0, index=index), flip=flip)
    mask = waves(size)
    as_mask = np.asarray(cut_mask(mask, crop), int)
    as_picture = np.asarray(cut(mask.convert("RGB"), crop), int)[..., 0]
    assert as_mask.shape == as_picture.shape == bucket[::-1]
    assert np.abs(as_mask - as_picture).max() <= 4


def test_colours_leave_the_mask_alone() -> None:
    mask = waves((100, 80))
    crop = fit((100, 80), (64, 48), angle=5.0)
    recoloured = dataclasses.replace(crop, color=(0.2, 0.5, 0.0, 0.3))
    assert cut_mask(mask, recoloured).tobytes() == cut_mask(mask, crop).tobytes()


@pytest.mark.parametrize("angle", [0.0, 20.0])
def test_a_white_mask_stays_white(angle: float) -> None:
    for size in ((100, 80), (30, 50), (1, 900)):
        mask = cut_mask(Image.new("L", size, 255), fit(size, (64, 48), angle=angle, zoom=1.1))
        assert mask.getextrema() == (255, 255)


def test_masks_are_found_beside_their_pictures_whatever_the_case() -> None:
    masks = {"sub/a-masklabel.png": Path("beside"), "b-masklabel.png": Path("flat")}
    assert find_mask("sub/A.JPG", masks, MaskConfig()) == Path("beside")
    assert find_mask("sub/b.png", masks, MaskConfig()) is None
    assert find_mask("sub/b.png", masks, MaskConfig(folder="masks")) == Path("flat")


def test_a_bare_extension_marks_masks_only_beside_the_pictures() -> None:
    assert is_mask_name("a.png", MaskConfig(suffixes=(".png",)))
    assert not is_mask_name("a.png", MaskConfig(suffixes=(".png",), folder="masks"))
    assert is_mask_name("a-MASKLABEL.png", MaskConfig(folder="masks"))
    assert is_mask_name("a-masklabel.png", None)
    assert not is_mask_name("a.png", None)


@pytest.mark.parametrize("ending", [".jpg", ".JPEG", ".webp", ".bmp", ".tif"])
def test_a_mask_may_be_a_picture_of_any_format(ending: str) -> None:
    name = f"0-masklabel{ending}"
    assert is_mask_name(name, None) and is_mask_name(name, MaskConfig(folder="masks"))
    masks = {name.lower(): Path("other"), "1-masklabel.png": Path("png"), "1-masklabel.jpg": Path("jpg")}
    assert find_mask("0.png", masks, MaskConfig()) == Path("other")
    assert find_mask("1.png", masks, MaskConfig()) == Path("png")  # the suffix as it is written comes first
    own = MaskConfig(suffixes=("_mask.png",))
    assert is_mask_name(f"a_mask{ending}", own) and find_mask("a.png", {f"a_mask{ending.lower()}": Path("x")}, own)
    assert not is_mask_name("0-masklabel.txt", None) and not is_mask_name("a.jpg", MaskConfig(suffixes=(".png",)))


def test_of_several_suffixes_the_first_one_found_counts() -> None:
    config = MaskConfig(suffixes=("_Mask.png", "-masklabel.png", ".mask.webp"))
    masks = {"a-masklabel.png": Path("second"), "a_mask.png": Path("first"), "b.mask.webp": Path("third")}
    assert find_mask("a.jpg", masks, config) == Path("first")
    assert find_mask("b.jpg", masks, config) == Path("third")
    assert find_mask("c.jpg", masks, config) is None
    assert [is_mask_name(name, config) for name in ("a_MASK.png", "a.mask.webp", "a-masklabel.png", "a.webp")] == [
        True,
        True,
        True,
        False,
    ]


def test_a_bare_extension_in_a_mask_folder_leaves_the_other_suffixes_telling() -> None:
    config = MaskConfig(suffixes=(".png", "_mask.png"), folder="masks")
    assert is_mask_name("a_mask.png", config)
    assert not is_mask_name("a.png", config)
    masks = {"sub/a_mask.png": Path("beside"), "a.png": Path("flat")}
    assert find_mask("sub/a.jpg", masks, config) == Path("flat")  # the order of suffixes comes first


@pytest.mark.parametrize("frames, step, groups", [(1, 4, [(0,)]), (9, 4, [(0,), (1, 2, 3, 4), (5, 6, 7, 8)])])
def test_a_latent_frame_has_the_mean_of_the_masks_of_its_frames(frames, step, groups):
    masks = torch.rand(frames, 1, 2, 3, generator=torch.Generator().manual_seed(frames))
    found = latent_masks(iter(masks), step)
    assert found.shape == (1, len(groups), 2, 3)
    for at, group in enumerate(groups):
        torch.testing.assert_close(found[:, at], sum(masks[number] for number in group) / len(group))
