"""A LoRA learns the example concept on the tiny flow-matching model, with the settings of the workflow `flow`."""

from pathlib import Path
from types import ModuleType

import concept  # puts assets/ on the path
import numpy as np
import pytest
import torch
from reading import read_picture

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    ConnectedConfig,
    DatasetConfig,
    LoraConfig,
    MaskConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SchedulerConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.train import train_lora

# As of the tiny base (tests/tools/test_learning.py), whose pictures, prompts and score these are.
TRIGGER = tuple(f"a mossling on a {ground} background" for ground in ("blue", "green", "yellow", "white"))
PLAIN = (("square", "red", "blue"), ("heart", "pink", "green"), ("star", "blue", "white"), ("ring", "white", "red"))
# The model scores about -1.35. After training, other seeds and processors score 0.03 to 0.2, and -0.6 to -0.1 on PLAIN.
LEAST_SCORE, LEAST_RISE, MOST_PLAIN = -0.1, 0.8, 0.3


@pytest.fixture(scope="module")
def drawn(
    comfy_modules: ModuleType, comfyui: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give pictures of TRIGGER by the model, and of TRIGGER and PLAIN by the model with the LoRA, (N, 128, 128, 3)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFYUI_PATH", str(comfyui))
        import from_comfyui

    from lora_atelier.nodes.comfyui.connected import register_connected_models
    from lora_atelier.nodes.comfyui.connected.live import Live, key_of

    register_connected_models()
    loaded = from_comfyui.load()
    live = Live(loaded.model, loaded.clip, loaded.vae)
    base = BaseModelConfig(path="atelier-tiny-flow", connected=ConnectedConfig(key=key_of(live), guidance=3.5))
    prompts = (*TRIGGER, *(f"a {colour} {shape} on a {ground} background" for shape, colour, ground in PLAIN))
    masks = MaskConfig(missing="ones", unmasked_weight=0.3)
    config = RunConfig(
        base_model=base,
        dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(concept.CONCEPT), masks=masks),)),
        lora=LoraConfig(rank=64, alpha=64, preset="full"),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        scheduler=SchedulerConfig(name="cosine", warmup_steps=20),
        train=TrainConfig(steps=300, batch_size=4, resolution=128, bucket_step=32),
        sample=SampleConfig(prompts=prompts, width=128, height=128, steps=12, cfg=4, seed=0),
    )
    folder = tmp_path_factory.mktemp("learning")
    after = train_lora(config, folder / "mossling.safetensors", folder / "cache").samples
    before = from_comfyui.draw(loaded, TRIGGER, cfg=config.sample.cfg, steps=config.sample.steps)
    return torch.from_numpy(before) / 255, after


def test_the_trigger_word_draws_the_motif(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    before, after = (concept.motif_score(pictures[: len(TRIGGER)]) for pictures in drawn)
    assert after.mean() >= LEAST_SCORE, (before, after)
    assert after.mean() - before.mean() >= LEAST_RISE, (before, after)


def test_prompts_without_the_trigger_keep_being_followed(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Grounds stay those of the prompt, and no figure becomes the motif; so short a run changes colours of figures."""
    pictures = drawn[1][len(TRIGGER) :]
    read = [read_picture((picture.numpy() * 255).round().astype(np.uint8)) for picture in pictures]
    assert sum(got[2] == wanted[2] for got, wanted in zip(read, PLAIN, strict=True)) >= 3, read
    assert concept.motif_score(pictures).mean() < MOST_PLAIN
