"""A run on another device than the CPU: every tensor is where it is used, in time, and what is learned is the same."""

from __future__ import annotations

import pytest
import torch
from durable import Cut, change, cut_at, run
from safetensors.torch import save_file
from second_device import card  # noqa: F401 (a fixture)
from tiny_models import family_tensors

from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    EmbeddingConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SavesConfig,
    TrainConfig,
)


@pytest.fixture
def config(checkpoint, pictures, comfyui):
    varied = ConceptConfig(
        folder=str(pictures),
        flip=True,
        captions=CaptionConfig(dropout=0.2, shuffle=True),
        masks=MaskConfig(missing="ones", unmasked_probability=0.2, prior_weight=0.5),
        augment=AugmentConfig(variants=2, crop_jitter=0.5),
    )
    concepts = (
        varied,
        *(ConceptConfig(folder=str(pictures), role=role) for role in ("prior_prediction", "validation")),
    )
    return RunConfig(
        base_model=BaseModelConfig(path=str(checkpoint)),
        dataset=DatasetConfig(concepts=concepts),
        lora=LoraConfig(rank=2, alpha=2, preset="attn-only"),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        train=TrainConfig(
            steps=3, batch_size=2, accumulate=2, resolution=64, bucket_step=32, seed=5, validate_every=2, keep_best=True
        ),
        sample=SampleConfig(prompts=("a thing",), steps=1, width=32, height=32),
        saves=SavesConfig(save_every=1, save_unit="steps", sample_every=2),
    )


WORD = EmbeddingConfig(token="thing", vectors=2, learning_rate=1e-2, stop=1, keep_norm=True)
CASES = {
    "words, text encoder, dropouts, average": {
        "lora": {"dropout": 0.2, "rank_dropout": 0.2, "dora": True, "embeddings": (WORD,), "scale_weight_norms": 0.05},
        "optimizer": {"text_encoder_learning_rate": 1e-3, "text_encoder_stop": 2, "ema_decay": 0.5},
    },
    "bfloat16 rounded at random": {
        "lora": {"algorithm": "glora", "dtype": "bfloat16"},
        "optimizer": {"name": "prodigy_plus_schedule_free", "learning_rate": 1.0, "options": {"d0": 1e-4}},
        "scheduler": {"name": "constant"},
    },
    "all in RAM, in 8 bits": {
        "base_model": {"unet_weights": "float8", "text_weights": "float8"},
        "memory": MemoryConfig(checkpointing="full", offload_weights="all", offload_activations="on").to_dict(),
        "lora": {"algorithm": "lokr", "preset": "full"},
        "objective": {"input_perturbation": 0.1, "loss": "huber"},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_learns_there_what_it_learns_here(name, config, tmp_path, card):  # noqa: F811
    config = change(config, **CASES[name])
    if "memory" in CASES[name]:
        save_file(family_tensors("sdxl"), tmp_path / "toy-sdxl.safetensors")
        config = change(config, base_model={"path": str(tmp_path / "toy-sdxl.safetensors")})
    here, _ = run(config, tmp_path / "here", tmp_path / "cache")
    with pytest.raises(Cut):
        run(config, tmp_path / "there", tmp_path / "cache there", device=card, step=cut_at(2))
    there, _ = run(config, tmp_path / "there", tmp_path / "cache there", device=card)
    assert "Went on after step 2" in there.how and there.losses == pytest.approx(here.losses, rel=1e-3)
    assert [loss for _, loss in there.validation] == pytest.approx([loss for _, loss in here.validation], rel=1e-3)
    assert torch.allclose(there.samples, here.samples, atol=0.02)
    assert here.tensors.keys() == there.tensors.keys()
    mine, theirs = (torch.cat([t.float().flatten() for _, t in sorted(r.tensors.items())]) for r in (there, here))
    assert (mine - theirs).norm() < 0.02 * theirs.norm()
