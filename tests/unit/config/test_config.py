"""Configurations are read strictly, written plainly and refuse what cannot work."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from lora_atelier.trainer_core import config as c
from lora_atelier.trainer_core.config.rows import rows_of

DATASET = c.DatasetConfig(
    concepts=(
        c.ConceptConfig(folder="cats", repeats=3, masks=c.MaskConfig(invert=True)),
        c.ConceptConfig(
            folder="dogs",
            captions=c.CaptionConfig(shuffle=True, keep=1, extensions=(".txt", ".tags")),
            augment=c.AugmentConfig(rotation=5),
            resolutions=("512", "640x384"),
        ),
    )
)
RUN = c.RunConfig(
    base_model=c.BaseModelConfig(path="model.safetensors", clip_skip=2),
    dataset=DATASET,
    train=c.TrainConfig(validate_every=10),
    sample=c.SampleConfig(prompts=("a cat", "a dog")),
)


def test_a_run_survives_dict_and_json() -> None:
    again = c.RunConfig.from_dict(json.loads(json.dumps(RUN.to_dict())))
    assert again == RUN
    assert again.digest() == RUN.digest()
    assert isinstance(again.dataset.concepts[0].masks, c.MaskConfig)
    assert isinstance(again.sample.prompts, tuple)


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rnak"):
        c.LoraConfig.from_dict({"rnak": 8})
    with pytest.raises(ValueError, match="colour"):
        c.RunConfig.from_dict(RUN.to_dict() | {"lora": {"colour": 1}})


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    values = RUN.to_dict()
    turned = dict(reversed(values.items()))
    assert c.RunConfig.from_dict(turned).digest() == RUN.digest()


def test_every_field_of_a_run_changes_its_digest() -> None:
    for field in dataclasses.fields(c.TrainConfig):
        value = getattr(RUN.train, field.name)
        other: Any = {
            "save_dtype": "float32",
            "keep_best": True,
            "log": "csv",
            "resolution": 768,
            "bucket_step": 32,
            "buckets": c.BucketConfig(no_upscale=True),
        }.get(field.name, value + (1 if isinstance(value, int) else 0.1) if isinstance(value, int | float) else None)
        changed = RUN.replace(train=RUN.train.replace(**{field.name: other}))
        assert changed.digest() != RUN.digest(), field.name


def test_configurations_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.train.steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        c.ConceptConfig("cats")  # type: ignore[misc]


REFUSED: list[tuple[type[c.Config], dict[str, Any], str]] = [
    (c.BaseModelConfig, {"path": "x", "prediction": "flow"}, "prediction"),
    (c.BaseModelConfig, {"path": "x", "clip_skip": 0}, "clip_skip"),
    (c.MaskConfig, {"unmasked_weight": 1.5}, "unmasked_weight"),
    (c.MaskConfig, {"unmasked_probability": float("nan")}, "unmasked_probability"),
    (c.MaskConfig, {"suffixes": ()}, "suffix"),
    (c.MaskConfig, {"suffixes": ("-mask.png", "")}, "suffix"),
    (c.MaskConfig, {"threshold": 2}, "threshold"),
    (c.MaskConfig, {"prior_weight": -1}, "prior_weight"),
    (c.ConceptConfig, {"folder": "x", "repeats": 0}, "repeats"),
    (c.ConceptConfig, {"folder": "x", "loss_weight": -1}, "loss_weight"),
    (c.ConceptConfig, {"folder": "x", "role": "test"}, "role"),
    (c.ConceptConfig, {"folder": "x", "samples": -1}, "samples"),
    (c.ConceptConfig, {"folder": "x", "resolutions": ("big",)}, "'big' is invalid"),
    (c.ConceptConfig, {"folder": "x", "background": "no colour"}, "background is 'no colour'"),
    (c.ConceptConfig, {"folder": "x", "min_side": 0}, "min_picture_side of Pictures"),
    (c.CaptionConfig, {"tag_dropout": 2}, "tag_dropout"),
    (c.CaptionConfig, {"tag_warmup_steps": -1}, "tag_warmup_steps"),
    (c.CaptionConfig, {"missing": "class_prompt"}, "set class_prompt of Captions"),
    (c.CaptionConfig, {"extensions": ("txt",)}, "dot"),
    (c.CaptionConfig, {"extensions": ()}, "dot"),
    (c.CaptionConfig, {"extensions": ("./../x",)}, "dot"),
    (c.CaptionConfig, {"separator": " "}, "separator"),
    (c.CaptionConfig, {"source": "one_file"}, "set caption_file of"),
    (c.CaptionConfig, {"encoding": "cp99999"}, "an unknown encoding"),
    (c.AugmentConfig, {"rotation": 46}, "rotation"),
    (c.AugmentConfig, {"variants": 0}, "variants"),
    (c.BucketConfig, {"resolutions": ("512", "100x100")}, "'100x100' is invalid"),
    (c.BucketConfig, {"min_side": 512, "max_side": 256}, "swap the two"),
    (c.LoraConfig, {"algorithm": "DyLoRA"}, "is 'DyLoRA', which is not here; choose lora with the highest rank"),
    (c.LoraConfig, {"algorithm": "dylor"}, "choose one of"),
    (c.OptimizerConfig, {"options": {"beta2": 1}}, "beta2 of Optimizer is 1; it must be between 0 and 0.999999"),
    (c.OptimizerConfig, {"name": "adamw9"}, "choose one of"),
    (
        c.OptimizerConfig,
        {"name": "sgd", "options": {"beta1": 0.9}},
        "sgd has no parameter beta1; there are momentum, nesterov, weight_decay",
    ),
    (c.OptimizerConfig, {"name": "sgd", "options": {"momentum": 0.0}}, "nesterov needs momentum"),
    (c.OptimizerConfig, {"name": "adafactor", "options": {"warmup_init": True}}, "relative_step"),
    (c.OptimizerConfig, {"name": "prodigy", "options": {"slice_p": 1.5}}, "whole number"),
    (c.OptimizerConfig, {"name": "prodigy", "options": {"separate": 1}}, "must be true or false"),
    (c.OptimizerConfig, {"name": "prodigy", "lora_plus_ratio": 16}, "estimates one step size"),
    (c.OptimizerConfig, {"name": "schedulefree_adamw", "ema_decay": 0.9}, "averages the weights already"),
    (c.OptimizerConfig, {"learning_rate": 0, "text_encoder_learning_rate": 1, "conv_learning_rate": 1}, "conv_"),
    (c.OptimizerConfig, {"ema_decay": 1}, "ema_decay"),
    (c.OptimizerConfig, {"options": {"betta2": 0.9}}, "adamw has no parameter betta2; did you mean beta2"),
    (c.SchedulerConfig, {"min_lr_ratio": 2}, "min_lr_ratio"),
    (c.SchedulerConfig, {"warmup_unit": "percent", "warmup_steps": 100}, "warmup_steps of Scheduler is 100 percent"),
    (c.SchedulerConfig, {"cycles": 3}, "cycles works with name rex_restarts or .* only, and name is cosine"),
    (c.LoraConfig, {"algorithm": "glora", "rank_dropout": 0.1}, "rank_dropout works with algorithm lora or loha or"),
    (c.LoraConfig, {"algorithm": "lokr", "factor": 0}, "between 1 and 1024, or -1 for what suits the model"),
    (
        c.LoraConfig,
        {"rank": -1},
        "rank of LoRA Config is -1; it must be between 1 and 4096, or 0 for what suits the model",
    ),
    (c.LoraConfig, {"alpha": -1}, "alpha"),
    (c.OptimizerConfig, {"learning_rate": -0.5}, "between 0 and 100, or -1 for what suits the model"),
    (c.CaptionConfig, {"dropout": -0.5}, "between 0 and 1, or -1 for what suits the model"),
    (
        c.TrainConfig,
        {"resolution": 32},
        "resolution of Train LoRA is 32; it must be between 64 and 8192 pixels, or 0 for what suits the model",
    ),
    (c.LoraConfig, {"block_ranks": (4, -1)}, "block_ranks of LoRA Config is -1; it must be between 0 and 4096"),
    (c.LoraConfig, {"block_ranks": (4.5,)}, "must be a whole number"),
    (c.LoraConfig, {"block_weights": (1, float("nan"))}, "block_weights of LoRA Config is too large, or no number"),
    (c.LoraConfig, {"include": ("*to_q", " ")}, "empty pattern"),
    (c.LoraConfig, {"conv_rank": 4}, "conv_rank has no effect: the preset attn-mlp trains no 3x3"),
    (c.LoraConfig, {"preset": "full-lin", "conv_block_alphas": (4,)}, "conv_block_alphas has no effect"),
    (c.LoraConfig, {"preset": "full", "conv_rank": 4, "conv_block_ranks": (4,)}, "conv_rank has no effect"),
    (c.LoraConfig, {"preset": "full", "conv_alpha": 4, "conv_block_alphas": (4,)}, "conv_alpha has no effect"),
    (c.LoraConfig, {"algorithm": "ia3", "block_ranks": (4,)}, "ia3 has no rank"),
    (c.LoraConfig, {"algorithm": "ia3", "kind_ranks": ("mlp=4",)}, "kind_ranks has no effect: ia3 has no rank"),
    (c.LoraConfig, {"preset": "full", "conv_rank": 4, "kind_ranks": ("convolution=4",)}, "conv_rank has no effect"),
    (c.LoraConfig, {"algorithm": "ia3", "preset": "full"}, "preset has no effect"),
    (c.LoraConfig, {"algorithm": "full", "preset": "full", "conv_rank": 4}, "full has no rank"),
    (c.LoraConfig, {"algorithm": "lokr", "full_matrix": True, "block_ranks": (4,)}, "lokr has no rank"),
    (c.LoraConfig, {"algorithm": "oft", "block_alphas": (4,)}, "oft has no alpha"),
    (c.LoraConfig, {"start": "a.safetensors", "exclude": ("*fc1",)}, "exclude has no effect: an existing LoRA"),
    (c.ObjectiveConfig, {"min_timestep": 600, "max_timestep": 500}, "min_timestep"),
    (c.ObjectiveConfig, {"max_timestep": 1000}, "max_timestep"),
    (c.ObjectiveConfig, {"loss": "l2"}, "loss of Noise & Loss is 'l2'"),
    (c.ObjectiveConfig, {"huber_c": 0.2}, "works with loss huber or smooth_l1 or huber_true only, and loss is mse"),
    (c.ObjectiveConfig, {"loss": "l1", "huber_schedule": "snr"}, "huber_schedule works with loss"),
    (c.ObjectiveConfig, {"loss": "huber", "huber_c": 0}, "huber_c"),
    (c.ObjectiveConfig, {"weighting": "debiased", "min_snr_gamma": 5}, "min_snr_gamma works with weighting"),
    (c.ObjectiveConfig, {"p2_gamma": 2}, "p2_gamma"),
    (c.ObjectiveConfig, {"weighting": "soft_min_snr"}, "set min_snr_gamma of Noise & Loss to 5"),
    (c.ObjectiveConfig, {"snr_weight_floor": 0.1}, "snr_weight_floor needs a weighting"),
    (c.ObjectiveConfig, {"snr_weight_floor": 2, "min_snr_gamma": 5}, "snr_weight_floor"),
    (c.ObjectiveConfig, {"loss_on": "x0", "min_snr_gamma": 5}, "loss_on x0 is a diagnostic"),
    (
        c.ObjectiveConfig,
        {"beta_a": 3},
        "beta_a works with timestep_distribution beta only, and timestep_distribution is auto",
    ),
    (c.ObjectiveConfig, {"timestep_distribution": "beta", "beta_b": 0}, "beta_b"),
    (c.ObjectiveConfig, {"timestep_distribution": "sigmoid", "sigmoid_slope": 0}, "to uniform instead"),
    (c.ObjectiveConfig, {"noise_offset_strength": "random"}, "noise_offset is 0; set noise_offset of"),
    (c.ObjectiveConfig, {"noise_offset": 0.1, "offset_adaptation": 1}, "offset_adaptation works with"),
    (c.ObjectiveConfig, {"pyramid_discount": 0.2}, "pyramid_discount"),
    (c.ObjectiveConfig, {"pyramid_iterations": -1}, "pyramid_iterations"),
    (c.ObjectiveConfig, {"input_perturbation": -0.1}, "input_perturbation"),
    (c.TrainConfig, {"steps": 0}, "steps"),
    (c.TrainConfig, {"batch_size": 0}, "batch_size"),
    (c.TrainConfig, {"bucket_step": 60}, "bucket_step"),
    (c.TrainConfig, {"resolution": 64, "bucket_step": 128}, "bucket_step"),
    (c.TrainConfig, {"seed": -1}, "seed"),
    (c.TrainConfig, {"early_stop_min_improvement": 1}, "early_stop_min_improvement"),
    (
        c.ObjectiveConfig,
        {"slider": "prompts", "slider_positive": "old", "easy_weight": 0.5},
        "none is easy or odd; set easy_weight of Noise & Loss to 1",
    ),
    (c.TrainConfig, {"plateau_patience": 3}, "plateau_patience 3 needs .* set validate_every of"),
    (c.TrainConfig, {"early_stop_patience": 3}, "early_stop_patience 3 needs .* set validate_every of"),
    (c.SampleConfig, {"width": 500}, "multiple of 8"),
]


@pytest.mark.parametrize(("kind", "values", "named"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_cannot_work_is_refused_by_name(kind: type[c.Config], values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**values)


LONG = "a" * 10_001
ENDLESS: list[tuple[Callable[[], object], str]] = [  # a setting that a stranger's workflow may hold, and its sentence
    (
        lambda: c.SchedulerConfig(points="0:1," * 10_000),
        "points of Scheduler has a text of more than 10000 characters",
    ),
    (
        lambda: c.SampleConfig(prompts=("a", LONG)),
        "sample_prompts of Saves & Samples has a text of more than 10000 characters",
    ),
    (lambda: c.EmbeddingConfig(token=LONG), "token of Embedding has a text of more than 10000 characters"),
    (lambda: c.LoraConfig(alpha=10**400), "alpha of LoRA Config is too large, or no number"),
    (
        lambda: c.LoraConfig(preset="full", conv_alpha=float("inf")),
        "conv_alpha of LoRA Config is too large, or no number",
    ),
    (
        lambda: c.LoraConfig(scale_weight_norms=float("nan")),
        "scale_weight_norms of LoRA Config is too large, or no number",
    ),
    (
        lambda: c.LoraConfig(block_alphas=(10**400,)),
        "block_alphas of LoRA Config is too large, or no number",
    ),
    (lambda: c.LoraConfig(block_weights=(1.0,) * 1001), "block_weights of LoRA Config has more than 1000 numbers"),
    (lambda: c.LoraConfig(include=("*a" * 200,)), "include of LoRA Config is too long"),
    (lambda: c.LoraConfig(exclude=("a",) * 201), "exclude of LoRA Config is too long"),
    (lambda: c.BucketConfig(resolutions=("9" * 5000,)), "The resolution '99999"),
    (lambda: c.SavesConfig(file_name="a" + "\u0301\u0316" * 4000), "has 8001 characters; use at most 100"),
]


@pytest.mark.parametrize(
    ("name", "said"), [("cat.", "write cat."), (".cat .", "write cat."), ("con.png", "cannot be"), (". .", "cannot be")]
)
def test_names_that_windows_writes_otherwise_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        c.SavesConfig(file_name=name)
    assert c.SavesConfig(file_name="cat .v2").file_name == "cat .v2"


@pytest.mark.parametrize("name", ["cat.ckpt", "cat.PT", "cat.v2.pth"])
def test_a_name_that_asks_for_a_pickle_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"write {name.rpartition('.')[0]}: files are written as .safetensors"):
        c.plain_name(name)


@pytest.mark.parametrize(("build", "said"), ENDLESS)
def test_endless_texts_and_numbers_are_refused_in_a_short_sentence(build: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert said in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"train": {"stpes": 5}}, "There is no setting train.stpes; did you mean train.steps?"),
        ({"train": {"steps": "5"}}, "train.steps is '5' and must be a whole number."),
        ({"train": {"steps": True}}, "train.steps is True and must be a whole number."),
        ({"train": {"keep_best": 1}}, "train.keep_best is 1 and must be true or false."),
        ({"train": 5}, "train is 5 and must be a table."),
        ({"memory": {"checkpointing": 0}}, "memory.checkpointing is 0 and must be a text."),
        ({"optimizer": {"learning_rate": [1]}}, "optimizer.learning_rate is [1] and must be a number."),
        ({"lora": {"include": "attn"}}, "lora.include is 'attn' and must be a list."),
        ({"dataset": {"concepts": [{}]}}, "The setting dataset.concepts.1.folder is missing."),
        ({"lora": {"beneath": [{"path": 1}]}}, "lora.beneath.1.path is 1 and must be a text."),
    ],
)
def test_a_wrong_value_is_refused_by_its_full_name(values: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        c.RunConfig.from_dict(RUN.to_dict() | values)


@pytest.mark.parametrize(
    ("config", "name"), [(c.SchedulerConfig, "name"), (c.ObjectiveConfig, "weighting"), (c.LoraConfig, "algorithm")]
)
def test_the_words_of_a_long_choice_explain_each(config: type, name: str) -> None:
    row = rows_of(config)[name]
    assert [choice for choice in row.choices if not re.search(rf"\b{choice}\b", row.words)] == []
