"""LoRA formats: how trainers name the tensors of a layer, and how these change its weight.

Only endings of names are known here. Names of layers are `aliases` of the base model's layers; match.py compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..networks.layers.deltas import comfy_parts, glora_delta, kronecker, loha_sides, lokr_left, lokr_right, lora_sides
from ..networks.layers.oft import skew, turn, turned_weight

# Endings of tensor names, by part: of kohya and LyCORIS, peft (with or without its adapter's name), diffusers.
ENDINGS = {
    "down": r"lora_down\.weight|lora_A(?:\.\w+)?\.weight|lora_A|lora\.down\.weight|lora_linear_layer\.down\.weight",
    "up": r"lora_up\.weight|lora_B(?:\.\w+)?\.weight|lora_B|lora\.up\.weight|lora_linear_layer\.up\.weight",
    "mid": r"lora_mid\.weight",
    "diff": r"diff|w_norm",
    "diff_b": r"diff_b|b_norm",
    **{part: rf"{part}\.weight" for part in ("a1", "a2", "b1", "b2")},
    **{
        name: name
        for name in (
            *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
            *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
            *("oft_blocks", "rescale", "alpha", "dora_scale"),
        )
    },
}
# layer.ending; diffusers' old attention processors wrote `to_q_lora.down.weight`
_TENSOR = re.compile(
    rf"(?P<layer>.+?)(?:\.(?:{'|'.join(f'(?P<{part}>{ending})' for part, ending in ENDINGS.items())})"
    r"|_(?:lora\.(?:(?P<old_down>down)|(?P<old_up>up))\.weight))"
)

_LOKR_LEFT = ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"})
_LOKR_RIGHT = ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}, {"lokr_w2_a", "lokr_w2_b", "lokr_t2"})
_LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
# The kind of a layer by its parts, apart from alpha, dora_scale and the bias' difference.
FORMS: dict[frozenset[str], str] = {
    frozenset({"down", "up"}): "LoRA",
    frozenset({"down", "up", "mid"}): "Tucker LoRA",
    frozenset(_LOHA): "LoHa",
    frozenset({*_LOHA, "hada_t1", "hada_t2"}): "LoHa",
    **{frozenset(left | right): "LoKr" for left in _LOKR_LEFT for right in _LOKR_RIGHT},
    frozenset({"a1", "a2", "b1", "b2"}): "GLoRA",
    frozenset({"oft_blocks"}): "OFT",
    frozenset({"oft_blocks", "rescale"}): "OFT",
    frozenset({"diff"}): "full difference",
    frozenset(): "full difference",  # of the bias alone
}
WEIGHT_DEPENDENT = ("GLoRA", "OFT")  # kinds whose delta is a function of the frozen weight


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayer:
    """One layer of a LoRA file."""

    source: str  # its name in the file
    kind: str  # LoRA, Tucker LoRA, LoHa, LoKr, GLoRA, OFT (and BOFT), DoRA, full difference
    tensors: dict[str, Tensor]  # by part, as ENDINGS names them; on the meta device when only the header was read
    alpha: float  # 0: equal to the rank, so the scale is 1; for OFT the limit of the rotation, 0: none

    @property
    def inputs(self) -> int:
        """Number of inputs of the weight; 0 for kinds other than LoRA and LoHa."""
        return next((self.tensors[p].shape[1:].numel() for p in ("down", "hada_w1_b") if p in self.tensors), 0)

    def scale(self, rank: int) -> float:
        """Compute alpha / rank; 1 for alpha 0."""
        return self.alpha / rank if self.alpha else 1.0


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


def layer_kind(parts: Iterable[str]) -> str:
    """Name the kind of a layer with these parts; "" when parts are missing or do not belong together."""
    have = set(parts)
    kind = FORMS.get(frozenset(have - {"alpha", "dora_scale", "diff_b"}), "")
    if kind == "full difference" and not have & {"diff", "diff_b"}:
        return ""
    if kind in ("full difference", "OFT"):
        return kind if "dora_scale" not in have else ""
    return "DoRA" if kind and "dora_scale" in have else kind


def delta_weight(layer: FileLayer) -> Tensor:
    """Compute the delta of a layer at strength 1, float32, (out, in[, k, k]) or with the last axes flat.

    LoRA s B A, for convolutions with Tucker's core; LoHa (Hyeon-Woo et al. 2022), LoKr (Edalati et al. 2022) in
    LyCORIS' forms. A LoKr of two full factors has no rank, so its scale is 1. Not for kinds of WEIGHT_DEPENDENT.
    """
    t = {part: tensor.float() for part, tensor in layer.tensors.items()}
    if "diff" in t:
        return t["diff"]
    if "down" in t:
        down, up = lora_sides(t["down"], t["up"], t.get("mid"))
        return layer.scale(t["down"].shape[0]) * (up @ down)
    if "hada_w1_a" in t:
        a1, b1, a2, b2 = loha_sides(t)
        delta = layer.scale(t["hada_w1_b"].shape[0]) * (a1 @ b1) * (a2 @ b2)
        return delta.unflatten(1, (-1, *t["hada_t1"].shape[2:])) if "hada_t1" in t else delta
    left, right, scale = lokr_factors(layer)
    return scale * kronecker(left, right)


def lokr_factors(layer: FileLayer) -> tuple[Tensor, Tensor, float]:
    """Compute both full factors of a LoKr, and its scale."""
    t = {part: tensor.float() for part, tensor in layer.tensors.items()}
    ranks = [t[part].shape[0] for part in ("lokr_w2_b", "lokr_w1_b") if part in t]
    return lokr_left(t).contiguous(), lokr_right(t).contiguous(), layer.scale(ranks[0]) if ranks else 1.0


def comfy_layer(layer: FileLayer) -> FileLayer:
    """Rewrite a layer as ComfyUI reads it: by `comfy_parts`, and a LoKr's core, which it leaves out, multiplied in."""
    tensors, alpha = layer.tensors, layer.alpha
    if "lokr_t2" in tensors:
        left, right, scale = lokr_factors(layer)
        others = {part: tensor for part, tensor in tensors.items() if not part.startswith("lokr_")}
        tensors, alpha = {**others, "lokr_w1": left, "lokr_w2": scale * right}, 0.0
    return FileLayer(source=layer.source, kind=layer.kind, tensors=comfy_parts(tensors), alpha=alpha)


def merged_weight(weight: Tensor, layer: FileLayer, strength: float) -> Tensor:
    """Add `strength` times a layer to a weight, float32; a layer of the bias alone leaves it.

    DoRA (Liu et al. 2024): W + strength * (m V / norm - W) with V = W + delta. As in ComfyUI, the norm is that of V
    for a magnitude per input (the paper's), and that of W for a magnitude per output.
    """
    weight = weight.float()
    if not set(layer.tensors) - {"diff_b"}:
        return weight
    if "oft_blocks" in layer.tensors:
        return weight + _oft_change(weight, layer, strength)
    change = (_glora_change(weight, layer) if "a1" in layer.tensors else delta_weight(layer)).reshape(weight.shape)
    if "dora_scale" not in layer.tensors:
        return weight + strength * change
    magnitude, changed = layer.tensors["dora_scale"].float(), weight + change
    per_output = magnitude.shape[0] == weight.shape[0]
    axes = [axis for axis in range(weight.ndim) if axis != (0 if per_output else 1)]
    norm = torch.linalg.vector_norm(weight if per_output else changed, dim=axes, keepdim=True)
    factor = magnitude.reshape(norm.shape) / (norm + torch.finfo(torch.float32).eps)
    return weight + strength * (changed * factor - weight)


def _glora_change(weight: Tensor, layer: FileLayer) -> Tensor:
    """Compute the delta of GLoRA on a float32 weight (Chavan et al. 2023, in LyCORIS' form): s (W a1 a2 + b1 b2)."""
    a1, a2, b1, b2 = (layer.tensors[part].float().flatten(1) for part in ("a1", "a2", "b1", "b2"))
    return layer.scale(len(a2)) * glora_delta(weight, a1, a2, b1, b2)


def _oft_change(weight: Tensor, layer: FileLayer, strength: float) -> Tensor:
    """Compute the delta of OFT or BOFT on a float32 weight.

    As in ComfyUI, strength scales each rotation's change and the weight's change; rescale acts on BOFT only.
    """
    blocks = layer.tensors["oft_blocks"].float()
    change = turned_weight(weight, strength * turn(skew(blocks, layer.alpha)))
    if "rescale" in layer.tensors and blocks.ndim == 4:
        change = (weight + change) * layer.tensors["rescale"].float().view(-1, *(1,) * (weight.ndim - 1)) - weight
    return strength * change


def fits(layer: FileLayer, weight: torch.Size, bias: torch.Size | None) -> bool:
    """Tell whether a layer fits a weight and bias of these shapes; computed on the meta device."""
    tensors = {part: torch.empty(tensor.shape, device="meta") for part, tensor in layer.tensors.items()}
    if "diff_b" in tensors and tensors.pop("diff_b").shape != bias:
        return False
    if not tensors:
        return True
    try:
        if "dora_scale" in tensors:
            magnitude = tensors["dora_scale"].shape
            if magnitude.numel() != (weight[0] if magnitude[0] == weight[0] else weight[1]):
                return False
        if "oft_blocks" in tensors:
            *_, count, size, side = tensors["oft_blocks"].shape
            rescale = tensors["rescale"].numel() if "rescale" in tensors else weight[0]
            return size == side and count * size == rescale == weight[0]
        empty = FileLayer(source=layer.source, kind=layer.kind, tensors=tensors, alpha=0.0)
        delta = _glora_change(torch.empty(weight, device="meta"), empty) if "a1" in tensors else delta_weight(empty)
    except (RuntimeError, IndexError, ValueError):  # torch and unpacking raise these for shapes that do not match
        return False
    return delta.shape[0] == weight[0] and delta.numel() == weight.numel()
