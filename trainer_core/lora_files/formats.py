"""LoRA formats: how trainers name the tensors of a layer, and how these change its weight.

Each kind of layer tells its own endings of names and its own formulas (networks/layers/). Names of layers are `aliases`
of the base model's layers; match.py compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..networks.layers import LAYERS, layer_of
from ..networks.layers.form import BESIDE, BIAS, MAGNITUDE, FileForm, scale_of

PLAIN, DORA = "LoRA", "DoRA"  # the kind that every program reads; a kind with a magnitude beside it
KINDS = tuple(dict.fromkeys(name for layer in LAYERS.values() for name in layer.forms.values()))
# Endings of tensor names, by part: ours as it is, then patterns of others'.
ENDINGS = {part: ends for layer in LAYERS.values() for part, ends in layer.endings.items()} | BESIDE
_PATTERNS = {part: "|".join([re.escape(own), *others]) for part, (own, *others) in ENDINGS.items()}
# layer.ending; diffusers' old attention processors wrote `to_q_lora.down.weight`
_TENSOR = re.compile(
    rf"(?P<layer>.+?)(?:\.(?:{'|'.join(f'(?P<{part}>{ending})' for part, ending in _PATTERNS.items())})"
    r"|_(?:lora\.(?:(?P<old_down>down)|(?P<old_up>up))\.weight))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayer:
    """One layer of a LoRA file."""

    source: str  # its name in the file
    kind: str  # one of KINDS, or DORA
    tensors: dict[str, Tensor]  # by part, as ENDINGS names them; on the meta device when only the header was read
    alpha: float  # 0: equal to the rank, so the scale is 1; of rotations the limit, 0: none

    @property
    def form(self) -> type[FileForm]:
        """What its tensors do to a weight, a DoRA's magnitude apart."""
        return layer_of(self.tensors)

    @property
    def of_weight(self) -> bool:
        """Whether its change is a function of the frozen weight."""
        return self.kind == DORA or self.form.of_weight

    @property
    def of_bias_alone(self) -> bool:
        """Whether it changes no weight."""
        return not set(self.tensors) - {BIAS}

    @property
    def flat(self) -> bool:
        """Whether it changes no matrix: a norm, or a bias alone."""
        return self.form.is_flat(self.tensors)

    @property
    def inputs(self) -> int:
        """Number of inputs of the weight; 0 where the tensors do not tell."""
        return self.form.inputs_of(self.tensors)

    @property
    def floats(self) -> dict[str, Tensor]:
        """Its tensors in float32."""
        return {part: tensor.float() for part, tensor in self.tensors.items()}

    def scale(self, rank: int) -> float:
        """Compute alpha / rank; 1 for alpha 0."""
        return scale_of(self.alpha, rank)


def group_tensors(names: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Group tensor names as {layer: {part: tensor name}}; also list the unknown ones."""
    layers: dict[str, dict[str, str]] = {}
    unknown = []
    for name in names:
        match = _TENSOR.fullmatch(name)
        part = next((p for p, found in match.groupdict().items() if found and p != "layer"), "") if match else ""
        part = part.removeprefix("old_")
        if match is None or part in layers.get(match["layer"], {}):  # a part twice: two adapters in one file
            unknown.append(name)
        else:
            layers.setdefault(match["layer"], {})[part] = name
    return layers, unknown


def form_of(parts: Iterable[str]) -> type[FileForm] | None:
    """Find the form of a layer with exactly these parts, by their names alone; None for no form's parts."""
    have = set(parts)
    own = frozenset(have - {BIAS, *BESIDE})
    if not have - set(BESIDE):
        return None
    return next((layer for layer in LAYERS.values() if own in layer.forms), None)


def layer_kind(parts: Iterable[str]) -> str:
    """Name the kind of a layer with these parts; "" when parts are missing or do not belong together."""
    have = set(parts)
    form = form_of(have)
    if form is None or (MAGNITUDE in have and not form.decomposes):
        return ""
    return DORA if MAGNITUDE in have else form.forms[frozenset(have - {BIAS, *BESIDE})]


def delta_weight(layer: FileLayer) -> Tensor:
    """Compute the delta of a layer at strength 1, float32, (out, in, *kernel) or with the last axes flat.

    Not for layers whose delta depends on the weight; of a DoRA, the delta before its magnitude.
    """
    return layer.form.delta_of(layer.floats, layer.alpha)


def comfy_form(layer: FileLayer) -> FileLayer:
    """Write a layer in a form that ComfyUI loads."""
    tensors, alpha = layer.form.comfy_form(layer.tensors, layer.alpha)
    return replace(layer, tensors=tensors, alpha=alpha)


def merged_weight(weight: Tensor, layer: FileLayer, strength: float) -> Tensor:
    """Add `strength` times a layer to a weight, float32; a layer of the bias alone leaves it.

    DoRA (Liu et al. 2024): W + strength * (m V / norm - W) with V = W + delta. As in ComfyUI, the norm is that of V
    for a magnitude per input (the paper's), and that of W for a magnitude per output.
    """
    weight = weight.float()
    if layer.of_bias_alone:
        return weight
    parts = layer.floats
    if MAGNITUDE not in parts:
        return weight + layer.form.change_of(weight, parts, layer.alpha, strength)
    magnitude, changed = parts[MAGNITUDE], weight + layer.form.change_of(weight, parts, layer.alpha, 1.0)
    per_output = magnitude.shape[0] == weight.shape[0]
    axes = [axis for axis in range(weight.ndim) if axis != (0 if per_output else 1)]
    norm = torch.linalg.vector_norm(weight if per_output else changed, dim=axes, keepdim=True)
    factor = magnitude.reshape(norm.shape) / (norm + torch.finfo(torch.float32).eps)
    return weight + strength * (changed * factor - weight)


def fits(layer: FileLayer, weight: torch.Size, bias: torch.Size | None) -> bool:
    """Tell whether a layer fits a weight and bias of these shapes; computed on the meta device."""
    tensors = {part: torch.empty(tensor.shape, device="meta") for part, tensor in layer.tensors.items()}
    if BIAS in tensors and tensors.pop(BIAS).shape != bias:
        return False
    if not tensors:
        return True
    try:
        if MAGNITUDE in tensors:
            magnitude = tensors[MAGNITUDE].shape
            if magnitude.numel() != (weight[0] if magnitude[0] == weight[0] else weight[1]):
                return False
        return layer.form.fits(tensors, weight)
    except (RuntimeError, IndexError, ValueError):  # torch and unpacking raise these for shapes that do not match
        return False
