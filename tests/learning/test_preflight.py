"""The memory estimate decides before anything is loaded: what fits runs, what does not is refused with a way out."""

import pytest
import torch

from lora_atelier.trainer_core import preflight, prepare
from lora_atelier.trainer_core.callbacks import Callbacks
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    ExistingConfig,
    LoraConfig,
    MemoryConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.memory import LEVELS
from lora_atelier.trainer_core.preflight import estimate_run
from lora_atelier.trainer_core.train import train_lora

CPU = torch.device("cpu")
SHAPE = (4, (128, 128), 77)  # what the configuration below trains at most


@pytest.fixture
def config(checkpoint, pictures, comfyui):
    return RunConfig(
        existing=ExistingConfig(on_existing="train again"),
        base_model=BaseModelConfig(path=str(checkpoint)),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(pictures)),)),
        lora=LoraConfig(rank=4, alpha=4),
        train=TrainConfig(steps=2, batch_size=4, resolution=128, bucket_step=128),
    )


def estimated(config, level="0"):
    return estimate_run(config, MemoryConfig(checkpointing=level), SHAPE, torch.float32, CPU).total


def let_be_free(monkeypatch, amount):
    monkeypatch.setattr(preflight, "free_bytes", lambda device: amount)


def let_nothing_load(monkeypatch):
    monkeypatch.setattr(prepare, "load_base_model", lambda *_: pytest.fail("a model was loaded"))


def run(config, folder):
    notes = []
    result = train_lora(config, folder / "lora.safetensors", folder / "cache", callbacks=Callbacks(note=notes.append))
    return result, next(note for note in notes if note.startswith("Memory: about"))


def test_each_level_needs_less(config):
    totals = [estimated(config, level) for level in LEVELS]
    assert totals == sorted(totals, reverse=True) and totals[-1] < 0.8 * totals[0]


def test_what_fits_is_not_slowed_down_and_what_does_not_takes_the_first_level_that_does(config, tmp_path, monkeypatch):
    plain, said = run(config, tmp_path)
    assert "with checkpointing 0." in said
    totals = {level: estimated(config, level) for level in LEVELS}
    let_be_free(monkeypatch, totals["2"])
    first = next(level for level in LEVELS if totals[level] <= totals["2"])
    small, said = run(config, tmp_path)
    assert f"with checkpointing {first}." in said and first != "0"
    assert small.losses == pytest.approx(plain.losses, rel=1e-5)


def test_settings_that_do_not_fit_are_refused_with_the_cheapest_that_do(config, tmp_path, monkeypatch):
    let_be_free(monkeypatch, 0.89 * estimated(config, "0"))
    let_nothing_load(monkeypatch)
    fixed = config.replace(memory=MemoryConfig(checkpointing="0"))
    with pytest.raises(ValueError, match=r"needs about .* with checkpointing 0, and .* free: set checkpointing [1-4f]"):
        run(fixed, tmp_path)


def test_what_fits_in_no_way_names_smaller_weights_and_batches(config, tmp_path, monkeypatch):
    small = config.replace(base_model=config.base_model.replace(unet_weights="float8"))
    let_be_free(monkeypatch, estimated(small, "full"))
    let_nothing_load(monkeypatch)
    with pytest.raises(ValueError, match=r"set unet_weights float8 with checkpointing full \(.* GB\)"):
        run(config, tmp_path)
    let_be_free(monkeypatch, 1)
    with pytest.raises(ValueError, match="lower the resolution"):
        run(config, tmp_path)


def test_trained_text_encoders_and_longer_captions_need_more(config):
    texts = config.replace(optimizer=config.optimizer.replace(text_encoder_learning_rate=1e-4))
    assert estimated(texts) > estimated(config)
    long = estimate_run(config, MemoryConfig(checkpointing="0"), (4, (128, 128), 231), torch.float32, CPU).total
    assert long > estimated(config)
