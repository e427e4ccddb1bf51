"""A run on another device than the CPU: every tensor is where it is used, and the numbers are the same."""

from __future__ import annotations

import pytest
import second_device
import torch
from durable import change, equal, run

from lora_atelier.trainer_core.config import *


@pytest.fixture
def config(checkpoint, pictures, comfyui):
    varied = ConceptConfig(
        folder=str(pictures),
        flip=True,
        captions=CaptionConfig(dropout=0.2, shuffle=True, tag_dropout=0.2),
        masks=MaskConfig(missing="ones", unmasked_probability=0.2),
        augment=AugmentConfig(variants=2, crop_jitter=0.5),
    )
    return RunConfig(
        base_model=BaseModelConfig(path=str(checkpoint)),
        dataset=DatasetConfig(concepts=(varied,)),
        lora=LoraConfig(rank=2, alpha=2, preset="attn-only"),
        optimizer=OptimizerConfig(learning_rate=1e-2, text_encoder_learning_rate=1e-3),
        train=TrainConfig(steps=4, batch_size=2, accumulate=2, resolution=64, bucket_step=32, seed=5),
        sample=SampleConfig(prompts=("a thing",), steps=1, width=32, height=32),
        existing=ExistingConfig(on_existing="train again"),
    )


def test_plain(config, tmp_path):
    here, _ = run(config, tmp_path / "here", tmp_path / "cache a")
    there, _ = run(config, tmp_path / "there", tmp_path / "cache b", device="card")
    assert here.losses == there.losses and equal(here.tensors, there.tensors)
    assert torch.equal(here.samples, there.samples)
