"""Noise and timesteps: closed forms, published values and statistics; every draw is its sample's alone."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from lora_atelier.trainer_core.common.rng import generator, sample_uniform
from lora_atelier.trainer_core.config import ObjectiveConfig
from lora_atelier.trainer_core.models.architectures import ARCHITECTURES
from lora_atelier.trainer_core.models.base import LevelDefaults, Side
from lora_atelier.trainer_core.models.sd.noise import alphas_cumprod, noise_model
from lora_atelier.trainer_core.objective import AffinePath, Batch, DrawIndex, Objective
from lora_atelier.trainer_core.objective.noise import add_pyramid, offset_growth, perturb, sample_noise
from lora_atelier.trainer_core.objective.path import LEAST_ALPHA, flow_noise
from lora_atelier.trainer_core.objective.timesteps import (
    beta,
    between,
    chosen_levels,
    cos_map,
    inverted_parabola,
    level_probabilities,
    level_shares,
    logit_normal,
    mode,
    sample_strata,
    sample_timesteps,
    shift_of,
    sigmoid_density,
    snr_uniform,
    uniform,
    unshifted,
)

ALL_NOISE = [
    {},
    {"noise_offset": 0.2},
    {"noise_offset": 0.2, "noise_offset_strength": "random"},
    {"noise_offset": 0.2, "noise_offset_strength": "adaptive", "offset_adaptation": 0.5},
    {"noise_offset": 0.2, "noise_offset_strength": "by_timestep"},
    {"pyramid_iterations": 6},
    {"noise_offset": 0.2, "pyramid_iterations": 6, "pyramid_discount": 0.8},
]


def noise_of(latents, seed=3, micro_batch=17, **settings):
    """Return the noise that an objective draws for a batch: what a model of epsilon should predict."""
    batch = Batch(index=DrawIndex(micro_batch=micro_batch, step=0), latents=latents, weights=torch.ones(len(latents)))
    objective = Objective(ObjectiveConfig(**settings), noise_model("epsilon", False), seed)
    return objective.draw(batch, torch.device("cpu")).target


def path_of(zero_terminal_snr=False):
    return AffinePath(noise_model("v_prediction", zero_terminal_snr))


@pytest.mark.parametrize("settings", ALL_NOISE, ids=str)
def test_the_noise_of_a_sample_is_its_own_and_repeats(settings):
    latents = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    first = noise_of(latents, **settings)
    torch.manual_seed(99)
    assert torch.equal(first, noise_of(latents, **settings))
    others = latents.clone()
    others[2:] += 5
    assert torch.equal(first[:2], noise_of(others, **settings)[:2])
    assert torch.equal(first[:2], noise_of(latents[:2], **settings))  # of no other neighbours
    assert not torch.equal(first, noise_of(latents, micro_batch=18, **settings))
    plain = sample_noise(3, 17, latents.shape)
    assert torch.equal(plain, first) == (settings == {})
    seen = perturb(first, 3, 17, 0.1)
    assert torch.equal(seen[:2], perturb(first[:2], 3, 17, 0.1))
    if "pyramid_iterations" not in settings:  # each channel is moved as a whole
        assert (first - plain).flatten(2).std(dim=2).max() < 1e-6


def test_the_strength_of_an_offset_is_as_it_is_set():
    count = 2000
    latents = torch.zeros(count, 2, 2, 2)
    latents[:, 1] = -3.0
    latents[:, 1, 0, 0] = -7.0  # mean -4

    def spread(**settings):
        moved = noise_of(latents, 0, 0, min_timestep=500, max_timestep=500, **settings)
        return ((moved - sample_noise(0, 0, latents.shape))[..., 0, 0]).std(dim=0).tolist()

    assert spread(noise_offset=0.5) == pytest.approx([0.5, 0.5], rel=0.05)
    random = spread(noise_offset=0.5, noise_offset_strength="random")  # E[(o u z)^2] = o^2 / 3
    assert random == pytest.approx([0.5 / 3**0.5] * 2, rel=0.05)
    adaptive = spread(noise_offset=0.5, noise_offset_strength="adaptive", offset_adaptation=0.25)
    assert adaptive == pytest.approx([0.5, 0.5 + 0.25 * 4], rel=0.05)
    assert spread(noise_offset=0.5, noise_offset_strength="adaptive", offset_adaptation=-0.25)[1] == 0
    growing = spread(noise_offset=1.0, noise_offset_strength="by_timestep")
    assert growing == pytest.approx([0.01438] * 2, rel=0.05)


def test_the_generalised_offset_grows_as_published_and_by_its_recursion():
    alphas = alphas_cumprod().double()
    growth = offset_growth(alphas.sqrt(), (1 - alphas).sqrt()).double()
    table = {0: 0.00013630, 1: 0.00019314, 10: 0.00046133, 100: 0.0016989, 500: 0.01438, 900: 0.32774, 999: 1}
    assert {k: growth[k].item() for k in table} == pytest.approx(table, rel=2e-4)
    total, slow = 1.0, [1 / math.sqrt(1 - alphas[0])]
    for k in range(1, 1000):
        before, step = float(alphas[k - 1]), float(alphas[k] / alphas[k - 1])
        total += (1 - step) * before**0.5 / (step * (1 - before)) * total / before**0.5
        slow.append(total / math.sqrt(1 - alphas[k]))
    scaled = offset_growth(torch.ones(1000), ((1 - alphas) / alphas).sqrt()).double()  # the same, as x0 + sigma noise
    assert torch.allclose(scaled, growth, rtol=1e-4)
    assert torch.allclose(growth, torch.tensor(slow, dtype=torch.float64) / slow[-1], rtol=1e-5)


# levels, discount; standard deviation before it is brought to 1, variance of a channel's mean afterwards
PYRAMIDS = [(1, 0.3, 1.414, 2.4e-4), (6, 0.8, 1.677, 8e-2)]
PYRAMIDS += [pytest.param(*each, marks=pytest.mark.thorough) for each in ((6, 0.3, 1.431, 7e-4), (6, 0.1, 1.415, None))]


@pytest.mark.parametrize(("levels", "discount", "deviation", "variance"), PYRAMIDS)
def test_pyramid_noise_has_the_published_statistics(levels, discount, deviation, variance):
    white = sample_noise(1, 0, (250, 4, 64, 64))
    raw = torch.stack([add_pyramid(n, generator(1, "pyramid", 0, i), levels, discount) for i, n in enumerate(white)])
    assert raw.std().item() == pytest.approx(deviation, abs=0.015)
    noise = sample_noise(1, 0, white.shape, 0.0, levels, discount)
    assert torch.allclose(noise, raw / raw.std(dim=(1, 2, 3), keepdim=True), atol=1e-6)
    assert noise.flatten(1).std(dim=1).sub(1).abs().max() < 1e-4
    if variance:
        assert noise.mean(dim=(2, 3)).var().item() == pytest.approx(variance, rel=0.25)


def test_a_pyramid_ends_where_a_side_is_one_pixel():
    narrow = torch.zeros(1, 2, 64)  # its second level is one pixel high whatever is drawn
    levels = [add_pyramid(narrow, generator(0, "pyramid", 0, 0), count, 1.0) for count in (1, 2, 9)]
    assert torch.equal(levels[1], levels[2]) and not torch.equal(levels[0], levels[1])


def test_perturbed_input_is_noisier_and_the_target_is_not():
    noise = sample_noise(0, 0, (64, 4, 16, 16))
    seen = perturb(noise, 0, 0, 0.5)
    assert (seen - noise).std().item() == pytest.approx(0.5, rel=0.02)
    assert seen.std().item() == pytest.approx(1.25**0.5, rel=0.02)
    assert abs(((seen - noise) * noise).mean().item()) < 0.01  # independent of the noise to be predicted


def quantiles(cumulative, *shares):
    return torch.searchsorted(cumulative, torch.tensor(shares, dtype=torch.float64), right=True).tolist()


def test_distributions_are_what_their_closed_forms_say():
    t = uniform(1000)
    assert quantiles(uniform(1000), 0, 0.0999, 0.1001, 0.5001, 0.99999) == [0, 99, 100, 500, 999]
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    for mean, expected in ((0, (161, 337, 500, 662, 838)), (-0.5, (104, 236, 377, 543, 758))):
        assert quantiles(logit_normal(uniform(1000), mean, 1), *(share + 1e-9 for share in shares)) == list(expected)
    assert torch.allclose(beta(uniform(1000), 1, 1), t)
    assert torch.allclose(beta(uniform(1000), 2, 2), 3 * t**2 - 2 * t**3)
    assert torch.allclose(beta(uniform(1000), 0.5, 0.5), 2 / math.pi * t.sqrt().asin())
    assert torch.allclose(beta(uniform(1000), 3, 1), t**3) and torch.allclose(
        beta(uniform(1000), 1, 7), 1 - (1 - t) ** 7
    )
    assert torch.allclose(beta(uniform(1000), 80, 30).flip(0)[1:], 1 - beta(uniform(1000), 30, 80)[:-1])  # mirrored
    density = torch.cat([t[:1], t.diff()]) * torch.sigmoid(8 * (t - 0.0005 - 0.3))
    assert torch.allclose(sigmoid_density(uniform(1000), 0.3, 8), density.cumsum(0) / density.sum(), atol=1e-6)
    assert torch.allclose(
        sigmoid_density(uniform(1000), 0.3, -8).flip(0)[1:], 1 - sigmoid_density(uniform(1000), 0.7, 8)[:-1]
    )
    ratios = path_of().snr.double()
    logs, found = ratios.log(), snr_uniform(ratios)
    assert torch.allclose(found.diff() / found.diff().sum(), -logs.diff() / (logs[0] - logs[-1]))


@pytest.mark.parametrize("scale", [-1, -0.5, 0, 0.81, 1.29, 1.75])
def test_mode_sampling_inverts_the_papers_function(scale):
    """Esser et al. 2024, section 3.1: f(u) = 1 - u - s (cos(pi u / 2)^2 - 1 + u), falling from 1 to 0."""
    t = uniform(1000)
    u = 1 - mode(t, scale)
    assert torch.allclose(1 - u - scale * ((math.pi / 2 * u).cos() ** 2 - 1 + u), t, atol=1e-12)
    assert mode(t, scale)[-1] == 1
    assert scale != 0 or torch.allclose(mode(t, 0), t)


def test_cos_map_has_the_papers_density_and_the_ratio_of_a_cosine_schedule():
    t, u = uniform(1000), torch.arange(1, 1000, dtype=torch.float64) / 1000
    assert torch.allclose(cos_map(1 - 1 / ((math.pi / 2 * u).tan() + 1)), u)
    density = 2 / (math.pi - 2 * math.pi * (t - 0.0005) + 2 * math.pi * (t - 0.0005) ** 2)
    assert torch.allclose(cos_map(t).diff(), density[1:] / 1000, rtol=1e-6)
    flow_times = 1 - 1 / ((math.pi / 2 * u).tan() + 1)
    cosine = (math.pi / 2 * u).cos() / (math.pi / 2 * u).sin()  # alpha / sigma of a cosine schedule at u
    assert torch.allclose((1 - flow_times) / flow_times, cosine)


def test_the_inverted_parabola_has_its_density_and_its_ends():
    t = uniform(1000)
    assert torch.allclose(inverted_parabola(t, 0.5, 0), t)
    assert torch.allclose(inverted_parabola(t, 0.5, 8), 3 * t**2 - 2 * t**3)  # that of beta(2, 2)
    for center, scale in ((0.5, 20), (0.3, 8), (1.0, 200), (0.5, -6)):
        density = (2 - scale * (t - 0.0005 - center) ** 2).clamp(min=0)
        found = inverted_parabola(t, center, scale)
        assert torch.allclose(found, density.cumsum(0) / density.sum(), atol=2e-5)
    assert inverted_parabola(t, 0.5, 800)[449] == 0 and inverted_parabola(t, 0.5, 800)[549] == 1  # 0.5 -+ 0.05


SETTINGS = [
    {},
    {"timestep_distribution": "logit_normal", "logit_mean": -0.5},
    {"timestep_distribution": "sigmoid", "sigmoid_slope": -6},
    {"timestep_distribution": "beta", "beta_a": 0.5, "beta_b": 3},
    {"timestep_distribution": "snr_uniform"},
    {"timestep_distribution": "mode"},
    {"timestep_distribution": "cos_map"},
    {"timestep_distribution": "inverted_parabola", "parabola_center": 0.4, "parabola_scale": 4},
]


def test_without_a_family_and_a_shift_nothing_is_new():
    for settings in SETTINGS[1:]:
        distribution = settings["timestep_distribution"]
        config = ObjectiveConfig(**settings)
        plain = level_probabilities(config, path_of())
        assert torch.equal(level_probabilities(config, path_of(), distribution, 1.0), plain)
    assert torch.equal(level_probabilities(ObjectiveConfig(), path_of(), "uniform"), uniform(1000))
    auto = Objective(ObjectiveConfig(), noise_model("epsilon", False), 0)
    assert torch.equal(auto.probabilities((64, 64)), uniform(1000))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shift", [0.3, 3.0, 12.0])
def test_a_shift_moves_times_and_leaves_the_distribution(settings, shift):
    """A draw below t is one below the time that the shift moves to t; so quantiles move as samplers' times do."""
    config = ObjectiveConfig(**settings)
    plain, moved = (level_probabilities(config, path_of(), shift=each) for each in (1.0, shift))
    t = uniform(1000)
    times = shift * t / (1 + (shift - 1) * t)
    assert torch.allclose(unshifted(times, shift), t)
    apart = times > 0.02  # below, a table has too few entries where a density is steep
    assert torch.allclose(between(moved, times)[apart], plain[apart], atol=1e-3)
    assert (moved.diff() >= 0).all() and moved[-1].item() == pytest.approx(1)
    assert (moved < plain)[:-1].all() if shift > 1 else (moved > plain)[:-1].all()
    dealt = [sample_timesteps(1, k, 8, moved, 0, sample_strata(1, k, 8), 8).sort().values for k in range(200)]
    ranks = torch.searchsorted(moved, torch.arange(1, 8, dtype=torch.float64) / 8)
    assert all((draws[:-1] <= ranks).all() and (draws[1:] >= ranks - 1).all() for draws in dealt)


def test_shares_are_counted_against_equally_likely_levels():
    assert level_shares(uniform(1000), 0, 1000, 50) == pytest.approx([1] * 50)
    assert level_shares(uniform(100), 500, 1000, 10) == pytest.approx([0] * 5 + [10] + [0] * 4)
    t = torch.arange(11, dtype=torch.float64) / 10
    expected = (3 * t**2 - 2 * t**3).diff() * 10
    assert level_shares(beta(uniform(1000), 2, 2), 0, 1000, 10) == pytest.approx(expected.tolist())


def test_a_table_is_read_along_straight_lines():
    table = torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64)
    t = torch.tensor([0.5 / 3, 1 / 3, 1.5 / 3, 1.0], dtype=torch.float64)
    assert between(table, t).tolist() == pytest.approx([0.05, 0.1, 0.25, 1.0])


FLUX = LevelDefaults(distribution="logit_normal", by_tokens=(0.5, 1.15, 256, 4096), token=2)


def test_the_shift_by_tokens_is_a_line_of_mu():
    assert shift_of(FLUX, (32, 32)) == pytest.approx(math.exp(0.5))
    assert shift_of(FLUX, (128, 128)) == pytest.approx(math.exp(1.15))
    assert shift_of(FLUX, (104, 152)) == pytest.approx(math.exp(0.5 + 0.65 * (52 * 76 - 256) / 3840))
    assert shift_of(FLUX, (31, 32)) == shift_of(FLUX, (32, 32))  # the last row is padded
    assert shift_of(LevelDefaults(shift=2.5), (1, 1)) == 2.5


SHIFTS = {  # of pictures of so many tokens: what these models' own schedulers give
    "qwen_image_21": {256: math.exp(0.5), 4096: math.exp(0.5 + 0.4 * 3840 / 7936), 8192: math.exp(0.9)},
    "ltx2": {256: math.exp(2.05), 4096: math.exp(2.05)},
    "joyimage": {4096: 4.0},
    "flux3_klein": {256: 6.93, 4096: 6.93},
    "moss_image": {256: 1.0, 4096: 1.0},
    "fibo2": {256: math.exp(0.5), 4096: math.exp(1.15)},
    "sensenova": {4096: 3.0},
}


@pytest.mark.parametrize("kind", SHIFTS)
def test_a_new_models_shift_is_its_schedulers(kind):
    (row,) = (row for row in ARCHITECTURES if row.kind == kind)
    for tokens, shift in SHIFTS[kind].items():
        size = (64, tokens // 64) if tokens >= 64 * 64 else (16, tokens // 16)
        assert shift_of(row.levels, size) == pytest.approx(shift, rel=1e-4)


def test_settings_come_before_the_family():
    family = LevelDefaults(distribution="logit_normal", shift=3.0, source="someone")
    assert chosen_levels(ObjectiveConfig(), family) == family
    assert chosen_levels(ObjectiveConfig(timestep_distribution="uniform"), family).shift == 3
    found = chosen_levels(ObjectiveConfig(timestep_shift=1.0), FLUX)
    assert (found.distribution, found.shift, found.by_tokens) == ("logit_normal", 1, None)
    assert chosen_levels(ObjectiveConfig(), LevelDefaults()) == LevelDefaults()  # every level equally often


def test_samples_are_shifted_by_the_size_of_their_latents():
    objective = Objective(ObjectiveConfig(), AffinePath(flow_noise()).noise, 3, FLUX)
    drawn = {}
    for side in (32, 128):
        latents = torch.zeros(400, 1, side, side)
        batch = Batch(index=DrawIndex(micro_batch=0, step=0), latents=latents, weights=torch.ones(400))
        drawn[side] = objective.draw(batch, torch.device("cpu")).levels
        middle = math.exp(0.5 if side == 32 else 1.15)
        expected = middle / (1 + middle)  # sigmoid(0) = 1/2, shifted
        assert (drawn[side] < 1000 * expected).double().mean().item() == pytest.approx(0.5, abs=0.08)
    assert (drawn[128] > drawn[32]).double().mean() > 0.98  # the same draws, moved
    assert objective.probabilities((32, 32)) is objective.probabilities((32, 32))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_distribution_lies_on_the_whole_range_and_is_shared_out_without_a_change(settings):
    for low, high in ((0, 999), (200, 299), (999, 999)):
        for zero in (False, True):
            objective = ObjectiveConfig(**settings, min_timestep=low, max_timestep=high)
            cumulative = level_probabilities(objective, path_of(zero))
            assert len(cumulative) == high - low + 1 and cumulative[-1].item() == pytest.approx(1)
            assert (cumulative.diff() > 0).all() and cumulative[0] > 0
    low, parts = 200, 8
    cumulative = level_probabilities(ObjectiveConfig(**settings, min_timestep=200, max_timestep=299), path_of())
    steps = range(1500)
    free = torch.stack([sample_timesteps(1, k, parts, cumulative, low) for k in steps])
    dealt = torch.stack(
        [sample_timesteps(1, k, parts, cumulative, low, sample_strata(1, k, parts), parts) for k in steps]
    )
    assert free.min() >= 200 and free.max() <= 299
    edges = torch.tensor(quantiles(cumulative, 0.125, 0.25, 0.5, 0.75))  # of any distribution
    for draws in (free, dealt):
        for place in (slice(None), 0, parts - 1):  # all samples, and each place alone
            values = draws[:, place].double()
            for edge in edges:
                share, sure = (values < low + edge).double().mean(), float(cumulative[edge - 1]) if edge else 0.0
                assert abs(share - sure) < 4.5 * (0.25 / values.numel()) ** 0.5
    mean_free, mean_dealt = (draws.double().mean(dim=1).var() for draws in (free, dealt))
    assert mean_dealt < mean_free / 4
    ranks = torch.searchsorted(cumulative, torch.tensor([k / parts for k in range(1, parts)], dtype=torch.float64))
    in_order = dealt.sort(dim=1).values - low
    assert (in_order[:, :-1] <= ranks).all() and (in_order[:, 1:] >= ranks - 1).all()  # one in each part


def test_pure_noise_has_its_share_under_a_uniform_ratio():
    cumulative = level_probabilities(ObjectiveConfig(timestep_distribution="snr_uniform"), path_of(True))
    assert 0.01 < cumulative[999] - cumulative[998] < 0.2
    assert path_of(True).positive_snr[-1].item() == pytest.approx(LEAST_ALPHA)


@pytest.mark.parametrize("axes", [(40,), (13, 24), (3, 9, 8)], ids=str)
def test_the_nearest_of_several_noises_is_taken(axes):
    latents = 2 * torch.randn(2, 3, *axes, generator=torch.Generator().manual_seed(0))
    found = sample_noise(5, 7, latents.shape, latents=latents, choices=6)

    def pooled(tensor: Tensor) -> Tensor:
        for axis, side in enumerate(tensor.shape[1:], 1):
            cells = min(8, side)
            edges = [(i * side // cells, -(-(i + 1) * side // cells)) for i in range(cells)]
            tensor = torch.stack([tensor.narrow(axis, a, b - a).mean(axis) for a, b in edges], axis)
        return tensor

    chosen = []
    for i, each in enumerate(latents):
        draws = generator(5, "noise", 7, i)
        noises = [torch.randn(each.shape, generator=draws) for _ in range(6)]
        distances = [float((pooled(noise) - pooled(each)).square().sum()) for noise in noises]
        chosen.append(distances.index(min(distances)))
        assert torch.equal(found[i], noises[chosen[-1]])
    assert any(chosen)  # not the plain draw of each


def test_one_choice_of_noise_is_the_plain_one_and_offsets_come_after_the_choice():
    latents = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample_noise(5, 7, latents.shape, latents=latents), sample_noise(5, 7, latents.shape))
    moved, plain = (sample_noise(5, 7, latents.shape, offset, latents=latents, choices=4) for offset in (0.5, 0.0))
    assert torch.allclose((moved - plain).std(dim=(2, 3)), torch.zeros(2, 3), atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_mixflow_shows_a_noisier_picture_than_it_tells_and_keeps_the_target(share):
    latents = torch.randn(4, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    batch = Batch(index=DrawIndex(micro_batch=2, step=0), latents=latents, weights=torch.ones(4))
    plain, mixed = (
        Objective(ObjectiveConfig(mixflow=each), flow_noise(), 3).draw(batch, torch.device("cpu"))
        for each in (0.0, share)
    )
    assert torch.equal(mixed.levels, plain.levels) and torch.equal(mixed.target, plain.target)
    noise, told = plain.target + latents, (plain.levels + 1) / 1000
    drawn = torch.tensor([sample_uniform(3, "mixflow", 2, i) for i in range(4)])
    seen = (told + drawn * share * (1 - told)).view(-1, 1, 1, 1)
    torch.testing.assert_close(mixed.noised, (1 - seen) * latents + seen * noise, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", [Side(0, 873), Side(874, 999), Side(950, 999)], ids=str)
def test_an_expert_is_drawn_its_levels_as_often_among_each_other_as_without_one(side):
    """All of 200 to 980; the middle of its own is where half of their probability lies below."""
    config = ObjectiveConfig(min_timestep=200, max_timestep=980)
    family = LevelDefaults(distribution="logit_normal", shift=3.0)
    whole, own = (
        Objective(config, AffinePath(flow_noise()).noise, 3, dataclasses.replace(family, sides=sides))
        for sides in ((), (side,))
    )
    single = whole.probabilities((1, 1)).diff(prepend=torch.zeros(1, dtype=torch.float64))
    first, last = max(side.first, 200), min(side.last, 980)
    expected = single[first - 200 : last - 199] / single[first - 200 : last - 199].sum()
    batch = Batch(index=DrawIndex(micro_batch=0, step=0), latents=torch.zeros(2000, 1, 1, 1), weights=torch.ones(2000))
    drawn = own.draw(batch, torch.device("cpu")).levels
    assert first <= drawn.min() and drawn.max() <= last
    for edge in range(first + 1, last, 20):
        sure = float(expected[: edge - first].sum())
        assert abs(float((drawn < edge).double().mean()) - sure) < 4.5 * (0.25 / 2000) ** 0.5


@pytest.mark.parametrize("every", [0, 3])
def test_a_step_is_one_experts_and_all_steps_together_have_the_distribution(every):
    """Micro-batches of a step share its side; by turns each side has half of the steps, and its own distribution."""
    family = LevelDefaults(
        distribution="logit_normal", shift=3.0, sides=(Side(0, 873), Side(874, 999)), switch_every=every
    )
    noise = AffinePath(flow_noise()).noise

    def levels(objective, step, half):
        index = DrawIndex(micro_batch=2 * step + half, step=step)
        batch = Batch(index=index, latents=torch.zeros(2, 1, 1, 1), weights=torch.ones(2))
        return objective.draw(batch, torch.device("cpu")).levels

    objective, steps = Objective(ObjectiveConfig(), noise, 3, family), 1500
    drawn = torch.stack([levels(objective, step, half) for step in range(steps) for half in (0, 1)]).view(steps, 4)
    high, table = drawn >= 874, objective.probabilities((1, 1))
    assert (high.all(1) | ~high.any(1)).all()
    for first in range(20, 40):  # of a resumed run, whose steps are those of the whole one
        resumed = Objective(ObjectiveConfig(), noise, 3, family)
        assert levels(resumed, first, 0).tolist() == drawn[first, :2].tolist()
    if every:
        assert high[:, 0].tolist() == [step // 3 % 2 == 1 for step in range(steps)]
        return
    for edge in (300, 600, 800, 874, 930):
        assert abs(float((drawn < edge).double().mean()) - float(table[edge - 1])) < 4.5 * (0.25 / steps) ** 0.5


def test_levels_are_looked_at_where_the_model_predicts():
    assert [LevelDefaults().at(share, 1000) for share in (0.0, 0.1, 0.5, 0.999, 1.0)] == [0, 100, 500, 999, 999]
    high = LevelDefaults(sides=(Side(874, 999),))
    assert [high.at(share, 1000) for share in (0.0, 0.5, 1.0)] == [874, 937, 999]
