"""A LoRA learns the example concept, in fewer and smaller steps than the tour's: the motif is measured."""

from dataclasses import replace
from pathlib import Path

import concept
import pytest
import torch

from lora_atelier.trainer_core.config import BaseModelConfig, ObjectiveConfig, SampleConfig
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.train import train_lora
from lora_atelier.trainer_core.training.sample import sample_images

# Backgrounds of the example pictures, and orange, which none of them has.
TRIGGER = tuple(
    f"a mossling on a {ground} background" for ground in ("blue", "green", "red", "yellow", "white", "orange")
)
PLAIN = (("square", "red", "blue"), ("heart", "pink", "green"), ("star", "blue", "white"),
         ("triangle", "green", "yellow"), ("ring", "white", "red"), ("cross", "black", "orange"))  # fmt: skip

# The score is 1 for a perfect motif, above 0.7 for the example pictures, at most 0 for a flat patch, and below
# 0 for every picture of the base's world (test_tiny_base.py). So a positive mean says that the motif is there, and
# the rise must be larger than the whole spread of the base's own pictures, which is about 0.4.
# Less than a third of the steps, which draw in fewer themselves, go from -0.7 to about 0: the rise is the same.
LEAST_SCORE, LEAST_RISE = {40: -0.25, 140: 0.1}, 0.4


@pytest.fixture(scope="module", params=[40, pytest.param(140, marks=pytest.mark.thorough)])
def steps(request: pytest.FixtureRequest) -> int:
    """Give the steps of the run."""
    return request.param


@pytest.fixture(scope="module")
def drawn(steps: int, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor]:
    """Give pictures of TRIGGER by the base, (4 or 6, 128, 128, 3), and of TRIGGER and PLAIN with the LoRA."""
    drawn, shown = (6, 4) if steps == 40 else (10, 6)
    prompts = (*TRIGGER[-shown:], *concept.plain_prompts(PLAIN[:shown]))
    sample = SampleConfig(prompts=prompts, width=128, height=128, steps=drawn, cfg=4, seed=0)
    base = BaseModelConfig(
        path=str(concept.ASSETS / "atelier-tiny.safetensors"), tokenizer=str(comfyui / "comfy" / "sd1_tokenizer")
    )
    run = concept.learning_run(base, sample, rank=16, rate=3e-3, steps=steps)
    config = replace(
        run,
        objective=ObjectiveConfig(min_snr_gamma=5),
        train=replace(run.train, batch_size=2),
        scheduler=replace(run.scheduler, warmup_steps=min(20, steps // 5)),
    )
    folder = tmp_path_factory.mktemp("learning")
    plain = replace(sample, prompts=TRIGGER[-shown:])
    before = torch.cat([image for _, image in sample_images(load_base_model(base), plain)])
    after = train_lora(config, folder / "mossling.safetensors", folder / "cache").samples
    return before, after


def test_the_trigger_word_draws_the_motif(drawn, steps):
    before, after = (concept.motif_score(pictures[: len(drawn[0])]) for pictures in drawn)
    assert after.mean() >= LEAST_SCORE[steps], (before, after)
    assert after.mean() - before.mean() >= LEAST_RISE, (before, after)


def test_prompts_without_the_trigger_keep_being_followed(drawn):
    """Colours of figure and ground stay those of the prompt, and no figure becomes the motif."""
    pictures = drawn[1][len(drawn[0]) :]
    figures, grounds, read = concept.read_plain(pictures, PLAIN[: len(pictures)])
    assert grounds >= len(pictures) - 1 and figures >= len(pictures) * 2 // 3, read
    assert concept.motif_score(pictures).mean() < LEAST_SCORE[140]
