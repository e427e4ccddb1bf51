"""Noise, targets, weights and loss: closed forms, published values, and diffusers as the reference."""

import pytest
import torch
from diffusers import DDPMScheduler

from lora_atelier.trainer_core.loss import sample_losses, snr_weight
from lora_atelier.trainer_core.masks import loss_mask
from lora_atelier.trainer_core.noise import (
    add_noise,
    alphas_cumprod,
    build_target,
    sample_noise,
    sample_timesteps,
    snr,
)

REFERENCE = {
    kind: DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear", prediction_type=kind)
    for kind in ("epsilon", "v_prediction")
}


def test_alphas_are_those_of_diffusers():
    assert torch.allclose(alphas_cumprod(), REFERENCE["epsilon"].alphas_cumprod, atol=1e-6)


@pytest.mark.parametrize("timestep", [0, 1, 147, 500, 999])
def test_noised_latents_and_v_targets_are_those_of_diffusers(timestep):
    latents, noise = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    steps = torch.full((2,), timestep)
    alphas = alphas_cumprod()[steps]
    scheduler = REFERENCE["v_prediction"]
    assert torch.allclose(add_noise(latents, noise, alphas), scheduler.add_noise(latents, noise, steps), atol=1e-5)
    velocity = scheduler.get_velocity(latents, noise, steps)
    assert torch.allclose(build_target("v_prediction", latents, noise, alphas), velocity, atol=1e-5)
    assert build_target("epsilon", latents, noise, alphas) is noise


def test_the_vector_at_timestep_500():
    alphas, one = alphas_cumprod()[[500]], torch.ones(1, 1, 1, 1)
    assert alphas.sqrt().item() == pytest.approx(0.525674, rel=1e-4)
    assert add_noise(one, -2 * one, alphas).item() == pytest.approx(-1.175699, rel=1e-4)
    assert build_target("v_prediction", one, -2 * one, alphas).item() == pytest.approx(-1.902033, rel=1e-4)


def test_latents_and_noise_come_back_from_v():
    latents, noise = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64)
    alphas = alphas_cumprod().double()[[3, 400, 990]]
    noised, v = add_noise(latents, noise, alphas), build_target("v_prediction", latents, noise, alphas)
    a, s = alphas.sqrt().view(-1, 1, 1, 1), (1 - alphas).sqrt().view(-1, 1, 1, 1)
    assert torch.allclose(a * noised - s * v, latents)
    assert torch.allclose(s * noised + a * v, noise)


# timestep, SNR, min-SNR-5 weight for epsilon, for v
SNR_TABLE = [
    (0, 1175.5, 0.0042536, 0.0042500),
    (1, 585.86, 0.0085344, 0.0085199),
    (10, 103.51, 0.048306, 0.047843),
    (100, 8.4539, 0.59144, 0.52888),
    (200, 3.0600, 1, 0.75369),
    (500, 0.38185, 1, 0.27633),
    (900, 0.014354, 1, 0.014151),
    (999, 0.0046819, 1, 0.0046601),
]


@pytest.mark.parametrize(("timestep", "ratio", "epsilon", "v"), SNR_TABLE)
def test_min_snr_weights(timestep, ratio, epsilon, v):
    value = snr(alphas_cumprod().double()[[timestep]])
    assert value.item() == pytest.approx(ratio, rel=2e-4)
    assert snr_weight(value, "epsilon", 5).item() == pytest.approx(epsilon, rel=2e-4)
    assert snr_weight(value, "v_prediction", 5).item() == pytest.approx(v, rel=2e-4)
    assert snr_weight(value, "epsilon", 0).item() == 1


def test_draws_depend_on_seed_and_index_alone():
    first = sample_noise(3, 17, (4, 4, 8, 8), 0.1)
    torch.manual_seed(99)
    assert torch.equal(first, sample_noise(3, 17, (4, 4, 8, 8), 0.1))
    assert torch.equal(first[:2], sample_noise(3, 17, (2, 4, 8, 8), 0.1))  # not of the batch's size
    assert not torch.equal(first, sample_noise(3, 18, (4, 4, 8, 8), 0.1))
    assert torch.equal(sample_timesteps(3, 5, 8), sample_timesteps(3, 5, 8))


def test_timesteps_fill_their_range_evenly():
    draws = torch.cat([sample_timesteps(0, i, 10, 200, 299) for i in range(500)])
    assert draws.min() == 200 and draws.max() == 299
    assert abs(draws.double().mean().item() - 249.5) < 4 * 28.87 / 5000**0.5


def test_noise_offset_moves_the_mean_of_each_channel():
    plain, moved = sample_noise(0, 0, (256, 4, 8, 8)), sample_noise(0, 0, (256, 4, 8, 8), 0.5)
    shift = (moved - plain).flatten(2)
    assert shift.std(dim=2).max() < 1e-6
    assert shift[..., 0].std().item() == pytest.approx(0.5, rel=0.1)


def test_the_loss_is_the_mean_of_each_sample():
    prediction, target = torch.randn(2, 3, 4, 8, 8)
    expected = [torch.nn.functional.mse_loss(p, t) for p, t in zip(prediction, target, strict=True)]
    assert torch.allclose(sample_losses(prediction, target), torch.stack(expected))
    halves = sample_losses(prediction.bfloat16(), target.bfloat16())
    assert halves.dtype == torch.float32 and torch.allclose(halves, torch.stack(expected), rtol=2e-2)


MASK_CASE = torch.tensor([[1.0, 0.0], [0.5, 0.0]]).view(1, 1, 2, 2)
ERRORS = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2).sqrt()
YES, NO = torch.tensor([True]), torch.tensor([False])


def test_masked_loss_vectors():
    mask = loss_mask(MASK_CASE, YES, 0.1)
    zero = torch.zeros_like(ERRORS)
    assert mask.mean().item() == pytest.approx(0.425)
    assert sample_losses(ERRORS, zero, mask).item() == pytest.approx(0.775)
    assert sample_losses(ERRORS, zero, mask, YES).item() == pytest.approx(1.8235294)
    assert sample_losses(ERRORS, zero, mask, NO).item() == pytest.approx(0.775)
    unmasked = loss_mask(MASK_CASE, NO, 0.1)
    assert sample_losses(ERRORS, zero, unmasked).item() == pytest.approx(2.5)


def test_an_empty_mask_gives_zero_and_one_pixel_its_own_loss():
    zero = torch.zeros_like(ERRORS)
    empty = loss_mask(torch.zeros(1, 1, 2, 2), YES, 0.0)
    assert sample_losses(ERRORS, zero, empty, YES).item() == 0
    pixel = torch.zeros(1, 1, 2, 2)
    pixel[0, 0, 0, 0] = 1
    assert sample_losses(ERRORS, zero, loss_mask(pixel, YES, 0.0), YES).item() == pytest.approx(1.0)


def test_normalising_acts_for_each_sample_alone():
    errors, masks = ERRORS.repeat(2, 1, 1, 1), loss_mask(MASK_CASE, YES, 0.1).repeat(2, 1, 1, 1)
    losses = sample_losses(errors, torch.zeros_like(errors), masks, torch.tensor([True, False]))
    assert losses.tolist() == pytest.approx([1.8235294, 0.775])


def test_masked_prior_preservation_has_the_published_values():
    """The table of the masked loss: plain, normalised, with prior, and the expectation over unmasked visits."""
    mask = loss_mask(torch.tensor([[1, 0], [0.5, 0]])[None, None], torch.tensor([True]), 0.1)
    prediction = torch.tensor([[1.0, 2], [3, 4]]).sqrt()[None, None]
    prior = prediction - torch.tensor([[0.5, 0.5], [1, 2]]).sqrt()[None, None]
    target, half = torch.zeros(1, 1, 2, 2), torch.tensor([0.5])

    def value(*more):
        return sample_losses(prediction, target, *more).item()

    yes, no = torch.tensor([True]), torch.tensor([False])
    assert value(mask, no) == pytest.approx(0.775) and value(mask, yes) == pytest.approx(1.8235294)
    assert value(mask, no, prior, half) == pytest.approx(1.11875)
    assert value(mask, yes, prior, half) == pytest.approx(2.4213555)
    assert value(torch.ones(1, 1, 2, 2), yes, prior, half) == pytest.approx(2.5)  # nothing is left out
    assert 0.9 * value(mask, no) + 0.1 * value() == pytest.approx(0.9475)
    assert 0.9 * value(mask, yes) + 0.1 * value() == pytest.approx(1.8911765)
    white = torch.tensor([[1.0, 0], [0, 0]])[None, None]
    assert value(white, yes) == pytest.approx(1.0) and value(torch.zeros(1, 1, 2, 2), yes) == 0


def test_zero_terminal_snr_has_the_published_alphas():
    alphas = alphas_cumprod(zero_terminal_snr=True).double()
    table = {0: 0.99915, 1: 0.99823, 10: 0.98979, 100: 0.88676, 200: 0.73706, 500: 0.24102, 900: 0.0029604}
    for step, value in table.items():
        assert alphas[step].item() == pytest.approx(value, rel=1e-4)
    assert alphas[999] == 0 and alphas[998].item() == pytest.approx(1.9679e-7, rel=1e-3)
    weights = snr_weight(snr(alphas), "v_prediction", 5)
    assert weights[0].item() == pytest.approx(0.0042500, rel=1e-3) and weights[999] == 0 and weights.isfinite().all()
