"""Read a LoRA file or its header: tensors, metadata, peft's settings (`lora_alpha`, `alpha_pattern`)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from ..models.files.safetensors_file import FileHeader, read_header
from .formats import FileLayer, group_tensors, layer_kind

BUNDLED = "bundle_emb."  # OneTrainer's embeddings in LoRA files: bundle_emb.<word>.<text encoder>
FEW = 3  # names in a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFile:
    """A LoRA file; where only its header was read, all tensors are on the meta device."""

    name: str
    layers: dict[str, FileLayer]  # by their names in the file
    metadata: dict[str, str]
    digest: str = ""  # sha256 of the file and of peft's settings
    model_hash: str = ""  # sha256 of the tensors, as kohya's sshs_model_hash
    tokens: tuple[str, ...] = ()  # of embeddings in the file, which are left out


def outline_lora(path: Path) -> LoraFile:
    """Read the layers of a LoRA file from its header. Raises ValueError for a file that is no LoRA."""
    header = read_header(path)
    return _lora_file(header, {name: torch.empty(shape, device="meta") for name, shape in header.shapes.items()})


def load_lora(path: Path) -> LoraFile:
    """Read a whole LoRA file. Raises ValueError for a file that is no LoRA and for values that are not finite."""
    header = read_header(path)
    data = path.read_bytes()
    tensors = load(data)
    for name, tensor in tensors.items():
        if not (tensor.half() if tensor.element_size() == 1 else tensor).isfinite().all():
            raise ValueError(f"{path.name}: {name} holds values that are not finite; use another LoRA.")
    start = 8 + int.from_bytes(data[:8], "little")
    return _lora_file(
        header,
        tensors,
        digest=hashlib.sha256(data + json.dumps(_adapter(header), sort_keys=True).encode()).hexdigest(),
        model_hash=hashlib.sha256(data[start:]).hexdigest(),
    )


def _lora_file(header: FileHeader, tensors: Mapping[str, Tensor], **hashes: str) -> LoraFile:
    name = header.path.name
    tokens = tuple(sorted({key.removeprefix(BUNDLED).split(".")[0] for key in tensors if key.startswith(BUNDLED)}))
    grouped, unknown = group_tensors(key for key in tensors if not key.startswith(BUNDLED))
    if not grouped:
        raise ValueError(f"{name} is no LoRA (first tensor: {next(iter(tensors))}); choose a LoRA file.")
    if unknown:
        raise ValueError(
            f"{name} holds {len(unknown)} tensors of an unknown kind ({list_some(unknown)}); use a file of LoRA, LoHa, "
            "LoKr, GLoRA, OFT, DoRA or full differences."
        )
    adapter, layers = _adapter(header), {}
    for layer, parts in grouped.items():
        kind = layer_kind(parts)
        if not kind:
            raise ValueError(
                f"{layer} in {name} has only {', '.join(sorted(parts))}; the file is incomplete, get it again."
            )
        found = {part: tensors[tensor] for part, tensor in parts.items()}
        stored = found.pop("alpha", None)
        if stored is None:
            alpha = _adapter_alpha(adapter, layer, found)
        else:
            alpha = 0.0 if stored.is_meta else float(stored)
        layers[layer] = FileLayer(source=layer, kind=kind, tensors=found, alpha=alpha)
    return LoraFile(name=name, layers=layers, metadata=header.metadata, tokens=tokens, **hashes)


def _adapter(header: FileHeader) -> dict[str, Any]:
    """Read peft's settings of the adapter, from the metadata (diffusers) or from peft's own file."""
    stored = header.metadata.get("lora_adapter_metadata", "")
    beside = header.path.with_name("adapter_config.json")
    if not stored and header.path.name == "adapter_model.safetensors" and beside.is_file():
        stored = beside.read_text(encoding="utf-8")
    try:
        return json.loads(stored or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"The adapter settings of {header.path.name} are broken ({error}); get them again.") from error


def _adapter_alpha(adapter: Mapping[str, Any], layer: str, tensors: Mapping[str, Tensor]) -> float:
    """Alpha of a layer in peft's settings; 0 when they give none (the scale is 1)."""
    model, _, rest = layer.partition(".")
    of_model = {k.removeprefix(f"{model}."): v for k, v in adapter.items() if k.startswith(f"{model}.")}
    settings, name = (of_model, rest) if of_model else (adapter, layer)
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    found = next((key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", name)), None)
    alpha = float(patterns[found] if found is not None else settings.get("lora_alpha") or 0)
    rank = tensors["down"].shape[0] if "down" in tensors else 1
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def list_some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (", …" if len(names) > FEW else "")
