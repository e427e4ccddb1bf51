"""The text encoders of a linked CLIP: which of their layers a LoRA can change, and how its file names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import comfy.lora
from torch import nn

from ....trainer_core.config import DENOISER_ONLY, Preset
from ....trainer_core.config.algorithms import KEYS_AND_ENDS
from ....trainer_core.lora_files.match import flat_name
from ....trainer_core.models import Layer
from ....trainer_core.models.base import Unit
from ....trainer_core.networks.layers.shape import is_linear
from .layers import is_key_or_end, named_blocks
from .names import WEIGHT

NAMED = re.compile(r"(lora_te(\d?))_")  # starts of names in files; those with dots are no names of ours
PRESETS: frozenset[str] = frozenset(preset for preset in get_args(Preset) if preset not in DENOISER_ONLY)
ATTENDS = re.compile(r"attn|attention", re.I)  # in the path of a layer; the others of a block are its MLP's


class ClipHandle(nn.Module):
    """Pass a text encoder that ComfyUI moves and casts through the core, as a module that nothing else moves."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.__dict__["encoder"] = encoder

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the encoder's weights, which are none of this module's."""
        return self.__dict__["encoder"].parameters(recurse)


@dataclass(kw_only=True)
class ConnectedEncoder:
    """A text encoder of a linked CLIP; implements `TextEncoder`."""

    prefix: str  # of its layers' names in LoRA files
    title: str
    model: ClipHandle
    layers: list[Layer]
    words: dict[str, Sequence[int]] = field(default_factory=dict)  # none are trained

    def units(self) -> list[Unit]:
        """List none: its blocks are among those of the denoiser, as their trial has shared them out."""
        return []


def text_encoders(clip: Any) -> tuple[ConnectedEncoder, ...]:
    """List the text encoders of a CLIP whose layers have names in ComfyUI's loader, in the order of these."""
    texts, known = clip.cond_stage_model, dict[str, dict[str, list[str]]]()
    for name, target in comfy.lora.model_lora_keys_clip(texts, {}).items():
        if isinstance(target, str) and target.endswith(WEIGHT):
            encoder, _, path = target.removesuffix(WEIGHT).partition(".")
            known.setdefault(encoder, {}).setdefault(path, []).append(name)
    starts = {encoder: _starts(getattr(texts, encoder), names) for encoder, names in known.items()}
    named = {encoder: found for encoder, found in starts.items() if found}
    # ComfyUI knows a CLIP's only text encoder without a number, too, and newer files have the last of several.
    chosen = {encoder: max(found) if len(named) > 1 else min(found) for encoder, found in named.items()}
    return tuple(
        ConnectedEncoder(
            prefix=prefix,
            title=f"text encoder {encoder.upper().replace('_', '-')}",
            model=ClipHandle(getattr(texts, encoder)),
            layers=_layers(getattr(texts, encoder), encoder, prefix, known[encoder]),
        )
        for encoder, (_, prefix) in sorted(chosen.items(), key=lambda each: each[1])
    )


def _starts(encoder: nn.Module, names: Mapping[str, Sequence[str]]) -> set[tuple[int, str]]:
    """Collect the starts of names of the layers that can be trained, with their numbers."""
    inside = (name for path in _trainable(encoder, names) for name in names[path])
    return {(int(match[2] or 0), match[1]) for name in inside if (match := NAMED.match(name))}


def _layers(encoder: nn.Module, title: str, prefix: str, names: Mapping[str, Sequence[str]]) -> list[Layer]:
    """List the layers that have a name with this prefix."""
    layers, inside = [], _trainable(encoder, names)
    for path, known in names.items():
        own = next((name for name in known if name.startswith(f"{prefix}_")), "")
        if not own:
            continue
        trainable, short = path in inside, path.removeprefix("transformer.")
        presets = PRESETS | ({KEYS_AND_ENDS} if is_key_or_end(short) else frozenset())
        layers.append(
            Layer(
                name=own,
                path=short,
                module=encoder.get_submodule(path),
                part=prefix,
                block="",
                trainable=trainable,
                presets=presets if trainable else frozenset(),
                comfy=f"text_encoders.{title}.{path}",
                aliases=tuple(flat_name(name) for name in known),
                kind=("attention" if ATTENDS.search(short) else "mlp") if trainable else "",
            )
        )
    return layers


def _trainable(encoder: nn.Module, paths: Iterable[str]) -> set[str]:
    """Find the linear layers of its repeated blocks."""
    blocks = {id(module) for block in named_blocks(encoder).values() for module in block.modules()}
    modules = {path: encoder.get_submodule(path) for path in paths}
    return {path for path, module in modules.items() if is_linear(module) and id(module) in blocks}
