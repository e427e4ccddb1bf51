"""The network: attach its layers to frozen layers of the base model, and detach them again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..common.callbacks import Norms
from ..config import LoraConfig
from ..config.network import FORM
from ..config.rows import rows_of
from ..memory import LIES_ON, device_of
from .build import build_layer
from .choose import TrainedLayer
from .embeddings import Embeddings
from .layers import LAYERS, algorithm_of, layer_of
from .layers.dora import frozen_weight
from .layers.form import MAGNITUDE
from .layers.layer import NetworkLayer
from .layers.shape import is_spatial


class LayerWeights(NamedTuple):
    """The tensors a layer continues from."""

    kind: str  # as `layer_kind` names it
    tensors: dict[str, Tensor]  # by part
    alpha: float

    @property
    def rank(self) -> int:
        """The rank; the block size for rotations, 1 for layers without a rank."""
        return layer_of(self.tensors).rank_of(self.tensors)

    @property
    def by_output(self) -> bool:
        """Whether a DoRA has a magnitude per output, (out, 1[, 1, 1])."""
        return MAGNITUDE in self.tensors and self.tensors[MAGNITUDE].shape[0] > 1

    def config(self, config: LoraConfig) -> LoraConfig:
        """Build the configuration that gives a new layer these parts; settings that act only in training stay."""
        algorithm, rows = algorithm_of(self.tensors), rows_of(LoraConfig)
        form: dict[str, Any] = {name: rows[name].default for name in FORM}
        form |= {"dora": MAGNITUDE in self.tensors, **LAYERS[algorithm].settings_of(self.tensors)}
        return config.replace(start="", algorithm=algorithm, **form)


class Network(nn.Module):
    """Everything that is trained: layers by their names in LoRA files, and the embeddings."""

    def __init__(
        self,
        chosen: Sequence[TrainedLayer],
        config: LoraConfig,
        seed: int,
        continued: Mapping[str, LayerWeights] | None = None,
    ) -> None:
        """Build the chosen layers. continued: the tensors that each continues from, by its name in LoRA files."""
        super().__init__()
        layers: dict[str, Any] = {}
        for trained in chosen:
            if continued is None:
                layer = build_layer(trained, config, seed)
            else:
                layer = _continued(trained, config, seed, continued[trained.name])
            layer.lr_factor = trained.lr_factor
            layers[trained.name] = layer
        self._frozen: dict[str, Any] = {trained.name: trained.module for trained in chosen}
        self.chosen = tuple(trained._replace(module=None) for trained in chosen)  # without the frozen layers
        self._layers: dict[str, NetworkLayer] = layers
        self.layers = nn.ModuleDict(layers)
        self.embeddings = Embeddings()

    def attach(self) -> None:
        """Apply every layer to its frozen layer from now on."""
        for name, module in self._frozen.items():
            if not isinstance(module, WithDelta):
                # A new class instead of a function per layer: torch.compile then sees that blocks are alike.
                module.__class__ = _with_delta(type(module))
                module.__dict__["delta"] = self._layers[name]  # not a child: the frozen model keeps its parameters
                self._layers[name].__dict__["frozen"] = module
        self.embeddings.attach()

    def detach(self, *parts: str) -> None:
        """Restore the frozen layers of some parts of the model exactly, or all of them."""
        out = {trained.name for trained in self.chosen if not parts or trained.part in parts}
        for name, module in self._frozen.items():
            if name in out and isinstance(module, WithDelta):
                del module.__dict__["delta"], self._layers[name].__dict__["frozen"]
                # The bases are WithDelta and the class that the layer had before.
                module.__class__ = type(module).__bases__[1]
        if not parts:
            self.embeddings.detach()

    def release(self, *parts: str) -> None:
        """Detach, and drop the frozen layers of some parts of the model, or of all, to free their memory."""
        self.detach()
        remaining = {trained.name for trained in self.chosen if parts and trained.part not in parts}
        self._frozen = {name: module for name, module in self._frozen.items() if name in remaining}
        if not parts:
            self.embeddings.release()

    def leave(self, *parts: str) -> None:
        """Leave the layers of some parts of the model attached for good: `detach` no longer reaches them."""
        self.attach()
        kept = {trained.name for trained in self.chosen if trained.part not in parts}
        self._frozen = {name: module for name, module in self._frozen.items() if name in kept}
        self.detach()

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move everything to `device`, in a dtype; a layer goes where its frozen layer will lie."""
        self.to(device, dtype)
        for name, module in self._frozen.items():
            self._layers[name].to(device_of(module, device))

    def split(self) -> tuple[list[NetworkLayer], list[NetworkLayer]]:
        """List the layers on the first card of the model, and those on its second one."""
        apart = {name for name, module in self._frozen.items() if LIES_ON in module.__dict__}
        listed = self._layers.items()
        return [v for name, v in listed if name not in apart], [v for name, v in listed if name in apart]

    @contextmanager
    def attached(self) -> Iterator[Network]:
        """Attach the network inside a `with` block."""
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    @contextmanager
    def detached(self, *parts: str) -> Iterator[Network]:
        """Detach the network, or some parts of it, inside a `with` block: the models are the frozen base there."""
        self.detach(*parts)
        try:
            yield self
        finally:
            self.attach()

    @contextmanager
    def watched(self, see: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Show the inputs of every layer, by its name, inside a `with` block."""

        def hook(name: str, module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            del module
            see(name, next(iter((*given, *named.values()))).detach())

        hooks = [
            module.register_forward_pre_hook(functools.partial(hook, name), with_kwargs=True)
            for name, module in self._frozen.items()
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def set_micro_batch(self, micro_batch: int | None) -> None:
        """Set the micro-batch, counted over the run, whose dropout masks apply; None, the default: no dropout.

        Validation and samples need None. Keep the number until the backward pass, which may recompute activations with
        the same masks.
        """
        for layer in self._layers.values():
            if layer.dropouts:
                layer.dropouts.begin(micro_batch)

    def reverse(self, reverse: bool) -> None:
        """Apply every layer as at strength -1, or as at 1 again; for layers that add to their frozen layer's output.

        Keep it until the backward pass, which may recompute activations.
        """
        for layer in self._layers.values():
            layer.reversed = reverse

    def set_times(self, times: Tensor | None, part: str) -> None:
        """Set the times of a micro-batch's samples, (B,) 0 to 1, by which layers of a part use ranks; None: all."""
        for trained in self.chosen:
            dropouts = self._layers[trained.name].dropouts
            if dropouts and dropouts.least_rank and trained.part == part:
                dropouts.times = times

    @torch.no_grad()
    def limit_norms(self, limit: float) -> Norms | None:
        """Scale down each trained delta whose norm exceeds `limit`.

        Each of its q factors is multiplied by (limit / norm)^(1/q). To be called after an update of the optimizer.
        Returns the norms afterwards; None if no layer has one.
        """
        layers = [layer for layer in self._layers.values() if any(f.requires_grad for f in layer.factors())]
        if not layers:
            return None
        found = [layer.delta_norm().float() for layer in layers]
        norms = torch.stack([norm.to(found[0].device) for norm in found])
        shares = limit / norms.clamp(min=limit)
        for layer, share in zip(layers, shares.unbind(), strict=True):
            for factor in (factors := layer.factors()):
                factor.mul_((share ** (1 / len(factors))).to(factor.device))
        norms = norms.clamp(max=limit)
        # One copy from the device, since each waits for it.
        shrunk, mean, largest = torch.stack([(shares < 1).sum(), norms.mean(), norms.max()]).tolist()
        return Norms(int(shrunk), mean, largest)

    def freeze(self, part: str) -> None:
        """Freeze the layers of a part of the model."""
        for trained in self.chosen:
            if trained.part == part:
                self._layers[trained.name].requires_grad_(False)

    def groups(
        self, rates: Mapping[str, float], conv_rate: float = 0.0, plus_ratio: float = 1.0
    ) -> list[dict[str, Any]]:
        """Build optimizer parameter groups {"params", "lr", "base_lr", "decays", "model", "name"}, none empty.

        rates: learning rates by the prefix of a part, the "model"; a conv_rate other than 0 replaces them for
        convolutions larger than 1x1. Each layer multiplies its rate by lr_factor, and that of the parameters in `plus`
        by plus_ratio (LoRA+, Hayou et al. 2024). "decays" is False for parameters without weight decay. "name" is the
        model, with what gives the group another rate: _conv, _x<lr_factor>, _plus. Layers with rate 0 are frozen.
        """
        groups: dict[tuple[str, float, bool], dict[str, Any]] = {}
        for model, rate in rates.items():
            for name in (trained.name for trained in self.chosen if trained.part == model):
                layer = self._layers[name]
                apart = bool(is_spatial(self._frozen.get(name)) and rate and conv_rate)
                own = layer.lr_factor * (conv_rate if apart else rate)
                name = model + "_conv" * apart + (f"_x{layer.lr_factor:g}" if layer.lr_factor != 1 else "")
                for key, parameter in layer.named_parameters():
                    # A rate of 0 freezes, so that the backward pass skips the layer.
                    parameter.requires_grad_(own > 0)
                    if own > 0:
                        plus = key in layer.plus and plus_ratio != 1
                        lr = own * (plus_ratio if plus else 1.0)
                        decays = parameter.ndim > 0 and key not in layer.no_decay
                        group = {"params": [], "lr": lr, "base_lr": lr, "decays": decays, "model": model}
                        group["name"] = name + "_plus" * plus
                        known = groups.setdefault((model, lr, decays), group)
                        known["name"] = min(known["name"], group["name"], key=len)  # of several with the same rate
                        known["params"].append(parameter)
        return [*groups.values(), *self.embeddings.groups()]

    def tensors(self) -> dict[str, Tensor]:
        """Collect all tensors by their names in LoRA files."""
        return {
            f"{name}.{suffix}": tensor
            for name, layer in self._layers.items()
            for suffix, tensor in (layer.tensors() | layer.magnitude_tensors()).items()
        }

    def changes(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, W' - W (float32, in W's shape) and rank of every layer with a matrix; needs the frozen layers."""
        for name, rank in ((trained.name, trained.rank) for trained in self.chosen if trained.name in self._frozen):
            layer = self._layers[name]
            weight = frozen_weight(self._frozen[name], torch.float32, next(layer.parameters()).device)
            if weight.ndim > 1:
                yield name, layer.changed_weight(weight).detach() - weight, rank


def _continued(trained: TrainedLayer, config: LoraConfig, seed: int, weights: LayerWeights) -> NetworkLayer:
    """Build a layer that continues from earlier weights; raise ValueError, with its name, if it cannot."""
    try:
        layer = build_layer(trained, weights.config(config), seed, by_output=weights.by_output)
        layer.load({part: t for part, t in weights.tensors.items() if part != MAGNITUDE}, weights.alpha)
        if MAGNITUDE in weights.tensors:
            layer.load_magnitude(weights.tensors[MAGNITUDE])
    except ValueError as error:
        raise ValueError(f"{trained.name}: {error}") from error
    return layer


class WithDelta(nn.Module):
    """Base class added to a frozen layer while a network is attached."""

    delta: NetworkLayer
    at_once = False  # whether the frozen layer adds a thin product itself

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the frozen layer's output as the network changes it; further arguments are the frozen layer's own."""
        # A layer can only add, so -1 takes a detour over the signs.
        if self.delta.reversed:  # y - delta = -(-y + delta)
            return -self.delta(input, -super().forward(input, *args, **kwargs))
        entered = self.delta.enter(input)
        if self.at_once and not args and not kwargs and (thin := self.delta.thin(input)) is not None:
            return self.delta.leave(cast(Any, super()).forward_with(entered, *thin))
        seen = entered if self.delta.uses_changed_input else input
        return self.delta.leave(self.delta(seen, super().forward(entered, *args, **kwargs)))


@functools.cache
def _with_delta(kind: type) -> type:
    return type(f"{kind.__name__}WithDelta", (WithDelta, kind), {"at_once": hasattr(kind, "forward_with")})
