"""Build the network that a run trains on a base model."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import OptimizerConfig, RunConfig
from ..models import BaseModel, word_ids
from .choose import choose_layers, trained_layer_of
from .embeddings import Embeddings
from .network import LayerWeights, Network


def learning_rates(optimizer: OptimizerConfig, base: BaseModel) -> dict[str, float]:
    """Map the prefix of each part of a base model to its learning rate."""
    others = [0.0] * len(base.parts)  # text encoders that no setting has a rate for
    return {part.prefix: rate for part, rate in zip(base.parts, (*optimizer.part_rates, *others), strict=False)}


def build_network(
    base: BaseModel, config: RunConfig, rates: Mapping[str, float], continued: Mapping[str, LayerWeights] | None = None
) -> Network:
    """Build new layers in the parts with a learning rate above 0, or the layers of a LoRA file that is continued.

    rates: by the prefix of a part. continued: the layers of such a file by their names in our files; those of parts
    without a rate are frozen, but attached.
    """
    if continued is None:
        chosen = choose_layers(base, config.lora, [prefix for prefix, rate in rates.items() if rate > 0])
    else:
        layers = {layer.name: layer for layer in base.layers.listed()}
        chosen = [trained_layer_of(layers[name], weights.rank, weights.alpha) for name, weights in continued.items()]
    network = Network(chosen, config.lora, config.train.seed, continued)
    network.embeddings = build_embeddings(base, config)
    return network


def build_embeddings(base: BaseModel, config: RunConfig) -> Embeddings:
    """Build the vectors of the trained words; those of a base model's outline have no values."""
    embeddings, text = config.lora.embeddings, base.text.trainable
    init = {embedding.token: text.token_ids(embedding.init) if text else [] for embedding in embeddings}
    texts = () if base.host else base.text.encoders  # a host refuses words to be trained, once all settings are known
    return Embeddings(texts, embeddings, word_ids(embeddings), init, config.train.seed)
