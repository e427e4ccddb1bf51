"""Measure how far a slider moves the tiny base, by the file it saves; called by `dev.py bench --slider`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lora_atelier.bench.cases import CACHE
from lora_atelier.bench.learning import configure, draw_concept
from lora_atelier.trainer_core.config import BeneathConfig, DatasetConfig, LoraConfig, ObjectiveConfig, SampleConfig

STEPS, RANK, PICTURES = 100, 4, 8
FIGURE = "a {} circle on a white background"
STRENGTHS = (-1.0, -0.5, 0.0, 0.5, 1.0)


def measure(steps: int = STEPS, size: int = 128) -> dict[str, float]:
    """Train a slider from blue to red on gray circles; return the mean of red less blue of gray circles by strength.

    Of all pixels in 0..1: a white ground has 0, and so has a gray circle. The pictures judged have other seeds.
    """
    import torch

    from lora_atelier.trainer_core.lora_files.merge import merge_beneath
    from lora_atelier.trainer_core.models.sd import load_base_model
    from lora_atelier.trainer_core.train import train_lora
    from lora_atelier.trainer_core.training.sample import sample_images

    def prompts(seeds: range) -> SampleConfig:
        asked = tuple(f"{FIGURE.format('gray')} --d {seed}" for seed in seeds)
        return SampleConfig(prompts=asked, width=size, height=size, steps=10, cfg=4)

    run, found = configure("adamw", 0, steps, size), {}
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        (pictures := Path(folder) / "drawn").mkdir()
        concept = draw_concept(run.base_model, prompts(range(PICTURES)), pictures)
        run = run.replace(
            dataset=DatasetConfig(concepts=(concept,)),
            lora=LoraConfig(rank=RANK, alpha=RANK),
            objective=ObjectiveConfig(
                slider="prompts", slider_positive=FIGURE.format("red"), slider_negative=FIGURE.format("blue")
            ),
            optimizer=run.optimizer.replace(learning_rate=1e-3),
            sample=SampleConfig(),
        )
        result = train_lora(run, Path(folder) / "slider.safetensors", CACHE / "learning")
        for strength in STRENGTHS:
            base = load_base_model(run.base_model)
            merge_beneath(base, (BeneathConfig(path=str(result.path), strength=strength),))
            drawn = torch.stack([image for _, image in sample_images(base, prompts(range(100, 100 + PICTURES)))])
            found[f"{strength:g}"] = float((drawn[..., 0] - drawn[..., 2]).mean())
    return found


def render(result: Mapping[str, float], command: str, stamp: str) -> str:
    """Write the row of strengths as Markdown."""
    lines = [
        f"| strength | {' | '.join(result)} |",
        f"|---|{'---|' * len(result)}",
        f"| red less blue | {' | '.join(f'{each:+.3f}' for each in result.values())} |",
        "",
        f"{STEPS} steps, rank {RANK}, one seed. Command: `{command}`, {stamp}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure the slider and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(2, 64) if options.dry else measure()))


if __name__ == "__main__":
    main()
