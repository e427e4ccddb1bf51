"""Central differences of losses that are rounded: right gradients are believed at any seed, wrong ones are not."""

import pytest
import torch
import zoo.comfy_here  # noqa: F401

from lora_atelier.nodes.comfyui.connected.proof import ROUNDED, WRONG_SLOPE, _check_slopes

LAYERS = 4


def checked(seed, step, reported):
    """Check gradients of a small network whose predictions are multiples of a step; reported: as many times the true.

    The gradient is that of no rounding, as in numbers of few bits.
    """
    draws = torch.Generator().manual_seed(seed)
    weights = [torch.randn(16, generator=draws, requires_grad=True) for _ in range(LAYERS)]
    mixes = [torch.randn(16, 16, generator=draws) / 4 for _ in weights]

    def run():
        made = sum((mix @ weight).sin() for mix, weight in zip(mixes, weights, strict=True))
        return made + ((made / step).round() * step - made).detach()

    loss = run().square().mean()
    loss.backward()
    found = {str(i): [(weight.detach(), weight.grad * reported)] for i, weight in enumerate(weights)}
    _check_slopes([run], [loss.item()], [found], list(found), "", ROUNDED)


@pytest.mark.parametrize("step", [0.1, 0.3, 1.0])
def test_right_gradients_are_believed_at_any_seed_however_coarse_the_numbers_are(step):
    for seed in range(40):
        checked(seed, step, 1)


@pytest.mark.parametrize("reported", [0.5, 2])
def test_wrong_gradients_are_refused_where_numbers_are_finer_than_that(reported):
    for seed in range(20):
        with pytest.raises(ValueError, match=WRONG_SLOPE.partition("{}")[0]):
            checked(seed, 0.01, reported)
