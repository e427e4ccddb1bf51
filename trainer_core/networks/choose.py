"""Which layers of a base model a network changes, and how large it is in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..config import LoraConfig

Layer = nn.Linear | nn.Conv2d
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class Target(NamedTuple):
    """One layer that is changed."""

    name: str  # as LoRA files call it
    module: Layer
    rank: int
    alpha: float


def choose_targets(
    unet: nn.Module | None,
    text_encoders: Mapping[str, tuple[nn.Module, int]],
    config: LoraConfig,
    unet_names: Callable[[str], str] = str,
) -> list[Target]:
    """Return the layers that the configuration trains, of the models that are given, in the models' own order.

    text_encoders, unet_names: as for Network. Raises ValueError when nothing is chosen.
    """
    layers: list[tuple[str, Layer]] = []
    if unet is not None:
        layers += [
            (f"lora_unet_{_flat(unet_names(name))}", module) for name, module in unet_layers(unet, config.preset)
        ]
    for prefix, (encoder, depth) in text_encoders.items():
        layers += [(f"{prefix}_{_flat(name)}", module) for name, module in text_layers(encoder, depth)]
    targets = []
    for name, module in layers:
        conv = isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
        rank = config.conv_rank if conv and config.conv_rank else config.rank
        alpha = config.conv_alpha if conv and config.conv_alpha else config.alpha
        targets.append(Target(name, module, rank, alpha))
    return targets


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
    """Return (diffusers name, layer) for the linear and convolution layers a preset trains.

    attn-only: attention projections; attn-mlp: everything inside the transformers; full: every layer but those that
    embed the size numbers of Stable Diffusion XL, which other trainers leave as they are, too.
    """
    modules = ((n, m) for n, m in unet.named_modules() if not n.startswith("add_embedding"))
    layers: list[tuple[str, Layer]] = [(n, m) for n, m in modules if isinstance(m, Layer)]
    if preset == "attn-only":
        layers = [(name, m) for name, m in layers if ".attn1." in name or ".attn2." in name]
    elif preset == "attn-mlp":
        layers = [(name, m) for name, m in layers if ".attentions." in name]
    if not layers:
        raise ValueError(f"The preset {preset} matches no layer of this UNet; choose another.")
    return layers


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


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _has_weight(module: nn.Module) -> bool:
    """Tell whether a module has a weight, as it is or kept small."""
    return isinstance(getattr(module, "weight", None), Tensor) or hasattr(module, "kept")
