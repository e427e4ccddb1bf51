"""Text encoders in a run: read from the store, learning, or stopped on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .config import OptimizerConfig
from .encode import Encoded
from .models import BaseModel, Conditioning, encode_caption
from .plan import Plan

KEPT = 512  # captions of text encoders that have stopped learning


def text_reader(
    base: BaseModel, encoded: Encoded, device: torch.device, *, learning: bool
) -> Callable[[str], Conditioning]:
    """Return what turns a caption into its conditioning: the store, or text encoders that learn or have learned."""
    if not base.texts:
        return encoded.conditioning

    def encode(caption: str) -> Conditioning:
        return encode_caption(base.texts, base.tokenizer, caption, device)

    return encode if learning else functools.lru_cache(maxsize=KEPT)(torch.no_grad()(encode))


def text_stops(optimizer: OptimizerConfig, base: BaseModel, plan: Plan) -> dict[str, int]:
    """Return the step before which each text encoder stops learning, by what names of its layers begin with."""
    stops = (optimizer.text_encoder_stop, optimizer.text_encoder_2_stop)
    return {
        part.kohya: plan.steps_of(stop) if optimizer.stop_unit == "epochs" else stop
        for part, stop in zip(base.family.texts, stops, strict=False)
        if stop
    }
