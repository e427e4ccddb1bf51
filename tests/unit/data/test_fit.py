"""Losses of pictures against the mean of their noise levels: closed forms, chance, and the same after a resume."""

import math
import random

import pytest
import torch

from lora_atelier.trainer_core.common.tensor_tree import pack, unpack
from lora_atelier.trainer_core.data.fit import BINS, Fit, PictureLosses, describe_fits
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


def test_a_resumed_run_has_the_same_sums_to_the_last_bit() -> None:
    draw = random.Random(1)
    seen = [(draw.randrange(3), draw.random(), draw.random()) for _ in range(50)]
    straight, first, second = (PictureLosses(["a", "b", "c"]) for _ in range(3))
    for each in seen:
        straight.add(*each)
    for each in seen[:20]:
        first.add(*each)
    second.load_state_dict(unpack(*pack(first.state_dict(), copy=True)))
    for each in seen[20:]:
        second.add(*each)
    assert second.fits() == straight.fits()
    second.load_state_dict(PictureLosses(["a", "b", "other"]).state_dict())
    assert second.fits() == {}
    straight.load_state_dict(None)  # a save without them
    assert straight.fits() == {}


def test_the_sentence_names_the_worst_first_with_captions_and_no_others() -> None:
    def fit(ratio: float, sure: float) -> Fit:
        return Fit(ratio=ratio, sure=sure, visits=9)

    pictures = [("a.png", "a cat", fit(1.2, 3.5)), ("b.png", "", fit(1.5, 9.0)), ("c.png", "x", fit(1.9, 2.0))]
    assert describe_fits(pictures) == (
        "2 pictures have higher losses than the others at the same noise levels, so look at them and their captions: "
        'b.png 1.50 times, a.png 1.20 times ("a cat").'
    )
    assert describe_fits(pictures[2:]) == ""


def test_losses_are_compared_without_weights_and_areas_of_masks() -> None:
    mask = torch.zeros(3, 1, 2, 2)
    mask[0, 0, 0], mask[1], mask[2, 0, 0] = 1, 1, 1
    empty = torch.zeros(())
    rest = {name: empty for name in ("latents", "levels", "noised", "target", "mix", "huber_c")}
    rest |= {"prior_weight": None, "held": None}
    draws = Draws(
        weights=torch.tensor([0.5, 2.0, 1.0]), mask=mask, normalize=torch.tensor([False, False, True]), **rest
    )  # type: ignore[arg-type]
    assert draws.plain(torch.tensor([1.0, 1.0, 1.0])).tolist() == [4.0, 0.5, 1.0]
    unmasked = Draws(weights=torch.tensor([0.5, 0.0]), mask=None, normalize=None, **rest)  # type: ignore[arg-type]
    assert unmasked.plain(torch.tensor([1.0, 1.0])).tolist() == [2.0, math.inf]
