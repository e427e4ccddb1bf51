"""Targets, weights and loss: closed forms, published values, and diffusers as the reference."""

import dataclasses
import itertools
import math
import typing

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from gradients import loss_of

from lora_atelier.trainer_core.common.axes import like
from lora_atelier.trainer_core.config import MIN_SNR, ObjectiveConfig
from lora_atelier.trainer_core.config.objective import HUBER, WEIGHTINGS, Loss
from lora_atelier.trainer_core.data.masks import loss_mask
from lora_atelier.trainer_core.models.base import NoiseModel
from lora_atelier.trainer_core.models.sd.noise import alphas_cumprod, noise_model
from lora_atelier.trainer_core.objective import AffinePath, Draws, Objective
from lora_atelier.trainer_core.objective import weighting as weightings
from lora_atelier.trainer_core.objective.loss import element_errors, huber_thresholds, masked_mean, sample_losses
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.objective.terms.prior import MaskedPrior, PriorPrediction

KINDS = ("epsilon", "v_prediction")
REFERENCE = {kind: DDPMScheduler(1000, 0.00085, 0.012, "scaled_linear", prediction_type=kind) for kind in KINDS}


def snr_weight(ratios, kind, *weighting, **settings):
    return weightings.snr_weight(ratios, kind, ratios + (kind == "v_prediction"), *weighting, **settings)


def path_of(kind="epsilon", zero_terminal_snr=False):
    return AffinePath(noise_model(kind, zero_terminal_snr))


def test_alphas_are_those_of_diffusers():
    assert torch.allclose(alphas_cumprod(), REFERENCE["epsilon"].alphas_cumprod, atol=1e-6)


@pytest.mark.parametrize("timestep", [0, 1, 147, 500, 999])
def test_noised_latents_and_v_targets_are_those_of_diffusers(timestep):
    latents, noise = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    steps = torch.full((2,), timestep)
    mix, scheduler = path_of("v_prediction").at(steps), REFERENCE["v_prediction"]
    assert torch.allclose(mix.noised(latents, noise), scheduler.add_noise(latents, noise, steps), atol=1e-5)
    velocity = scheduler.get_velocity(latents, noise, steps)
    assert torch.allclose(mix.target(latents, noise), velocity, atol=1e-5)
    assert path_of().at(steps).target(latents, noise) is noise


def test_the_vector_at_timestep_500():
    one, level = torch.ones(1, 1, 1, 1), torch.tensor([500])
    mix = path_of("v_prediction").at(level)
    assert mix.alpha.item() == pytest.approx(0.525674, rel=1e-4)
    assert mix.noised(one, -2 * one).item() == pytest.approx(-1.175699, rel=1e-4)
    assert mix.target(one, -2 * one).item() == pytest.approx(-1.902033, rel=1e-4)


def test_latents_and_noise_come_back_from_v():
    latents, noise = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64)
    mix = path_of("v_prediction").at(torch.tensor([3, 400, 990]))
    noised, v = mix.noised(latents, noise), mix.target(latents, noise)
    a, s = like(mix.alpha.double(), latents), like(mix.sigma.double(), latents)
    assert torch.allclose((a * noised - s * v) / (a * a + s * s), latents)
    assert torch.allclose((s * noised + a * v) / (a * a + s * s), noise)


def test_flow_goes_straight_from_the_latents_to_the_noise():
    path = AffinePath(flow_noise(1000))
    latents, noise = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(2))
    levels = torch.tensor([0, 249, 999])
    mix, t = path.at(levels), torch.tensor([0.001, 0.25, 1.0]).view(-1, 1, 1, 1)
    noised = mix.noised(latents, noise)
    assert torch.allclose(noised, (1 - t) * latents + t * noise)
    assert torch.equal(mix.target(latents, noise), noise - latents)  # the same at every level: d noised / dt
    assert torch.allclose((mix.noised(latents, noise) - latents) / t, noise - latents, rtol=1e-3, atol=1e-3)
    assert torch.allclose(mix.clean(noise - latents, noised), latents, atol=1e-5)
    assert path.snr[[0, 249, 999]].tolist() == pytest.approx([999**2, 9, 0], rel=1e-3)
    assert path.noise.ratio[[0, 249]].tolist() == pytest.approx([1 / 999, 1 / 3], rel=1e-5)


def test_every_prediction_is_one_affine_form():
    """What a kind predicts, written as p x0 + q noise, is the same target and implies the same latents."""
    latents, noise = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(3))
    predicted = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(4))
    levels = torch.tensor([3, 400, 900])
    for path in (path_of(), path_of("v_prediction"), AffinePath(flow_noise(1000)), x0_path()):
        own = path.noise
        p, q = {
            "epsilon": (torch.zeros(1000), torch.ones(1000)),
            "v_prediction": (-own.sigma, own.alpha),
            "flow": (-torch.ones(1000), torch.ones(1000)),
            "x0": (torch.ones(1000), torch.zeros(1000)),
        }[path.kind]
        affine = AffinePath(
            NoiseModel(kind="affine", alpha=own.alpha, sigma=own.sigma, snr=own.snr, ratio=own.ratio, p=p, q=q)
        )
        first, second = path.at(levels), affine.at(levels)
        assert torch.allclose(first.target(latents, noise), second.target(latents, noise), atol=1e-6)
        noised = first.noised(latents, noise)
        ours = first.clean(predicted, noised)
        assert torch.allclose(ours, second.clean(predicted, noised), rtol=1e-4, atol=1e-4)
        assert torch.allclose(first.clean(first.target(latents, noise), noised), latents, atol=1e-4)


def x0_path():
    return AffinePath(dataclasses.replace(noise_model("epsilon", False), kind="x0"))


def karras_path(data=0.5):
    sigma = torch.linspace(math.log(0.002), math.log(80), 1000, dtype=torch.float64).exp()
    length = (sigma.square() + data**2).sqrt()
    p, q = sigma / (data * length), -data / length
    tables = {"alpha": torch.ones(1000), "sigma": sigma, "snr": sigma**-2, "ratio": sigma, "p": p, "q": q}
    return AffinePath(NoiseModel(kind="affine", **{name: table.float() for name, table in tables.items()}))


def test_preconditioned_networks_of_edm_learn_what_karras_et_al_write():
    """Table 1: noised = c_in (x0 + sigma noise), target = (x0 - c_skip (x0 + sigma noise)) / c_out."""
    data, sigma = 0.5, torch.tensor([0.002, 0.1, 1.0, 80.0], dtype=torch.float64)
    c_in = (sigma**2 + data**2).rsqrt()
    c_skip, c_out = data**2 / (sigma**2 + data**2), sigma * data * c_in
    noise_of_edm = NoiseModel(
        kind="affine",
        alpha=c_in,
        sigma=c_in * sigma,
        snr=sigma**-2,
        ratio=sigma,
        p=(1 - c_skip) / c_out,
        q=-c_skip * sigma / c_out,
    )
    latents, noise = torch.randn(2, 4, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mix = AffinePath(noise_of_edm).at(torch.arange(4))
    wide = [each.view(-1, 1, 1, 1) for each in (sigma, c_in, c_skip, c_out)]
    s, first, skip, out = wide
    noised = latents + s * noise
    assert torch.allclose(mix.noised(latents, noise), first * noised)
    target = mix.target(latents, noise)
    assert torch.allclose(target, (latents - skip * noised) / out, rtol=1e-6, atol=1e-7)
    assert torch.allclose(mix.clean(target, mix.noised(latents, noise)).double(), latents, rtol=1e-3, atol=1e-3)


def as_samplers_scale(noise):
    """The same path as x0 + sigma noise, as samplers hold it."""
    return dataclasses.replace(noise, alpha=torch.ones(1000), sigma=noise.ratio)


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_does_not_keep_the_variance_is_the_same_in_another_scale(kind):
    latents, noise, predicted = torch.randn(3, 3, 4, 4, 4, generator=torch.Generator().manual_seed(7))
    levels, own = torch.tensor([3, 400, 990]), noise_model(kind, False)
    first, second = AffinePath(own).at(levels), AffinePath(as_samplers_scale(own)).at(levels)
    assert torch.equal(first.length, torch.ones(3))  # so that its own numbers stay to the bit
    assert torch.allclose(second.target(latents, noise), first.target(latents, noise), atol=1e-5)
    noised = first.noised(latents, noise)
    assert torch.allclose(second.noised(latents, noise), noised / like(first.alpha, noised), rtol=1e-4, atol=1e-4)
    implied = second.clean(predicted, noised / like(first.alpha, noised))
    assert torch.allclose(implied, first.clean(predicted, noised), rtol=1e-3, atol=1e-3)


def test_min_snr_weighs_every_kind_as_it_weighs_the_clean_latents():
    """The weighted error of any prediction is min(snr, gamma) times the error of the clean latents that it implies."""
    latents, noise, predicted = torch.randn(3, 4, 1, 2, 2, generator=torch.Generator().manual_seed(8))
    levels = torch.tensor([60, 300, 600, 900])
    for path in (path_of(), path_of("v_prediction"), AffinePath(flow_noise(1000)), x0_path(), karras_path()):
        mix = path.at(levels)
        noised = mix.noised(latents, noise)
        errors = (predicted - mix.target(latents, noise)).square().mean(dim=(1, 2, 3))
        clean = (mix.clean(predicted, noised) - latents).square().mean(dim=(1, 2, 3))
        objective = Objective(ObjectiveConfig(min_snr_gamma=5), path.noise, 0)
        weighted = errors * objective.level_weights()[levels]
        assert torch.allclose(weighted, clean * path.snr[levels].clamp(max=5), rtol=2e-3), path.kind


def test_pure_noise_is_told_by_what_is_left_of_the_picture():
    for path, expected in (
        (path_of(), False),
        (path_of("v_prediction", True), True),
        (AffinePath(as_samplers_scale(noise_model("v_prediction", False))), False),
        (AffinePath(flow_noise(1000)), True),
    ):
        assert path.ends_in_noise == expected


# timestep, SNR; weights for epsilon and v: min-SNR-5, debiased, P2 of gamma 1; min-SNR-5 for v with zero terminal SNR
SNR_TABLE = [
    (0, 1175.5, (0.0042536, 0.0042500), (0.031623, 0.000999), (0.00085, 0.00084928), 0.0042500),
    (1, 585.86, (0.0085344, 0.0085199), (0.041314, 0.001704), (0.001704, 0.0017011), 0.0088328),
    (10, 103.51, (0.048306, 0.047843), (0.098291, 0.0095687), (0.0095687, 0.009478), 0.051031),
    (100, 8.4539, (0.59144, 0.52888), (0.34393, 0.10578), (0.10578, 0.095658), 0.56619),
    (200, 3.0600, (1, 0.75369), (0.57167, 0.24631), (0.24631, 0.19763), 0.73706),
    (500, 0.38185, (1, 0.27633), (1.6183, 0.72367), (0.72367, 0.41984), 0.24102),
    (900, 0.014354, (1, 0.014151), (8.3466, 0.98585), (0.98585, 0.49644), 0.0029604),
    (999, 0.0046819, (1, 0.0046601), (14.615, 0.99534), (0.99534, 0.49883), 0),
]


@pytest.mark.parametrize(("timestep", "ratio", "min_snr", "debiased", "p2", "terminal"), SNR_TABLE)
def test_weights_have_the_published_values(timestep, ratio, min_snr, debiased, p2, terminal):
    alphas = alphas_cumprod().double()
    value = (alphas / (1 - alphas))[[timestep]]
    assert path_of().snr[timestep].item() == pytest.approx(value.item())
    assert value.item() == pytest.approx(ratio, rel=2e-4)
    for kind, *expected in zip(KINDS, min_snr, debiased, p2, strict=True):
        found = [
            snr_weight(value, kind, weighting, min_snr_gamma=gamma).item()
            for weighting, gamma in (("min_snr", 5), ("debiased", 0), ("p2", 0))
        ]
        assert found == pytest.approx(expected, rel=3e-4)
        assert snr_weight(value, kind).item() == 1
        # the smooth form bends below min-SNR around gamma, and is half of it there
        noise = kind == "epsilon"
        smooth = 5 * value / (5 + value) / (value if noise else value + 1)
        assert snr_weight(value, kind, "soft_min_snr", min_snr_gamma=5).item() == pytest.approx(smooth.item())
        assert snr_weight(value, kind, "p2", floor=0.1).item() == pytest.approx(max(0.1, expected[2]), rel=3e-4)
    ended = path_of("v_prediction", True).snr.double()[[timestep]]
    assert snr_weight(ended, "v_prediction", min_snr_gamma=5).item() == pytest.approx(terminal, rel=3e-4)
    as_noise, as_v = (
        snr_weight(value, kind, weighting, v_like_weight=0.5).item()
        for kind, weighting in (("v_prediction", "v_scaled"), ("epsilon", "v_like"))
    )
    limited = min(ratio, 1000)
    assert as_noise == pytest.approx(limited / (limited + 1), rel=2e-4)
    assert as_v == pytest.approx(1 + 0.5 * (limited + 1) / limited, rel=2e-4)


def test_every_weighting_has_a_formula():
    assert list(weightings.FORMULAS) == list(WEIGHTINGS)


def test_no_weight_for_v_is_infinite_where_the_noise_ends_in_pure_noise():
    ratios = path_of("v_prediction", True).snr
    for weighting in ("min_snr", "soft_min_snr", "debiased", "p2", "v_scaled"):
        weights = snr_weight(ratios, "v_prediction", weighting, min_snr_gamma=5)
        assert weights.isfinite().all() and (weights >= 0).all()
        assert (snr_weight(ratios, "v_prediction", weighting, min_snr_gamma=5, floor=0.01) >= 0.01).all()


# |error|, mse, huber c=.1, smooth_l1 c=.1, huber c=1, huber_true 1, log_cosh
LOSS_TABLE = [
    (0.1, 0.01, 0.0082843, 0.082843, 0.0099751, 0.005, 0.0049917),
    (0.5, 0.25, 0.08198, 0.8198, 0.23607, 0.125, 0.12011),
    (1, 1, 0.18100, 1.8100, 0.82843, 0.5, 0.43378),
    (2, 4, 0.38050, 3.8050, 2.4721, 1.5, 1.3250),
]


@pytest.mark.parametrize("row", LOSS_TABLE)
def test_errors_of_elements_have_the_published_values(row):
    size, *expected = row
    kinds = [("mse", 0), ("huber", 0.1), ("smooth_l1", 0.1), ("huber", 1), ("huber_true", 1), ("log_cosh", 0)]
    zero = torch.zeros(1, 1, 1, 1)
    for sign in (1, -1):
        error = torch.full((1, 1, 1, 1), sign * size)
        found = [element_errors(error, zero, loss, torch.tensor([c])).item() for loss, c in kinds]
        assert found == pytest.approx(expected, rel=1e-4)
        assert element_errors(error, zero, "l1").item() == pytest.approx(size)


def test_small_errors_keep_their_digits_and_large_ones_stay_finite():
    sizes = torch.tensor([1e-4, 1e-2, 3.0, 300.0]).view(4, 1, 1, 1)
    zero, c = torch.zeros_like(sizes), torch.full((4,), 0.1)
    exact = sizes.double()
    root = (exact.square() + 0.01).sqrt() - 0.1
    assert torch.allclose(element_errors(sizes, zero, "huber", c).double(), 2 * 0.1 * root, rtol=1e-5)
    assert torch.allclose(element_errors(sizes, zero, "smooth_l1", c).double(), 2 * root, rtol=1e-5)
    hubers = torch.nn.functional.huber_loss(sizes, zero, reduction="none", delta=0.1)
    assert torch.allclose(element_errors(sizes, zero, "huber_true", c), hubers)
    assert torch.allclose(element_errors(sizes, zero, "log_cosh").double()[1:3], exact.cosh().log()[1:3], rtol=2e-3)


def test_huber_thresholds_follow_their_schedules():
    steps = torch.tensor([0, 100, 500, 900, 999])
    sigmas = path_of().noise.ratio[steps]
    table = {
        "constant": (0.1, 0.1, 0.1, 0.1, 0.1),
        "exponential": (1, 0.79433, 0.31623, 0.12589, 0.10023),
        "snr": (0.94971, 0.59830, 0.23128, 0.11030, 0.10369),
    }
    for schedule, expected in table.items():
        for scale in (1, 0.5):
            found = huber_thresholds(0.1, schedule, scale, steps / 1000, sigmas)
            assert found.tolist() == pytest.approx([scale * c for c in expected], rel=1e-4)
    ended = huber_thresholds(0.1, "snr", 1, torch.ones(1), torch.tensor([math.inf]))  # pure noise
    assert ended.item() == pytest.approx(0.1)


def test_clean_latents_come_back_from_what_models_predict():
    latents, noise = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    for kind in KINDS:
        mix = path_of(kind).at(torch.tensor([3, 400, 990]))
        noised = mix.noised(latents, noise)
        assert torch.allclose(mix.clean(mix.target(latents, noise), noised), latents, atol=1e-4)
    assert x0_path().at(torch.tensor([3, 400, 990])).target(latents, noise) is latents


def draws_of(kind, latents, noise, **values):
    """Return two samples of a model of epsilon or v, at levels 20 and 700, with noise that was drawn for them."""
    levels = torch.tensor([20, 700])
    mix = path_of(kind).at(levels)
    given = {"weights": torch.ones(2), "huber_c": torch.ones(2)} | values
    noised, target = mix.noised(latents, noise), mix.target(latents, noise)
    return Draws(latents=latents, levels=levels, noised=noised, target=target, mix=mix, **given)


def implied(kind, predicted, noised):
    """Return the clean latents that predictions at levels 20 and 700 imply, by the formulas of papers."""
    alphas = alphas_cumprod()[[20, 700]].view(-1, 1, 1, 1)
    if kind == "epsilon":
        return (noised - (1 - alphas).sqrt() * predicted) / alphas.sqrt()
    return alphas.sqrt() * noised - (1 - alphas).sqrt() * predicted


def hand_computed(prediction, target, mask, prior, prior_weight, loss, c):
    """Return the loss of one sample with loops and Python's own floats."""
    area = inside = outside = 0.0
    for (i, y, x), p in np.ndenumerate(prediction.numpy()):
        m = 1.0 if mask is None else float(mask[0, y, x])
        for other, share, kind in ((target, m, "target"), (prior, 1 - m, "prior")):
            d = abs(float(p) - float(other[i, y, x]))
            error = {
                "mse": d * d,
                "l1": d,
                "huber": 2 * c * (math.sqrt(d * d + c * c) - c),
                "smooth_l1": 2 * (math.sqrt(d * d + c * c) - c),
                "huber_true": d * d / 2 if d <= c else c * (d - c / 2),
                "log_cosh": math.log(math.cosh(d)),
            }[loss]
            inside, outside = inside + (kind == "target") * share * error, outside + (kind == "prior") * share * error
        area += 1
    return (inside + (0 if mask is None else prior_weight * outside)) / area


@pytest.mark.parametrize("loss", typing.get_args(Loss))
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_loss_weighting_prediction_and_mask(loss, kind):
    """Each once: finite, of the right shape, with a finite gradient, and what a loop over the elements gives."""
    draws = torch.Generator().manual_seed(5)
    latents, noise, predicted, frozen = torch.randn(4, 2, 3, 4, 4, generator=draws)
    grey = torch.rand(2, 1, 4, 4, generator=draws)
    noise_levels = noise_model(kind, False)
    for loss_on, mask, prior in itertools.product(("prediction", "x0"), (None, grey), (None, frozen)):
        settings = ObjectiveConfig(loss=loss, loss_on=loss_on, **({"huber_schedule": "snr"} if loss in HUBER else {}))
        objective = Objective(settings, noise_levels, 0)
        sigmas, shares = noise_levels.ratio[[20, 700]], torch.tensor([0.02, 0.7])
        thresholds = huber_thresholds(settings.huber_c, settings.huber_schedule, settings.huber_scale, shares, sigmas)
        weighs = {} if prior is None else {MaskedPrior: torch.tensor([0.5, 2.0])}
        given = draws_of(kind, latents, noise, mask=mask, shares=weighs, huber_c=thresholds)
        leaf = predicted.clone().requires_grad_()
        each = loss_of(objective, leaf, given, prior)
        assert each.shape == (2,) and each.dtype == torch.float32
        said, wanted, other = leaf.detach(), given.target, frozen if prior is not None else given.target
        if loss_on == "x0":
            said, wanted = implied(kind, said, given.noised), latents
            other = implied(kind, frozen, given.noised) if prior is not None else latents
        for i in range(2):
            weight = float(weighs[MaskedPrior][i]) if weighs else 0.0
            own_mask, c = None if mask is None else mask[i], float(thresholds[i])
            expected = hand_computed(said[i], wanted[i], own_mask, other[i], weight, loss, c)
            assert each[i].item() == pytest.approx(expected, rel=2e-4)
        names = WEIGHTINGS if loss_on == "prediction" else ["min_snr"]
        for weighting in names:
            gamma = 5.0 if weighting in MIN_SNR and loss_on == "prediction" else 0.0
            weighted = Objective(settings.replace(weighting=weighting, min_snr_gamma=gamma), noise_levels, 0)
            weights = weighted.level_weights()[[20, 700]]
            found = loss_of(weighted, leaf, dataclasses.replace(given, weights=weights), prior)
            assert torch.allclose(found, each * weights)
            (slope,) = torch.autograd.grad(found.sum(), leaf, retain_graph=True)
            assert weights.shape == (2,) and (weights > 0).all() and weights.isfinite().all()
            assert slope.shape == leaf.shape and slope.isfinite().all() and slope.any()


def test_a_held_sample_learns_what_the_frozen_model_predicts_and_its_neighbour_the_target():
    latents, noise, predicted, frozen = torch.randn(4, 2, 3, 4, 4, generator=torch.Generator().manual_seed(6))
    given = draws_of("epsilon", latents, noise, shares={PriorPrediction: torch.tensor([1.0, 0.0])})
    for loss_on in ("prediction", "x0"):
        objective, plain = (
            Objective(ObjectiveConfig(loss_on=loss_on), noise_model("epsilon", False), 0),
            loss_on != "x0",
        )
        losses = loss_of(objective, predicted, given, frozen)
        said, held = (x if plain else implied("epsilon", x, given.noised) for x in (predicted, frozen))
        expected = [(said[0] - held[0]).square().mean(), (said[1] - (noise if plain else latents)[1]).square().mean()]
        assert losses.tolist() == pytest.approx([float(each) for each in expected], rel=1e-4)
        assert loss_of(objective, frozen, given, frozen)[0].item() == 0


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

    def value(mask=None, normalize=None, prior=None, weight=0.0):
        found = sample_losses(prediction, target, mask, normalize)
        if prior is not None:
            found = found + weight * masked_mean(element_errors(prediction, prior), 1 - mask, normalize)
        return found.item()

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
