"""Measure how far sliders move the tiny base, by the files they save; called by `dev.py bench --slider`."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_atelier.bench.cases import CACHE
from lora_atelier.bench.learning import configure, draw_concept
from lora_atelier.trainer_core.common.wording import count
from lora_atelier.trainer_core.config import (
    BeneathConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    LoraConfig,
    ObjectiveConfig,
    RunConfig,
    SampleConfig,
)

STEPS, RANK, PICTURES = 100, 4, 8
FIGURE = "a {} circle on a white background"
STRENGTHS = (-1.0, -0.5, 0.0, 0.5, 1.0)
OF = ("two prompts", "pairs of pictures")


def measure(of: str = OF[0], seed: int = 0, steps: int = STEPS, size: int = 128) -> dict[str, float]:
    """Train a slider from blue to red; return the mean of red less blue of gray circles by strength.

    Of all pixels in 0..1: a white ground has 0, and so has a gray circle. Every seed is judged by the same pictures,
    which none trains on. of: two prompts, on gray circles; or pairs of circles that differ in colour alone, with the
    caption of a gray one.
    """
    import torch

    from lora_atelier.trainer_core.lora_files.merge import merge_beneath
    from lora_atelier.trainer_core.models.sd import load_base_model
    from lora_atelier.trainer_core.train import train_lora
    from lora_atelier.trainer_core.training.sample import sample_images

    run, found = configure("adamw", seed, steps, size), {}
    run = run.replace(
        lora=LoraConfig(rank=RANK, alpha=RANK),
        objective=ObjectiveConfig(),
        optimizer=run.optimizer.replace(learning_rate=1e-3),
        sample=SampleConfig(),
    )
    judged = prompts(range(100, 100 + PICTURES), size)
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        run = (of_prompts if of == OF[0] else of_pairs)(run, Path(folder), size)
        result = train_lora(run, Path(folder) / "slider.safetensors", CACHE / "learning")
        for strength in STRENGTHS:
            base = load_base_model(run.base_model)
            merge_beneath(base, (BeneathConfig(path=str(result.path), strength=strength),))
            drawn = torch.cat([image for _, image in sample_images(base, judged)])
            found[f"{strength:g}"] = float((drawn[..., 0] - drawn[..., 2]).mean())
    return found


def prompts(seeds: range, size: int) -> SampleConfig:
    """Ask for a gray circle of each seed."""
    asked = tuple(f"{FIGURE.format('gray')} --d {seed}" for seed in seeds)
    return SampleConfig(prompts=asked, width=size, height=size, steps=10, cfg=4)


def of_prompts(run: RunConfig, folder: Path, size: int) -> RunConfig:
    """Train two prompts on gray circles that the base draws into a folder, others with each seed of the run."""
    (pictures := folder / "drawn").mkdir()
    first = PICTURES * run.train.seed
    concept = draw_concept(run.base_model, prompts(range(first, first + PICTURES), size), pictures)
    slider = {"slider": "prompts", "slider_positive": FIGURE.format("red"), "slider_negative": FIGURE.format("blue")}
    return run.replace(dataset=DatasetConfig(concepts=(concept,)), objective=run.objective.replace(**slider))


def of_pairs(run: RunConfig, folder: Path, size: int) -> RunConfig:
    """Train pairs of a red and a blue circle in one place, drawn into a folder, with the caption of a gray one."""
    from PIL import Image, ImageDraw

    for colour in ("red", "blue"):
        (folder / colour).mkdir()
        for number in range(PICTURES):
            x, y, radius = (size * each // 128 for each in (48 + 4 * number, 76 - 3 * number, 28 + 2 * number))
            picture = Image.new("RGB", (size, size), "white")
            ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), colour)
            picture.save(folder / colour / f"{number}.png")
            (folder / colour / f"{number}.txt").write_text(FIGURE.format("gray"), encoding="utf-8")
    blue = ControlConfig(folders=(str(folder / "blue"),), use="slider")
    concept = ConceptConfig(folder=str(folder / "red"), controls=blue)
    return run.replace(dataset=DatasetConfig(concepts=(concept,)))


def render(results: Sequence[Mapping[str, Mapping[str, float]]], command: str, stamp: str) -> str:
    """Write the rows of strengths as Markdown, means over the seeds with the lowest and the highest.

    results: of each seed, red less blue by strength, by what the slider is made of.
    """
    strengths = next(iter(results[0].values()))
    lines = [
        f"| red less blue at strength | {' | '.join(strengths)} |",
        f"|---|{'---|' * len(strengths)}",
        *(
            f"| {of} | {' | '.join(spread([each[of][strength] for each in results]) for strength in strengths)} |"
            for of in results[0]
        ),
        "",
        f"{STEPS} steps, rank {RANK}, {count(len(results), 'seed')}. Command: `{command}`, {stamp}.",
    ]
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Write a mean with the lowest and the highest value."""
    return f"{statistics.fmean(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})"


def main() -> None:
    """Measure both sliders with a seed and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    length = (2, 64) if options.dry else ()
    options.out.write_text(json.dumps({of: measure(of, options.seed, *length) for of in OF}))


if __name__ == "__main__":
    main()
