"""A tiny model with a network beside all its layers, on noised latents and captions: losses and gradients in a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.sampler_helpers
import comfy.samplers
import torch
from torch import Tensor, nn
from zoo.zoo import ZOO, build, conditioning, latents

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.layers import list_layers, units
from lora_atelier.nodes.comfyui.connected.observed import Observed
from lora_atelier.nodes.comfyui.connected.proof import prove
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.memory import copied_before_written
from lora_atelier.trainer_core.networks import Network
from lora_atelier.trainer_core.networks.choose import trained_layer_of
from lora_atelier.trainer_core.networks.layers.shape import is_matrix

LEVELS = (0.35, 0.75)  # of noise, one for each sample, as shares of the model's table


class Trial:
    """A model at work on a batch of one sample for each seed; samples of unequal captions run one after another."""

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype = torch.float32,
        tokens: Sequence[int] = (0, 0),
        built: Any = None,  # model and patcher, by default new ones in dtype
        device: torch.device | str = "cpu",
        **config: Any,
    ) -> None:
        self.model, self.patcher = built or build(name, dtype=dtype)
        self.dtype, self.device = dtype, device
        self.model.to(device)
        self.patcher.load_device = torch.device(device)
        sampling, count = self.model.model_sampling, len(tokens)
        clean, self.noise = (latents(name, count, seed).to(device, dtype) for seed in (5, 6))
        last = len(sampling.sigmas) - 1
        self.sigmas = torch.stack([sampling.sigmas[int(level * last)] for level in LEVELS[:count]]).to(dtype)
        shape = (-1, *(1,) * (clean.ndim - 1))
        self.noised = sampling.noise_scaling(self.sigmas.view(shape), self.noise.clone(), clean)
        self.samples = [self._conditions(name, 10 + i, number) for i, number in enumerate(tokens)]
        self.groups = [[0, 1]] if len(set(tokens)) < count else [[i] for i in range(count)]
        self.network = network(self.model, **config).to(device, dtype)
        self.units = units(self.model.diffusion_model)
        self.output: Any = None
        self.model.diffusion_model.register_forward_hook(self._keep)

    def _conditions(self, name: str, seed: int, tokens: int) -> dict[str, Any]:
        """Build the conditions of one sample, as ComfyUI's sampler does."""
        found = comfy.sampler_helpers.convert_cond(conditioning(name, seed, tokens))
        first = latents(name).to(self.device)
        # Pictures for models that start from one; their own would give the answer away.
        for cond in found:
            cond |= {key: self._cast(value) for key, value in cond.items()}
            cond |= {"latent_image": torch.zeros_like(first)}
        found = comfy.samplers.encode_model_conds(
            self.model.extra_conds, found, first, first.device, "positive", latent_shapes=[first.shape]
        )
        return {key: cond.process_cond(batch_size=1, area=None) for key, cond in found[0]["model_conds"].items()}

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else None)

    def _keep(self, _: nn.Module, __: Any, output: Any) -> None:
        self.output = output  # before ComfyUI rounds it to float32

    def predict(self, options: dict[str, Any] | None = None) -> Tensor:
        """Compute what the network says about each sample, in its own dtype."""
        options = gradients.options(self.patcher) if options is None else options
        parts = []
        for group in self.groups:
            numbers = torch.tensor(group)
            joint = comfy.samplers.cond_cat([self.samples[number] for number in group])
            given = {**options, "cond_or_uncond": [0], "uuids": [0], "sigmas": self.sigmas[numbers]}
            self.model.apply_model(self.noised[numbers], self.sigmas[numbers], **joint, transformer_options=given)
            parts.append(self.output if isinstance(self.output, Tensor) else self.output[0])
        self.output = None
        return torch.cat(parts)

    def loss(self) -> Tensor:
        """Compute the mean square of what the network says less the noise, of as many channels."""
        prediction = self.predict()
        return (prediction - self.noise[:, : prediction.shape[1]]).square().mean()

    def gradients(self) -> list[Tensor]:
        """Compute the gradient of each parameter of the network; zeros where there is none."""
        self.network.zero_grad(set_to_none=True)
        with copied_before_written():
            self.loss().backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.network.parameters()]

    def prove(self) -> list[str]:
        """List the layers without a gradient, as the trial before a run does."""
        frozen = self.network._frozen
        return prove([self.predict] * 2, self.network._layers, Observed(self.model.diffusion_model, frozen)).idle

    @torch.no_grad()
    def slope(self, direction: Sequence[Tensor], step: float) -> float:
        """Measure by central differences how the loss changes along a direction."""
        losses = []
        for move in (step, -2 * step):
            self._move(direction, move)
            losses.append(self.loss().item())
        self._move(direction, step)
        return (losses[0] - losses[1]) / (2 * step)

    def _move(self, direction: Sequence[Tensor], step: float) -> None:
        for parameter, change in zip(self.network.parameters(), direction, strict=True):
            parameter.add_(change, alpha=step)


def network(model: Any, *, used: bool = True, **config: Any) -> Network:
    """Build a network beside all layers of a model that can have one; `used` as if it had been trained."""
    trained = [layer for layer in list_layers(model) if layer.trainable and is_matrix(layer.module)]
    made = Network(
        [trained_layer_of(layer, 4, 4.0) for layer in trained], LoraConfig(rank=4, alpha=4.0, **config), seed=0
    )
    if used:
        draws = torch.Generator().manual_seed(3)
        for name, parameter in made.named_parameters():
            if name.endswith(("up", "magnitude")):
                nn.init.normal_(parameter, std=0.05, generator=draws)
    return made


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Compute how far two lists of gradients are apart, relative to their norm."""
    pairs = list(zip(one, other, strict=True))
    difference = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return float((difference / sum(b.double().square().sum() for _, b in pairs)).sqrt())


__all__ = ["ZOO", "Trial", "apart", "network"]
