"""Match the layers of a LoRA file with the layers of a base model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..common.wording import names
from ..config import put_beneath
from ..models import BaseModel, Layer
from ..models.base import Slice
from ..networks.layers.shape import weight_shape
from .formats import PLAIN, FileLayer, fits
from .read import LoraFile, list_some

TEXT = re.compile(r"lora_te\d?_|text_encoder")  # starts of layers of text encoders in files


class Piece(NamedTuple):
    """A layer of a LoRA file, and the slice that it changes of a layer of the base model."""

    stored: FileLayer
    slice: Slice | None  # None: the whole layer


def layers_by_name(base: BaseModel) -> dict[str, Layer]:
    """Map the names in our files to the layers of a base model."""
    return {layer.name: layer for layer in base.layers.listed()}


def flat_name(name: str) -> str:
    """Write a layer's name with underscores for dots, and without the marks that some programs add."""
    return name.replace(".", "_").replace("base_model_model_", "").replace("_processor_", "_")


def match_layers(lora: LoraFile, base: BaseModel, layers: Mapping[str, Layer]) -> dict[str, list[Piece]]:
    """Map the names in our files to the layers of a LoRA file there: one for the whole layer, or some for its slices.

    layers: the base model's, by the same names. Raises ValueError for a layer that the base model lacks or has in
    another shape; it names the model the file is for.
    """
    known: dict[str, tuple[str, Slice | None]] = {}
    for name, layer in layers.items():
        known |= {alias: (name, None) for alias in layer.aliases}
        known |= {alias: (name, piece) for alias, piece in layer.slices.items()}
    if any(flat_name(source) not in known for source in lora.layers) and (further := base.layers.further_names):
        known = {**further(), **known}
    found: dict[str, list[Piece]] = {}
    unmatched = []
    for source, stored in lora.layers.items():
        name, part = known.get(flat_name(source), ("", None))
        if name not in layers:
            unmatched.append(source)
            continue
        pieces = found.setdefault(name, [])
        if other := next((piece for piece in pieces if overlap(piece.slice, part)), None):
            raise ValueError(
                f"{lora.name} has the layer {name} twice, as {other.stored.source} and as {source}; use another file."
            )
        pieces.append(Piece(stored, part))
    _check_all_matched(lora, base, unmatched)
    misshaped = [
        piece.stored.source for name, pieces in found.items() for piece in pieces if not _fits(piece, layers[name])
    ]
    if misshaped:
        raise ValueError(
            f"{len(misshaped)} of {len(lora.layers)} layers of {lora.name} have another shape than in {base.name} "
            f"({list_some(misshaped)}): {_remedy(lora, base)}"
        )
    return found


def _check_all_matched(lora: LoraFile, base: BaseModel, unmatched: Sequence[str]) -> None:
    """Raise ValueError for layers of a file that have no place in a base model."""
    if not unmatched:
        return
    if len(base.parts) == 1 and len(unmatched) < len(lora.layers) and all(map(TEXT.match, unmatched)):
        raise ValueError(
            f"{lora.name} also changes text encoders, which {base.name} is trained without; apply it with ComfyUI's "
            "Load LoRA to MODEL and CLIP instead."
        )
    raise ValueError(
        f"{len(unmatched)} of {len(lora.layers)} layers of {lora.name} have no place in {base.name} "
        f"({list_some(list(unmatched))}): {_remedy(lora, base)}"
    )


def _remedy(lora: LoraFile, base: BaseModel) -> str:
    """Say which LoRA to choose, and which model this one is for, if anything tells."""
    guess = base.layers.made_for({source: stored.inputs for source, stored in lora.layers.items()}, lora.metadata)
    remedy = f"choose one for {base.title}."
    if guess and guess not in base.title:
        remedy = f"it is a LoRA for {names([guess])}, the base model is {base.title}; {remedy}"
    return remedy


def overlap(one: Slice | None, other: Slice | None) -> bool:
    """Tell whether two slices of a layer share outputs; None: the whole layer."""
    if one is None or other is None:
        return True
    return one.start < other.start + other.length and other.start < one.start + one.length


def _fits(piece: Piece, layer: Layer) -> bool:
    """Tell whether a layer of a file fits its place; slices have no bias of their own."""
    outputs, *rest = weight_shape(layer.module)
    if piece.slice is None:
        bias = getattr(layer.module, "bias", None)
        return fits(piece.stored, torch.Size((outputs, *rest)), None if bias is None else bias.shape)
    inside = piece.slice.start + piece.slice.length <= outputs
    return inside and fits(piece.stored, torch.Size((piece.slice.length, *rest)), None)


def whole_layer(pieces: Sequence[Piece], outputs: int) -> FileLayer:
    """Join the pieces of a layer: LoRAs of slices become one of the sum of their ranks, block by block.

    outputs: of the whole layer. Raises ValueError for slices of another kind than LoRA.
    """
    if pieces[0].slice is None:
        return pieces[0].stored
    pieces = sorted(pieces, key=lambda piece: piece.slice.start if piece.slice else 0)
    stored = [piece.stored for piece in pieces]
    if other := next((layer for layer in stored if layer.kind != PLAIN), None):
        raise ValueError(
            f"{other.source} is a {other.kind} of a part of a layer, which cannot be continued; {put_beneath()}."
        )
    ranks = [len(layer.tensors["down"]) for layer in stored]
    scales = [layer.scale(rank) for layer, rank in zip(stored, ranks, strict=True)]
    first = stored[0].tensors["up"]
    up = first.new_zeros(outputs, sum(ranks), *first.shape[2:])
    at = 0
    for piece, rank, scale in zip(pieces, ranks, scales, strict=True):
        assert piece.slice is not None
        start, own = piece.slice.start, piece.stored.tensors["up"]
        if piece.slice.swapped:
            own = torch.cat(own.chunk(2)[::-1])
        up[start : start + piece.slice.length, at : at + rank] = own * (scale / scales[0])
        at += rank
    down = torch.cat([layer.tensors["down"].to(first.dtype) for layer in stored])
    return FileLayer(
        source=", ".join(layer.source for layer in stored),
        kind=PLAIN,
        tensors={"down": down, "up": up},
        alpha=scales[0] * sum(ranks),
    )
