"""LoRA files that a run builds on: one that is continued, and those that are merged into the base model beneath it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..config import RunConfig
from ..config.optimizer import RATES
from ..models import BaseModel, Layer
from ..networks import LayerWeights
from .match import fit, layers_by_name
from .read import LoraFile, _some, load_lora, outline_lora


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """What a run continues."""

    layers: dict[str, LayerWeights]  # by their names in our files
    changes_text: bool  # some of them lie in text encoders, so that captions become something else
    name: str
    digest: str
    model_hash: str

    def describe(self) -> dict[str, Any]:
        """Describe this file for the metadata of a new one; rank and alpha are those of the largest layer."""
        largest = max(self.layers.values(), key=lambda layer: layer.rank)
        size = {"rank": largest.rank, "alpha": largest.alpha, "kinds": sorted({s.kind for s in self.layers.values()})}
        return {"file": self.name, "sshs_model_hash": self.model_hash, **size}


def layer_weights(lora: LoraFile, base: BaseModel, layers: Mapping[str, Layer]) -> dict[str, LayerWeights]:
    """Collect the tensors that each layer continues from, by its name in our files; kinds may differ.

    layers: those of the base model, by name. Raises ValueError for layers of a kind of module that is not trained.
    """
    found = {}
    for name, layer in fit(lora, base, layers).items():
        module = layers[name].module
        norm = isinstance(module, nn.GroupNorm | nn.LayerNorm) and set(layer.tensors) <= {"diff", "diff_b"}
        if not norm and not isinstance(module, nn.Linear | nn.Conv2d):
            what = type(module).__name__
            raise ValueError(
                f"{layer.source} in {lora.name} changes a module of the kind {what}, which is not trained; use the "
                "file beneath a new LoRA instead."
            )
        tensors = {part: tensor.float() for part, tensor in layer.tensors.items()}
        weights = LayerWeights(kind=layer.kind, tensors=tensors, alpha=layer.alpha)
        if not layer.alpha and "oft_blocks" not in layer.tensors:
            weights = weights._replace(alpha=float(weights.rank))
        found[name] = weights
    return found


def file_remarks(config: RunConfig) -> list[str]:
    """Return sentences about what of the files that are continued or merged is left out."""
    paths = [path for path in (config.lora.start, *(beneath.path for beneath in config.lora.beneath)) if path]
    return [
        f"{lora.name} holds embeddings besides its layers ({_some(list(lora.words))}); they are left out."
        for lora in map(outline_lora, map(Path, paths))
        if lora.words
    ]


def check_lora_files(config: RunConfig, base: BaseModel) -> None:
    """Raise ValueError for files that cannot be continued or merged, from their headers alone; base: its outline."""
    layers = layers_by_name(base)
    for beneath in config.lora.beneath:
        fit(outline_lora(Path(beneath.path)), base, layers)
    if not config.lora.start:
        return
    lora = outline_lora(Path(config.lora.start))
    parts = {layers[name].part for name in layer_weights(lora, base, layers)}
    for part, setting, rate in zip(base.parts, RATES, config.optimizer.part_rates, strict=False):
        if rate > 0 and part.prefix not in parts:
            raise ValueError(
                f"{setting} is {rate:g}, but {lora.name} has no layer there ({part.prefix}_…) that could be continued; "
                "set it to 0."
            )


def load_continued(config: RunConfig, base: BaseModel, *, outline: bool = False) -> Continued | None:
    """Read the file that a run continues, if it does; outline: its header alone, tensors on the meta device.

    base: the model that it continues on, or its outline.
    """
    if not config.lora.start:
        return None
    lora = (outline_lora if outline else load_lora)(Path(config.lora.start))
    layers = layers_by_name(base)
    continued = layer_weights(lora, base, layers)
    return Continued(
        layers=continued,
        changes_text=any(layers[name].part != base.parts[0].prefix for name in continued),
        name=lora.name,
        digest=lora.digest,
        model_hash=lora.model_hash,
    )
