"""Measure the time that the real training loop spends outside forward pass, backward pass and optimizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lora_atelier.bench.bases import ready, tokenizer
from lora_atelier.bench.cases import PLAIN, Case
from lora_atelier.bench.contenders import OPTIMIZER
from lora_atelier.bench.measure import now
from lora_atelier.trainer_core.common.callbacks import Callbacks, StepReport
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    LoraConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.train import train_lora

PICTURES = 4


def time_loop(case: Case) -> list[dict[str, float]]:
    """Train on pictures of noise with `train_lora`; return the seconds by part of each step but the first.

    Wrappers around the UNet's forward, Tensor.backward and the optimizer time the parts.
    """
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    device = torch.device(case.device)
    spent: dict[str, float] = {}
    rows: list[dict[str, float]] = []

    def collect(report: StepReport) -> None:
        rows.append({"seconds": report.seconds, **spent})
        spent.clear()

    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        config = RunConfig(
            base_model=BaseModelConfig(
                path=str(ready(case.base)),
                tokenizer=tokenizer(),
                precision=case.dtype,  # type: ignore[arg-type]
            ),
            dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(write_pictures(Path(folder), case.resolution))),)),
            lora=LoraConfig(rank=case.rank, alpha=case.rank, preset=case.preset),  # type: ignore[arg-type]
            optimizer=OPTIMIZER,
            train=TrainConfig(steps=case.loop_steps + 1, batch_size=case.batch, resolution=case.resolution),
            memory=PLAIN,
        )
        with (
            timed(UNet2DConditionModel, "forward", "forward", spent, device),
            timed(torch.Tensor, "backward", "backward", spent, device),
            timed(torch.optim.AdamW, "step", "optimizer", spent, device),
        ):
            train_lora(config, Path(folder) / "lora.safetensors", Path(folder), device, Callbacks(step=collect))
    return rows[1:]


def write_pictures(folder: Path, resolution: int, count: int = PICTURES) -> Path:
    """Write square pictures of seeded noise with captions; return their folder."""
    from PIL import Image

    pictures = folder / "pictures"
    pictures.mkdir()
    seeded = torch.Generator().manual_seed(0)
    for i in range(count):
        values = torch.randint(0, 256, (resolution, resolution, 3), generator=seeded, dtype=torch.uint8)
        Image.fromarray(values.numpy()).save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(f"a thing, number {i}", encoding="utf-8")
    return pictures


@contextmanager
def timed(owner: Any, name: str, part: str, spent: dict[str, float], device: torch.device) -> Iterator[None]:
    """Add the seconds that a method takes to `spent` for the length of a `with` block."""
    original = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        began = now(device)
        try:
            return original(*args, **kwargs)
        finally:
            spent[part] = spent.get(part, 0.0) + now(device) - began

    setattr(owner, name, measured)
    try:
        yield
    finally:
        setattr(owner, name, original)
