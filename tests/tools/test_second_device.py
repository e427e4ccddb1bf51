"""A run on another device than the CPU: every tensor is where it is used, in time, and what is learned is the same."""

from __future__ import annotations

import pytest
import sessions
import torch
from durable import Cut, cut_at
from safetensors.torch import save_file
from second_device import PRETENDED, device_is  # noqa: F401 (a fixture)
from tiny_models import family_tensors
from tiny_runs import change, run

from lora_atelier.trainer_core.config import AugmentConfig, DatasetConfig, EmbeddingConfig, MaskConfig, MemoryConfig
from lora_atelier.trainer_core.training import saving


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    config = sessions.make_scene(tmp_path_factory.mktemp("scenes") / "scene")
    things, held = config.dataset.concepts
    masks, augment = MaskConfig(missing="ones", prior_weight=0.5), AugmentConfig(variants=2, crop_jitter=0.5)
    concepts = (things.replace(masks=masks, augment=augment), things.replace(role="prior_prediction"), held)
    steps = {"steps": 3, "batch_size": 2, "validate_every": 3}
    config = change(config, train=steps, optimizer={"ema_decay": 0.0, "learning_rate": 1e-3})
    exact = config.base_model.replace(precision="float32")
    return config.replace(dataset=DatasetConfig(concepts=concepts), base_model=exact)


WORD = EmbeddingConfig(token="thing", vectors=2, learning_rate=1e-2, stop=1, keep_norm=True)
CASES = {
    "words, text encoder, dropouts, average": {
        "lora": {"dropout": 0.2, "rank_dropout": 0.2, "dora": True, "embeddings": (WORD,), "scale_weight_norms": 0.05},
        "optimizer": {"text_encoder_learning_rate": 1e-3, "text_encoder_stop": 2, "ema_decay": 0.5},
    },
    "bfloat16 rounded at random": {
        "lora": {"algorithm": "glora", "dtype": "bfloat16", "dropout": 0.0},
        "optimizer": {"name": "prodigy_plus_schedule_free", "learning_rate": 1.0, "options": {"d0": 1e-4}},
    },
    "all in RAM, in 8 bits": {
        "base_model": {"weights": "float8", "text_weights": "float8"},
        "memory": MemoryConfig(checkpointing="full", offload_weights="all", offload_activations="on").to_dict(),
        "lora": {"algorithm": "lokr", "dropout": 0.0},
        "objective": {"input_perturbation": 0.1, "loss": "huber"},
    },
    "nothing kept of encodings": {"memory": {"encodings": "none"}, "lora": {"dropout": 0.0}},
    "nothing kept, encoders in RAM": {
        "memory": MemoryConfig(checkpointing="full", offload_weights="all", encodings="none").to_dict(),
        "lora": {"dropout": 0.0},
    },
}


FIRST = next(iter(CASES))
# "nothing kept, encoders in RAM" encodes as it does, and moves more; the first case's state comes back as well.
AGAIN = {
    ("all in RAM, in 8 bits", "card"),  # test_memory.py has such weights come and go
    ("nothing kept of encodings", "card"),
    ("bfloat16 rounded at random", "card"),
    (FIRST, "card"),  # which has what the Mac has, and streams, as the cases of RAM show
    (FIRST, "old"),  # which lacks what the Mac lacks, but for bfloat16
}


# The first case does what most runs do; what the others keep in RAM, or in 8 bits, only the card can.
WHERE = [(name, "card") for name in CASES] + [(FIRST, kind) for kind in PRETENDED if kind != "card"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, marks=pytest.mark.thorough if each in AGAIN else ()) for each in WHERE],
)
def test_a_run_learns_there_what_it_learns_here(name, kind, config, tmp_path, device_is):  # noqa: F811
    card = device_is(kind)
    config = change(config, **CASES[name])
    if "offload_weights" in CASES[name].get("memory", {}):
        config = change(config, train={"steps": 2})
        save_file(family_tensors("sdxl"), tmp_path / "toy-sdxl.safetensors")
        config = change(config, base_model={"path": str(tmp_path / "toy-sdxl.safetensors")})
    here = run(config, tmp_path / "here", tmp_path / "cache")
    if "optimizer" in CASES[name]:  # whose state is what comes back to the device
        with pytest.raises(Cut):
            run(config, tmp_path / "there", tmp_path / "cache there", device=card, step=cut_at(2))
    there = run(config, tmp_path / "there", tmp_path / "cache there", device=card)
    assert ("Resumed after step 2" in there.origin) == ("optimizer" in CASES[name])
    assert there.losses == pytest.approx(here.losses, rel=1e-3)
    assert [loss for _, loss in there.validation] == pytest.approx([loss for _, loss in here.validation], rel=1e-3)
    assert torch.allclose(there.samples, here.samples, atol=0.02)
    assert here.tensors.keys() == there.tensors.keys()
    mine, theirs = (torch.cat([t.float().flatten() for _, t in sorted(r.tensors.items())]) for r in (there, here))
    assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_a_lora_that_cannot_be_computed_there_costs_no_step(config, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise TypeError("The device has no such operation.")

    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(saving, "write_versions", refuse)
        run(config, tmp_path / "run", tmp_path / "cache")
    assert "Resumed after step 1 of 3" in run(config, tmp_path / "run", tmp_path / "cache").origin


@pytest.mark.parametrize("kind", ["mac", "old"])
def test_numbers_that_a_device_lacks_are_refused_in_a_sentence(kind, config, tmp_path, device_is):  # noqa: F811
    number = "float8" if kind == "mac" else "bfloat16"
    part = {"weights": "float8"} if kind == "mac" else {"precision": "bfloat16"}
    with pytest.raises(ValueError, match=rf"{number}.* set .* to (int8|float32)\.$"):
        run(change(config, base_model=part), tmp_path / "run", device=device_is(kind))
    assert not (tmp_path / "run").exists()
