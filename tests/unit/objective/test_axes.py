"""The objective counts no axes: a sound's, a picture's and a clip's latents of the same numbers have the same loss."""

import math

import pytest
import torch
from gradients import loss_of
from torch import Tensor

from lora_atelier.trainer_core.config import ObjectiveConfig
from lora_atelier.trainer_core.data.masks import loss_mask
from lora_atelier.trainer_core.models.base import LevelDefaults, NoiseModel
from lora_atelier.trainer_core.objective import AffinePath, Batch, DrawIndex, Objective
from lora_atelier.trainer_core.objective.loss import element_errors, masked_mean, sample_losses
from lora_atelier.trainer_core.objective.noise import add_pyramid, sample_noise
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.objective.terms.prior import MaskedPrior, PriorPrediction
from lora_atelier.trainer_core.objective.timesteps import shift_of

AXES = [(32,), (4, 8), (2, 4, 4)]
LEVELS = torch.tensor([20, 400, 990])


def numbers(count: int, channels: int = 3, seed: int = 0) -> Tensor:
    """Draw (3, channels, 32) numbers, which stand for latents of any of AXES."""
    return torch.randn(count, 3, channels, 32, generator=torch.Generator().manual_seed(seed))


def noise_of_kind(kind: str) -> NoiseModel:
    """Build a noise model of 1000 levels; "affine" has coefficients of its own."""
    flow = flow_noise(1000)
    alpha, sigma = flow.alpha.clamp(min=0.01), flow.sigma
    ratio, own = sigma / alpha, kind == "affine"
    p, q = (alpha + 0.5, -sigma) if own else (None, None)
    return NoiseModel(kind=kind, alpha=alpha, sigma=sigma, snr=ratio.square().reciprocal(), ratio=ratio, p=p, q=q)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "flow", "x0", "affine"])
def test_the_path_mixes_each_sample_with_its_own_coefficients(axes, kind):
    latents, noise = numbers(2)
    path = AffinePath(noise_of_kind(kind))
    mix, shape = path.at(LEVELS), (3, 3, *axes)
    noised, target = (
        mix.noised(latents.view(shape), noise.view(shape)),
        mix.target(latents.view(shape), noise.view(shape)),
    )
    for i, level in enumerate(LEVELS.tolist()):
        alpha, sigma = path.noise.alpha[level], path.noise.sigma[level]
        assert torch.allclose(noised[i].flatten(1), alpha * latents[i] + sigma * noise[i])
    assert torch.allclose(mix.clean(target, noised), latents.view(shape), atol=2e-4)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "smooth_l1", "huber_true", "log_cosh"])
def test_a_loss_is_the_mean_over_all_axes(axes, loss):
    prediction, target = numbers(2)
    c = torch.tensor([0.1, 1.0, 3.0])
    pairs = zip(prediction, target, c, strict=True)
    errors = torch.stack([element_errors(p[None], t[None], loss, k[None])[0] for p, t, k in pairs])
    found = sample_losses(prediction.view(3, 3, *axes), target.view(3, 3, *axes), loss=loss, huber_c=c)
    assert torch.allclose(found, errors.mean(dim=(1, 2)), rtol=1e-5)


@pytest.mark.parametrize("axes", AXES)
def test_masks_and_what_is_kept_outside_of_them_are_the_same_on_all_axes(axes):
    prediction, target, frozen = numbers(3)
    mask = torch.rand(3, 1, 32, generator=torch.Generator().manual_seed(1))
    normalize, weight = torch.tensor([True, False, True]), torch.tensor([0.5, 0.0, 2.0])
    inside = ((prediction - target).square() * mask).mean(dim=(1, 2))
    outside = ((prediction - frozen).square() * (1 - mask)).mean(dim=(1, 2))
    area, rest = (torch.where(normalize, each.mean(dim=(1, 2)), 1.0) for each in (mask, 1 - mask))
    shape = (3, 3, *axes)
    whole = mask.view(3, 1, *axes)
    found = sample_losses(prediction.view(shape), target.view(shape), whole, normalize)
    drift = masked_mean(element_errors(prediction.view(shape), frozen.view(shape)), 1 - whole, normalize)
    assert torch.allclose(found + weight * drift, inside / area + weight * outside / rest, rtol=1e-5)
    used = loss_mask(mask.view(3, 1, *axes), torch.tensor([True, False, True]), 0.2)
    assert torch.equal(used[1], torch.ones(1, *axes)) and torch.equal(used[0], mask[0].view(1, *axes).clamp(min=0.2))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise_offset": 0.1},
        {"noise_offset": 0.1, "noise_offset_strength": "random"},
        {"noise_offset": 0.1, "noise_offset_strength": "adaptive"},
        {"noise_offset": 0.1, "noise_offset_strength": "by_timestep"},
        {"input_perturbation": 0.1, "min_snr_gamma": 5.0},
        {"loss_on": "x0"},
        {"guidance_loss": 3.0},
    ],
    ids=str,
)
def test_a_whole_objective_gives_the_same_losses_on_all_axes(axes, settings):
    objective = Objective(ObjectiveConfig(**settings), noise_of_kind("epsilon"), 7)
    latents, prediction, frozen, blank = numbers(4, seed=5)
    mask = torch.rand(3, 1, 32, generator=torch.Generator().manual_seed(2))

    def losses(axes: tuple[int, ...]) -> Tensor:
        shape = (3, 3, *axes)
        batch = Batch(
            index=DrawIndex(micro_batch=0, step=0),
            latents=latents.view(shape),
            weights=torch.tensor([1.0, 0.5, 2.0]),
            mask=mask.view(3, 1, *axes),
            shares={
                MaskedPrior: torch.tensor([0.0, 1.0, 0.0]),
                PriorPrediction: torch.tensor([0.0, 0.0, 1.0]),
            },
        )
        draws = objective.draw(batch, torch.device("cpu"))
        assert torch.allclose(draws.plain(torch.ones(3)), 1 / draws.weights / mask.mean(dim=(1, 2)))
        given = blank.view(shape) if settings.get("guidance_loss") else None
        return loss_of(objective, prediction.view(shape), draws, frozen.view(shape), given)

    assert torch.allclose(losses(axes), losses(AXES[0]), rtol=1e-5)


@pytest.mark.parametrize("axes", AXES)
def test_an_offset_moves_whole_channels(axes):
    offset = torch.tensor([[0.5], [0.0]]).expand(2, 3)
    plain, moved = (sample_noise(0, 0, (2, 3, *axes), each) for each in (0.0, offset))
    shift = (moved - plain).flatten(2)
    assert torch.allclose(shift, shift[..., :1].expand_as(shift), atol=1e-6)
    assert shift[0].abs().min() > 1e-3 and not shift[1].any()


def test_a_clip_of_one_frame_has_the_pyramid_of_its_picture():
    noise = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(3))
    picture = add_pyramid(noise, torch.Generator().manual_seed(4), 6, 0.3)
    clip = add_pyramid(noise[:, None], torch.Generator().manual_seed(4), 6, 0.3)
    assert torch.allclose(clip[:, 0], picture, atol=1e-5) and not torch.allclose(picture, noise)


@pytest.mark.parametrize("axes", [(256,), (16, 16), (8, 8, 8)])
def test_each_level_of_a_pyramid_adds_its_variance(axes):
    """The first level has full size: its weight is 1, and the variances of independent noises add up."""
    noise = torch.randn(64, *axes, generator=torch.Generator().manual_seed(5))
    whole = add_pyramid(noise, torch.Generator().manual_seed(6), 1, 0.3)
    assert float(whole.var()) == pytest.approx(2, rel=0.1)
    further = add_pyramid(noise, torch.Generator().manual_seed(6), 2, 0.3) - whole
    assert 0 < float(further.var()) < 0.3**2


def test_frames_count_as_tokens_of_their_own():
    levels = LevelDefaults(by_tokens=(0.5, 1.15, 256, 4096), token=2)
    picture, clip = shift_of(levels, (32, 32)), shift_of(levels, (4, 32, 32))
    assert picture == pytest.approx(math.exp(0.5)) and clip == pytest.approx(shift_of(levels, (64, 64)))
    assert shift_of(levels, (512,)) == pytest.approx(picture), "a sound's tokens lie along its one axis"


def test_levels_are_drawn_by_the_tokens_of_all_axes():
    levels = LevelDefaults(by_tokens=(0.5, 1.15, 256, 4096), token=2)
    objective = Objective(ObjectiveConfig(), flow_noise(1000), 0, levels)
    few = objective.probabilities((32, 32))
    many = [objective.probabilities(axes) for axes in ((2048,), (64, 64), (4, 32, 32))]
    assert torch.equal(many[0], many[1]) and torch.equal(many[1], many[2])
    assert float(few[500]) > float(many[0][500]) + 0.01, "a larger picture has more noise"
