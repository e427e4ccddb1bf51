"""The learned uncertainty of noise levels: its formula, what it settles at, and resuming; weightings of flow models."""

import math

import pytest
import torch

from lora_atelier.trainer_core.common.tensor_tree import load_state, save_state
from lora_atelier.trainer_core.config import ObjectiveConfig
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.objective import AffinePath, Objective
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.objective.terms.uncertainty import Uncertainty

CPU = torch.device("cpu")
LEVELS = torch.tensor([20, 500, 999])
LOSSES = torch.tensor([2.0, 0.3, 0.02])


def uncertainty(rate=0.05, noise=None, seed=3) -> Uncertainty:
    found = Uncertainty(rate)
    found.begin(AffinePath(noise or noise_model("epsilon", False)), seed, CPU)
    return found


def learn(found: Uncertainty, steps: int, scale: float = 1.0) -> None:
    for _ in range(steps):
        found.forget_gradients()
        (found.weigh(LOSSES, LEVELS).mean() * scale).backward()
        found.update(scale)


def test_at_first_all_levels_weigh_as_without_it() -> None:
    assert torch.equal(uncertainty().weigh(LOSSES, LEVELS), LOSSES)


def test_losses_are_divided_by_exp_u_and_u_is_added() -> None:
    found = uncertainty()
    learn(found, 3)
    u = found.at(LEVELS).detach()
    assert u.abs().min() > 1e-3
    losses = LOSSES.clone().requires_grad_()
    weighed = found.weigh(losses, LEVELS)
    expected = [loss / math.exp(each) + each for loss, each in zip(LOSSES.tolist(), u.tolist(), strict=True)]
    assert weighed.tolist() == pytest.approx(expected, rel=1e-5)
    (slope,) = torch.autograd.grad(weighed.sum(), losses)
    assert slope.tolist() == pytest.approx([math.exp(-each) for each in u.tolist()], rel=1e-5)


@pytest.mark.parametrize("noise", [noise_model("epsilon", False), noise_model("v_prediction", True), flow_noise()])
def test_it_settles_where_exp_u_is_the_mean_loss_also_at_pure_noise(noise) -> None:
    found = uncertainty(noise=noise)
    learn(found, 400)
    assert found.at(LEVELS).exp().tolist() == pytest.approx(LOSSES.tolist(), rel=0.05)


def test_a_loss_scale_of_float16_changes_nothing() -> None:
    plain, scaled = uncertainty(), uncertainty()
    learn(plain, 5)
    learn(scaled, 5, 4096.0)
    assert torch.equal(plain.weight, scaled.weight)


def test_it_resumes_to_the_last_bit(tmp_path) -> None:
    whole, first, second = uncertainty(), uncertainty(), uncertainty()
    assert torch.equal(first._features, second._features)
    assert not torch.equal(first._features, uncertainty(seed=4)._features)
    learn(whole, 6)
    learn(first, 3)
    save_state(tmp_path / "state.safetensors", {"uncertainty": first.state_dict()})
    second.load_state_dict(load_state(tmp_path / "state.safetensors")["uncertainty"])
    learn(second, 3)
    assert torch.equal(whole.weight, second.weight)


def test_other_weights_of_levels_are_refused_beside_it() -> None:
    with pytest.raises(ValueError, match="set weighting of Noise & Loss to min_snr and min_snr_gamma to 0"):
        ObjectiveConfig(uncertainty_rate=0.01, min_snr_gamma=5.0)


def test_weightings_of_flow_models_are_those_of_their_times() -> None:
    times = torch.arange(1, 1001, dtype=torch.float64) / 1000

    def weights(name: str) -> torch.Tensor:
        return Objective(ObjectiveConfig(weighting=name), flow_noise(), 0).level_weights().double()

    assert torch.allclose(weights("cos_map"), 2 / (math.pi * (1 - 2 * times + 2 * times**2)), rtol=1e-5)
    cleanest = 1 / (1 + math.sqrt(1000))  # where the signal-to-noise ratio is limited
    assert torch.allclose(weights("sigma_sqrt"), times.clamp(min=cleanest) ** -2, rtol=1e-4)
    assert float(weights("cos_map").mean()) == pytest.approx(1, rel=2e-3)  # the density of a distribution
