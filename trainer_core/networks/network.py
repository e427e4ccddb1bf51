"""Put a network beside the layers it changes, and take it away again."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.callbacks import Norms
from ..config import LoraConfig
from .build import algorithm_of, build_layer
from .choose import Target
from .embeddings import Embeddings
from .layers.dora import frozen_weight
from .layers.layer import NetworkLayer

RANKED = ("down", "hada_w1_b", "lokr_w2_b", "lokr_w1_b", "a2")  # tensors that have a row for each rank


class Start(NamedTuple):
    """What a layer begins with that an earlier run has trained."""

    kind: str  # as `layer_kind` calls it
    tensors: dict[str, Tensor]  # by part, as lora_files/formats.py names them
    alpha: float  # of OFT the limit of its rotation

    @property
    def rank(self) -> int:
        """Return the rank, of OFT the size of its blocks, 1 for what has none."""
        if "oft_blocks" in self.tensors:
            return self.tensors["oft_blocks"].shape[-1]
        return next((self.tensors[part].shape[0] for part in RANKED if part in self.tensors), 1)

    @property
    def by_output(self) -> bool:
        """Tell whether a DoRA's magnitudes are along the outputs, as (out, 1[, 1, 1])."""
        return "dora_scale" in self.tensors and self.tensors["dora_scale"].shape[0] > 1

    def config(self, config: LoraConfig) -> LoraConfig:
        """Return the configuration under which a new layer has these parts; what acts in training alone stays."""
        parts = set(self.tensors)
        algorithm: Any = algorithm_of(self.tensors) or "lora"
        return config.replace(
            start="",
            algorithm=algorithm,
            dora="dora_scale" in parts,
            tucker=bool(parts & {"mid", "hada_t1", "lokr_t2"}),
            factor=-1,
            decompose_both="lokr_w1_a" in parts,
            full_matrix=algorithm == "lokr" and not parts & {"lokr_w1_a", "lokr_w2_a"},
            rs_lora=False,
            init="default",
        )


class Network(nn.Module):
    """Everything that is trained: layers by their names in LoRA files, and the frozen layers they stand beside."""

    def __init__(
        self, targets: Sequence[Target], config: LoraConfig, seed: int, start: Mapping[str, Start] | None = None
    ) -> None:
        """Build a layer for each target. start: what each of them resumes from, by its name in LoRA files."""
        super().__init__()
        layers: dict[str, Any] = {}
        for target in targets:
            layer = build_layer(target, config, seed) if start is None else _resumed(target, config, seed, start)
            layer.lr_factor = target.lr_factor
            layers[target.name] = layer
        self._targets: dict[str, Any] = {target.name: target.module for target in targets}
        self.chosen = tuple(target._replace(module=None) for target in targets)  # without the frozen layers
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

    def let_go(self, *parts: str) -> None:
        """Detach and forget the frozen layers of some parts of the model, or all, so that their memory can be freed."""
        self.detach()
        kept = {target.name for target in self.chosen if parts and target.part not in parts}
        self._targets = {name: module for name, module in self._targets.items() if name in kept}
        if not parts:
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

    def at(self, micro_batch: int | None) -> None:
        """Let dropouts leave out from now on what they do at a micro-batch, running over the run; None: nothing.

        None is how it begins, and how it has to be in validation and samples. What a micro-batch's backward pass
        computes again leaves out the same, so keep it until then.
        """
        for layer in self._layers.values():
            if layer.dropouts:
                layer.dropouts.micro_batch = micro_batch

    @torch.no_grad()
    def limit_norms(self, limit: float) -> Norms | None:
        """Shrink the delta of every layer that learns to a norm of `limit`, each of its q factors by kappa^(1/q).

        What is smaller stays. To be called after an update of the optimizer. Return what the norms are then; None
        where no layer has one.
        """
        layers = [layer for layer in self._layers.values() if any(f.requires_grad for f in layer.factors())]
        if not layers:
            return None
        norms = torch.stack([layer.delta_norm().float() for layer in layers])
        shares = limit / norms.clamp(min=limit)
        for layer, share in zip(layers, shares.unbind(), strict=True):
            for factor in (factors := layer.factors()):
                factor.mul_(share ** (1 / len(factors)))
        norms = norms.clamp(max=limit)
        shrunk, mean, largest = torch.stack([(shares < 1).sum(), norms.mean(), norms.max()]).tolist()
        return Norms(int(shrunk), mean, largest)

    def freeze(self, part: str) -> None:
        """Let the layers of a part of the model stay as they are from now on."""
        for target in self.chosen:
            if target.part == part:
                self._layers[target.name].requires_grad_(False)

    def groups(
        self, rates: Mapping[str, float], conv_rate: float = 0.0, plus_ratio: float = 1.0
    ) -> list[dict[str, Any]]:
        """Return optimizer parameter groups {"params", "lr", "base_lr", "decays", "model"}, none empty.

        rates: by the prefix of a part, the "model". Convolutions larger than 1x1 learn at conv_rate where
        that is not 0. Each layer multiplies its rate by lr_factor, and that of the parameters in `plus` by plus_ratio
        (LoRA+, Hayou et al. 2024). "decays" is False for parameters that weight decay must leave alone. Layers
        without a rate stay as they are and get no gradient.
        """
        groups: dict[tuple[str, float, bool], dict[str, Any]] = {}
        for model, rate in rates.items():
            for name in (target.name for target in self.chosen if target.part == model):
                layer = self._layers[name]
                large = max(getattr(self._targets.get(name), "kernel_size", (1,))) > 1
                own = layer.lr_factor * (conv_rate if large and rate and conv_rate else rate)
                for key, parameter in layer.named_parameters():
                    parameter.requires_grad_(own > 0)
                    if own > 0:
                        lr = own * (plus_ratio if key in layer.plus else 1.0)
                        decays = parameter.ndim > 0 and key not in layer.no_decay
                        group = {"params": [], "lr": lr, "base_lr": lr, "decays": decays, "model": model}
                        groups.setdefault((model, lr, decays), group)["params"].append(parameter)
        return [*groups.values(), *self.embeddings.groups()]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors under their names in LoRA files."""
        return {
            f"{name}.{suffix}": tensor
            for name, layer in self._layers.items()
            for suffix, tensor in (layer.tensors() | layer.magnitude_tensors()).items()
        }

    def changes(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, W' - W (float32, in W's shape) and rank of every layer with a matrix; its model must be there."""
        for name, rank in ((target.name, target.rank) for target in self.chosen if target.name in self._targets):
            weight = frozen_weight(self._targets[name], torch.float32)
            if weight.ndim > 1:
                yield name, self._layers[name].changed_weight(weight).detach() - weight, rank


def _resumed(target: Target, config: LoraConfig, seed: int, start: Mapping[str, Start]) -> NetworkLayer:
    """Build the layer that an earlier run has trained; ValueError, with its name, where that is not possible."""
    begin = start[target.name]
    try:
        layer = build_layer(target, begin.config(config), seed, by_output=begin.by_output)
        layer.load({part: t for part, t in begin.tensors.items() if part != "dora_scale"}, begin.alpha)
        if "dora_scale" in begin.tensors:
            layer.load_magnitude(begin.tensors["dora_scale"])
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from error
    return layer


class WithDelta(nn.Module):
    """What a frozen layer is besides while a network is attached."""

    delta: NetworkLayer

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output as the network changes it."""
        entered = self.delta.enter(x)
        return self.delta.leave(self.delta(entered if self.delta.sees_entered else x, super().forward(entered)))


@functools.cache
def _with_delta(kind: type) -> type:
    return type(f"{kind.__name__}WithDelta", (WithDelta, kind), {})
