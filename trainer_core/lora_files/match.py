"""Match the layers of a LoRA file with the layers of a base model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common.wording import names
from ..models import BaseModel, Layer
from .formats import FileLayer, fits
from .read import LoraFile, list_some


def layers_by_name(base: BaseModel) -> dict[str, Layer]:
    """Map the names in our files to the layers of a base model."""
    return {layer.name: layer for layer in base.layers()}


def match_layers(lora: LoraFile, base: BaseModel, layers: Mapping[str, Layer]) -> dict[str, FileLayer]:
    """Map the names in our files to the layers of a LoRA file. layers: the base model's, by the same names.

    Raises ValueError for a layer that the base model lacks or has in another shape; it names the model the file is for.
    """
    by_alias = {alias: name for name, layer in layers.items() for alias in layer.aliases}
    found: dict[str, FileLayer] = {}
    unmatched = []
    for source, stored in lora.layers.items():
        flat = source.replace(".", "_").replace("base_model_model_", "").replace("_processor_", "_")
        name = by_alias.get(flat)
        if name is None:
            unmatched.append(source)
        elif name in found:
            raise ValueError(
                f"{lora.name} has the layer {name} twice, as {found[name].source} and as {source}; use another file."
            )
        else:
            found[name] = stored
    guess = base.made_for({source: stored.inputs for source, stored in lora.layers.items()}, lora.metadata)
    remedy = f"choose one for {base.title}."
    if guess not in ("", base.title):
        remedy = f"it is a LoRA for {names([guess])}, the base model is {base.title}; {remedy}"
    if unmatched:
        raise ValueError(
            f"{len(unmatched)} of {len(lora.layers)} layers of {lora.name} have no place in {base.name} "
            f"({list_some(unmatched)}): {remedy}"
        )
    if misshaped := [stored.source for name, stored in found.items() if not _shapes_match(stored, layers[name].module)]:
        raise ValueError(
            f"{len(misshaped)} of {len(lora.layers)} layers of {lora.name} have another shape than in {base.name} "
            f"({list_some(misshaped)}): {remedy}"
        )
    return found


def _shapes_match(layer: FileLayer, module: Any) -> bool:
    bias = getattr(module, "bias", None)
    return fits(layer, module.weight.shape, None if bias is None else bias.shape)
