"""Measure the time of a save against that of a step; called by `dev.py bench --saves`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from lora_atelier.bench.report import build_ratio, ratios_head, verdict

SAVES = 6  # measured, after a first one that is not
GOAL = 0.01  # of a run's time
RESOLUTIONS = {"tiny": 64, "sd15": 256}  # pixels on the CPU
ON_GPU = 512


def measure(name: str, device_name: str) -> dict[str, Any]:
    """Train a model with AdamW, an average and a save after each step; return seconds of each step and each save."""
    import torch

    from lora_atelier.bench.bases import ready, tokenizer
    from lora_atelier.bench.cases import BASES, CACHE, PLAIN
    from lora_atelier.bench.loop import timed, write_pictures
    from lora_atelier.bench.measure import describe_machine
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.config import (
        BaseModelConfig,
        ConceptConfig,
        DatasetConfig,
        LoraConfig,
        OptimizerConfig,
        RunConfig,
        SavesConfig,
        TrainConfig,
    )
    from lora_atelier.trainer_core.runs import open_run
    from lora_atelier.trainer_core.train import train_lora
    from lora_atelier.trainer_core.training import saving

    device = torch.device(device_name)
    resolution = ON_GPU if device.type == "cuda" else RESOLUTIONS[name]
    spent: dict[str, float] = {}
    steps: list[float] = []
    saves: list[float] = []

    def after(report: Any) -> None:
        steps.append(report.seconds)
        if "save" in spent:
            saves.append(spent.pop("save"))

    CACHE.mkdir(parents=True, exist_ok=True)
    # Beside the models, on a disk: a system's folder for temporary files may lie in memory.
    with tempfile.TemporaryDirectory(prefix="saves-", dir=CACHE) as place:
        folder = Path(place)
        config = RunConfig(
            base_model=BaseModelConfig(
                path=str(ready(name)),
                tokenizer=tokenizer(),
                precision="bfloat16" if device.type == "cuda" else "float32",
            ),
            dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(write_pictures(folder, resolution, 2))),)),
            lora=LoraConfig(rank=16, alpha=16, preset="attn-mlp"),
            optimizer=OptimizerConfig(ema_decay=0.999),
            train=TrainConfig(steps=SAVES + 2, resolution=resolution),
            memory=PLAIN,
            saves=SavesConfig(save_every=1, save_unit="steps"),
        )
        with timed(saving, "save", "save", spent, device):  # the last one, at the end, is not among them
            result = train_lora(config, folder / "lora.safetensors", folder / "cache", device, Callbacks(step=after))
        size = open_run(result.run).checkpoints()[0].size
    return {
        "title": BASES[name].title,
        "machine": describe_machine(device),
        "resolution": resolution,
        "minutes": SavesConfig().save_every,
        "megabytes": size / 1e6,
        "steps": steps[1:],
        "saves": saves[1:],
    }


def render(result: dict[str, Any], command: str, stamp: str) -> str:
    """Write the table of saves as Markdown."""
    machine, steps, saves = result["machine"], result["steps"], result["saves"]
    every = 60 * result["minutes"]
    shares = build_ratio(
        f"share of a run that saving takes, every {result['minutes']} minutes",
        [seconds / (every + seconds) for seconds in saves],
        most=GOAL,
    )
    lines = [
        f"### What a save costs, {machine['device']}",
        "",
        f"{result['title']}, {result['resolution']} px, batch 1, rank 16, preset attn-mlp, AdamW and an average, a "
        f"save after each step: {result['megabytes']:.0f} MB of weights, average, optimizer and two LoRA files, "
        f"which are read back and verified. {stamp}, {machine['cpu']}, {machine['cores']} cores. Command: `{command}`.",
        "",
        *ratios_head(),
        *(
            f"| {name} | {median(values):.3f} | {min(values):.3f} – {max(values):.3f}, n = {len(values)} |  |  |"
            for name, values in (("seconds of a step", steps), ("seconds of a save", saves))
        ),
        verdict(build_ratio("a save / a step", [s / median(steps) for s in saves]), False),
        f"| {shares.name} | {shares.middle:.2%} | {shares.low:.2%} – {shares.high:.2%}, n = {shares.count} | "
        f"≤ {GOAL:.0%} | {'met' if shares.met else '**missed**'} |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the saves of one model and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=RESOLUTIONS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(options.model, options.device)))


if __name__ == "__main__":
    main()
