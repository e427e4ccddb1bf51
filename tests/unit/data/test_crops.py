"""A focus lies as near the centre of its crop as the picture allows, whatever else moves the crop."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import AugmentConfig
from lora_atelier.trainer_core.data.crops import Crop, fit, variant

share = st.floats(0, 1)


def offset_of(crop: Crop, focus: tuple[float, float], original: tuple[int, int]) -> list[float]:
    """Compute how far a point of the picture is from the crop's centre along both sides, in trained pixels."""
    first, second, _, fourth = crop.corners(original)
    away = [focus[0] * original[0], focus[1] * original[1]]
    found = []
    for end, bucket in zip((second, fourth), crop.bucket, strict=True):
        length = math.dist(first, end)
        along = sum((p - f) * (e - f) for p, f, e in zip(away, first, end, strict=True)) / length
        found.append(along / length * bucket - bucket / 2)
    return found


@given(st.tuples(share, share), st.floats(1, 2), st.sampled_from([0.0, 20.0, -35.0]))
def test_a_focus_is_centred_or_the_crop_lies_at_the_edge(focus: tuple[float, float], zoom: float, angle: float) -> None:
    size = (300, 200)
    crop = fit(size, (64, 128), zoom=zoom, angle=angle, focus=focus)
    for away, start, whole, side in zip(
        offset_of(crop, focus, size), crop.offset, crop.resized, crop.bucket, strict=True
    ):
        centred, low, high = abs(away) <= 1, start == 0 and away < 1, start == whole - side and away > -1
        assert centred or low or high


def test_the_middle_is_the_centred_crop_and_none_changes_nothing() -> None:
    assert fit((300, 200), (64, 128), focus=(0.5, 0.5)) == fit((300, 200), (64, 128))
    left, right = (fit((300, 200), (64, 128), focus=(x, 0.5)) for x in (0.0, 1.0))
    assert left.offset == (0, 0) and right.offset == (right.resized[0] - 64, 0)


def test_augmentation_moves_the_crop_from_the_focus() -> None:
    augment = AugmentConfig(crop_jitter=0.5, variants=20)

    def lefts(focus: tuple[float, float] | None) -> list[int]:
        crops = [
            variant((300, 200), (64, 128), augment, seed=0, picture=0, index=index, focus=focus) for index in range(20)
        ]
        return [crop.offset[0] for crop in crops]

    room = fit((300, 200), (64, 128)).resized[0] - 64
    assert max(lefts((0.0, 0.5))) <= room / 4 and min(lefts((0.0, 0.5))) == 0
    middle = [left - room // 2 for left in lefts(None)]
    assert all(abs(a - b) <= 1 for a, b in zip(middle, (left - room // 2 for left in lefts((0.5, 0.5))), strict=True))
