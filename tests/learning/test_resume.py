"""A run that is cut off goes on to the last bit; one that is finished is taken; a longer one continues."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from lora_atelier.trainer_core.callbacks import Callbacks
from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    ExistingConfig,
    LoraConfig,
    MaskConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SavesConfig,
    SchedulerConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.run import find_runs
from lora_atelier.trainer_core.train import train_lora


class Cut(BaseException):
    """What a Cancel is to the core."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(checkpoint, pictures, comfyui):
    return RunConfig(
        base_model=BaseModelConfig(path=str(checkpoint)),
        dataset=DatasetConfig(
            concepts=(
                ConceptConfig(folder=str(pictures), flip=True, captions=CaptionConfig(dropout=0.2, shuffle=True)),
                ConceptConfig(folder=str(pictures), role="validation"),
            )
        ),
        lora=LoraConfig(rank=2, alpha=2, preset="attn-only", dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        scheduler=SchedulerConfig(name="constant"),
        train=TrainConfig(steps=4, accumulate=2, resolution=64, bucket_step=32, seed=5, validate_every=2),
        sample=SampleConfig(prompts=("a thing",), steps=2, width=32, height=32),
        saves=SavesConfig(save_every=1, save_unit="steps", sample_every=1),
    )


def change(config, **parts):
    return config.replace(**{part: getattr(config, part).replace(**values) for part, values in parts.items()})


def run(config, folder, cache, **callbacks):
    notes = []
    result = train_lora(config, folder / "lora.safetensors", cache, callbacks=Callbacks(note=notes.append, **callbacks))
    return result, notes


def cut_at(step):
    def check(report):
        if report.step == step:
            raise Cut

    return check


def same(a, b):
    """Tell whether two results are the same to the last bit."""
    assert a.tensors.keys() == b.tensors.keys()
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    assert repr(a.losses) == repr(b.losses) and repr(a.concepts) == repr(b.concepts)  # NaN is NaN
    assert a.validation == b.validation and a.best == b.best
    assert torch.equal(a.samples, b.samples)
    return True


def test_a_run_that_is_cut_off_goes_on_to_the_last_bit_and_a_finished_one_is_taken(config, tmp_path, cache):
    whole, _ = run(config, tmp_path / "whole", cache)
    folder = tmp_path / "cut"
    for step in (1, 3):
        with pytest.raises(Cut):
            run(config, folder, cache, step=cut_at(step))
        (found,) = find_runs(folder / "runs")
        assert found.checkpoints()[0].step == step and found.result() is None
    result, notes = run(config, folder, cache)
    assert same(whole, result) and result.finished
    assert result.how.startswith("Went on after step 3 of 4") and result.how in notes
    assert result.path.name == "lora.safetensors"

    seen = []
    again, _ = run(config, folder, cache, step=seen.append, phase=lambda *phase: seen.append(phase))
    assert same(result, again) and not seen and again.path == result.path and "Nothing was trained" in again.how
