"""Judge how close pictures come to the example concept, the mossling."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

ASSETS = Path(__file__).resolve().parents[1] / "assets"
CONCEPT = ASSETS / "concept_example"
sys.path.append(str(ASSETS))  # its scripts are modules for one another and for the tests
SIDE = 64  # pictures are compared with their shorter side at this many pixels
HALVES = (15, 17, 19, 21, 23, 25, 27)  # half heights of the motif that are tried, in pixels of SIDE
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
