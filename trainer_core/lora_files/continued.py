"""LoRA files that a run builds on: one that it continues, and those that it merges into the base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import RunConfig, node, put_beneath, setting
from ..config.optimizer import RATES
from ..models import BaseModel, Layer
from ..networks import LayerWeights
from ..networks.layers.shape import is_matrix, is_norm, weight_shape
from .formats import PLAIN
from .match import layers_by_name, match_layers, whole_layer
from .read import LoraFile, list_some, load_lora, outline_lora


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """The LoRA file that a run continues."""

    layers: dict[str, LayerWeights]  # by their names in our files
    changes_text: bool  # some layers are of text encoders, so captions are encoded differently
    name: str
    digest: str
    model_hash: str

    def describe(self) -> dict[str, Any]:
        """Describe this file for the metadata of the new one; rank and alpha are those of the largest layer."""
        largest = max(self.layers.values(), key=lambda layer: layer.rank)
        size = {"rank": largest.rank, "alpha": largest.alpha, "kinds": sorted({s.kind for s in self.layers.values()})}
        return {"file": self.name, "sshs_model_hash": self.model_hash, **size}


def layer_weights(lora: LoraFile, base: BaseModel, layers: Mapping[str, Layer]) -> dict[str, LayerWeights]:
    """Collect the tensors that each layer continues from, by its name in our files; kinds may differ.

    layers: the base model's, by name. Raises ValueError for a layer on a module that cannot be trained.
    """
    found = {}
    for name, pieces in match_layers(lora, base, layers).items():
        module = layers[name].module
        layer = whole_layer(pieces, weight_shape(module)[0])
        norm = is_norm(module) and layer.flat
        if not norm and not is_matrix(module):
            what = type(module).__name__
            raise ValueError(
                f"{layer.source} in {lora.name} changes a module of the kind {what}, which cannot be trained; "
                f"{put_beneath()}."
            )
        tensors = {part: tensor.float() for part, tensor in layer.tensors.items()}
        weights = LayerWeights(kind=layer.kind, tensors=tensors, alpha=layer.alpha)
        if not layer.alpha and layer.form.scaled:
            weights = weights._replace(alpha=float(weights.rank))
        found[name] = weights
    return found


def file_remarks(config: RunConfig) -> list[str]:
    """List a sentence for each continued or merged file whose embeddings are left out."""
    paths = [path for path in (config.lora.start, *(beneath.path for beneath in config.lora.beneath)) if path]
    return [
        f"{lora.name} holds embeddings beside its layers ({list_some(list(lora.tokens))}); they are left out."
        for lora in map(outline_lora, map(Path, paths))
        if lora.tokens
    ]


def check_lora_files(config: RunConfig, base: BaseModel) -> None:
    """Raise ValueError for files that cannot be continued or merged; reads headers only. base: its outline."""
    layers = layers_by_name(base)
    for beneath in config.lora.beneath:
        match_layers(outline_lora(Path(beneath.path)), base, layers)
        if beneath.training_only and base.host is None:
            raise ValueError(
                f"{base.title} from {node('base_model')} holds the LoRAs beneath in its weights, so samples cannot go "
                f"without {Path(beneath.path).name}; set {setting('beneath.training_only')} to false, or link the "
                f"model to {node('connected')}."
            )
    if not config.lora.start:
        return
    lora = outline_lora(Path(config.lora.start))
    weights = layer_weights(lora, base, layers)
    if config.lora.names == "peft" and (others := {each.kind for each in weights.values()} - {PLAIN}):
        raise ValueError(
            f"{lora.name} holds layers of the kind {min(others)}, which peft's names cannot say; set "
            f"{setting('lora.names')} to comfy."
        )
    parts = {layers[name].part for name in weights}
    for part, name, rate in zip(base.parts, RATES, config.optimizer.part_rates, strict=False):
        if rate > 0 and part.prefix not in parts:
            raise ValueError(
                f"{setting(f'optimizer.{name}')} is {rate:g}, but {lora.name} has no layer there to continue "
                f"({part.prefix}_…); set it to 0."
            )


def load_continued(config: RunConfig, base: BaseModel, *, outline: bool = False) -> Continued | None:
    """Read the LoRA file that a run continues; None without one.

    outline: read the header only, tensors on the meta device. base: the model to train, or its outline.
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
