"""Read a LoRA file or its header: tensors, metadata, peft's settings (`lora_alpha`, `alpha_pattern`)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.json_files import parse_json, read_json
from ..common.wording import count
from ..models.files.safetensors_file import BLOCK, FileHeader, opened, read_header, read_whole
from .formats import DORA, KINDS, FileLayer, group_tensors, layer_kind

BUNDLED = "bundle_emb."  # OneTrainer's embeddings in LoRA files: bundle_emb.<word>.<text encoder>
FEW = 3  # names in a sentence
MOST_ALPHA = 1e9
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


TURNED = (".oft_R", ".oft_R.weight", ".oft_r", ".oft_r.weight")  # ends of names of rotations in another form


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
    tensors = {name: torch.empty(shape, device="meta") for name, shape in header.shapes.items()}
    return parse_lora(tensors, path.name, header.metadata, _adapter(header))


def load_lora(path: Path) -> LoraFile:
    """Read a whole LoRA file. Raises ValueError for a file that is no LoRA and for values that are not finite."""
    header = read_header(path)
    pieces: list[Any] = []  # the header's bytes, then the tensors' own memory
    with opened(header):
        tensors = read_whole(header, pieces.append)
    for name, tensor in tensors.items():
        if not (tensor.half() if tensor.element_size() == 1 else tensor).isfinite().all():
            raise ValueError(f"{path.name}: {name} holds values that are not finite; use another LoRA.")
    settings = _adapter(header)
    digest = _hash(*pieces, json.dumps(settings, sort_keys=True).encode())
    lora = parse_lora(tensors, path.name, header.metadata, settings)
    return replace(lora, digest=digest, model_hash=_hash(*pieces[1:]))


def _hash(*pieces: Any) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        for start in range(0, len(piece), BLOCK):
            look()
            digest.update(piece[start : start + BLOCK])
    return digest.hexdigest()


def parse_lora(
    tensors: Mapping[str, Tensor], name: str, metadata: Mapping[str, str], settings: Mapping[str, Any] = NO_SETTINGS
) -> LoraFile:
    """Find the layers in the tensors of a LoRA, of a file or of the graph; name: for messages.

    settings: peft's, of the adapter. Raises ValueError for what is no LoRA, and for incomplete layers.
    """
    tokens = tuple(sorted({key.removeprefix(BUNDLED).split(".")[0] for key in tensors if key.startswith(BUNDLED)}))
    grouped, unknown = group_tensors(key for key in tensors if not key.startswith(BUNDLED))
    if turned := next((key for key in tensors if key.endswith(TURNED)), None):
        raise ValueError(
            f"{name} is an OFT v2 LoRA, as OneTrainer and peft write it ({turned}), which is not read here; choose a "
            f"file of one of these kinds: {', '.join((*KINDS, DORA))}."
        )
    if not grouped:
        first = f"first tensor: {next(iter(tensors))}" if tensors else "it holds no tensors"
        raise ValueError(f"{name} is no LoRA ({first}); choose a LoRA file.")
    if unknown:
        raise ValueError(
            f"{name} holds {count(unknown, 'tensor')} of an unknown kind ({list_some(unknown)}); use one of these "
            f"kinds: {', '.join((*KINDS, DORA))}."
        )
    alphas, layers = _alphas_by_model(settings, name), {}
    for layer, parts in grouped.items():
        kind = layer_kind(parts)
        if not kind:
            raise ValueError(
                f"{layer} in {name} has only {', '.join(sorted(parts))}; the file is incomplete, get it again."
            )
        found = {part: tensors[tensor] for part, tensor in parts.items()}
        for part, tensor in found.items():
            if not tensor.numel() or (part == "alpha" and tensor.numel() > 1):
                raise ValueError(f"{parts[part]} in {name} has an impossible shape; get the file again.")
        stored = found.pop("alpha", None)
        if stored is None:
            alpha = _adapter_alpha(alphas, layer, found, name)
        else:
            alpha = 0.0 if stored.is_meta else float(stored)
        layers[layer] = FileLayer(source=layer, kind=kind, tensors=found, alpha=alpha)
    return LoraFile(name=name, layers=layers, metadata=dict(metadata), tokens=tokens)


def _adapter(header: FileHeader) -> dict[str, Any]:
    """Read peft's settings of the adapter, from the metadata (diffusers) or from peft's own file."""
    stored, name = header.metadata.get("lora_adapter_metadata", ""), header.path.name
    beside = header.path.with_name("adapter_config.json")
    try:
        if stored:
            settings = parse_json(stored)
        elif name == "adapter_model.safetensors" and beside.is_file():
            settings = read_json(beside)
        else:
            settings = {}
    except ValueError as problem:
        raise ValueError(f"The adapter settings of {name} are broken: {problem}. Get them again.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"The adapter settings of {name} are broken: no JSON object. Get them again.")
    return settings


class _Alphas(NamedTuple):
    """The alphas that peft's settings give the layers of a model; numbers as they are in the file."""

    usual: Any
    ends: dict[str, tuple[int, Any]]  # (number among the patterns, alpha) by layer's name, or its end after a dot
    whole: dict[str, tuple[int, Any]]  # the same by whole name
    literal: bool  # no pattern was left out
    root: bool  # of the rank, by which an alpha is multiplied


def _alphas_by_model(settings: Mapping[str, Any], name: str) -> dict[str, _Alphas]:
    """Read the alphas of peft's settings by the prefix of their model; "" for those of all models."""
    models: dict[str, dict[str, Any]] = {"": dict(settings)}
    for key, value in settings.items():
        model, dot, rest = key.partition(".")
        if dot:
            models.setdefault(model, {})[rest] = value
    return {model: _alphas(each, name) for model, each in models.items()}


def _alphas(settings: Mapping[str, Any], name: str) -> _Alphas:
    """Read the alphas of one model. peft runs its patterns as regular expressions; here they are names alone."""
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"The adapter settings of {name} are broken: alpha_pattern is no object. Get them again.")
    ends, whole, literal = {}, {}, True
    for number, (pattern, alpha) in enumerate(patterns.items()):
        key = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if re.fullmatch(r"[\w.-]+", key):
            (whole if pattern.startswith("^") else ends).setdefault(key, (number, alpha))
        else:
            literal = False
    return _Alphas(settings.get("lora_alpha"), ends, whole, literal, bool(settings.get("use_rslora")))


def _adapter_alpha(models: Mapping[str, _Alphas], layer: str, tensors: Mapping[str, Tensor], name: str) -> float:
    """Find the alpha of a layer in peft's settings, by the first pattern that matches; 0 for none (the scale is 1)."""
    model, _, rest = layer.partition(".")
    alphas, path = (models[model], rest) if model in models else (models[""], layer)
    if not alphas.literal:
        raise ValueError(
            f"The adapter settings of {name} set alphas by regular expressions, which are not run here; use a file "
            "with plain names in alpha_pattern."
        )
    pieces = path.split(".")
    found = [alphas.ends.get(".".join(pieces[start:])) for start in range(len(pieces))]
    found.append(alphas.whole.get(path.removeprefix("base_model.model.")))
    alpha = min((match for match in found if match), default=(0, alphas.usual or 0), key=itemgetter(0))[1]
    if type(alpha) not in (int, float) or not abs(alpha) <= MOST_ALPHA:
        raise ValueError(f"The adapter settings of {name} give {layer} an alpha that is no number; get them again.")
    rank = tensors["down"].shape[0] if "down" in tensors and tensors["down"].ndim else 1
    return alpha * math.sqrt(rank) if alphas.root else float(alpha)


def list_some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (", …" if len(names) > FEW else "")
