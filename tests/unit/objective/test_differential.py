"""Differential guidance: its closed form, its gradient, and its place behind the other terms."""

import pytest
import torch
from gradients import Told

from lora_atelier.trainer_core.config import BaseModelConfig, DatasetConfig, ObjectiveConfig, RunConfig
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.objective import Batch, DrawIndex, Objective, terms_of
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.objective.terms.differential import DifferentialGuidance

LATENTS = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
OTHERS = {"base_model": BaseModelConfig(path="base.safetensors"), "dataset": DatasetConfig(concepts=())}
MASK = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def computed(config, noise, terms=()):
    """Compute losses and the gradient of the prediction, with the draws."""
    objective = Objective(config, noise, 3, terms=terms)
    batch = Batch(
        index=DrawIndex(micro_batch=2, step=0), latents=LATENTS, weights=torch.tensor([1.0, 0.5, 2.0]), mask=MASK
    )
    draws = objective.draw(batch, torch.device("cpu"))
    prediction = draws.noised.sin().requires_grad_()
    losses = objective.loss(prediction, Told(draws, None, None, objective))
    return losses.detach(), torch.autograd.grad(losses.sum(), prediction)[0], draws, prediction.detach()


@pytest.mark.parametrize("noise", [noise_model("epsilon", False), flow_noise()], ids=["epsilon", "flow"])
@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_the_target_lies_past_itself(noise, loss):
    config = ObjectiveConfig(loss=loss)
    losses, gradient, draws, prediction = computed(config, noise, [DifferentialGuidance(3.0)])
    free = prediction.clone().requires_grad_()
    difference = free - (prediction + 3.0 * (draws.target - prediction))
    c = draws.huber_c.view(-1, 1, 1, 1)
    errors = {
        "mse": lambda: difference.square(),
        "l1": difference.abs,
        "huber": lambda: 2 * c * ((difference.square() + c.square()).sqrt() - c),
    }[loss]()
    expected = (errors * MASK).mean(dim=(1, 2, 3)) * draws.weights
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), free)[0], atol=1e-6, rtol=1e-4)


def test_with_squared_errors_it_multiplies_gradients_by_its_scale_and_losses_by_its_square():
    plain, pulled = (
        computed(ObjectiveConfig(), noise_model("epsilon", False), terms) for terms in ([], [DifferentialGuidance(3.0)])
    )
    torch.testing.assert_close(pulled[0], 9 * plain[0])
    torch.testing.assert_close(pulled[1], 3 * plain[1])


def test_a_run_has_it_behind_whatever_moves_the_target():
    given = RunConfig(objective=ObjectiveConfig(guidance_loss=2.0, differential_guidance=3.0), **OTHERS)
    assert [type(term).__name__ for term in terms_of(given)] == ["GuidanceLoss", "DifferentialGuidance"]
    assert terms_of(RunConfig(**OTHERS)) == []
