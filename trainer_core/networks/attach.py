"""Put a network beside the layers it changes, and take it away again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..config import LoraConfig
from .build import build_layer
from .choose import Target, choose_targets, named_layers
from .embeddings import Embeddings
from .layer import NetworkLayer


class Start(NamedTuple):
    """What a layer begins with that an earlier run has trained."""

    down: Tensor  # (rank, in[, k, k])
    up: Tensor  # (out, rank[, 1, 1])
    alpha: float


class Network(nn.Module):
    """Everything that is trained: layers by kohya name, and the frozen layers they stand beside."""

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
        if start is None:
            targets = choose_targets(unet, text_encoders, config, unet_names)
        else:
            modules = named_layers(unet, text_encoders, unet_names)
            targets = [Target(name, modules[name][1], s.down.shape[0], s.alpha) for name, s in start.items()]
        self._targets: dict[str, Any] = {target.name: target.module for target in targets}
        layers: dict[str, Any] = {target.name: build_layer(target, config, seed) for target in targets}
        for name, begin in (start or {}).items():
            layers[name].down.data.copy_(begin.down)
            layers[name].up.data.copy_(begin.up)
        self._layers: dict[str, NetworkLayer] = layers
        self.layers = nn.ModuleDict(layers)
        self.embeddings = Embeddings()

    def attach(self) -> None:
        """Add every layer's delta to the output of its frozen layer from now on."""
        for name, module in self._targets.items():
            if not isinstance(module, WithDelta):
                # By class, not by a function of its own for each layer: torch.compile then sees that blocks are alike.
                module.__class__ = _with_delta(type(module))
                module.__dict__["delta"] = self._layers[name]  # no child: the frozen model stays the frozen model
                self._layers[name].__dict__["frozen"] = module
        self.embeddings.attach()

    def detach(self) -> None:
        """Leave the frozen layers exactly as they were."""
        for name, module in self._targets.items():
            if isinstance(module, WithDelta):
                del module.__dict__["delta"], self._layers[name].__dict__["frozen"]
                module.__class__ = type(module).__bases__[1]
        self.embeddings.detach()

    def let_go(self, *prefixes: str) -> None:
        """Detach and forget the frozen layers whose names begin so, or all, so that their memory can be freed."""
        self.detach()
        kept = {name: module for name, module in self._targets.items() if not name.startswith(prefixes)}
        self._targets = kept if prefixes else {}
        if not prefixes:
            self.embeddings.let_go()

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
        return [*groups, *self.embeddings.groups()]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under their kohya names."""
        return {f"{name}.{k}": t for name, layer in self._layers.items() for k, t in layer.tensors().items()}


class WithDelta(nn.Module):
    """What a frozen layer is besides while a network is attached."""

    delta: NetworkLayer

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output as the network changes it."""
        x = self.delta.enter(x)
        return self.delta(x, super().forward(x))


@functools.cache
def _with_delta(kind: type) -> type:
    return type(f"{kind.__name__}WithDelta", (WithDelta, kind), {})
