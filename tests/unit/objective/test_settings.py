"""Settings of the objective against the base model: refusals and remarks."""

import pytest

from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig, ObjectiveConfig, RunConfig
from lora_atelier.trainer_core.models.base import LevelDefaults, Side
from lora_atelier.trainer_core.models.sd.noise import noise_model
from lora_atelier.trainer_core.objective import check_objective, describe_levels, objective_remarks
from lora_atelier.trainer_core.objective.path import flow_noise
from lora_atelier.trainer_core.runs import build_keys
from lora_atelier.trainer_core.runs import key as keys

SOMEONE = LevelDefaults(distribution="logit_normal", shift=2.2, source="someone's trainer")
BY_TOKENS = LevelDefaults(distribution="logit_normal", by_tokens=(0.5, 1.15, 256, 4096), token=2, source="another's")
HIGH = LevelDefaults(sides=(Side(874, 999),))


def run_of(**objective):
    return RunConfig(
        base_model=BaseModelConfig(path="model.safetensors"),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder="pictures"),)),
        objective=ObjectiveConfig(**objective),
    )


def test_levels_are_described_in_words():
    assert describe_levels(LevelDefaults()) == "uniform"
    assert describe_levels(SOMEONE) == "logit_normal, shift 2.2"
    assert describe_levels(BY_TOKENS) == "logit_normal, shift exp(0.5) at 256 tokens to exp(1.15) at 4096"
    assert describe_levels(HIGH) == "uniform, timesteps 874 to 999 alone"


def test_an_expert_of_whose_levels_none_is_trained_is_refused():
    check_objective(run_of(max_timestep=874), flow_noise(), HIGH)
    with pytest.raises(ValueError, match="predicts at the timesteps 874 to 999, and none of them is trained; set min"):
        check_objective(run_of(max_timestep=873), flow_noise(), HIGH)


def test_the_levels_of_a_family_are_told_and_those_of_the_settings_are_not():
    flow = flow_noise()
    (told,) = objective_remarks(run_of(), flow, SOMEONE)
    assert told.startswith("Timesteps are drawn from logit_normal, shift 2.2, as") and "(someone's trainer)." in told
    (told,) = objective_remarks(run_of(timestep_distribution="uniform"), flow, SOMEONE)
    assert told == "Timesteps are drawn from uniform, shift 2.2."
    assert objective_remarks(run_of(timestep_distribution="beta"), noise_model("epsilon", False)) == []
    assert objective_remarks(run_of(timestep_distribution="uniform", timestep_shift=1), flow, SOMEONE) == []
    assert objective_remarks(run_of(), noise_model("epsilon", False), LevelDefaults(source="x")) == []


def test_a_flow_model_is_told_of_weights_and_noise_that_do_not_suit_it():
    flow, choice = flow_noise(), {"timestep_distribution": "uniform", "timestep_shift": 1}
    (told,) = objective_remarks(run_of(min_snr_gamma=5, **choice), flow)
    assert "Set min_snr_gamma of Noise & Loss to 0." in told
    (told,) = objective_remarks(run_of(noise_offset=0.1, **choice), flow)
    assert told.startswith("This model's last timestep is pure noise, from which")
    for name in ("debiased", "p2", "v_scaled", "v_like"):
        with pytest.raises(ValueError, match=f"{name} is not for models that predict flow"):
            check_objective(run_of(weighting=name), flow)
    with pytest.raises(ValueError, match="is undefined where"):
        check_objective(run_of(noise_offset=0.1, noise_offset_strength="by_timestep"), flow)


def test_mixflow_is_for_flow_models_and_for_their_predictions():
    check_objective(run_of(mixflow=0.8), flow_noise())
    with pytest.raises(ValueError, match="mixflow is for flow models, and this one predicts epsilon; set mixflow of"):
        check_objective(run_of(mixflow=0.8), noise_model("epsilon", False))
    with pytest.raises(ValueError, match="With mixflow the picture that a prediction implies"):
        ObjectiveConfig(mixflow=0.8, loss_on="x0")


def test_no_shift_leaves_the_keys_of_runs_as_they_were_before_there_were_shifts(monkeypatch):
    seen = []
    monkeypatch.setattr(keys, "_digest", lambda values: seen.append(dict(values["objective"])) or "")
    build_keys(run_of(), {}, "", LevelDefaults(source="anyone"))
    build_keys(run_of(), {}, "", SOMEONE)
    assert seen[0]["timestep_distribution"] == "uniform" and "timestep_shift" not in seen[0]
    assert seen[2]["timestep_distribution"] == "logit_normal" and seen[2]["timestep_shift"] == 2.2


def test_a_run_is_known_by_what_it_draws_from_whoever_chose_it():
    def key(levels=None, **objective):
        return build_keys(run_of(**objective), {"path": "0" * 64}, "1" * 64, levels).run

    plain = key()
    uniform = {"timestep_distribution": "uniform", "timestep_shift": 1.0}
    assert plain == key(LevelDefaults(source="anyone")) == key(**uniform) == key(SOMEONE, **uniform)
    assert key(SOMEONE) == key(timestep_distribution="logit_normal", timestep_shift=2.2)
    others = [
        key(SOMEONE),
        key(BY_TOKENS),
        key(SOMEONE, timestep_shift=1),
        key(SOMEONE, timestep_shift=3),
        key(HIGH),
        plain,
    ]
    assert len(set(others)) == len(others)
