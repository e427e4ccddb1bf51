"""The gradient noise scale against gradients whose noise is known."""

import math

import pytest
import torch

from lora_atelier.trainer_core.optim.noise_scale import ELEMENTS, NoiseScale

TRUTH = 12.0  # pictures


def measured(batches, steps, parameters, truth=TRUTH, loss_scale=1.0, seed=3):
    """Return a NoiseScale that has seen gradients of |G|^2 = 1 and tr(S) = truth.

    batches: sizes of the micro-batches of a step.
    """
    draws = torch.Generator().manual_seed(seed)
    scale, size = NoiseScale(parameters, every=1), sum(p.numel() for p in parameters)
    true = torch.randn(size, generator=draws)
    true /= true.norm()
    shapes = [p.shape for p in parameters]
    running = None
    for _ in range(steps):
        total, seen = torch.zeros(size), 0
        for number, count in enumerate(batches):
            noise = torch.randn(size, generator=draws) * math.sqrt(truth / size / count)
            total, seen = total + (true + noise) * count / sum(batches), seen + count
            for p, part in zip(parameters, total.split([s.numel() for s in shapes]), strict=True):
                p.grad = part.view(p.shape).clone()
            if number == len(batches) // 2 - 1:
                for p in parameters:
                    p.grad *= loss_scale
                scale.halfway(seen, lambda: loss_scale)
        running = scale.record(*scale.finished(sum(batches)).tolist())
    return scale, running


def parameters(*shapes):
    return [torch.zeros(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("batches", "loss_scale"),
    [((2,), 1.0), ((1, 1), 1.0), ((3, 1, 2, 2, 1), 4096.0)],
    ids=["steps", "halves", "uneven"],
)
def test_the_scale_of_known_noise_is_found_within_the_uncertainty_it_states(batches, loss_scale):
    found = [measured(batches, 120, parameters((20, 16), (80,)), loss_scale=loss_scale, seed=i) for i in range(10)]
    ranges = [scale.estimate() for scale, _ in found]
    assert sum(low < TRUTH < high for low, _, high in ranges) >= 8  # 95 % each
    assert all(high / low < 2.5 for low, _, high in ranges)
    for value in (sum(middle for _, middle, _ in ranges) / 10, sum(running for _, running in found) / 10):
        assert value == pytest.approx(TRUTH, rel=0.05)


def test_a_part_of_many_parameters_is_enough():
    scale, _ = measured((2,), 24, parameters((ELEMENTS // 512, 512), (ELEMENTS, 2)))
    assert scale.estimate()[1] == pytest.approx(TRUTH, rel=0.2)


def test_its_sentence():
    few, _ = measured((2,), 10, parameters((500,)))
    assert few.sentence(2) == "" and few.estimate() is None
    hidden, _ = measured((1,), 60, parameters((500,)), truth=1e6)
    assert "could not be estimated" in hidden.sentence(1)
    good, _ = measured((2,), 240, parameters((500,)))
    assert "is 2, so a larger one" in good.sentence(2) and "in that range" in good.sentence(12)
    assert "is 99, so a smaller one" in good.sentence(99) and "above about 1" in good.sentence(99)


def test_steps_without_a_gradient_or_a_finite_one_leave_the_estimate_alone():
    (p,) = parameters((50,))
    scale = NoiseScale([p], every=1)
    assert not scale.finished(1).isfinite().any()  # nothing before it
    assert scale.finished(1).tolist() == [0.0, 0.0]
    p.grad = torch.full((50,), math.nan)
    assert scale.record(*scale.finished(1).tolist()) is None and scale.record(0.0, 0.0) is None
    assert scale.sentence(1) == ""


@pytest.mark.parametrize("halves", [False, True])
def test_only_some_steps_are_looked_at_and_only_neighbours_compared(halves):
    (p,) = parameters((50,))
    scale, compared = NoiseScale([p], every=4), []
    for step in range(10):
        p.grad = torch.full((50,), float(step + 1))
        if halves:
            scale.halfway(1, lambda: 1.0)
            p.grad = p.grad * 2
        if scale.finished(2).isfinite().all():
            compared.append(step)
    assert compared == ([0, 4, 8] if halves else [1, 5, 9])
