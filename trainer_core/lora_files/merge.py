"""Merge LoRA files into a base model's weights, or rename them for ComfyUI's loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ..config import BeneathConfig, node, setting
from ..models import BaseModel
from ..networks.layers.shape import weight_shape
from .formats import BIAS, PLAIN, FileLayer, comfy_form, merged_weight
from .lora import tensors_of
from .match import Piece, layers_by_name, match_layers, whole_layer
from .read import load_lora


def merge_beneath(base: BaseModel, beneath: tuple[BeneathConfig, ...]) -> None:
    """Merge LoRA files into the weights of a base model in memory, in their order.

    Computed in float32, rounded once to the model's dtype. Changed text encoders get another identity in the cache.
    Where a host holds the weights, it puts them on, and the weights stay as they are.
    Raises ValueError for a file that does not fit, and for a sum that overflows the dtype.
    """
    if base.host:
        for config in beneath:
            tensors = comfy_tensors(Path(config.path), base)
            base.host.put_beneath(tensors, config.strength, training_only=config.training_only)
        return
    if not beneath:
        return
    layers, dtype = layers_by_name(base), base.denoiser.dtype
    changes: dict[str, list[tuple[FileLayer, float]]] = {}
    text = []
    for config in beneath:
        lora = load_lora(Path(config.path))
        found = match_layers(lora, base, layers)
        for name, pieces in found.items():
            changes.setdefault(name, []).extend((piece.stored, config.strength) for piece in pieces)
        if any(layers[name].part != base.parts[0].prefix for name in found):
            text.append(f"{lora.digest}*{config.strength}")
    for name, summands in changes.items():
        module = layers[name].module
        weight = module.weight.detach().float()
        bias = module.bias.detach().float() if getattr(module, "bias", None) is not None else None
        for layer, strength in summands:
            weight = merged_weight(weight, layer, strength)
            if bias is not None and BIAS in layer.tensors:
                bias = bias + strength * layer.tensors[BIAS].float()
        module.weight.data = weight.to(dtype)
        if bias is not None:
            module.bias.data = bias.to(dtype)
        if not all(parameter.isfinite().all() for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{name} overflows {dtype} with {len(summands)} LoRAs beneath added; lower their strength, or "
                f"set {setting('base_model.precision')} to bfloat16 or float32."
            )
    if base.text.trainable:
        base.text.trainable.mark(*text)


def comfy_tensors(path: Path, base: BaseModel) -> dict[str, Tensor]:
    """Load the tensors of a LoRA file of any format, under names that ComfyUI's loader knows.

    base: the model that the file is for, or its outline.
    """
    layers = layers_by_name(base)
    tensors: dict[str, Tensor] = {}
    for name, pieces in match_layers(load_lora(path), base, layers).items():
        if any(part is not None and not part.comfy for _, part in pieces):
            pieces = [Piece(_joined(pieces, weight_shape(layers[name].module)[0]), None)]
        for stored, part in pieces:
            comfy = part.comfy if part else layers[name].comfy
            tensors |= tensors_of([replace(comfy_form(stored), source=comfy)])
    return tensors


def _joined(pieces: Sequence[Piece], outputs: int) -> FileLayer:
    """Join slices that ComfyUI has no names for to their layer; raises ValueError for all but plain LoRA."""
    if other := next((piece.stored for piece in pieces if piece.stored.kind != PLAIN), None):
        raise ValueError(
            f"{other.source} is a {other.kind} of a part of a layer, for which ComfyUI has no name; make the file a "
            f"plain LoRA by {node('convert')} first."
        )
    return whole_layer(pieces, outputs)
