"""Build the outline of a run: base model and network on the meta device, without weights, for all checks before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import RunConfig
from ..lora_files.continued import load_continued
from ..memory import DTYPES
from ..models import BaseModel, source_of
from ..networks import Network
from ..networks.of_model import build_network, learning_rates


@dataclass(frozen=True, slots=True)
class Outline:
    """A base model and the network on it, both on the meta device."""

    base: BaseModel
    network: Network


def trains_text(config: RunConfig, base: BaseModel) -> bool:
    """Tell whether text encoders run in each step: because their layers or embeddings are trained."""
    rates = learning_rates(config.optimizer, base)
    return bool(config.lora.embeddings) or any(rates[part.prefix] > 0 for part in base.parts[1:])


def outline_run(config: RunConfig, base: BaseModel | None = None, dtype: torch.dtype = torch.float32) -> Outline:
    """Build the outline of a run. base: the outline of its base model, by default built here in dtype.

    Raises ValueError for a choice of layers that the base model does not have, and for a file that cannot be continued.
    """
    base = base or source_of(config.base_model).outline(dtype)
    start = load_continued(config, base, outline=True)
    with torch.device("meta"):
        rates = learning_rates(config.optimizer, base)
        network = build_network(base, config, rates, start.layers if start else None)
    return Outline(base, network.to(DTYPES[config.lora.dtype]))
