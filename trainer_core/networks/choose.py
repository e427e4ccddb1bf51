"""Which layers of a base model a network changes, and how large it is in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..config import UNET_ONLY, LoraConfig
from .blocks import BASE, NUMBERS, block_finder, spread

Layer = nn.Linear | nn.Conv2d
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
IA3_LAYERS = (".to_k", ".to_v", ".ff.net.2", ".k_proj", ".v_proj", ".fc2")  # keys, values, what leaves the MLP


class Target(NamedTuple):
    """One layer that is changed."""

    name: str  # as LoRA files call it
    module: Any  # linear, convolution or norm
    rank: int
    alpha: float
    path: str = ""  # its own name: that of diffusers, or that of transformers with `text_model.`
    block: str = ""  # of the UNet, as `block_names` calls it; "" in text encoders
    lr_factor: float = 1.0


def choose_targets(
    unet: nn.Module | None,
    text_encoders: Mapping[str, tuple[nn.Module, int]],
    config: LoraConfig,
    unet_names: Callable[[str], str] = str,
) -> list[Target]:
    """Return the layers that the configuration trains, of the models that are given, in the models' own order.

    text_encoders, unet_names: as for Network. Raises ValueError for a model none of whose layers is chosen, for
    patterns that match nothing, and for numbers of blocks that do not go with the UNet.
    """
    if text_encoders and config.preset in UNET_ONLY:
        raise ValueError(
            f"The preset {config.preset} trains no text encoder; set their learning rates to 0, or choose another."
        )
    given = [name for name in (*NUMBERS, "train_norm") if getattr(config, name)]
    if unet is None and given:
        raise ValueError(f"{given[0]} is about the UNet, whose learning rate is 0; raise that, or leave it out.")
    every: list[tuple[Target, bool]] = []  # and whether it is trained without patterns
    find = block_finder(unet) if unet is not None else str
    for path, module in unet.named_modules() if unet is not None else ():
        if isinstance(module, Layer) or (config.train_norm and _is_norm(module)):
            name = f"lora_unet_{_flat(unet_names(path))}"
            target = Target(name, module, config.rank, config.alpha, path, find(path))
            every.append((target, _trained(config, path, module)))
    for prefix, (encoder, depth) in text_encoders.items():
        for path, module in text_layers(encoder, depth):
            target = Target(f"{prefix}_{_flat(path)}", module, config.rank, config.alpha, path)
            every.append((target, _trained(config, path, module)))
    targets = _sized(_matching(every, config), unet, config)
    for prefix in (*(["lora_unet"] if unet is not None else []), *text_encoders):
        if not any(target.name.startswith(f"{prefix}_") for target in targets):
            raise ValueError(
                f"No layer of {prefix}_… is left to train with preset {config.preset} and the patterns and numbers of "
                "blocks of LoRA Config; change these, or set the learning rate of that model to 0."
            )
    return targets


def _matching(every: list[tuple[Target, bool]], config: LoraConfig) -> list[Target]:
    """Return the preset's layers with those that are included and without those that are excluded."""
    _check_patterns("include", config.include, [target for target, _ in every])
    chosen = [target for target, trained in every if trained or _matches(target, config.include)]
    _check_patterns("exclude", config.exclude, chosen)
    return [target for target in chosen if not _matches(target, config.exclude)]


def _matches(target: Target, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in (target.path, target.name))


def _check_patterns(setting: str, patterns: Iterable[str], targets: list[Target]) -> None:
    """Raise ValueError for a pattern that matches none of these layers, with names that are near to it."""
    for pattern in patterns:
        if not any(_matches(target, [pattern]) for target in targets):
            pieces = [target.path.split(".") for target in targets]
            names = {".".join(p[i : i + size]) for p in pieces for size in (1, 2, 3) for i in range(len(p))}
            names |= {name for target in targets for name in (target.path, target.name)}
            near = get_close_matches(pattern.strip("*."), sorted(names), cutoff=0.0)
            which = "of the models that are trained" if setting == "include" else "that would be trained without it"
            raise ValueError(
                f"The pattern {pattern} of {setting} matches no layer {which}; near to it: {', '.join(near)}. A "
                "pattern is compared with whole names, and * stands for any letters."
            )


def _sized(targets: list[Target], unet: Any, config: LoraConfig) -> list[Target]:
    """Return the targets with ranks, alphas and learning rates of their blocks, without those that have none."""
    numbers = {setting: spread(unet, config, setting) if unet is not None else {} for setting in NUMBERS}
    weights, sized = numbers["block_weights"], []
    for target in targets:
        rank = numbers["block_ranks"].get(target.block, config.rank)
        alpha = numbers["block_alphas"].get(target.block, config.alpha)
        if _is_spatial(target.module):
            rank = numbers["conv_block_ranks"].get(target.block, rank and (config.conv_rank or rank))
            alpha = numbers["conv_block_alphas"].get(target.block, config.conv_alpha or alpha)
        weight = weights.get(target.block or BASE, 1.0)
        if rank and weight:
            sized.append(target._replace(rank=int(rank), alpha=alpha or float(rank), lr_factor=weight))
    return sized


def named_layers(
    unet: nn.Module | None, text_encoders: Mapping[str, tuple[nn.Module, int]], unet_names: Callable[[str], str] = str
) -> dict[str, tuple[str, Any]]:
    """Return (own name, module) of every module that has a weight, by the name that LoRA files give it."""
    found: dict[str, tuple[str, Any]] = {}
    for name, module in unet.named_modules() if unet is not None else ():
        if _has_weight(module):
            found[f"lora_unet_{_flat(unet_names(name))}"] = name, module
    for prefix, (encoder, _) in text_encoders.items():
        for name, module in encoder.named_modules():
            if _has_weight(module):
                found[f"{prefix}_{_flat(_text_name(name))}"] = _text_name(name), module
    return found


def unet_layers(unet: nn.Module, preset: str) -> list[tuple[str, Layer]]:
    """Return (diffusers name, layer) for the linear and convolution layers a preset trains."""
    return [(n, m) for n, m in unet.named_modules() if isinstance(m, Layer) and _in_preset(preset, n, m)]


def _trained(config: LoraConfig, path: str, module: nn.Module) -> bool:
    """Tell whether a layer is trained without any pattern; all of `text_layers` are."""
    if config.algorithm == "ia3" and isinstance(module, Layer):
        return path.endswith(IA3_LAYERS)
    return path.startswith("text_model.") or _in_preset(config.preset, path, module)


def _in_preset(preset: str, path: str, module: nn.Module) -> bool:
    """Tell whether a preset trains a layer of the UNet, or a norm layer among those that it trains.

    Size numbers' embeddings of Stable Diffusion XL are in none: other trainers leave them as they are, too.
    """
    if path.startswith("add_embedding"):
        return False
    if preset == "attn-only" and isinstance(module, Layer):
        return ".attn1." in path or ".attn2." in path
    if preset in ("attn-only", "attn-mlp", "unet-transformer-only"):
        return ".attentions." in path
    if preset == "unet-convblock-only":
        return ".attentions." not in path and not path.startswith("time_embedding")
    return preset == "full" or not _is_spatial(module)


def text_layers(text_encoder: nn.Module, depth: int) -> list[tuple[str, Layer]]:
    """Return (transformers name with `text_model.`, layer) for the projections in a CLIP encoder's first layers."""
    return [
        (_text_name(name), m)
        for name, m in text_encoder.named_modules()
        if name.rpartition(".")[2] in TEXT_LAYERS and isinstance(m, nn.Linear) and _number(name) < depth
    ]


def _text_name(name: str) -> str:
    """Return a text encoder's module name with `text_model.`, which newer transformers leave out."""
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"


def _number(name: str) -> int:
    """Return the number of the layer that a text encoder's module belongs to."""
    return next(int(part) for part in name.split(".") if part.isdecimal())


def _is_spatial(module: nn.Module) -> bool:
    """Tell whether a module is a convolution that looks at more than one pixel."""
    return isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.GroupNorm | nn.LayerNorm)


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _has_weight(module: nn.Module) -> bool:
    """Tell whether a module has a weight, as it is or kept small."""
    return isinstance(getattr(module, "weight", None), Tensor) or hasattr(module, "kept")
