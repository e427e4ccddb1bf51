"""Buckets, placements, crops and variants are those that were worked out by hand."""

import dataclasses
import json
import math

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import AugmentConfig
from lora_atelier.trainer_core.data.buckets import (
    NEUTRAL,
    Resolution,
    bucket_list,
    buckets_of,
    choose_bucket,
    choose_sizes,
    cover,
    merge_buckets,
    no_upscale_bucket,
    parse_resolution,
)
from lora_atelier.trainer_core.data.crops import Crop, fit, variant

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
    buckets = bucket_list((resolution, resolution), step)
    lying = {tuple(map(int, size.split("x"))) for size in LANDSCAPE[resolution, step].split()}
    assert set(buckets) == lying | {(h, w) for w, h in lying}
    assert len(buckets) == {(512, 64): 11, (512, 32): 33, (768, 64): 23, (1024, 64): 33}[resolution, step]
    assert list(buckets) == sorted(set(buckets))


@given(st.integers(64, 2048), st.sampled_from([8, 16, 32, 64, 128]))
@examples(60)
def test_every_bucket_keeps_within_area_aspect_and_step(resolution: int, step: int) -> None:
    if resolution < step:
        with pytest.raises(ValueError, match=str(step)):
            bucket_list((resolution, resolution), step)
        return
    square = step * (resolution // step)
    buckets = bucket_list((resolution, resolution), step)
    assert (square, square) in buckets
    for width, height in buckets:
        assert width % step == height % step == 0 < min(width, height)
        assert width * height <= resolution**2
        assert max(width, height) <= 4 * min(width, height)
        assert (height, width) in buckets
        assert width * height >= 0.9 * resolution**2 or width == height == square


@pytest.mark.parametrize("resolution", [512, 768, 1024])
def test_a_transposed_picture_gets_the_transposed_bucket(resolution: int) -> None:
    buckets = bucket_list((resolution, resolution), 64)
    for width in range(1, 2000, 57):
        for height in range(1, 2000, 61):
            bucket = choose_bucket((width, height), buckets)
            assert choose_bucket((height, width), buckets) == bucket[::-1]


def test_the_log_metric_is_not_biased() -> None:
    assert choose_bucket((640, 1000), bucket_list((1024, 1024), 64)) == (768, 1280)
    assert choose_bucket((1000, 640), bucket_list((1024, 1024), 64)) == (1280, 768)


def test_ties_go_to_the_larger_area_then_the_longer_then_the_wider() -> None:
    assert choose_bucket((300, 100), bucket_list((512, 512), 64)) == (960, 256)  # as far from 768x320, of equal area
    assert choose_bucket((100, 300), bucket_list((512, 512), 64)) == (256, 960)
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
    assert choose_bucket(size, bucket_list((resolution, resolution), 64)) == bucket
    crop = fit(size, bucket)
    assert crop == Crop(resized=resized, offset=offset, bucket=bucket)
    if lost is not None:
        assert crop.crop_share(size) == pytest.approx(lost, abs=6e-5)


def test_the_scale_is_the_factor_of_the_table() -> None:
    assert fit((800, 600), (1152, 896)).scale((800, 600)) == pytest.approx(1.4933, abs=1e-4)


@given(st.integers(1, 12_000), st.integers(1, 12_000), st.sampled_from(bucket_list((512, 512), 64)))
@examples(200)
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


def test_the_log_distance_is_the_one_that_is_minimised() -> None:
    buckets = bucket_list((1024, 1024), 64)
    for size in [(777, 1234), (5000, 999), (640, 480), (1333, 2000)]:
        chosen = choose_bucket(size, buckets)
        distances = [abs(math.log(w / h) - math.log(size[0] / size[1])) for w, h in buckets]
        assert abs(math.log(chosen[0] / chosen[1]) - math.log(size[0] / size[1])) <= min(distances) + 1e-12


# --- targets --------------------------------------------------------------------------------------------------


def test_a_number_asks_for_buckets_and_a_size_for_itself() -> None:
    assert parse_resolution("512") == Resolution(width=512, height=512)
    assert parse_resolution("640x384") == Resolution(width=640, height=384, fixed=True)
    assert parse_resolution(" 640X384 ").area == 640 * 384
    assert buckets_of(parse_resolution("512"), 64) == bucket_list((512, 512), 64)
    assert buckets_of(parse_resolution("640x384"), 64, max_side=512) == ((640, 384),)


@pytest.mark.parametrize("text", ["", "x", "512x", "x512", "1x2x3", "5.5", "-512", "0", "512 x 384", "²"])
def test_other_resolutions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        parse_resolution(text)


def test_only_the_area_of_a_target_counts() -> None:
    assert bucket_list((1024, 256), 64) == bucket_list((512, 512), 64)
    assert (448, 448) in bucket_list((640, 384), 64)  # floor(sqrt(245760) / 64) = 7


@given(st.integers(0, 1100), st.integers(0, 1100))
@examples(60)
def test_side_limits_remove_narrow_buckets_and_clip_long_ones(low: int, high: int) -> None:
    every, most = bucket_list((512, 512), 64), high // 64 * 64
    clipped = {(w, most) for w in range(64, most + 1, 64) if 512**2 // w // 64 * 64 > most <= 4 * w} if high else set()
    every = {*every, *clipped, *((h, w) for w, h in clipped)}
    within = tuple(sorted(b for b in every if min(b) >= low and (high == 0 or max(b) <= high)))
    if within:
        assert bucket_list((512, 512), 64, min_side=low, max_side=high) == within
        return
    with pytest.raises(ValueError, match=r" fits (min|max)_side") as error:
        bucket_list((512, 512), 64, min_side=low, max_side=high)
    assert (f"min_side {low}" in str(error.value)) == (low > 0)
    assert (f"max_side {high}" in str(error.value)) == (high > 0)


@pytest.mark.parametrize(("step", "number"), [(32, 49), (64, 25)])  # sd-scripts' numbers
def test_long_sides_are_clipped_and_not_collapsed_to_one_square(step: int, number: int) -> None:
    buckets = bucket_list((1024, 1024), step, min_side=256, max_side=1024)
    assert len(buckets) == number
    assert set(map(max, buckets)) == {1024}
    assert {min(bucket) for bucket in buckets} == set(range(256, 1025, step))


# --- placements -----------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 6000), st.integers(1, 6000))

NO_UPSCALE = [((1500, 1000), (1248, 832), (1216, 832)), ((800, 600), (800, 600), (768, 576))]
NO_UPSCALE += [((300, 500), (300, 500), (256, 448))]


@pytest.mark.parametrize(("size", "resized", "bucket"), NO_UPSCALE)
def test_the_no_upscale_vectors(size, resized, bucket) -> None:
    assert no_upscale_bucket(size, 1024**2, 64) == (bucket, resized)
    resolution = parse_resolution("1024")
    assert choose_sizes(size, resolution, buckets_of(resolution, 64), step=64, no_upscale=True) == (bucket, resized)


@given(SIZES, st.sampled_from([256, 512, 1024]), st.sampled_from([8, 16, 64]))
@example((262, 4254), 256, 8)  # two ways of reducing it end in one bucket
@example((965, 1465), 512, 8)  # both sides are rounded up
@example((60, 900), 1024, 64)  # narrower than a step
@examples(300)
def test_no_upscale_never_enlarges_and_keeps_within_the_area(size, side: int, step: int) -> None:
    bucket, resized = no_upscale_bucket(size, side**2, step)
    assert no_upscale_bucket(size[::-1], side**2, step) == (bucket[::-1], resized[::-1])
    assert bucket == tuple(edge // step * step for edge in resized)
    assert all(new <= old for new, old in zip(resized, size, strict=True))
    # One side is rounded to whole pixels, and the other one follows from it: (w + 0.5) ((w + 0.5) h / w + 0.5).
    assert bucket[0] * bucket[1] <= side**2 + 2 * max(bucket)
    if resized != size:
        assert size[0] * size[1] > side**2
        assert not min(bucket) or fit(size, bucket, resized=resized).scale(size) in (
            resized[0] / size[0],
            resized[1] / size[1],
        )


def test_choices_of_sizes() -> None:
    resolution = parse_resolution("512")
    buckets = buckets_of(resolution, 64)
    assert choose_sizes((1500, 1000), resolution, buckets, step=64) == ((640, 384), (640, 427))
    fixed = parse_resolution("640x384")
    sizes = buckets_of(fixed, 64)
    assert choose_sizes((100, 900), fixed, sizes, step=64) == ((640, 384), (640, 5760))
    assert choose_sizes((1500, 1000), fixed, sizes, step=64, no_upscale=True) == ((640, 384), (640, 427))
    assert choose_sizes((300, 500), fixed, sizes, step=64, no_upscale=True) == ((256, 448), (300, 500))


# --- merging --------------------------------------------------------------------------------------------------


def merged(counts: dict, moves: dict) -> dict:
    """Return the counts after the moves."""
    after = {bucket: count for bucket, count in counts.items() if bucket not in moves}
    for bucket, goal in moves.items():
        after[goal] += counts[bucket]
    return after


def test_small_buckets_join_the_nearest_that_then_holds_a_batch() -> None:
    square, wide, wider, widest = (512, 512), (576, 448), (640, 384), (1024, 256)
    assert merge_buckets({square: 9, wide: 4, widest: 40}, 4) == {}
    assert merge_buckets({square: 9, wide: 3, widest: 40}, 4) == {wide: square}
    assert merge_buckets({square: 9, wider: 3, widest: 1}, 4) == {widest: wider}  # 3 + 1 is a batch
    assert merge_buckets({square: 2, wider: 1, widest: 1}, 8) == {wider: square, widest: square}
    assert merge_buckets({square: 1}, 8) == merge_buckets({}, 8) == merge_buckets({square: 0, wide: 9}, 8) == {}
    assert merge_buckets({(448, 576): 1, (576, 448): 1, square: 8}, 4) == {(448, 576): square, (576, 448): square}


@given(
    st.dictionaries(st.sampled_from(bucket_list((512, 512), 64)), st.integers(1, 20), max_size=11), st.integers(1, 24)
)
@examples(300)
def test_merging_loses_nothing_and_leaves_at_most_one_small_bucket(counts: dict, batch_size: int) -> None:
    moves = merge_buckets(counts, batch_size)
    after = merged(counts, moves)
    assert sum(after.values()) == sum(counts.values())
    small = [bucket for bucket, count in after.items() if count < batch_size]
    assert len(small) <= 1
    assert not small or len(after) == 1
    assert all(counts[bucket] < batch_size for bucket in moves)
    assert not set(moves) & set(moves.values())


# --- shift, zoom, angle ---------------------------------------------------------------------------------------


def test_a_shift_moves_the_cut_within_its_room() -> None:
    crops = {x: fit((1920, 1080), (640, 384), shift=(x, x)) for x in (-1.0, -0.5, 0.0, 0.5, 1.0)}
    assert {x: crop.offset for x, crop in crops.items()} == {
        -1.0: (0, 0),
        -0.5: (10, 0),
        0.0: (21, 0),
        0.5: (32, 0),
        1.0: (43, 0),
    }


def test_a_zoom_enlarges_and_makes_room() -> None:
    crop = fit((1000, 1000), (500, 500), zoom=1.25, shift=(1.0, -1.0))
    assert (crop.resized, crop.offset) == ((625, 625), (125, 0))
    assert crop.source_box((1000, 1000)) == (200, 0, 1000, 800)
    assert crop.crop_share((1000, 1000)) == pytest.approx(1 - 0.8**2)
    assert crop.scale((1000, 1000)) == pytest.approx(0.625)


def test_a_resized_size_of_ones_own_is_kept_and_must_cover() -> None:
    crop = fit((800, 600), (768, 576), resized=(800, 600))
    assert (crop.resized, crop.offset, crop.scale((800, 600))) == ((800, 600), (16, 12), 1.0)
    with pytest.raises(ValueError, match="do not cover"):
        fit((800, 600), (768, 576), resized=(800, 500))


def test_a_turned_picture_keeps_the_largest_upright_rectangle_of_its_aspect() -> None:
    size = (300, 300)
    crop = fit(size, (64, 64), angle=45.0)
    middles = [(150, 0), (300, 150), (150, 300), (0, 150)]  # of the edges: the square inside on its corner
    assert [pytest.approx(corner, abs=1e-9) for corner in middles] == [*crop.corners(size)[0:4]]
    assert crop.crop_share(size) == pytest.approx(0.5)
    assert crop.scale(size) == pytest.approx(64 / 300 * math.sqrt(2))
    assert crop.source_box(size) == pytest.approx((0, 0, 300, 300))


def test_the_corners_of_an_unturned_crop_are_those_of_its_box() -> None:
    crop = fit((1500, 1000), (640, 384), shift=(0.3, -0.4), zoom=1.3)
    left, top, right, bottom = crop.source_box((1500, 1000))
    box = [(left, top), (right, top), (right, bottom), (left, bottom)]
    assert [pytest.approx(corner) for corner in box] == list(crop.corners((1500, 1000)))


@given(SIZES, st.sampled_from(bucket_list((512, 512), 64)), st.floats(-45, 45))
@examples(200)
def test_the_upright_rectangle_touches_the_edge_and_shares_the_aspect(size, bucket, angle: float) -> None:
    whole = Crop(resized=size, offset=(0, 0), bucket=size, angle=angle)
    first, second, third, fourth = whole.corners(size)
    assert math.dist(first, second) * size[1] == pytest.approx(math.dist(second, third) * size[0], rel=1e-6)
    room = [min(x, size[0] - x, y, size[1] - y) for x, y in (first, second, third, fourth)]
    assert min(room) == pytest.approx(0, abs=1e-6)
    area = math.dist(first, second) * math.dist(first, fourth)
    assert whole.crop_share(size) == pytest.approx(1 - area / (size[0] * size[1]), abs=1e-9)


# --- variants -------------------------------------------------------------------------------------------------

AMOUNTS = st.floats(0, 1)
AUGMENTS = st.builds(
    AugmentConfig,
    crop_jitter=AMOUNTS,
    zoom=AMOUNTS,
    rotation=st.floats(0, 45),
    brightness=AMOUNTS,
    contrast=AMOUNTS,
    saturation=AMOUNTS,
    hue=st.floats(0, 0.5),
)


@given(SIZES, st.sampled_from(bucket_list((512, 512), 64)), AUGMENTS, st.integers(0, 99))
@examples(200)
def test_what_a_variant_keeps_lies_inside_the_picture(size, bucket, augment: AugmentConfig, index: int) -> None:
    crop = variant(size, bucket, augment, seed=7, picture=3, index=index)
    slack = 1e-6 * max(size)
    for x, y in crop.corners(size):
        assert -slack <= x <= size[0] + slack
        assert -slack <= y <= size[1] + slack
    least = cover(size, bucket)
    for i in (0, 1):
        assert 0 <= crop.offset[i] <= crop.resized[i] - bucket[i]
        assert least[i] <= crop.resized[i] <= least[i] * (1 + augment.zoom) + 0.5
    assert abs(crop.angle) <= augment.rotation
    assert 0 <= crop.crop_share(size) <= 1
    for factor, amount in zip(crop.color, (augment.brightness, augment.contrast, augment.saturation), strict=False):
        assert 1 - amount <= factor <= 1 + amount
    assert abs(crop.color[3]) <= augment.hue


@pytest.mark.parametrize("augment", [None, AugmentConfig()])
def test_without_amounts_a_variant_is_the_plain_fit(augment: AugmentConfig | None) -> None:
    for index in range(5):
        crop = variant((1500, 1000), (640, 384), augment, seed=1, picture=0, index=index)
        assert crop == fit((1500, 1000), (640, 384))
        # as text, too: 0.0 and -0.0 are equal and would name two cache entries
        assert json.dumps(dataclasses.asdict(crop)) == json.dumps(dataclasses.asdict(fit((1500, 1000), (640, 384))))


def test_variants_are_pure_functions_that_differ() -> None:
    augment = AugmentConfig(crop_jitter=1, zoom=0.2, rotation=10, brightness=0.1, contrast=0.1, saturation=0.1, hue=0.1)

    def draw(seed: int, picture: int, index: int) -> Crop:
        return variant((1500, 1000), (640, 384), augment, seed=seed, picture=picture, index=index)

    assert draw(1, 2, 3) == draw(1, 2, 3)
    places = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]
    assert len({draw(*drawn) for drawn in places}) == len(places)


def test_each_setting_has_a_draw_of_its_own() -> None:
    everything = dict(zoom=0.2, rotation=10.0, brightness=0.1, contrast=0.2, saturation=0.3, hue=0.4)

    def draw(**amounts: float) -> Crop:
        return variant((1000, 1000), (500, 500), AugmentConfig(**amounts), seed=1, picture=0, index=0)

    full = draw(**everything)
    assert draw(zoom=0.2).resized == full.resized != (500, 500)
    assert draw(rotation=10).angle == full.angle != 0
    for at, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        alone = draw(**{name: everything[name]}).color
        assert alone[at] == full.color[at] != NEUTRAL[at]
        assert [alone[i] for i in range(4) if i != at] == [NEUTRAL[i] for i in range(4) if i != at]


def test_the_draws_fill_their_ranges_evenly() -> None:
    augment = AugmentConfig(rotation=10, hue=0.5)
    crops = [variant((100, 100), (64, 64), augment, seed=1, picture=0, index=i) for i in range(400)]
    angles = [crop.angle for crop in crops]
    deviation = 20 / math.sqrt(12) / math.sqrt(len(angles))
    assert abs(sum(angles) / len(angles)) < 4 * deviation
    assert min(angles) < -9 < 9 < max(angles)


# --- size and crop ids ----------------------------------------------------------------------------------------


def test_the_numbers_of_a_framing() -> None:
    lying, upright = fit((1500, 1000), (1216, 832)), fit((1000, 1500), (832, 1216))
    assert lying.framing((1500, 1000)).numbers == (1000, 1500, 0, 16, 832, 1216)
    assert upright.framing((1000, 1500)).numbers == (1500, 1000, 16, 0, 1216, 832)


@given(SIZES, st.sampled_from(bucket_list((512, 512), 64)), st.floats(-1, 1))
@examples(100)
def test_a_mirrored_crop_is_the_crop_of_the_mirrored_picture(size, bucket, shift: float) -> None:
    plain = fit(size, bucket, shift=(shift, 0.0))
    mirrored = dataclasses.replace(plain, flip=True)
    left = plain.resized[0] - plain.offset[0] - bucket[0]
    assert mirrored.framing(size) == plain.framing(size)._replace(left=left)
