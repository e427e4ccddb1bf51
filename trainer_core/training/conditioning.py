"""Turn captions into conditioning, from the cache or the text encoders, and freeze what stops in time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from ..config import EmbeddingConfig, OptimizerConfig, RunConfig, setting
from ..data.plan import Plan
from ..models import BaseModel, Conditioning, mentions, word_ids
from ..networks import Network
from ..networks.of_model import learning_rates
from .encoded import Encoded

CACHED_CAPTIONS = 512  # conditionings that are kept once the text encoders are frozen


def text_reader(
    base: BaseModel, encoded: Callable[[], Encoded], device: torch.device, *, training: bool
) -> Callable[[str], Conditioning]:
    """Build a function that turns a caption into its conditioning.

    Captions that training cannot change come from the cache, all others from the text encoders in memory. encoded:
    returns what is encoded by then. training: the text encoders or embeddings still change.
    """
    if not base.text.encoders:
        return lambda *caption: encoded().conditioning(*caption)

    def encode(caption: str) -> Conditioning:
        return base.text.encode(caption, device)

    encode_live = encode if training else functools.lru_cache(maxsize=CACHED_CAPTIONS)(torch.no_grad()(encode))

    def read(caption: str) -> Conditioning:
        if caption not in encoded().text_keys:
            return encode_live(caption)
        return {name: tensor.to(device) for name, tensor in encoded().conditioning(caption).items()}

    return read


def part_stops(optimizer: OptimizerConfig, base: BaseModel, plan: Plan) -> dict[str, int]:
    """Compute the step before which each part of a base model is frozen, by its prefix."""
    steps = (steps for _, steps in _rates_and_stops(optimizer, plan))
    return {part.prefix: step for part, step in zip(base.parts, steps, strict=False) if step}


def embedding_stops(embeddings: Sequence[EmbeddingConfig], plan: Plan) -> dict[str, int]:
    """Compute the step before which the vectors of each token are frozen; tokens trained to the end are left out."""
    stops = {}
    for embedding in embeddings:
        if embedding.stop_unit == "epochs":
            stops[embedding.token] = plan.steps_of(int(embedding.stop))
        else:
            whole = plan.steps if embedding.stop_unit == "share" else 1
            stops[embedding.token] = round(embedding.stop * whole)
    return {embedding.token: max(1, stops[embedding.token]) for embedding in embeddings if embedding.stop}


def check_embeddings(embeddings: Sequence[EmbeddingConfig], plan: Plan, outline: BaseModel) -> None:
    """Raise ValueError for a token that no trained caption contains, or whose vectors do not fit into a caption."""
    if not embeddings:
        return
    words = word_ids(embeddings)
    captions = plan.captions(trained_only=True)
    for token, ids in words.items():
        if not any(mentions(caption, {token: ids}) for caption in captions):
            raise ValueError(
                f"No caption that is trained contains the word {token}, which {setting('embeddings.token')} names; "
                f"write it into the captions or into {setting('captions.prefix')}, or do not train it."
            )
    if (cut_of := outline.text.cut) is None:
        return
    for caption in sorted(captions):
        if cut := cut_of(caption, words)[1]:
            raise ValueError(
                f'The caption "{caption[:60]}..." has no room for the {len(words[cut[0]])} vectors of {cut[0]}: it is '
                f"cut after {outline.text.max_tokens} tokens; shorten it, move the word to its front, or lower vectors."
            )


def check_stops(optimizer: OptimizerConfig, plan: Plan, embeddings: Sequence[EmbeddingConfig] = ()) -> None:
    """Raise ValueError for a run whose last steps would train nothing."""
    last = [step or plan.steps for rate, step in _rates_and_stops(optimizer, plan) if rate]
    stops = embedding_stops(embeddings, plan)
    last += [stops.get(embedding.token, plan.steps) for embedding in embeddings]
    if last and max(last) < plan.steps:
        remedy = f"{setting('optimizer.denoiser_stop')} to 0"
        if not optimizer.learning_rate:
            remedy = f"{setting('optimizer.learning_rate')} above 0"
        raise ValueError(
            f"All that is trained stops after step {max(last)} of {plan.steps}, so the last steps would train nothing; "
            f"make the run shorter, or set {remedy}."
        )


def _rates_and_stops(optimizer: OptimizerConfig, plan: Plan) -> list[tuple[float, int]]:
    """List (learning rate, step before which it is frozen, 0 = never) for each part."""
    rates, stops = optimizer.part_rates, optimizer.part_stops
    in_epochs = optimizer.stop_unit == "epochs"
    return [(rate, plan.steps_of(n) if n and in_epochs else n) for rate, n in zip(rates, stops, strict=True)]


def freeze_stopped(
    network: Network, config: RunConfig, base: BaseModel, plan: Plan, step: int, stopped: dict[str, float]
) -> bool:
    """Freeze parts and embeddings that stop before a step; add them to `stopped`, return whether any did."""
    before = len(stopped)
    for prefix, stop in part_stops(config.optimizer, base, plan).items():
        if stop <= step and prefix not in stopped:
            network.freeze(prefix)
            stopped[prefix] = 0.0
    for word, stop in embedding_stops(config.lora.embeddings, plan).items():
        if stop <= step and f"embedding {word}" not in stopped:
            network.embeddings.freeze(word)
            stopped[f"embedding {word}"] = 0.0
    return len(stopped) > before


def text_is_trained(network: Network, config: RunConfig, base: BaseModel, stopped: Mapping[str, float]) -> bool:
    """Tell whether text encoders or embeddings are still trained."""
    rates = {**learning_rates(config.optimizer, base), **stopped}
    return network.embeddings.trainable or any(rates[text.prefix] > 0 for text in base.text.encoders)
