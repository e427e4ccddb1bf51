"""Text encoders in a run: read from the store, learning, or stopped on the way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .config import EmbeddingConfig, OptimizerConfig
from .encode import Encoded
from .models import (
    CHUNK,
    MAX_CHUNKS,
    BaseModel,
    Conditioning,
    cut_words,
    encode_caption,
    mentions,
    word_ids,
)
from .plan import Plan

KEPT = 512  # captions of text encoders that have stopped learning


def text_reader(
    base: BaseModel, encoded: Encoded, device: torch.device, *, learning: bool
) -> Callable[[str], Conditioning]:
    """Return what turns a caption into its conditioning: the store, or text encoders that learn or have learned.

    With text encoders in memory the store may still hold captions on which nothing that learns acts.
    """
    if not base.texts:
        return encoded.conditioning

    def encode(caption: str) -> Conditioning:
        return encode_caption(base.texts, base.tokenizer, caption, device)

    live = encode if learning else functools.lru_cache(maxsize=KEPT)(torch.no_grad()(encode))

    def read(caption: str) -> Conditioning:
        if caption not in encoded.text_keys:
            return live(caption)
        context, pooled = encoded.conditioning(caption)
        return Conditioning(context.to(device), None if pooled is None else pooled.to(device))

    return read


def text_stops(optimizer: OptimizerConfig, base: BaseModel, plan: Plan) -> dict[str, int]:
    """Return the step before which each text encoder stops learning, by what names of its layers begin with."""
    steps = (steps for _, steps in _rates_and_stops(optimizer, plan))
    return {part.kohya: step for part, step in zip(base.family.texts, steps, strict=False) if step}


def embedding_stops(embeddings: Sequence[EmbeddingConfig], plan: Plan) -> dict[str, int]:
    """Return the step before which the vectors of each token stop learning; of those that learn to the end none."""
    stops = {}
    for embedding in embeddings:
        if embedding.stop_unit == "epochs":
            stops[embedding.token] = plan.steps_of(int(embedding.stop))
        else:
            whole = plan.steps if embedding.stop_unit == "share" else 1
            stops[embedding.token] = round(embedding.stop * whole)
    return {embedding.token: max(1, stops[embedding.token]) for embedding in embeddings if embedding.stop}


def check_embeddings(embeddings: Sequence[EmbeddingConfig], plan: Plan, tokenizer: Any) -> None:
    """Raise ValueError for tokens that no trained caption contains, and for captions too long for their vectors."""
    if not embeddings:
        return
    words = word_ids(embeddings)
    captions = plan.captions(trained_only=True)
    for token, ids in words.items():
        if not any(mentions(caption, {token: ids}) for caption in captions):
            raise ValueError(
                f"No caption that is trained contains the word {token}, for which Embedding learns vectors; write it "
                "into the captions or into caption_prefix, or leave that Embedding out."
            )
    for caption in sorted(captions):
        if cut := cut_words(tokenizer, caption, words):
            raise ValueError(
                f'The caption "{caption[:60]}..." has no room for the {len(words[cut[0]])} vectors of {cut[0]}: it is '
                f"cut after {CHUNK * MAX_CHUNKS} tokens; shorten it, move the word to its front, or lower vectors."
            )


def check_stops(optimizer: OptimizerConfig, plan: Plan, embeddings: Sequence[EmbeddingConfig] = ()) -> None:
    """Raise ValueError when a run would go on after all that learns has stopped."""
    last = [step or plan.steps for rate, step in _rates_and_stops(optimizer, plan) if rate > 0]
    stops = embedding_stops(embeddings, plan)
    last += [stops.get(embedding.token, plan.steps) for embedding in embeddings]
    if optimizer.learning_rate == 0 and last and max(last) < plan.steps:
        what = "the text encoders and embeddings" if embeddings else "the text encoders"
        raise ValueError(
            f"learning_rate is 0 and {what} stop after step {max(last)} of {plan.steps}, so nothing would "
            "learn from then on; make the run shorter, or set learning_rate."
        )


def _rates_and_stops(optimizer: OptimizerConfig, plan: Plan) -> list[tuple[float, int]]:
    """Return (learning rate, step before which it stops, 0 = never) of both text encoders."""
    rates = (optimizer.text_encoder_learning_rate, optimizer.text_encoder_2_learning_rate)
    stops = (optimizer.text_encoder_stop, optimizer.text_encoder_2_stop)
    in_epochs = optimizer.stop_unit == "epochs"
    return [(rate, plan.steps_of(n) if n and in_epochs else n) for rate, n in zip(rates, stops, strict=True)]
