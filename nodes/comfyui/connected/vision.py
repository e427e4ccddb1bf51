"""What a CLIP_VISION says of the frames that a clip begins and ends with, for MODELs that read it beside these."""

from __future__ import annotations

from typing import Any, NamedTuple

import comfy.model_base
import torch
from torch import Tensor

from .beside import Beside


class Reads(NamedTuple):
    """How a class of MODELs reads what CLIP vision says, as ComfyUI's own templates link it."""

    part: str  # of its network
    states: str  # of a CLIP_VISION_OUTPUT
    crop: bool  # to the middle square of a frame; else the whole is squeezed into one


READS = {
    comfy.model_base.WAN21: Reads("img_emb", "penultimate_hidden_states", crop=False),
    comfy.model_base.HunyuanVideo15: Reads("vision_in", "last_hidden_state", crop=True),
}


def reads_of(model: Any, beside: Beside) -> Reads | None:
    """Find how a MODEL reads what CLIP vision says of the one picture beside its latents; None where it does not."""
    found = next((reads for kind, reads in READS.items() if isinstance(model, kind)), None)
    if found is None or beside.pictures != 1 or getattr(model.diffusion_model, found.part, None) is None:
        return None
    return found


class Sight:
    """A linked CLIP_VISION, for a MODEL that reads it."""

    def __init__(self, vision: Any, reads: Reads) -> None:
        self.linked, self._reads = vision, reads

    @torch.no_grad()
    def states(self, pixels: Tensor) -> Tensor:
        """Encode (1, 3, H, W) pixels in -1..1, or (1, 3, 2, H, W), as CLIP Vision Encode does: (tokens, width) float32.

        The tokens of the last frame follow those of the first, as in WanFirstLastFrameToVideo.
        """
        frames = pixels.unsqueeze(2) if pixels.ndim < 5 else pixels
        images = ((frames[0].movedim(0, -1) + 1) / 2).cpu()
        said = [self.linked.encode_image(image[None], crop=self._reads.crop) for image in images]
        return torch.cat([each[self._reads.states][0] for each in said]).float().cpu()
