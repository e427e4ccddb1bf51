"""Build the network that a run trains on a base model."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import OptimizerConfig, RunConfig
from ..models import BaseModel, word_ids
from .choose import choose_targets, target_of
from .embeddings import Embeddings
from .network import Network, Start


def learning_rates(optimizer: OptimizerConfig, base: BaseModel) -> dict[str, float]:
    """Return the learning rate of each part of a base model by its prefix."""
    return {part.prefix: rate for part, rate in zip(base.parts, optimizer.part_rates, strict=False)}


def build_network(
    base: BaseModel, config: RunConfig, rates: Mapping[str, float], start: Mapping[str, Start] | None = None
) -> Network:
    """Build new layers in the parts that have a learning rate, or those of a LoRA file that the run resumes.

    rates: by the prefix of a part. start: the layers of such a file by their names in our files; those of parts without
    a rate stay as they are, and act on what is trained.
    """
    if start is None:
        targets = choose_targets(base, config.lora, [prefix for prefix, rate in rates.items() if rate > 0])
    else:
        layers = {layer.name: layer for layer in base.layers()}
        targets = [target_of(layers[name], begin.rank, begin.alpha) for name, begin in start.items()]
    network = Network(targets, config.lora, config.train.seed, start)
    network.embeddings = build_embeddings(base, config)
    return network


def build_embeddings(base: BaseModel, config: RunConfig) -> Embeddings:
    """Build the vectors of the words that are learned; of a base model's outline without values."""
    embeddings = config.lora.embeddings
    init = {embedding.token: base.token_ids(embedding.init) for embedding in embeddings}
    return Embeddings(base.text_encoders, embeddings, word_ids(embeddings), init, config.train.seed)
