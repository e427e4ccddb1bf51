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
    steps = (steps for _, steps in _rates_and_stops(optimizer, plan))
    return {part.kohya: step for part, step in zip(base.family.texts, steps, strict=False) if step}


def check_stops(optimizer: OptimizerConfig, plan: Plan) -> None:
    """Raise ValueError when a run would go on after all that learns has stopped."""
    last = [step or plan.steps for rate, step in _rates_and_stops(optimizer, plan) if rate > 0]
    if optimizer.learning_rate == 0 and last and max(last) < plan.steps:
        raise ValueError(
            f"learning_rate is 0 and the text encoders stop after step {max(last)} of {plan.steps}, so nothing would "
            "learn from then on; make the run shorter, or set learning_rate."
        )


def _rates_and_stops(optimizer: OptimizerConfig, plan: Plan) -> list[tuple[float, int]]:
    """Return (learning rate, step before which it stops, 0 = never) of both text encoders."""
    rates = (optimizer.text_encoder_learning_rate, optimizer.text_encoder_2_learning_rate)
    stops = (optimizer.text_encoder_stop, optimizer.text_encoder_2_stop)
    in_epochs = optimizer.stop_unit == "epochs"
    return [(rate, plan.steps_of(n) if n and in_epochs else n) for rate, n in zip(rates, stops, strict=True)]
