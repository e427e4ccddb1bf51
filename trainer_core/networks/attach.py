"""Find the layers a preset names, put a network beside them, take it away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..config import LoraConfig
from .lora import LoraLayer

Layer = nn.Linear | nn.Conv2d
TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class Network(nn.Module):
    """Everything that is trained: LoRA layers by kohya name, and the frozen layers they stand beside."""

    def __init__(self, unet: nn.Module | None, text_encoder: nn.Module | None, config: LoraConfig, seed: int) -> None:
        """Build a layer for each target in the models that are given; None leaves a model untrained."""
        super().__init__()
        targets: dict[str, Layer] = {}
        if unet is not None:
            targets |= {f"lora_unet_{_flat(name)}": module for name, module in unet_layers(unet, config.preset)}
        if text_encoder is not None:
            targets |= {f"lora_te_{_flat(name)}": module for name, module in text_layers(text_encoder)}
        self._targets = targets
        layers = {}
        for name, module in targets.items():
            conv = isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
            rank = config.conv_rank if conv and config.conv_rank else config.rank
            alpha = config.conv_alpha if conv and config.conv_alpha else config.alpha
            layers[name] = LoraLayer(module, rank, alpha, name=name, seed=seed)
        self._layers: dict[str, LoraLayer] = layers
        self.layers = nn.ModuleDict(layers)
        self._originals: dict[str, Any] = {}

    def attach(self) -> None:
        """Add every layer's delta to the output of its frozen layer from now on."""
        for name, module in self._targets.items():
            if name not in self._originals:
                self._originals[name] = module.forward
                module.forward = _with_delta(module.forward, self._layers[name])

    def detach(self) -> None:
        """Leave the frozen layers exactly as they were."""
        for name in list(self._originals):
            self._targets[name].__dict__.pop("forward")
            del self._originals[name]

    def let_go(self) -> None:
        """Detach and forget the frozen layers, so that their memory can be freed."""
        self.detach()
        self._targets = {}

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

    def groups(self, learning_rate: float, text_encoder_learning_rate: float) -> list[dict[str, Any]]:
        """Return optimizer parameter groups, UNet first; a group without layers or rate is left out."""
        rates = {"lora_unet_": learning_rate, "lora_te_": text_encoder_learning_rate}
        groups = []
        for prefix, rate in rates.items():
            params = [p for name, layer in self._layers.items() if name.startswith(prefix) for p in layer.parameters()]
            if params and rate > 0:
                groups.append({"params": params, "lr": rate, "base_lr": rate})
        return groups

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under their kohya names."""
        return {f"{name}.{k}": t for name, layer in self._layers.items() for k, t in layer.tensors().items()}


def _with_delta(forward: Any, layer: nn.Module) -> Any:
    def forward_with_delta(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return layer(x, forward(x, *args, **kwargs))

    return forward_with_delta


def unet_layers(unet: nn.Module, preset: str) -> list[tuple[str, Layer]]:
    """Return (diffusers name, layer) for the linear and convolution layers a preset trains.

    attn-only: attention projections; attn-mlp: everything inside the transformers; full: every layer.
    """
    layers: list[tuple[str, Layer]] = [(n, m) for n, m in unet.named_modules() if isinstance(m, Layer)]
    if preset == "attn-only":
        layers = [(name, m) for name, m in layers if ".attn1." in name or ".attn2." in name]
    elif preset == "attn-mlp":
        layers = [(name, m) for name, m in layers if ".attentions." in name]
    if not layers:
        raise ValueError(f"The preset {preset} matches no layer of this UNet; choose another.")
    return layers


def text_layers(text_encoder: nn.Module) -> list[tuple[str, Layer]]:
    """Return (transformers name with `text_model.`, layer) for the projections of a CLIP text encoder."""
    return [
        (f"text_model.{name.removeprefix('text_model.')}", m)
        for name, m in text_encoder.named_modules()
        if name.rpartition(".")[2] in TEXT_LAYERS and isinstance(m, nn.Linear)
    ]


def _flat(name: str) -> str:
    return name.replace(".", "_")
