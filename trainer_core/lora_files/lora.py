"""A LoRA in memory: its tensors by their names in a file, with the metadata of that file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.json_files import parse_json
from .formats import ENDINGS, FileLayer
from .read import BUNDLED, LoraFile, load_lora, parse_lora
from .room import check_layers

HISTORY = "atelier.history"  # metadata: a JSON list of what was done to the LoRA since it was trained, oldest first
HASHES = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")  # of the file as it was before


class Lora(dict[str, Tensor]):
    """What a LORA output carries: tensors by name, as ComfyUI's nodes read them, and beside them the metadata."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Copy both."""
        super().__init__(tensors)
        self.metadata = dict(metadata)


def metadata_of(lora: Mapping[str, Tensor]) -> dict[str, str]:
    """Copy the metadata of a LoRA; those of other programs' nodes have none."""
    return dict(lora.metadata) if isinstance(lora, Lora) else {}


def layers_of(lora: Mapping[str, Tensor], name: str) -> LoraFile:
    """Find the layers of a LoRA of the graph; name: of it, for messages.

    Raises ValueError for what is no LoRA, what `check_layers` refuses, and values that are not finite.
    """
    found = parse_lora(lora, name, metadata_of(lora))
    check_layers(found.layers.values(), name)
    for layer in found.layers.values():
        for part, tensor in layer.tensors.items():
            if not (tensor.half() if tensor.element_size() == 1 else tensor).isfinite().all():
                raise ValueError(
                    f"{part} of {layer.source} in {name} holds values that are not finite; use another LoRA."
                )
    return found


def read_lora(path: Path) -> tuple[Lora, LoraFile]:
    """Read a LoRA file of any format: as a LORA output carries it, with every alpha as a tensor; and its layers."""
    file = load_lora(path)
    check_layers(file.layers.values(), file.name)
    return Lora(tensors_of(file.layers.values()), file.metadata), file


def tensors_of(layers: Iterable[FileLayer]) -> dict[str, Tensor]:
    """Name the tensors of layers as kohya and LyCORIS do, by their `source`; an alpha of 0 is left out."""
    tensors = {}
    for layer in layers:
        tensors |= {f"{layer.source}.{ENDINGS[part][0]}": tensor for part, tensor in layer.tensors.items()}
        if layer.alpha or not layer.form.scaled:  # ComfyUI leaves out BOFT layers without alpha
            tensors[f"{layer.source}.alpha"] = torch.tensor(layer.alpha)
    return tensors


def remade(
    lora: Mapping[str, Tensor],
    layers: Iterable[FileLayer],
    tool: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> Lora:
    """Build what a tool made of a LoRA: its new layers, the embeddings that it carries, and the metadata.

    tensors: of the layers, by default under the names of kohya and LyCORIS.
    """
    layers = list(layers)
    embeddings = {name: tensor for name, tensor in lora.items() if name.startswith(BUNDLED)}
    return Lora(
        {**(tensors_of(layers) if tensors is None else tensors), **embeddings},
        with_history(metadata_of(lora), tool, settings, layers),
    )


def with_history(
    metadata: Mapping[str, str], tool: str, settings: Mapping[str, Any], layers: Iterable[FileLayer]
) -> dict[str, str]:
    """Add what a tool did to the metadata of a LoRA: its settings, and kohya's rank and alpha of the largest layer.

    settings: of the tool, plain values without paths. layers: of the result. Hashes of the former file are left out.
    """
    try:
        past = parse_json(metadata.get(HISTORY, "[]"))
    except ValueError:  # a stranger's; what it said cannot be kept
        past = []
    about = {key: text for key, text in metadata.items() if key not in HASHES}
    done = [*(past if isinstance(past, list) else []), {"tool": tool, **settings}]
    about[HISTORY] = json.dumps(done, ensure_ascii=False, sort_keys=True)
    pairs = [layer for layer in layers if "down" in layer.tensors]
    if pairs:
        largest = max(pairs, key=lambda layer: len(layer.tensors["down"]))
        rank = len(largest.tensors["down"])
        about |= {"ss_network_dim": str(rank), "ss_network_alpha": f"{largest.alpha or rank:g}"}
    return about
