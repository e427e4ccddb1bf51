"""Match the layers of a LoRA file with the layers of a base model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..models import BaseModel, Layer
from .formats import FileLayer, fits
from .read import LoraFile, _some


def layers_by_name(base: BaseModel) -> dict[str, Layer]:
    """Return all layers of a base model by their names in our files."""
    return {layer.name: layer for layer in base.layers()}


def fit(lora: LoraFile, base: BaseModel, layers: Mapping[str, Layer]) -> dict[str, FileLayer]:
    """Return a file's layers by the names that they have in our files. layers: those of the base model, by these names.

    Raises ValueError when one has no place in the base model or another shape, saying what the file seems to be for.
    """
    names = {alias: name for name, layer in layers.items() for alias in layer.aliases}
    found: dict[str, FileLayer] = {}
    homeless = []
    for source, stored in lora.layers.items():
        flat = source.replace(".", "_").replace("base_model_model_", "").replace("_processor_", "_")
        name = names.get(flat)
        if name is None:
            homeless.append(source)
        elif name in found:
            raise ValueError(f"{lora.name} has the layer {name} twice, as {found[name].source} and as {source}.")
        else:
            found[name] = stored
    guess = base.made_for({source: stored.inputs for source, stored in lora.layers.items()}, lora.metadata)
    remedy = f"choose one for {base.title}."
    if guess not in ("", base.title):
        remedy = f"it is a LoRA for {guess}, the base model is {base.title}; {remedy}"
    if homeless:
        raise ValueError(
            f"{len(homeless)} of {len(lora.layers)} layers of {lora.name} have no place in {base.name} "
            f"({_some(homeless)}): {remedy}"
        )
    if misfits := [stored.source for name, stored in found.items() if not _fits(stored, layers[name].module)]:
        raise ValueError(
            f"{len(misfits)} of {len(lora.layers)} layers of {lora.name} have another shape than in {base.name} "
            f"({_some(misfits)}): {remedy}"
        )
    return found


def _fits(layer: FileLayer, module: Any) -> bool:
    bias = getattr(module, "bias", None)
    return fits(layer, module.weight.shape, None if bias is None else bias.shape)
