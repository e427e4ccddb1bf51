"""Objectives in whole runs: what is switched on acts, repeats to the last bit, and is said before the start."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from durable import apart
from gradients import gradients, loss_of
from lora_runs import metadata_in
from prepared import NeverLoaded, prepared
from tiny_runs import change, run, run_with_notes, tiny_config

from lora_atelier.trainer_core.config import DatasetConfig, MaskConfig, ObjectiveConfig, OptimizerConfig
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.objective import Objective, objective_remarks
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.training.batch import read_batch

pytestmark = pytest.mark.usefixtures("no_estimates", "one_cache")

THOROUGH = functools.partial(pytest.param, marks=pytest.mark.thorough)
# In every run each guide once, with captions from the cache or from text encoders that are trained.
CACHED, TRAINED = [0.0, THOROUGH(1e-3)], [THOROUGH(0.0), 1e-3]

EVERYTHING = ObjectiveConfig(
    min_snr_gamma=5,
    weighting="soft_min_snr",
    snr_weight_floor=0.05,
    noise_offset=0.1,
    noise_offset_strength="adaptive",
    pyramid_iterations=4,
    input_perturbation=0.1,
    loss="huber",
    huber_schedule="snr",
    timestep_distribution="beta",
    stratified_timesteps=True,
    min_timestep=50,
    max_timestep=950,
)


@pytest.fixture
def config(checkpoint, pictures):
    return tiny_config(
        checkpoint, pictures, lora={"preset": "attn-mlp"}, train={"steps": 3, "accumulate": 2, "seed": 5}
    )


def dataset(config, **values):
    """Return the dataset and another concept of the same pictures."""
    first = config.dataset.concepts[0]
    return DatasetConfig(concepts=(first, first.replace(**values)))


def test_a_run_with_everything_switched_on_repeats_to_the_last_bit(config, tmp_path):
    masks = MaskConfig(missing="ones", prior_weight=0.5, unmasked_probability=0.3)
    concepts = dataset(config, role="prior_prediction", masks=masks, loss_weight=0.5)
    config = config.replace(objective=EVERYTHING, dataset=concepts)
    first = run(config, tmp_path)
    torch.manual_seed(3)
    second = run(config, tmp_path)
    assert first.losses == second.losses and all(map(math.isfinite, first.losses))
    assert all(torch.equal(t, second.tensors[k]) for k, t in first.tensors.items())
    told = metadata_in(second.path)
    assert (told["ss_loss_type"], told["ss_huber_schedule"], told["ss_huber_c"]) == ("huber", "snr", "0.1")
    assert (told["ss_noise_offset"], told["ss_adaptive_noise_scale"]) == ("0.1", "0.1")
    assert (told["ss_multires_noise_iterations"], told["ss_ip_noise_gamma"]) == ("4", "0.1")
    assert told["ss_min_snr_gamma"] == "None" and told["modelspec.timestep_range"] == "50,950"


CHANGES = [
    {"loss": "l1"},
    {"loss": "huber"},
    {"loss": "huber", "huber_c": 0.2},
    {"loss": "huber", "huber_scale": 3},
    {"loss": "huber", "huber_schedule": "exponential"},
    {"loss": "huber", "huber_schedule": "snr"},
    {"loss_on": "x0"},
    {"min_snr_gamma": 0.05},
    {"min_snr_gamma": 0.05, "snr_weight_floor": 0.95},
    {"weighting": "soft_min_snr", "min_snr_gamma": 0.05},
    {"weighting": "debiased"},
    {"weighting": "p2"},
    {"weighting": "p2", "p2_gamma": 0.5},
    {"weighting": "v_like"},
    {"weighting": "v_like", "v_like_weight": 2},
    {"timestep_distribution": "logit_normal"},
    {"timestep_distribution": "logit_normal", "logit_mean": 1},
    {"timestep_distribution": "logit_normal", "logit_scale": 0.5},
    {"timestep_distribution": "sigmoid"},
    {"timestep_distribution": "sigmoid", "sigmoid_center": 0.8},
    {"timestep_distribution": "sigmoid", "sigmoid_slope": -5},
    {"timestep_distribution": "beta"},
    {"timestep_distribution": "beta", "beta_a": 4},
    {"timestep_distribution": "beta", "beta_b": 4},
    {"timestep_distribution": "snr_uniform"},
    {"timestep_distribution": "mode"},
    {"timestep_distribution": "mode", "mode_scale": -1},
    {"timestep_distribution": "cos_map"},
    {"timestep_distribution": "inverted_parabola", "parabola_scale": 6},  # 8 is beta's default
    {"timestep_distribution": "inverted_parabola", "parabola_center": 0.8},
    {"timestep_distribution": "inverted_parabola", "parabola_scale": 100},
    {"timestep_shift": 3},
    {"timestep_distribution": "logit_normal", "timestep_shift": 0.3},
    {"min_timestep": 500},
    {"max_timestep": 500},
    {"stratified_timesteps": True},
    {"noise_offset": 0.1},
    {"noise_offset": 0.1, "noise_offset_strength": "random"},
    {"noise_offset": 0.1, "noise_offset_strength": "adaptive"},
    {"noise_offset": 0.1, "noise_offset_strength": "adaptive", "offset_adaptation": 1},
    {"noise_offset": 0.1, "noise_offset_strength": "by_timestep"},
    {"pyramid_iterations": 1},
    {"pyramid_iterations": 3},
    {"pyramid_iterations": 3, "pyramid_discount": 0.8},
    {"input_perturbation": 0.2},
]


def test_every_setting_changes_the_loss(config, tmp_path):
    """The same batch and the same prediction, with one setting after the other."""
    run = prepared(change(config, train={"steps": 1}), tmp_path)
    losses = []
    for changed in ({}, *CHANGES):
        objective = Objective(ObjectiveConfig(**changed), run.base.noise, run.config.train.seed)
        batch = read_batch(run.encoded, run.plan.step(0)[0], run.plan, run.config, run.objective.terms)
        draws = objective.draw(batch, run.device)
        losses.append(float(loss_of(objective, draws.noised.sin(), draws).sum()))
    assert apart(*losses) and all(map(math.isfinite, losses))


@pytest.mark.parametrize(("reduction", "factor"), [("sum_batch", 2), ("sum_accumulate", 4), THOROUGH("sum", 8)])
def test_a_summed_loss_is_a_multiple_of_the_mean(config, tmp_path, reduction, factor):
    """Of 4 batches of 2: gradient descent goes exactly as far as with the learning rate times the factor."""
    plain = {"momentum": 0.0, "nesterov": False}
    config = change(config, train={"steps": 1, "accumulate": 4})

    def trained(rate, objective):
        optimizer = OptimizerConfig(name="sgd", options=plain, learning_rate=rate, max_grad_norm=0)
        return run(config.replace(objective=objective, optimizer=optimizer), tmp_path)

    summed, mean = trained(0.125, ObjectiveConfig(loss_reduction=reduction)), trained(0.125 * factor, ObjectiveConfig())
    assert summed.losses == mean.losses
    assert all(torch.equal(t, summed.tensors[k]) for k, t in mean.tensors.items())


def passed(config, folder, objective):
    """Return the passes of the first step of a fresh run, its gradient, and the captions it needs beside its own."""
    run = prepared(config.replace(objective=objective), folder)
    with run.network.attached():
        passes = gradients(run)
    found = [p.grad for group in run.optimizer.param_groups for p in group["params"]]
    return run, passes, torch.cat([gradient.flatten() for gradient in found])


def test_guidance_is_of_the_prediction_without_a_caption(config, tmp_path):
    """The loss of a step, computed by hand from the model's predictions with and without captions."""
    run, passes, _ = passed(config, tmp_path, ObjectiveConfig(guidance_loss=3.5))
    losses = []
    with torch.no_grad(), run.network.attached():
        for micro in run.plan.step(0):
            draws = run.objective.draw(
                read_batch(run.encoded, micro, run.plan, run.config, run.objective.terms), run.device
            )
            read = run.reader(training=True)
            told, blank = (
                run.base.denoiser.predict(draws.noised, draws.levels, run.conditions(samples, read))
                for samples in (micro.samples, [replace(sample, caption="") for sample in micro.samples])
            )
            assert not torch.equal(told, blank)
            losses.append((told - blank - 3.5 * (draws.target - blank)).square().mean(dim=(1, 2, 3)))
    assert float(passes.loss) == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


SLIDER = ObjectiveConfig(
    slider="prompts", slider_positive="red", slider_negative="blue", slider_keep=("flat", "round"), slider_strength=2.0
)


def direction(run, micro, draws, *prompts):
    """Compute the base model's prediction for the captions, and the difference of those for two prompts."""
    read = run.reader(training=True)
    with torch.no_grad(), run.network.detached():
        own, one, other = (
            run.base.denoiser.predict(draws.noised, draws.levels, run.conditions(samples, read))
            for samples in (micro.samples, *([replace(s, caption=each) for s in micro.samples] for each in prompts))
        )
    return own, one - other


@pytest.mark.parametrize("text_rate", TRAINED)
def test_a_step_of_a_slider_is_that_of_the_paper_in_both_directions(config, tmp_path, text_rate):
    """Loss and gradient of a fresh network, computed by hand: it still predicts what the base model does."""
    config = change(config, optimizer={"text_encoder_learning_rate": text_rate})
    run, passes, gradient = passed(config, tmp_path, SLIDER)
    run.optimizer.zero_grad()
    losses = []
    with run.network.attached():
        for micro, kept, sign in zip(run.plan.step(0), ("flat", "flat"), (1, -1), strict=True):
            draws = run.objective.draw(
                read_batch(run.encoded, micro, run.plan, run.config, run.objective.terms), run.device
            )
            own, moved = direction(run, micro, draws, f"red, {kept}", f"blue, {kept}")
            told = run.base.denoiser.predict(
                draws.noised, draws.levels, run.conditions(micro.samples, run.reader(training=True))
            )
            prediction = own + sign * (told - own)  # at strength -1 a fresh network's gradient is the opposite one
            losses.append((prediction - own - sign * 2.0 * moved).square().mean(dim=(1, 2, 3)))
            (losses[-1].sum() / 4).backward()
    assert float(passes.loss) == pytest.approx(float(torch.cat(losses).detach().mean()), rel=1e-5) != 0
    found = torch.cat([p.grad.flatten() for group in run.optimizer.param_groups for p in group["params"]])
    torch.testing.assert_close(gradient, found, rtol=1e-3, atol=1e-6 * float(found.abs().max()))


def test_a_slider_moves_predictions_one_way_at_strength_1_and_the_other_at_minus_1(config, tmp_path):
    one = SLIDER.replace(slider_keep=(), slider_strength=1.0)
    config = config.replace(train=config.train.replace(steps=12), objective=one)
    run = prepared(config.replace(optimizer=OptimizerConfig(learning_rate=2e-2)), tmp_path)
    with run.network.attached():
        for run.at in range(12):
            gradients(run)
            run.optimizer.step()
            run.optimizer.zero_grad()
        micro = run.plan.step(0)[0]
        draws = run.objective.draw(
            read_batch(run.encoded, micro, run.plan, run.config, run.objective.terms), run.device
        )
        own, moved = direction(run, micro, draws, "red", "blue")
        shares = []
        for reverse in (False, True):
            run.network.reverse(reverse)
            with torch.no_grad():
                conditions = run.conditions(micro.samples, run.reader(training=True))
                found = run.base.denoiser.predict(draws.noised, draws.levels, conditions) - own
            shares.append(float((found * moved).sum() / moved.square().sum()))
    assert shares[0] > 0.2 and shares[1] < -0.2, shares


@pytest.mark.parametrize("text_rate", TRAINED)
def test_preservation_is_nothing_until_the_network_says_something_else(config, tmp_path, text_rate):
    """A fresh network predicts as the base does; later its loss is against what the base says of the other caption."""
    config = change(config, optimizer={"text_encoder_learning_rate": text_rate})
    blank = ObjectiveConfig(preservation="blank", preservation_weight=8.0)
    (_, plain, moved), (_, kept, same) = (passed(config, tmp_path / str(i), each) for i, each in
                                          enumerate((ObjectiveConfig(), blank)))  # fmt: skip
    assert float(kept.loss) == pytest.approx(float(plain.loss), rel=1e-5)
    torch.testing.assert_close(same, moved, rtol=1e-3, atol=1e-6)
    config = change(config, train={"steps": 2}, optimizer={"learning_rate": 1e-2})
    runs = [run(config.replace(objective=each), tmp_path) for each in (ObjectiveConfig(), blank)]
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0], rel=1e-5) and runs[0].losses[1:] != runs[1].losses[1:]


def test_a_trigger_word_that_no_caption_has_is_refused_before_a_model_is_loaded(config, tmp_path):
    words = ObjectiveConfig(preservation="class", preservation_trigger="zwx", preservation_class="a man")
    with pytest.raises(ValueError, match="No caption that is trained contains 'zwx'; set preservation_trigger"):
        run(config.replace(objective=words), tmp_path, source=NeverLoaded(config.base_model))


def test_the_samples_of_a_step_share_the_noise_levels_out(config, tmp_path):
    run = prepared(config.replace(objective=ObjectiveConfig(stratified_timesteps=True)), tmp_path)
    for step in range(3):
        batches = [
            read_batch(run.encoded, micro, run.plan, run.config, run.objective.terms) for micro in run.plan.step(step)
        ]
        drawn = torch.cat([run.objective.draw(batch, run.device).levels for batch in batches]).sort().values
        assert (drawn * len(drawn) // 1000).tolist() == list(range(len(drawn))) and len(batches) == 2


@pytest.mark.parametrize("text_rate", CACHED)
def test_prior_prediction_holds_the_model_to_what_it_said_of_those_captions(config, tmp_path, monkeypatch, text_rate):
    """Pictures of this role have no loss while the network is fresh, and one afterwards that is against the base."""
    losses, own = [], Objective.loss

    def recorded(*arguments):
        losses.append(own(*arguments))
        return losses[-1]

    monkeypatch.setattr(Objective, "loss", recorded)
    concepts = dataset(config, role="prior_prediction")
    rates = {"text_encoder_learning_rate": text_rate, "learning_rate": 1e-2}
    config = change(config.replace(dataset=concepts), optimizer=rates, train={"steps": 4, "batch_size": 3})
    result, notes = run_with_notes(config, tmp_path)
    micro_batches = [micro for k in range(4) for micro in result.plan.step(k)]
    held = [
        [result.plan.concepts[sample.picture].role == "prior_prediction" for sample in micro.samples]
        for micro in micro_batches
    ]
    assert any(any(each) and not all(each) for each in held)  # both kinds in one batch
    for number, (each, values) in enumerate(zip(held, losses, strict=True)):
        for is_held, loss in zip(each, values.tolist(), strict=True):
            if is_held and number < 2:  # of the first step
                assert loss < 1e-10
            else:
                assert loss > (1e-7 if is_held else 1e-2)
    assert not any("repeat" in note and "byte for byte" in note for note in notes)  # the same pictures are meant


def test_combinations_that_mean_nothing_are_refused_and_those_that_surprise_are_reported(config, tmp_path):
    v = config.base_model.replace(prediction="v_prediction", zero_terminal_snr="on")
    for sentence, objective, base in (
        ("v_scaled is not for models that predict epsilon", {"weighting": "v_scaled"}, config.base_model),
        ("v_like is not for models that predict v_prediction", {"weighting": "v_like"}, v),
        ("is undefined where", {"noise_offset": 0.1, "noise_offset_strength": "by_timestep"}, v),
        ("model predicts epsilon; turn it off", {}, v.replace(prediction="epsilon")),
    ):
        with pytest.raises(ValueError, match=sentence):
            wrong = config.replace(objective=ObjectiveConfig(**objective), base_model=base)
            run(wrong, tmp_path, source=NeverLoaded(base))
    objective = ObjectiveConfig(noise_offset=0.1, pyramid_iterations=2, min_snr_gamma=5, stratified_timesteps=True)
    single = change(config, train={"steps": 1, "batch_size": 1, "accumulate": 1})
    result, notes = run_with_notes(single.replace(objective=objective, base_model=v), tmp_path)
    assert all(map(math.isfinite, result.losses))
    for part in (
        "a noise offset and pyramid noise the LoRA",
        "has the weight 0",
        "has no effect on one sample",
        "add up; try one",
    ):
        assert sum(part in note for note in notes) == 1, part
    floored = objective.replace(snr_weight_floor=0.1, stratified_timesteps=False)
    said = objective_remarks(config.replace(base_model=v, objective=floored), noise_model("v_prediction", True))
    assert said and not any("has the weight 0" in each for each in said)
    plain = noise_model("epsilon", False)
    (said,) = objective_remarks(config.replace(objective=ObjectiveConfig(loss_on="x0")), plain)
    assert "for diagnosis" in said and objective_remarks(config, plain) == []


@pytest.mark.parametrize(
    ("objective", "remedy"),
    [
        ({"min_snr_gamma": 5}, "Set min_snr_gamma of Noise & Loss to 0"),
        ({"weighting": "sigma_sqrt"}, "Set weighting of Noise & Loss to min_snr"),
        ({"weighting": "cos_map"}, None),
        ({"weighting": "sigma_sqrt", "min_timestep": 900}, None),
        ({}, None),
    ],
)
def test_a_weighting_that_leaves_noise_out_is_reported_for_flow_models(config, objective, remedy):
    said = objective_remarks(config.replace(objective=ObjectiveConfig(**objective)), flow_noise())
    assert ["hardly trains" in each and remedy in each for each in said] == ([True] if remedy else [])
