"""Three ways through the same UNet: the frozen pass, this pack's LoRA, and diffusers with peft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_atelier.bench.measure import now
from lora_atelier.trainer_core.config import LoraConfig, OptimizerConfig
from lora_atelier.trainer_core.networks import Network
from lora_atelier.trainer_core.networks.attach import unet_layers
from lora_atelier.trainer_core.optim import build_optimizer

RANK = 8
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, max_grad_norm=1.0)

Step = Callable[[], dict[str, float]]  # takes one training step; returns seconds by phase, and the loss


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What every contender is given, one picture."""

    noised: Tensor  # (1, 4, H/8, W/8)
    noise: Tensor  # the target, same shape, float32
    timesteps: Tensor  # (1,)
    context: Tensor  # (1, 77, D)


def build_batch(unet: nn.Module, resolution: int) -> Batch:
    """Draw a seeded batch of one picture of resolution x resolution pixels."""
    config: Any = unet.config
    parameter = next(unet.parameters())
    seeded = torch.Generator().manual_seed(0)
    size = (1, config.in_channels, resolution // 8, resolution // 8)
    noised, noise, context = (
        torch.randn(shape, generator=seeded) for shape in (size, size, (1, 77, config.cross_attention_dim))
    )
    return Batch(
        noised=noised.to(parameter),
        noise=noise.to(parameter.device),
        timesteps=torch.tensor([500], device=parameter.device),
        context=context.to(parameter),
    )


def build_frozen(unet: nn.Module, batch: Batch) -> Step:
    """Run forward and backward pass with no network, the gradient taken to the input latents: the limit."""
    noised = batch.noised.clone().requires_grad_()

    def update() -> None:
        noised.grad = None

    return lambda: _step(unet, noised, batch, update)


def build_ours(unet: nn.Module, batch: Batch) -> Step:
    """Train this pack's network on all layers, attached for the length of a step."""
    network = Network(unet, {}, LoraConfig(rank=RANK, alpha=RANK, preset="full"), seed=0).to(batch.noised.device)
    optimizer = build_optimizer(OPTIMIZER, network.groups({"lora_unet": OPTIMIZER.learning_rate}))
    update = _update(list(network.parameters()), optimizer)

    def step() -> dict[str, float]:
        with network.attached():
            return _step(unet, batch.noised, batch, update)

    return step


def build_peft(unet: nn.Module, batch: Batch) -> Step:
    """Train peft's LoRA on the same layers of a second UNet over the very same weight tensors, same optimizer."""
    import peft

    twin: Any = share_weights(unet)
    names = [name for name, _ in unet_layers(unet, "full")]
    twin.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    trained = [p for p in twin.parameters() if p.requires_grad]
    if len(trained) != 2 * len(names):
        raise RuntimeError(f"peft trains {len(trained)} tensors on {len(names)} layers; expected two for each.")
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = build_optimizer(OPTIMIZER, [{"params": trained, "lr": OPTIMIZER.learning_rate}])
    update = _update(trained, optimizer)
    return lambda: _step(twin, batch.noised, batch, update)


CONTENDERS: dict[str, Callable[[nn.Module, Batch], Step]] = {
    "frozen": build_frozen,
    "ours": build_ours,
    "peft": build_peft,
}


def share_weights(unet: nn.Module) -> nn.Module:
    """Return a second UNet that holds the same weight tensors."""
    with torch.device("meta"):
        twin = type(unet).from_config(unet.config)  # type: ignore[attr-defined]
    twin.load_state_dict(unet.state_dict(), assign=True)
    return twin.requires_grad_(False).eval()


def race(unet: nn.Module, batch: Batch, steps: int) -> list[dict[str, dict[str, float]]]:
    """Let all contenders take one step in turn, `steps` times after one that is not counted.

    Raises RuntimeError when their first predictions differ: untrained networks change nothing.
    """
    contenders = {name: build(unet, batch) for name, build in CONTENDERS.items()}
    first = {name: step()["loss"] for name, step in contenders.items()}
    if max(first.values()) - min(first.values()) > 1e-3 * first["frozen"]:
        raise RuntimeError(f"The contenders do not compute the same: first losses {first}.")
    return [{name: step() for name, step in contenders.items()} for _ in range(steps)]


def _step(unet: nn.Module, noised: Tensor, batch: Batch, update: Callable[[], None]) -> dict[str, float]:
    device = noised.device
    began = now(device)
    prediction = unet(noised, batch.timesteps, encoder_hidden_states=batch.context).sample
    loss = F.mse_loss(prediction.float(), batch.noise)
    predicted = now(device)
    loss.backward()
    derived = now(device)
    update()
    ended = now(device)
    return {
        "seconds": ended - began,
        "forward": predicted - began,
        "backward": derived - predicted,
        "update": ended - derived,
        "loss": float(loss.detach()),
    }


def _update(parameters: list[Any], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return clipping, optimizer step and clearing as one call, as the training loop does them."""

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update
