"""Find the layers a preset names, put a network beside them, take it away again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..config import LoraConfig
from .lora import LoraLayer

Layer = nn.Linear | nn.Conv2d
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class Start(NamedTuple):
    """What a layer begins with that an earlier run has trained."""

    down: Tensor  # (rank, in[, k, k])
    up: Tensor  # (out, rank[, 1, 1])
    alpha: float


class Network(nn.Module):
    """Everything that is trained: LoRA layers by kohya name, and the frozen layers they stand beside."""

    def __init__(
        self,
        unet: nn.Module | None,
        text_encoders: Mapping[str, tuple[nn.Module, int]],
        config: LoraConfig,
        seed: int,
        unet_names: Callable[[str], str] = str,
        start: Mapping[str, Start] | None = None,
    ) -> None:
        """Build a layer for each target in the models that are given; a model that is not given stays untrained.

        text_encoders: by what names of their layers in a LoRA file begin with, and how deep they are in use.
        unet_names: turns the diffusers name of a UNet layer into the one that LoRA files of its family use.
        start: layers of an earlier run by kohya name. These and no others are built, whatever the preset says.
        """
        super().__init__()
        targets: dict[str, Layer] = {}
        if start is not None:
            modules = named_layers(unet, text_encoders, unet_names)
            targets = {name: modules[name][1] for name in start}
        elif unet is not None:
            layers_of_unet = unet_layers(unet, config.preset)
            targets |= {f"lora_unet_{_flat(unet_names(name))}": module for name, module in layers_of_unet}
        for prefix, (encoder, depth) in text_encoders.items() if start is None else ():
            targets |= {f"{prefix}_{_flat(name)}": module for name, module in text_layers(encoder, depth)}
        self._targets = targets
        layers = {}
        for name, module in targets.items():
            conv = isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
            rank = config.conv_rank if conv and config.conv_rank else config.rank
            alpha = config.conv_alpha if conv and config.conv_alpha else config.alpha
            if start is not None:
                rank, alpha = start[name].down.shape[0], start[name].alpha
            layers[name] = LoraLayer(module, rank, alpha, name=name, seed=seed)
            if start is not None:
                layers[name].down.data.copy_(start[name].down)
                layers[name].up.data.copy_(start[name].up)
        self._layers: dict[str, LoraLayer] = layers
        self.layers = nn.ModuleDict(layers)

    def attach(self) -> None:
        """Add every layer's delta to the output of its frozen layer from now on."""
        for name, module in self._targets.items():
            if not isinstance(module, WithDelta):
                # By class, not by a function of its own for each layer: torch.compile then sees that blocks are alike.
                module.__class__ = _with_delta(type(module))
                module.__dict__["delta"] = self._layers[name]  # no child: the frozen model stays the frozen model

    def detach(self) -> None:
        """Leave the frozen layers exactly as they were."""
        for module in self._targets.values():
            if isinstance(module, WithDelta):
                del module.__dict__["delta"]
                module.__class__ = type(module).__bases__[1]

    def let_go(self, *prefixes: str) -> None:
        """Detach and forget the frozen layers whose names begin so, or all, so that their memory can be freed."""
        self.detach()
        kept = {name: module for name, module in self._targets.items() if not name.startswith(prefixes)}
        self._targets = kept if prefixes else {}

    @contextmanager
    def attached(self) -> Iterator[Network]:
        """Attach for the length of a `with` block."""
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    @contextmanager
    def detached(self) -> Iterator[Network]:
        """Take the network away for the length of a `with` block: the models are the frozen base inside."""
        self.detach()
        try:
            yield self
        finally:
            self.attach()

    def freeze(self, prefix: str) -> None:
        """Let the layers whose names begin with `prefix` stay as they are from now on."""
        for name, layer in self._layers.items():
            if name.startswith(f"{prefix}_"):
                layer.requires_grad_(False)

    def groups(self, rates: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return optimizer parameter groups by what their layers' names begin with; without layers or rate none.

        Layers without a rate stay as they are and get no gradient.
        """
        groups = []
        for prefix, rate in rates.items():
            params = [
                p for name, layer in self._layers.items() if name.startswith(f"{prefix}_") for p in layer.parameters()
            ]
            for parameter in params:
                parameter.requires_grad_(rate > 0)
            if params and rate > 0:
                groups.append({"params": params, "lr": rate, "base_lr": rate})
        return groups

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under their kohya names."""
        return {f"{name}.{k}": t for name, layer in self._layers.items() for k, t in layer.tensors().items()}


class WithDelta(nn.Module):
    """What a frozen layer is besides while a network is attached."""

    delta: LoraLayer

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output plus its delta."""
        return self.delta(x, super().forward(x))


@functools.cache
def _with_delta(kind: type) -> type:
    return type(f"{kind.__name__}WithDelta", (WithDelta, kind), {})


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
