"""Losses of pictures against the mean of their noise levels: closed forms, chance, and the same after a resume."""

import math
import random
from typing import Any

import pytest
import torch

from lora_atelier.trainer_core.common.tensor_tree import pack, unpack
from lora_atelier.trainer_core.data.fit import (
    BINS,
    BYTES,
    KEPT,
    LOOK,
    Fit,
    PictureLosses,
    describe_fits,
    describe_left_out,
)
from lora_atelier.trainer_core.objective import Draws


def test_the_ratio_is_the_picture_s_losses_by_the_means_of_their_levels() -> None:
    losses = PictureLosses(["a", "b", "c"])
    for picture, level, loss in ((0, 0.1, 4.0), (1, 0.1, 2.0), (0, 0.9, 1.0), (1, 0.9, 3.0), (1, 1.0, 2.0)):
        losses.add(picture, level, loss)  # means 3 at 0.1, and 2 at 0.9 and 1.0, which share a bin if BINS is 20
    losses.add(2, 0.5, math.nan)
    assert int(0.9 * BINS) != BINS - 1
    fits = losses.fits()
    assert list(fits) == [0, 1]  # the worst first, and none for a picture without a loss
    assert fits[0].ratio == pytest.approx(5 / (3 + 2)) and fits[1].ratio == pytest.approx(7 / (3 + 2 + 2))


def test_a_picture_of_high_noise_levels_is_no_misfit_and_a_worse_one_is() -> None:
    draw, losses = random.Random(0), PictureLosses([str(i) for i in range(8)])
    for visit in range(8 * 60):
        picture, level = visit % 8, draw.random()
        level = level / 4 if picture == 3 else level  # another range of levels, whose losses are higher
        losses.add(picture, level, (1.5 - level) * draw.uniform(0.8, 1.2) * (1.3 if picture == 5 else 1.0))
    fits = losses.fits()
    assert [i for i, fit in fits.items() if fit.is_bad] == [5] and next(iter(fits)) == 5
    assert fits[5].ratio == pytest.approx(1.3, rel=0.08) and fits[3].ratio == pytest.approx(1.0, rel=0.08)
    assert all(fit.visits == 60 for fit in fits.values())


def test_equal_losses_are_no_misfits() -> None:
    losses = PictureLosses(["a", "b"])
    for visit in range(100):
        losses.add(visit % 2, visit / 100, 1.0)
    assert all(fit.ratio == 1 and not fit.is_bad for fit in losses.fits().values())


def watched(pictures: int, visits: int, factors: dict[int, float], **options: Any) -> tuple[PictureLosses, list[int]]:
    """Watch pictures whose losses vary by a few per cent, times the factor of each; also list which became odd.

    visits: of each, and some more, as the first loss of a level is compared with nothing.
    """
    draw, odd = random.Random(3), []
    losses = PictureLosses([str(i) for i in range(pictures)], **options)
    for visit in range(visits + LOOK // 2):
        for i in range(pictures):
            level = draw.random()
            factor = factors.get(i, 1.0) * draw.uniform(0.97, 1.03) * (1 + 0.01 * i)
            if losses.add(i, level, factor * (0.1 + level) * 0.99**visit):  # which all fall
                odd.append(i)
    return losses, odd


def test_a_picture_that_stands_out_twice_is_odd_and_weighs_nothing_if_that_is_asked() -> None:
    for leave_out in (False, True):
        losses, odd = watched(8, 2 * LOOK, {5: 1.5}, leave_out=leave_out)
        fits = losses.fits()
        assert odd == [i for i, fit in fits.items() if fit.odd] == [5]
        assert [losses.weight(i) for i in range(8)] == [0.0 if leave_out and i == 5 else 1.0 for i in range(8)]
        assert fits[5].residual == pytest.approx(math.log(1.5), abs=0.15)
    losses, odd = watched(8, LOOK, {5: 1.5})  # once is not enough
    assert odd == [] and not any(fit.odd for fit in losses.fits().values())
    few, odd = watched(3, 4 * LOOK, {1: 1.5})  # of which nobody can tell
    assert odd == [] and not any(fit.odd or fit.easy for fit in few.fits().values())


def test_pictures_are_compared_within_their_concept() -> None:
    high = {i: 2.0 for i in range(4, 8)}
    assert watched(8, 4 * LOOK, {**high, 6: 3.0})[1] == []  # half of all are high, so that none stands out
    assert watched(8, 4 * LOOK, {**high, 6: 3.0}, concepts=[0] * 4 + [1] * 4)[1] == [6]


def test_an_easy_picture_weighs_less_from_look_to_look_and_recovers() -> None:
    looks = KEPT // LOOK
    for more, weight in ((0, 0.5), (1, 0.25), (2, 0.2), (5, 0.2)):
        losses, _ = watched(9, (looks + more) * LOOK, {0: 0.6}, least=0.2)
        assert losses.weight(0) == weight and losses.fits()[0].easy, more
        assert losses.fits()[0].weight == weight and losses.weight(8) == 1
    draw = random.Random(4)
    for _ in range(2 * KEPT):  # as hard as the others from now on
        for i in range(9):
            losses.add(i, level := draw.random(), draw.uniform(1.0, 1.03) * (0.1 + level) * (1.3 if i == 0 else 1))
    assert not losses.fits()[0].easy and losses.weight(0) == pytest.approx(0.2 * 1.1**4, rel=1e-9)
    falling, _ = watched(9, 2 * KEPT, {0: 0.6})  # off, as the usual least weight is 1
    assert falling.weight(0) == 1 and falling.fits()[0].easy


def test_a_picture_that_still_falls_is_not_easy() -> None:
    draw, losses = random.Random(5), PictureLosses([str(i) for i in range(8)], least=0.125)
    for visit in range(KEPT + LOOK // 2):
        for i in range(8):
            level = draw.random()
            losses.add(i, level, (0.1 + level) * draw.uniform(0.97, 1.03) * (0.9**visit if i == 0 else 1.0))
    fit = losses.fits()[0]
    assert fit.trend is not None and fit.trend < -0.4 and fit.residual is not None and fit.residual < -0.3
    assert not fit.easy and losses.weight(0) == 1


def test_a_resumed_run_watches_as_a_whole_one_to_the_last_bit() -> None:
    draw = random.Random(1)
    seen = [(draw.randrange(6), draw.random(), draw.random()) for _ in range(400)]
    contents = list("abcdef")
    for cut in (20, 101, 300):
        straight, first, second = (PictureLosses(contents, least=0.125, leave_out=True) for _ in range(3))
        for each in seen[:cut]:
            first.add(*each)
        second.load_state_dict(unpack(*pack(first.state_dict(), copy=True)))
        for each in seen[cut:]:
            second.add(*each)
        for each in seen:
            straight.add(*each)
        assert second.fits() == straight.fits()
        assert any(fit.weight < 1 for fit in straight.fits().values())
        state = straight.state_dict()
        again = second.state_dict()
        assert all(torch.equal(state[name].nan_to_num(), again[name].nan_to_num()) for name in state if name != "of")
        tensors = [each for name, each in state.items() if name not in ("of", "levels", "means")]
        assert sum(each.nbytes for each in tensors) == BYTES * len(contents)
    second.load_state_dict(PictureLosses(["a", "b", "other"]).state_dict())
    assert second.fits() == {} and second.weight(0) == 1
    straight.load_state_dict(None)  # a save without them
    assert straight.fits() == {}
    old = {name: each for name, each in first.state_dict().items() if name in ("of", "sums", "visits", "levels")}
    straight.load_state_dict(old)  # of before there was a watch
    assert {i: fit.ratio for i, fit in straight.fits().items()} == {i: fit.ratio for i, fit in first.fits().items()}
    assert all(fit.residual is None for fit in straight.fits().values())


def test_the_sentence_names_the_worst_first_with_captions_and_no_others() -> None:
    def fit(ratio: float, sure: float) -> Fit:
        return Fit(ratio=ratio, sure=sure, visits=9)

    pictures = [("a.png", "a cat", fit(1.2, 3.5)), ("b.png", "", fit(1.5, 9.0)), ("c.png", "x", fit(1.9, 2.0))]
    assert describe_fits(pictures) == (
        "2 pictures have higher losses than the others at the same noise levels, so look at them and their captions: "
        'b.png 1.50 times, a.png 1.20 times ("a cat").'
    )
    assert describe_fits(pictures[2:]) == ""
    said = describe_left_out("b.png", ["a cat"], pictures[1][2], 80)
    assert said.startswith("b.png is left out after step 80") and "are 1.50 times those of all pictures" in said
    odd = Fit(ratio=1.9, sure=2.0, visits=9, odd=True)
    assert describe_fits([("c.png", "x", odd)]).startswith("1 picture has higher losses than the others")


def test_losses_are_compared_without_weights_and_areas_of_masks() -> None:
    mask = torch.zeros(3, 1, 2, 2)
    mask[0, 0, 0], mask[1], mask[2, 0, 0] = 1, 1, 1
    empty = torch.zeros(())
    rest = {name: empty for name in ("latents", "levels", "noised", "target", "mix", "huber_c")}
    draws = Draws(
        weights=torch.tensor([0.5, 2.0, 1.0]), mask=mask, normalize=torch.tensor([False, False, True]), **rest
    )  # type: ignore[arg-type]
    assert draws.plain(torch.tensor([1.0, 1.0, 1.0])).tolist() == [4.0, 0.5, 1.0]
    unmasked = Draws(weights=torch.tensor([0.5, 0.0]), mask=None, normalize=None, **rest)  # type: ignore[arg-type]
    assert unmasked.plain(torch.tensor([1.0, 1.0])).tolist() == [2.0, math.inf]
