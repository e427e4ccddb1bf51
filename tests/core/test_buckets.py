"""Buckets, fits and cuts are those of maths.md, section 1."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lora_atelier.trainer_core.buckets import Crop, bucket_list, choose_bucket, cut, fit, open_upright

LANDSCAPE = {
    (512, 64): "512x512 576x448 640x384 768x320 960x256 1024x256",
    (512, 32): "512x512 544x480 576x448 608x416 640x384 672x384 704x352 736x352 768x320 800x320 832x288 864x288 "
    "896x288 928x256 960x256 992x256 1024x256",
    (768, 64): "768x768 832x704 896x640 960x576 1024x576 1088x512 1152x512 1216x448 1280x448 1408x384 1472x384 "
    "1536x384",
    (1024, 64): "1024x1024 1088x960 1152x896 1216x832 1280x768 1344x768 1408x704 1472x704 1536x640 1600x640 "
    "1664x576 1728x576 1792x576 1856x512 1920x512 1984x512 2048x512",
}


@pytest.mark.parametrize(("resolution", "step"), LANDSCAPE)
def test_the_bucket_tables(resolution: int, step: int) -> None:
    buckets = bucket_list(resolution, step)
    lying = {tuple(map(int, size.split("x"))) for size in LANDSCAPE[resolution, step].split()}
    assert set(buckets) == lying | {(h, w) for w, h in lying}
    assert len(buckets) == {(512, 64): 11, (512, 32): 33, (768, 64): 23, (1024, 64): 33}[resolution, step]
    assert list(buckets) == sorted(set(buckets))


@given(st.integers(64, 2048), st.sampled_from([8, 16, 32, 64, 128]))
@settings(max_examples=60, deadline=None)
def test_every_bucket_keeps_within_area_aspect_and_step(resolution: int, step: int) -> None:
    if resolution < step:
        with pytest.raises(ValueError, match=str(step)):
            bucket_list(resolution, step)
        return
    square = step * (resolution // step)
    buckets = bucket_list(resolution, step)
    assert (square, square) in buckets
    for width, height in buckets:
        assert width % step == height % step == 0 < min(width, height)
        assert width * height <= resolution**2
        assert max(width, height) <= 4 * min(width, height)
        assert (height, width) in buckets
        assert width * height >= 0.9 * resolution**2 or width == height == square


@pytest.mark.parametrize("resolution", [512, 768, 1024])
def test_a_transposed_picture_gets_the_transposed_bucket(resolution: int) -> None:
    buckets = bucket_list(resolution, 64)
    for width in range(1, 2000, 57):
        for height in range(1, 2000, 61):
            bucket = choose_bucket((width, height), buckets)
            assert choose_bucket((height, width), buckets) == bucket[::-1]


def test_the_log_metric_is_not_biased() -> None:
    assert choose_bucket((640, 1000), bucket_list(1024, 64)) == (768, 1280)
    assert choose_bucket((1000, 640), bucket_list(1024, 64)) == (1280, 768)


def test_ties_go_to_the_larger_area_then_the_longer_then_the_wider() -> None:
    assert choose_bucket((300, 100), bucket_list(512, 64)) == (960, 256)  # as far from 768x320, of equal area
    assert choose_bucket((100, 300), bucket_list(512, 64)) == (256, 960)
    assert choose_bucket((100, 100), [(512, 512), (1024, 1024)]) == (1024, 1024)
    assert choose_bucket((100, 100), [(256, 512), (512, 256)]) == (512, 256)


FITS = [  # picture, resolution, bucket, resized, offset, share cropped (None: not in the table)
    ((1500, 1000), 512, (640, 384), (640, 427), (0, 21), None),
    ((1000, 1500), 512, (384, 640), (427, 640), (21, 0), None),
    ((1920, 1080), 512, (640, 384), (683, 384), (21, 0), None),
    ((4000, 3000), 512, (576, 448), (597, 448), (10, 0), None),
    ((800, 600), 512, (576, 448), (597, 448), (10, 0), None),
    ((3000, 500), 512, (1024, 256), (1536, 256), (256, 0), None),
    ((1500, 1000), 1024, (1216, 832), (1248, 832), (16, 0), 0.0256),
    ((1000, 1500), 1024, (832, 1216), (832, 1248), (0, 16), 0.0256),
    ((1920, 1080), 1024, (1344, 768), (1365, 768), (10, 0), 0.0154),
    ((4000, 3000), 1024, (1152, 896), (1195, 896), (21, 0), 0.0360),
    ((800, 600), 1024, (1152, 896), (1195, 896), (21, 0), 0.0360),
    ((3000, 500), 1024, (2048, 512), (3072, 512), (512, 0), 0.3333),
]


@pytest.mark.parametrize(("size", "resolution", "bucket", "resized", "offset", "lost"), FITS)
def test_the_fit_table(size, resolution, bucket, resized, offset, lost) -> None:
    assert choose_bucket(size, bucket_list(resolution, 64)) == bucket
    crop = fit(size, bucket)
    assert crop == Crop(resized=resized, offset=offset, bucket=bucket)
    if lost is not None:
        assert crop.crop_share == pytest.approx(lost, abs=6e-5)


def test_the_scale_is_the_factor_of_the_table() -> None:
    assert fit((800, 600), (1152, 896)).scale((800, 600)) == pytest.approx(1.4933, abs=1e-4)


@given(st.integers(1, 12_000), st.integers(1, 12_000), st.sampled_from(bucket_list(512, 64)))
@settings(max_examples=200, deadline=None)
def test_a_fit_covers_its_bucket_and_stays_inside(width: int, height: int, bucket: tuple[int, int]) -> None:
    crop = fit((width, height), bucket)
    assert any(crop.resized[i] == bucket[i] for i in (0, 1))
    for i in (0, 1):
        assert 0 <= crop.offset[i] <= crop.resized[i] - bucket[i] - crop.offset[i] <= crop.offset[i] + 1
    left, top, right, bottom = crop.source_box((width, height))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    turned = fit((height, width), bucket[::-1])
    assert (turned.resized, turned.offset) == (crop.resized[::-1], crop.offset[::-1])


def random_picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def area_weights(old: int, new: int) -> np.ndarray:
    """Return the (new, old) matrix of overlaps, the definition of an area filter."""
    edges = np.arange(new + 1) * old / new
    pixels = np.arange(old)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return overlap.clip(0) * new / old


@pytest.mark.parametrize("size", [(150, 100), (100, 150), (131, 127), (65, 64), (640, 643)])
def test_shrinking_averages_exact_areas(size: tuple[int, int]) -> None:
    picture = random_picture(*size)
    crop = fit(size, (64, 64))
    whole = np.asarray(picture, np.float64)
    whole = np.einsum("yh,hwc->ywc", area_weights(size[1], crop.resized[1]), whole)
    whole = np.einsum("xw,ywc->yxc", area_weights(size[0], crop.resized[0]), whole)
    left, top = crop.offset
    expected = whole[top : top + 64, left : left + 64]
    assert np.abs(np.asarray(cut(picture, crop), np.float64) - expected).max() <= 0.51


def test_growing_is_lanczos_of_the_whole_picture_then_cropped() -> None:
    picture = random_picture(30, 20)
    crop = fit((30, 20), (64, 64))
    left, top = crop.offset
    whole = picture.resize(crop.resized, Image.Resampling.LANCZOS).crop((left, top, left + 64, top + 64))
    assert np.abs(np.asarray(whole, int) - np.asarray(cut(picture, crop), int)).max() <= 1


def test_a_picture_of_the_right_size_is_left_as_it_is_and_flip_mirrors() -> None:
    picture = random_picture(64, 64)
    crop = fit((64, 64), (64, 64))
    assert np.array_equal(np.asarray(cut(picture, crop)), np.asarray(picture))
    flipped = cut(picture, Crop(resized=crop.resized, offset=crop.offset, bucket=crop.bucket, flip=True))
    assert np.array_equal(np.asarray(flipped), np.asarray(picture)[:, ::-1])


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (1, 1), (3, 2000), (2000, 3)])
def test_extreme_pictures_are_cut_without_building_the_resized_one(size: tuple[int, int]) -> None:
    picture = Image.new("RGB", size, (10, 200, 30))
    crop = fit(size, choose_bucket(size, bucket_list(512, 64)))
    result = cut(picture, crop)
    assert result.size == crop.bucket
    assert result.getextrema() == ((10, 10), (200, 200), (30, 30))


def test_a_flat_picture_stays_flat_through_any_geometry() -> None:
    for width in range(60, 200, 29):
        for height in range(60, 200, 31):
            for bucket in bucket_list(64, 16):
                crop = fit((width, height), bucket)
                assert cut(Image.new("RGB", (width, height), (255, 0, 77)), crop).getextrema() == (
                    (255, 255),
                    (0, 0),
                    (77, 77),
                )


def test_the_orientation_in_exif_is_applied_before_anything_else(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: width and height change places
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert open_upright(tmp_path / "a.jpg").size == (20, 40)


def test_the_log_distance_is_the_one_that_is_minimised() -> None:
    buckets = bucket_list(1024, 64)
    for size in [(777, 1234), (5000, 999), (640, 480), (1333, 2000)]:
        chosen = choose_bucket(size, buckets)
        distances = [abs(math.log(w / h) - math.log(size[0] / size[1])) for w, h in buckets]
        assert abs(math.log(chosen[0] / chosen[1]) - math.log(size[0] / size[1])) <= min(distances) + 1e-12
