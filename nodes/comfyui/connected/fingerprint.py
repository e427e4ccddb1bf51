"""What a MODEL computes, in a few numbers: hashes cannot tell it where code of others runs, which may read anything."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....trainer_core.common.cancel import look
from ....trainer_core.common.computed import KEY, Computed
from ....trainer_core.config import SamplePicture
from . import text
from .identity import code_of
from .sampling import draw
from .trial import FILED, comfyui_runs
from .wired import Wired

LEAST = 256  # pixels of each side of the picture
STEPS = 2  # of its sampler, each at another level of noise
NUMBERS = 16


def fingerprint(wired: Wired) -> Computed:
    """Draw a small picture of fixed noise with the linked models, and project its latents on fixed directions.

    Without numbers where ComfyUI's own code alone runs, and for a MODEL that draws random numbers of its own.
    """
    if not code_of(wired.model.model) and not code_of(wired.clip.patcher.model):
        return Computed()
    assert wired.denoiser is not None
    bound = FILED * wired.denoiser.bound
    with comfyui_runs(f"{wired.name} with the linked CLIP"):
        first, second = (_projected(wired) for _ in range(2))
    found = Computed(tuple(first), bound)
    return Computed() if not all(map(math.isfinite, first)) or found.differs({KEY: second}) else found


def _projected(wired: Wired) -> list[float]:
    side = math.lcm(wired.latents.step, 8)
    side *= -(-LEAST // side)
    caption = text.encode(wired.clip, "", weights=False)
    picture = SamplePicture(
        prompt="",
        negative="",
        width=side,
        height=side,
        steps=STEPS,
        cfg=1.0,
        seed=0,
        sampler="euler",
        scheduler="simple",
        guidance=None,
        controls=(),
    )
    latents: Tensor = draw(wired.model, (caption, caption), picture, look)
    flat = latents.double().flatten().cpu()
    signs = torch.randint(2, (NUMBERS, len(flat)), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return [float(f"{number:.6g}") for number in (signs.double() @ flat / len(flat) ** 0.5).tolist()]
