"""A LoRA learns the example concept on the tiny flow-matching model, beside plain figures that it must not forget."""

import json
from pathlib import Path
from types import ModuleType

import concept  # puts assets/ on the path
import numpy as np
import pytest
import torch
from prompts import to_prompt
from toy_workflows import shorten

from comfy_client import ComfyClient
from lora_atelier.dev import FLOW
from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, ConnectedConfig, SampleConfig
from lora_atelier.trainer_core.train import train_lora

# As of the tiny base (tests/tools/test_learning.py), whose pictures, prompts and score these are.
TRIGGER = tuple(f"a mossling on a {ground} background" for ground in ("blue", "green", "yellow", "white"))
PLAIN = (("square", "red", "blue"), ("heart", "pink", "green"), ("star", "blue", "white"), ("ring", "white", "red"))
# The model scores about -1.35 on TRIGGER. What must hold after the training is what holds for the tiny base, and more.
LEAST_SCORE, LEAST_RISE = 0.1, 0.8


@pytest.fixture(scope="module")
def drawn(
    comfy_modules: ModuleType, comfyui: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give pictures of TRIGGER by the model, and of TRIGGER and PLAIN by the model with the LoRA, (N, 128, 128, 3)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFYUI_PATH", str(comfyui))
        import from_comfyui

    from lora_atelier.nodes.comfyui.connected.live import LinkedModels
    from lora_atelier.nodes.comfyui.connected.model import ConnectedSource

    loaded = from_comfyui.load()
    live = LinkedModels(loaded.model, loaded.clip, loaded.vae)
    base = BaseModelConfig(path="atelier-tiny-flow", connected=ConnectedConfig(guidance=3.5))
    prompts = (*TRIGGER, *concept.plain_prompts(PLAIN))
    folder, plain = (tmp_path_factory.mktemp(name) for name in ("learning", "plain"))
    concept.draw_plain_figures(plain, 6)
    regularisation = ConceptConfig(folder=str(plain), role="regularisation")
    sample = SampleConfig(prompts=prompts, width=128, height=128, steps=12, cfg=4, seed=0)
    config = concept.learning_run(base, sample, regularisation, rank=64, rate=4e-3, steps=500)
    source = ConnectedSource(base, live)
    after = train_lora(config, folder / "mossling.safetensors", folder / "cache", source=source).samples
    before = from_comfyui.draw(loaded, TRIGGER, cfg=config.sample.cfg, steps=config.sample.steps)
    return torch.from_numpy(before) / 255, after


@pytest.mark.thorough  # in every run the tiny base shows what is learned (tests/tools/test_learning.py)
def test_the_trigger_word_draws_the_motif(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    before, after = (concept.motif_score(pictures[: len(TRIGGER)]) for pictures in drawn)
    assert after.mean() >= LEAST_SCORE, (before, after)
    assert after.mean() - before.mean() >= LEAST_RISE, (before, after)


# In every run a few steps move the pictures; a fifth of the steps go from -1.2 to about -0.4.
@pytest.mark.parametrize(
    ("steps", "least", "rise"),
    [
        (8, None, None),
        pytest.param(80, -0.8, 0.5, marks=pytest.mark.thorough),
        pytest.param(400, LEAST_SCORE, LEAST_RISE, marks=pytest.mark.thorough),
    ],
)
def test_the_demo_draws_what_the_model_could_not(
    comfy: ComfyClient, steps: int, least: float | None, rise: float | None
) -> None:
    """`dev.py demo --flow`, and with fewer steps: the picture before and after, and its two samples."""
    prompt = to_prompt(json.loads(FLOW.read_text(encoding="utf-8")), comfy.first_info())
    (train,) = (each["inputs"] for each in prompt.values() if each["class_type"] == "AtelierTrain")
    assert train["steps"] == 400
    train |= {"steps": steps, "name": f"mossling_flow_{steps}"}
    if least is None:
        shorten(
            prompt,
            AtelierTrain={"batch_size": 1},
            AtelierSample={"steps": 2},
            AtelierSaves={"sample_steps": 2},
        )
    result = comfy.queue(prompt)
    assert result.ok, result.error
    shown = {node["_meta"]["title"]: key for key, node in prompt.items()}
    (pair,) = comfy.images(result, shown["Before and after"])
    side = pair.height
    found = [pair.crop((0, 0, side, side)), pair.crop((pair.width - side, 0, pair.width, side))]
    found += comfy.images(result, shown["Samples of Train LoRA"])
    pictures = torch.stack([torch.from_numpy(np.array(each.convert("RGB"))) for each in found]) / 255
    assert len(pictures) == 4 and not torch.equal(pictures[0], pictures[1])
    if least is None or rise is None:
        return
    before, *after = concept.motif_score(pictures).tolist()
    mean = sum(after) / len(after)
    assert before < 0 and mean >= least and mean - before >= rise, (before, after)


@pytest.mark.thorough
def test_prompts_without_the_trigger_keep_being_followed(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Colours of figure and ground stay those of the prompt, and no figure becomes the motif."""
    pictures = drawn[1][len(TRIGGER) :]
    figures, grounds, read = concept.read_plain(pictures, PLAIN)
    assert grounds >= 3 and figures >= 3, read
    assert concept.motif_score(pictures).mean() < LEAST_SCORE
