"""Choose the layers of a base model that a network trains, and their ranks and alphas."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..config import ALGORITHMS, DENOISER_ONLY, LoraConfig, node, setting
from ..models.base import BASE, BaseModel, Layer
from .blocks import NUMBERS, numbers_by_block
from .layers.shape import is_norm, is_spatial


class TrainedLayer(NamedTuple):
    """One layer of the base model that the network changes."""

    name: str  # in LoRA files
    module: Any  # linear, convolution or norm
    rank: int
    alpha: float
    path: str = ""  # in its own network
    part: str = ""  # prefix of its part of the base model
    block: str = ""  # of the denoiser; "" outside of it
    comfy: str = ""  # its name for ComfyUI, with dots
    lr_factor: float = 1.0


def choose_layers(base: BaseModel, config: LoraConfig, parts: Collection[str]) -> list[TrainedLayer]:
    """Choose the layers to train in some parts of a base model, in the model's order.

    parts: their prefixes. Raises ValueError for a part without chosen layers, for patterns that match no layer, and for
    lists of block numbers that do not fit the denoiser.
    """
    denoiser = base.parts[0]
    if set(parts) - {denoiser.prefix} and config.preset in DENOISER_ONLY:
        raise ValueError(
            f"The preset {config.preset} trains no text encoder; set their learning rates to 0, or "
            f"{setting('lora.preset')} to another."
        )
    listed = base.layers.listed()
    if config.preset in DENOISER_ONLY and not any(config.preset in layer.presets for layer in listed):
        raise ValueError(
            f"The preset {config.preset} is for UNets, and {base.title} is none; set {setting('lora.preset')} to "
            "attn-mlp."
        )
    number = next((name for name in (*NUMBERS, "train_norm") if getattr(config, name)), "")
    if denoiser.prefix not in parts and number:
        raise ValueError(
            f"{number} applies to the {denoiser.title}, whose learning rate is 0; raise that learning rate, or clear "
            f"{setting(f'lora.{number}')}."
        )
    if not parts:  # words are trained alone
        return []
    trainable = [
        layer
        for layer in listed
        if layer.part in parts and layer.trainable and (config.train_norm or not is_norm(layer.module))
    ]
    chosen = _matching(trainable, config)
    numbers = {name: numbers_by_block(base, config, name) if denoiser.prefix in parts else {} for name in NUMBERS}
    sized = _with_numbers(chosen, numbers, config)
    for part in base.parts:
        if part.prefix in parts and not any(trained.part == part.prefix for trained in sized):
            raise ValueError(
                f"No layer of {part.prefix}_… is left to train with preset {config.preset}, include, exclude and the "
                f"block numbers of {node('lora')}; change these, or set the learning rate of that model to 0."
            )
    return sized


def _matching(trainable: list[Layer], config: LoraConfig) -> list[Layer]:
    """List the layers of the preset, plus the included ones and those of kinds with a rank, minus the excluded ones."""
    _check_patterns("include", config.include, trainable)
    kinds = config.ranks_of_kinds
    if absent := [kind for kind in kinds if all(layer.kind != kind for layer in trainable)]:
        raise ValueError(
            f"kind_ranks names {absent[0]}, and the models that are trained have no such layer; take it out of "
            f"{setting('lora.kind_ranks')}."
        )
    chosen = [
        layer
        for layer in trainable
        if _in_preset(layer, config) or _matches(layer, config.include) or kinds.get(layer.kind)
    ]
    _check_patterns("exclude", config.exclude, chosen)
    return [layer for layer in chosen if not _matches(layer, config.exclude)]


def _in_preset(layer: Layer, config: LoraConfig) -> bool:
    """Tell whether the preset, or the algorithm's own choice in its place, trains a layer; norms follow the preset."""
    own = "" if is_norm(layer.module) else ALGORITHMS[config.algorithm].layers
    return (own or config.preset) in layer.presets


def _matches(layer: Layer, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (layer.path, layer.name))


def _check_patterns(setting: str, patterns: Iterable[str], layers: list[Layer]) -> None:
    """Raise ValueError, with similar names, for a pattern that matches none of these layers."""
    for pattern in patterns:
        if not any(_matches(layer, [pattern]) for layer in layers):
            pieces = [layer.path.split(".") for layer in layers]
            names = {".".join(p[i : i + size]) for p in pieces for size in (1, 2, 3) for i in range(len(p))}
            names |= {name for layer in layers for name in (layer.path, layer.name)}
            near = get_close_matches(pattern.strip("*."), sorted(names), cutoff=0.0)
            which = "of the models that are trained" if setting == "include" else "that would be trained without it"
            raise ValueError(
                f"The pattern {pattern} of {setting} matches no layer {which}; similar names: {', '.join(near)}. A "
                "pattern must match a whole name; * stands for any letters."
            )


def _with_numbers(layers: list[Layer], numbers: dict[str, dict[str, float]], config: LoraConfig) -> list[TrainedLayer]:
    """Give layers the rank, alpha and learning-rate factor of their block; drop those with rank or factor 0.

    A rank of their kind replaces that of their block, with its alpha / rank; blocks with rank 0 stay left out.
    """
    weights, kinds, sized = numbers["block_weights"], config.ranks_of_kinds, []
    for layer in layers:
        rank = numbers["block_ranks"].get(layer.block, config.rank)
        alpha = numbers["block_alphas"].get(layer.block, config.alpha)
        if is_spatial(layer.module):
            rank = numbers["conv_block_ranks"].get(layer.block, rank and (config.conv_rank or rank))
            alpha = numbers["conv_block_alphas"].get(layer.block, config.conv_alpha or alpha)
        own = kinds.get(layer.kind)
        if own is not None and rank:
            rank, alpha = own, alpha * own / rank
        weight = weights.get(layer.block or BASE, 1.0)
        if rank and weight:
            sized.append(trained_layer_of(layer, int(rank), alpha or float(rank))._replace(lr_factor=weight))
    return sized


def trained_layer_of(layer: Layer, rank: int, alpha: float) -> TrainedLayer:
    """Describe a layer that is trained with this rank and alpha."""
    return TrainedLayer(layer.name, layer.module, rank, alpha, layer.path, layer.part, layer.block, layer.comfy)
