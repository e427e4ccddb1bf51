"""Which frames of clips are trained: against counts by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import ClipConfig
from lora_atelier.trainer_core.data.clips import clip_of, fate, is_short, resampled, rounded


def config(**settings):
    return ClipConfig(**{"step": 4, "rate": 0.0} | settings)


@pytest.mark.parametrize(
    "frames, rate, times, wanted, expected",
    [
        (6, 24.0, (), 0.0, (0, 1, 2, 3, 4, 5)),
        (6, 23.976, (), 24.0, (0, 1, 2, 3, 4, 5)),
        (12, 24.0, (), 16.0, (0, 1, 3, 4, 6, 7, 9, 10)),
        (12, 48.0, (), 16.0, (0, 3, 6, 9)),
        (3, 8.0, (), 16.0, (0, 0, 1, 1, 2, 2)),
        (1, 24.0, (), 16.0, (0,)),
        (2, 120.0, (), 16.0, (0,)),
        # Frames at 0, 0.1, 0.5 and 0.6 s, each 0.1 s long, seen every 0.1 s:
        (4, 10.0, (0.0, 0.1, 0.5, 0.6), 10.0, (0, 1, 1, 1, 1, 2, 3)),
        (4, 10.0, (2.0, 2.1, 2.5, 2.6), 5.0, (0, 1, 1)),
    ],
)
def test_frames_are_those_that_are_seen_at_the_rate(frames, rate, times, wanted, expected):
    assert resampled(frames, rate, times, wanted) == expected


@pytest.mark.parametrize(
    "settings, frames, starts, length, unused",
    [
        ({"frames": (9,)}, 20, (0,), 9, 11),
        ({"frames": (8,)}, 20, (0,), 5, 15),  # 8 is no 4n + 1
        ({"frames": (5, 17, 33)}, 20, (0,), 17, 3),
        ({"frames": (33,)}, 20, (0,), 17, 3),  # too short
        ({"frames": (33,)}, 3, (0,), 1, 2),
        ({"frames": (9,), "take": "chunk"}, 20, (0, 9), 9, 2),
        ({"frames": (9,), "take": "slide", "slide_frames": 5}, 20, (0, 5, 10), 9, 1),
        ({"frames": (5,), "take": "slide", "slide_frames": 8}, 20, (0, 8), 5, 10),
        ({"frames": (9,), "take": "uniform", "parts": 3}, 20, (0, 6, 11), 9, 0),
        ({"frames": (9,), "take": "uniform", "parts": 1}, 20, (0,), 9, 11),
        ({"frames": (9,), "take": "uniform", "parts": 40}, 11, (0, 1, 2), 9, 0),
        ({"take": "full"}, 20, (0,), 17, 3),
        ({"take": "full", "most_frames": 16}, 20, (0,), 13, 7),
        ({"frames": (24,), "step": 8}, 20, (0,), 17, 3),
    ],
)
def test_parts_of_a_clip(settings, frames, starts, length, unused):
    found = clip_of(frames, 16.0, (), config(**settings))
    assert (found.starts, found.length, found.unused) == (starts, length, unused)
    assert found.part(len(starts) - 1) == tuple(range(starts[-1], starts[-1] + length))


@given(
    st.integers(1, 400),
    st.sampled_from([8.0, 16.0, 23.976, 25.0, 30.0, 60.0]),
    st.sampled_from([0.0, 16.0, 24.0, 25.0]),
    st.sampled_from(["head", "chunk", "slide", "uniform", "full"]),
    st.lists(st.integers(1, 99), min_size=1, max_size=3),
    st.sampled_from([1, 4, 6, 8]),
)
def test_every_part_lies_in_the_clip_and_has_frames_that_the_model_takes(frames, rate, wanted, take, lengths, step):
    found = clip_of(frames, rate, (), config(take=take, frames=tuple(lengths), step=step, rate=wanted))
    assert found.length >= 1 and (found.length - 1) % step == 0 and found.starts[0] == 0
    for number in range(len(found.starts)):
        part = found.part(number)
        assert len(part) == found.length and list(part) == sorted(part) and part[0] >= 0 and part[-1] < frames
    together = {start + i for start in found.starts for i in range(found.length)}
    assert found.unused == len(found.frames) - len(together)


def test_the_fate_of_a_clip_is_told():
    def told(available, **settings):
        return fate(clip_of(available, 16.0, (), config(**settings)), config(**settings))

    assert told(20, frames=(9,)) == "frames 0 to 8, 9 of them; 11 not used"
    assert told(9, frames=(9,)) == "frames 0 to 8, 9 of them"
    assert told(20, frames=(9,), take="chunk") == "frames 0 to 17 in 2 parts of 9; 2 not used"
    assert told(1, frames=(9,)) == "frame 0, as a picture; too short for 9"
    assert told(7, frames=(9, 33)) == "frames 0 to 4, 5 of them; 2 not used; too short for 9"
    assert is_short(clip_of(7, 16.0, (), config(frames=(9, 33))), config(frames=(9, 33)))
    assert not is_short(clip_of(10, 16.0, (), config(frames=(9, 33))), config(frames=(9, 33)))


@pytest.mark.parametrize(
    "frames, step, expected", [(33, 4, 33), (32, 4, 29), (1, 8, 1), (8, 8, 1), (9, 8, 9), (7, 1, 7)]
)
def test_numbers_of_frames_are_rounded_down(frames, step, expected):
    assert rounded(frames, step) == expected
