"""Judge how close pictures come to the example concept, the mossling."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    LoraConfig,
    MaskConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SchedulerConfig,
    TrainConfig,
)

ASSETS = Path(__file__).resolve().parents[1] / "assets"
CONCEPT = ASSETS / "concept_example"
sys.path.append(str(ASSETS))  # its scripts are modules for one another and for the tests
SIDE = 64  # pictures are compared with their shorter side at this many pixels
HALVES = (15, 17, 19, 21, 23, 25, 27)  # half heights of the motif that are tried, in pixels of SIDE
SEED = 4242  # of plain figures; the base models were trained on pictures of other seeds
TILTS = (-5.0, 5.0)  # degrees


def motif_score(images: Tensor) -> Tensor:
    """Return the share of the motif's colour variation each picture (N, H, W, 3) in 0..1 shows at its best place, (N,).

    For a motif T with mask m at some place, size and tilt: 1 - sum m |I - T|^2 / sum m |T - mean T|^2, the coefficient
    of determination, at its maximum over places, sizes and tilts. A perfect motif gives 1, any flat patch at most 0,
    and neither background, position nor size matters. It asks for the right colours in the right arrangement, so that
    another round figure of the right colour scores low too.
    """
    pictures = images.movedim(-1, 1).float()
    scale = SIDE / min(pictures.shape[-2:])
    pictures = F.interpolate(pictures, scale_factor=scale, mode="bilinear", antialias=True, align_corners=False)
    best = torch.full((len(pictures),), -torch.inf)
    for motif, mask in _motifs():
        if motif.shape[1] > pictures.shape[2] or motif.shape[2] > pictures.shape[3]:
            continue
        squares = F.conv2d(pictures.square(), mask.expand(1, 3, -1, -1))
        error = squares - 2 * F.conv2d(pictures, (motif * mask)[None]) + (motif.square() * mask).sum()
        mean = (motif * mask).sum((1, 2), keepdim=True) / mask.sum()
        spread = ((motif - mean).square() * mask).sum()
        best = torch.maximum(best, (1 - error / spread).amax((1, 2, 3)))
    return best


@lru_cache
def _motifs() -> tuple[tuple[Tensor, Tensor], ...]:
    """Draw the motif at each size and tilt, cut to its box: (3, h, w) in 0..1 and its mask (1, h, w)."""
    from draw_concept import draw_motif

    motifs = []
    for half in HALVES:
        for tilt in TILTS:
            canvas = Image.new("RGB", (400, 400), (128, 128, 128))
            mask = draw_motif(canvas, 200, 200, 160, tilt, 0.0)
            box = mask.getbbox()
            size = [round((box[i + 2] - box[i]) * half / 160) for i in (0, 1)]
            picture, cover = (image.crop(box).resize(size, Image.Resampling.BOX) for image in (canvas, mask))
            motifs.append((
                torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255,
                torch.from_numpy(np.array(cover))[None].float() / 255,
            ))  # fmt: skip
    return tuple(motifs)


def load_pictures() -> list[Tensor]:
    """Return the example pictures as (H, W, 3) tensors in 0..1, in order."""
    files = sorted(path for path in CONCEPT.glob("*.png") if not path.stem.endswith("-masklabel"))
    return [torch.from_numpy(np.array(Image.open(file).convert("RGB"))).float() / 255 for file in files]


def learning_run(
    base: BaseModelConfig, sample: SampleConfig, *others: ConceptConfig, rank: int, rate: float, steps: int
) -> RunConfig:
    """Describe a run that learns the example with its masks, and others beside it; rate: the highest learning rate."""
    masks = MaskConfig(missing="ones", unmasked_weight=0.3)
    return RunConfig(
        base_model=base,
        dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(CONCEPT), masks=masks), *others)),
        lora=LoraConfig(rank=rank, alpha=rank, preset="full"),
        optimizer=OptimizerConfig(learning_rate=rate),
        scheduler=SchedulerConfig(name="cosine", warmup_steps=20),
        train=TrainConfig(steps=steps, batch_size=4, resolution=128, bucket_step=32),
        sample=sample,
    )


def plain_prompts(plain: Sequence[tuple[str, str, str]]) -> list[str]:
    """Ask for plain figures: shape, colour and ground of each."""
    return [f"a {colour} {shape} on a {ground} background" for shape, colour, ground in plain]


def read_plain(pictures: Tensor, plain: Sequence[tuple[str, str, str]]) -> tuple[int, int, object]:
    """Count the pictures (N, H, W, 3) whose figure, and whose ground, has the colour asked for; and what was read."""
    from reading import read_picture

    read = [read_picture((picture.numpy() * 255).round().astype(np.uint8)) for picture in pictures]
    right = [[got[1] == wanted[1], got[2] == wanted[2]] for got, wanted in zip(read, plain, strict=True)]
    figures, grounds = (sum(column) for column in zip(*right, strict=True))
    return figures, grounds, read


def draw_plain_figures(folder: Path, count: int) -> None:
    """Draw captioned pictures of the base's world into a folder: one figure on its ground, nothing else."""
    import drawing

    scenes = ((i, drawing.scene_at(SEED, i)) for i in itertools.count())
    plain = ((i, scene) for i, scene in scenes if is_plain(scene))
    for i, scene in itertools.islice(plain, count):
        drawing.draw(scene, SEED, i).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(scene.caption, encoding="utf-8")


def is_plain(scene: Any) -> bool:
    """Tell whether a scene shows one figure of the usual size in the middle, without textures."""
    words = [(each.texture, each.size, each.place) for each in scene.figures]
    return words == [("", "", "")] and not scene.ground_texture
