"""What a run's end says to try next: only what its figures show, each in a sentence with a value."""

import math

import pytest
import torch

from lora_atelier.trainer_core.training.advice import Figures, advise

FLAT = [0.1] * 400


def figures(**given) -> Figures:
    usual = {"losses": FLAT, "validation": [], "prediction": 0.1, "noise_scale": None, "batch_size": 1, "accumulate": 1}
    return Figures(**(usual | given))


def measured(*losses: float, every: int = 100) -> list[tuple[int, float]]:
    """Pair each loss with its step: the first with 0, the next `every` steps later."""
    return [(every * i, loss) for i, loss in enumerate(losses)]


def noisy(first: float, last: float, count: int = 800, spread: float = 0.05) -> list[float]:
    """Return losses that go from one to the other, with noise of their own."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(1)) * spread
    return (torch.linspace(first, last, count) + noise).tolist()


def test_a_run_without_anything_to_say_says_nothing() -> None:
    assert advise(figures()) == []
    assert advise(figures(losses=[], validation=measured(0.5, 0.4))) == []
    assert advise(figures(losses=[math.nan] * 400, prediction=None)) == []


def test_a_run_that_learnt_by_heart_names_the_step_of_the_lowest_loss() -> None:
    curve = measured(0.5, 0.4, 0.3, 0.32, 0.34, 0.36)
    assert advise(figures(validation=curve)) == [
        "The validation loss rose by 20% since step 200: set steps of Train LoRA to 200, or keep_best of Validation to "
        "on."
    ]
    epochs = advise(figures(validation=curve, epochs=10))
    assert len(epochs) == 1 and "set epochs of Train LoRA to 5" in epochs[0]
    assert advise(figures(validation=curve, keeps_best=True)) == []
    assert advise(figures(validation=measured(0.5, 0.4, 0.3, 0.301, 0.302, 0.303))) == []  # a rise of nothing
    assert advise(figures(validation=measured(0.5, 0.4, 0.3, 0.32, 0.33))) == []  # not yet for long
    rising = advise(figures(validation=measured(0.3, 0.31, 0.32, 0.34, 0.36), keeps_best=True))
    assert len(rising) == 1 and "never fell below its start: set learning_rate of Optimizer lower" in rising[0]


def test_a_run_whose_validation_loss_still_falls_is_too_short() -> None:
    curve = measured(0.5, 0.4, 0.35, 0.3, 0.25)
    assert advise(figures(validation=curve)) == [
        "The validation loss still fell at the end: set steps of Train LoRA to 600."
    ]
    assert advise(figures(validation=measured(0.5, 0.4, 0.3, 0.2999, 0.2998))) == []  # it has settled
    assert advise(figures(validation=curve, losses=noisy(1, 0))) == advise(figures(validation=curve))
    assert advise(figures(validation=measured(0.5, 0.4, 0.3, 0.3, 0.31), losses=noisy(1, 0))) == []


@pytest.mark.parametrize(("first", "last", "said"), [(1.0, 0.5, True), (0.5, 0.499, False), (0.5, 1.0, False)])
def test_without_validation_the_training_loss_tells_beyond_its_noise(first, last, said) -> None:
    found = advise(figures(losses=noisy(first, last)))
    assert found == (["The loss still fell in the last quarter: set steps of Train LoRA to 1200."] if said else [])
    assert advise(figures(losses=noisy(first, last)[:150])) == []  # too few to tell


def test_a_lora_that_hardly_changes_anything_needs_a_higher_rate() -> None:
    (sentence,) = advise(figures(prediction=0.002))
    assert sentence == (
        "The LoRA changes a prediction by 0.20% only: set learning_rate of Optimizer about 3 times higher."
    )
    assert advise(figures(prediction=0.002, losses=noisy(1, 0))) == [sentence]  # more steps are no better remedy
    assert advise(figures(prediction=0.0)) == []  # said elsewhere
    assert advise(figures(prediction=0.002, rated=False)) == []


def test_a_batch_below_the_noise_scale_is_accumulated() -> None:
    scale = (7.5, 12.0, 20.0)
    assert advise(figures(noise_scale=scale, batch_size=2)) == [
        "Gradients of 2 at a time are mostly noise: set accumulate of Train LoRA to 4."
    ]
    assert advise(figures(noise_scale=scale, batch_size=2, accumulate=4)) == []
