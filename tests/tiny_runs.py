"""Whole runs on the tiny checkpoints: how tests set them, and how they train them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from clip_tokenizer import TOKENIZER
from prepared import Ready, cache_of

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig, RunConfig
from lora_atelier.trainer_core.train import train_lora

PLAIN = {
    "existing": {"on_existing": "train again"},
    "lora": {"rank": 2, "alpha": 2, "preset": "attn-only"},
    "optimizer": {"learning_rate": 1e-3},
    "scheduler": {"name": "constant"},
    "train": {"steps": 4, "batch_size": 2, "resolution": 64, "bucket_step": 32},
}
CALLBACKS = {field.name for field in fields(Callbacks)}


def change(config: RunConfig, **parts: dict[str, Any]) -> RunConfig:
    """Replace fields of a configuration's parts: change(config, train={"steps": 3})."""
    return config.replace(**{part: getattr(config, part).replace(**values) for part, values in parts.items()})


def tiny_config(base: BaseModelConfig | Path, *concepts: ConceptConfig | Path, **parts: dict[str, Any]) -> RunConfig:
    """Configure a short run on a model or its file, over concepts or folders; parts: what it has other than PLAIN."""
    if isinstance(base, Path):
        base = BaseModelConfig(tokenizer=TOKENIZER, path=str(base))
    found = (ConceptConfig(folder=str(each)) if isinstance(each, Path) else each for each in concepts)
    plain = change(RunConfig(base_model=base, dataset=DatasetConfig(concepts=tuple(found))), **PLAIN)
    return change(plain, **parts)


def run(config: RunConfig, folder: Path, cache: Path | None = None, **options: Any) -> Any:
    """Train into a folder, on a copy of the base model that is read from the disk once; return the result.

    options: callbacks by name, and arguments of train_lora, which go before those given here.
    """
    told = Callbacks(**{name: options.pop(name) for name in CALLBACKS & options.keys()})
    usual = {"output": folder / "lora.safetensors", "cache": cache or cache_of(folder)}
    return train_lora(config, **{**usual, "source": Ready(config.base_model), **options}, callbacks=told)


def run_with_notes(config: RunConfig, folder: Path, cache: Path | None = None, **options: Any) -> tuple[Any, list[str]]:
    """Train as `run` does; return the result and the sentences that a person reads."""
    notes: list[str] = []
    return run(config, folder, cache, note=notes.append, **options), notes
