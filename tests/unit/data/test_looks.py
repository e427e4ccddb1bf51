"""What pictures look like: hashes that near-duplicates share, blur and borders against closed forms."""

import io
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from lora_atelier.trainer_core.data.looks import CORNERS, MOST_APART, Look, alike, look_at, near_duplicates, same_marks


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def soft(seed: int, side: int = 200) -> Image.Image:
    """Draw large soft shapes."""
    return Image.fromarray(noise(8, 8, seed)).resize((side, side), Image.Resampling.BICUBIC)


def look(pixels: np.ndarray) -> Look:
    return look_at(Image.fromarray(pixels))


def apart(one: Image.Image, other: Image.Image) -> int:
    return (int(look_at(one).hash, 16) ^ int(look_at(other).hash, 16)).bit_count()


@pytest.mark.parametrize("seed", range(5))
def test_a_picture_that_was_scaled_or_compressed_keeps_its_hash_and_others_have_another(seed: int) -> None:
    picture, file = soft(seed), io.BytesIO()
    picture.save(file, "JPEG", quality=60)
    assert apart(picture, picture.resize((90, 110))) <= MOST_APART
    assert apart(picture, Image.open(file)) <= MOST_APART
    assert apart(picture, soft(seed + 100)) > MOST_APART
    assert apart(picture, ImageOps.mirror(picture)) > MOST_APART


def test_pictures_without_shapes_have_no_hash_and_are_alike_to_none() -> None:
    assert look(np.full((40, 40, 3), 7, np.uint8)) == Look(hash="", blur=0.0, border=0.0)
    slope = Image.linear_gradient("L").convert("RGB")  # its waves are all zero, but for rounding
    assert [look_at(picture).hash for picture in (slope, slope.resize((200, 200)), slope.rotate(90))] == ["", "", ""]
    assert list(near_duplicates(["", "", "0" * 16, ""])) == []


HASHES = st.lists(
    st.builds(
        lambda base, bits: base ^ sum(1 << bit for bit in bits),
        st.sampled_from([0, 2**64 - 1, 0x0123456789ABCDEF]),
        st.sets(st.integers(0, 63), max_size=MOST_APART + 1),
    ),
    max_size=12,
)


@given(HASHES)
def test_near_duplicates_are_all_that_are_close_to_one_that_is_none(values: list[int]) -> None:
    wanted: dict[int, int] = {}
    for i in range(len(values)):
        close = [j for j in range(i) if j not in wanted and (values[i] ^ values[j]).bit_count() <= MOST_APART]
        wanted |= {i: close[0]} if close else {}
    assert dict(near_duplicates([f"{value:016x}" for value in values])) == wanted


def test_blur_is_cretes_measure() -> None:
    step, ramp = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64, 3), np.uint8)
    step[:, 32:] = 200
    ramp[:] = (3 * np.arange(64, dtype=np.uint8))[:, None, None]
    assert look(step).blur == round(1 / 11, 3)  # 11 small steps are left of one step, and the part lost is 10/11
    assert look(ramp).blur == 1.0  # a mean changes no ramp
    picture = Image.fromarray(noise(128, 128))
    blurs = [look_at(picture.filter(ImageFilter.GaussianBlur(radius))).blur for radius in (0, 1, 2, 4)]
    assert blurs == sorted(set(blurs))


def test_borders_are_bars_of_one_colour_on_opposite_sides() -> None:
    inside = noise(100, 100)
    assert look(inside).border == 0
    bars = inside.copy()
    bars[:10] = bars[-14:] = 20
    assert look(bars).border == pytest.approx(0.24)
    assert look(bars.swapaxes(0, 1)).border == pytest.approx(0.24)
    framed = bars.copy()
    framed[:, :10] = framed[:, -10:] = 20
    assert look(framed).border == pytest.approx(1 - 0.76 * 0.8)
    one, other = inside.copy(), inside.copy()
    one[:10] = 20  # a floor or a sky
    other[:10], other[-10:] = 20, 200
    assert look(one).border == look(other).border == 0
    ground = np.full((100, 100, 3), 255, np.uint8)
    ground[30:70, 40:60] = 0  # a figure on a white ground has no border
    assert look(ground).border == 0


def scene(seed: int, side: int = 768) -> Image.Image:
    """Draw what is mistaken for marks: shapes over the edges, horizons with poles, grass, rows of windows."""
    draws = np.random.default_rng(seed)
    picture = soft(seed, side)
    pen, kind = ImageDraw.Draw(picture), seed % 4
    x, y, step = (int(each) for each in draws.integers((0, 0, 14), (side // 2, side, 60)))
    if kind == 0:
        for left, top, width, height in draws.integers(10, side // 3, (20, 4)) * (2, 2, 1, 1):
            colour = tuple(map(int, draws.integers(0, 256, 3)))
            pen.ellipse((int(left), int(top), int(left + width), int(top + height)), fill=colour)
    elif kind == 1:
        pen.rectangle((0, y, side, side), fill=(90, 120, 60))
        for pole in draws.integers(0, side, 4):
            pen.line((int(pole), y, int(pole), y - 150), fill=(20, 20, 20), width=6)
    elif kind == 2:
        noisy = np.asarray(picture).astype(np.int16) + draws.integers(-60, 60, (side, side, 1))
        picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    else:
        for left in range(x, side, step):
            for top in range(y // 2, side, step):
                pen.rectangle((left, top, left + step // 2, top + step // 2), fill=(30, 40, 60))
    return picture


def written(picture: Image.Image, text: str, corner: str) -> Image.Image:
    """Write a text of 24 pixels into a corner."""
    font = ImageFont.load_default(24)
    left, top, right, bottom = font.getbbox(text)
    x = 12 - left if "left" in corner else picture.width - 12 - right
    y = 12 - top if "top" in corner else picture.height - 12 - bottom
    ImageDraw.Draw(picture).text((x, y), text, font=font, fill="white" if np.asarray(picture)[4, 4] < 128 else "black")
    return picture


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("text", ["www.example.com", "(c) Jane Doe 2024", "12:34:56 2023"])
def test_text_in_a_corner_is_found_on_a_calm_ground(text: str, corner: str) -> None:
    ground = Image.new("L", (768, 512), 40 if corner < "m" else 210)
    assert look_at(written(ground, text, corner).convert("RGB")).text == str(CORNERS.index(corner))


def test_nearly_no_picture_without_a_mark_has_one() -> None:
    looks = [look_at(scene(seed)) for seed in range(40)]
    assert sum(bool(each.text) for each in looks) == 0
    assert sum(bool(each.marks) for each in looks) <= 2 and same_marks([each.marks for each in looks]) == {}


def test_the_same_mark_of_several_pictures_is_found_and_another_is_not() -> None:
    marks = []
    for seed in range(8):
        picture = soft(seed, 768)
        pen = ImageDraw.Draw(picture)
        pen.ellipse((684, 684, 754, 754), outline=(255, 255, 255), width=6)
        pen.polygon(((719, 694), (744, 740), (694, 740)), fill=(0, 0, 0))
        marks.append(look_at(picture).marks)
    assert len(same_marks(marks)[3]) >= 6
    assert same_marks(marks[:2]) == {} == same_marks([f",,,{bits:048x}" for bits in (15, 15 << 20, 15 << 40)])


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 63), max_size=8)), max_size=12), st.randoms())
def test_groups_are_what_near_duplicates_join_in_any_order(
    looks: list[tuple[int, set[int]]], draw: random.Random
) -> None:
    bits = [base * 0x5555555500FF00FF % 2**64 ^ sum(1 << i for i in flipped) for base, flipped in looks]
    hashes = {str(i): f"{value:016x}" for i, value in enumerate(bits)} | {"plain": "", "bare": ""}
    joined = {name: {name} for name in hashes}
    for i, one in enumerate(bits):
        for j, other in enumerate(bits):
            if (one ^ other).bit_count() <= MOST_APART and joined[str(i)] is not joined[str(j)]:
                joined[str(i)] |= joined[str(j)]
                for name in joined[str(j)]:
                    joined[name] = joined[str(i)]
    names = [*hashes]
    draw.shuffle(names)
    assert {*alike({name: hashes[name] for name in names})} == {frozenset(group) for group in joined.values()}
