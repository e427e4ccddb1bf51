"""One side of the race on a linked model: a process that takes a training step for every line it reads.

The node is called as its server calls it; a hook of its optimizer holds it between two steps. Its own copy of the
weights is left out: it gets the only one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from lora_atelier.bench.measure import describe_machine, now, read_peak, start_peak
from lora_atelier.bench.results import publish

Turn = Callable[[], None]
RANK, TOKENS = 8, 64
LATENTS = 32  # latents of one side: 256 pixels
# row of the tiny models -> title, sizes, latents, width of captions, width of the pooled caption, whether the model
# writes into what its backward pass needs
SIZES: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...], int, int, bool]] = {
    "flux": (
        "flux_dev",
        "Flux, hidden 1024, 4 double and 8 single blocks",
        {
            "hidden_size": 1024,
            "num_heads": 8,
            "depth": 4,
            "depth_single_blocks": 8,
            "axes_dim": [16, 56, 56],
            "context_in_dim": 4096,
            "vec_in_dim": 768,
        },
        (16, LATENTS, LATENTS),
        4096,
        768,
        True,
    ),
    "wan": (
        "wan21_t2v",
        "Wan 2.1, hidden 1024, 16 blocks",
        {"dim": 1024, "ffn_dim": 4096, "num_heads": 8, "num_layers": 16, "text_dim": 4096, "freq_dim": 256},
        (16, 1, LATENTS, LATENTS),
        4096,
        0,
        False,
    ),
}
SIZES["clip"] = (  # a few more tokens than a picture of 256 pixels
    "wan21_t2v",
    "Wan 2.1, hidden 1024, 6 blocks, clips of 17 frames",
    SIZES["wan"][2] | {"num_layers": 6},
    (16, 5, 16, 16),
    *SIZES["wan"][4:],
)


def main() -> None:
    """Read which side this is, take an uncounted step and one more for every further line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    comfy_first()
    import torch
    import zoo.zoo  # noqa: F401  # what takes long comes before the first turn

    part = json.loads(sys.stdin.readline())
    if part["toy"]:
        torch.set_num_threads(1)  # tiny operations are no faster on more, and much slower where others work
    cpu = torch.device("cpu")
    race = Race(part["model"], toy=part["toy"], float8=part["side"].endswith("float8"))
    about = race.about() | {"machine": describe_machine(cpu)}
    loaded, numbers, began = start_peak(cpu), count(), now(cpu)

    def turn() -> None:
        """Tell of a step, and wait for the next line."""
        nonlocal began
        told = {"seconds": now(cpu) - began, "peak": read_peak(cpu), "loaded": loaded, "about": about}
        publish(options.out, next(numbers), told)
        if not sys.stdin.readline():
            sys.exit()
        began = now(cpu)

    race.run(part["side"], turn)


def comfy_first() -> None:
    """Make ComfyUI importable, on the CPU; the tiny models are, by dev.py."""
    sys.argv = [sys.argv[0], "--cpu"]
    sys.path[0] = os.environ["COMFYUI_PATH"]  # `import nodes` must find its own


class Race:
    """A model of middle size, and the sides that train it."""

    def __init__(self, model: str, *, toy: bool, float8: bool) -> None:
        import torch
        from zoo import zoo

        self.is_clip = model == "clip"
        self.row, self.title, sizes, latents, width, pooled, self.writes = SIZES[model]
        row = zoo.ZOO[self.row]
        if not toy:
            row = replace(row, config={**row.config, **sizes}, latents=latents, text=(TOKENS, width), pooled=pooled)
        zoo.ZOO[self.row] = row
        self.latents = row.latents
        dtype = torch.float8_e4m3fn if float8 else torch.float32
        self.patcher = zoo.build(self.row, dtype=dtype, compute=torch.float32)[1]

    def about(self) -> dict[str, Any]:
        """Describe the model."""
        count = sum(parameter.numel() for parameter in self.patcher.model.diffusion_model.parameters())
        return {"title": self.title, "parameters": count, "pixels": 8 * self.latents[-1]}

    def run(self, side: str, turn: Turn) -> None:
        """Take a side's steps, with a turn after each, until the process ends."""
        if side.startswith("stock"):
            self._stock(turn, checkpointing=side == "stock")
        elif side == "frozen":
            self._frozen(turn)
        else:
            self._ours(turn, "full" if side.endswith("full") else "0")

    def _inputs(self) -> tuple[Any, tuple[Any, ...], Any]:
        """Link the model, and build noised latents, levels and conditions, and the target."""
        import torch

        return inputs_of(self.row, self.patcher, torch.device("cpu"), clip=self.is_clip)

    def _frozen(self, turn: Turn) -> None:
        """Run forward and backward through ComfyUI's model as it is, down to its input."""
        import comfy.model_management
        import torch
        import torch.nn.functional as F

        model, (noised, levels, conditions), target = self._inputs()
        self.patcher.model.requires_grad_(False).eval()
        comfy.model_management.in_training = True
        while True:
            with self.possible():
                given = noised.clone().requires_grad_()
                F.mse_loss(model.denoiser.predict(given, levels, conditions), target).backward()
            assert torch.is_tensor(given.grad)
            turn()

    def possible(self) -> Any:
        """Make a backward pass possible in a model that writes into what it needs, by torch's own means."""
        import torch

        return torch.autograd.graph.allow_mutation_on_saved_tensors() if self.writes else nullcontext()

    def _ours(self, turn: Turn, level: str) -> None:
        """Train this pack's network with its session, passes and levels of checkpointing."""
        import torch

        for _ in train_steps(*self._inputs(), RANK, level, torch.device("cpu")):
            turn()

    def _stock(self, turn: Turn, *, checkpointing: bool) -> None:
        """Train by ComfyUI's own node, which waits between two steps."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from lora_atelier.bench.stock_node import train

        register_optimizer_step_post_hook(lambda *_: turn())
        around = nullcontext if checkpointing else self.possible
        train(self.row, self.patcher, rank=RANK, steps=1_000_000, depth=int(checkpointing), around=around)


def inputs_of(row: str, patcher: Any, device: Any, *, clip: bool = False) -> tuple[Any, tuple[Any, ...], Any]:
    """Link a model, and build noised latents, levels and conditions on a device, and the target."""
    import torch
    from zoo import zoo
    from zoo.linked import DrawnClip

    from lora_atelier.nodes.comfyui.connected.live import LinkedModels
    from lora_atelier.nodes.comfyui.connected.model import ConnectedModel
    from lora_atelier.trainer_core.common.axes import Framing
    from lora_atelier.trainer_core.config import BaseModelConfig, ConnectedConfig

    latents, tokens = zoo.ZOO[row].latents, zoo.ZOO[row].text[0]
    config = BaseModelConfig(path=row, connected=ConnectedConfig())
    model = ConnectedModel(config, LinkedModels(patcher, DrawnClip(row), None))
    caption = model.text.encode(" ".join(["word"] * (tokens - 2)), "cpu")
    channels, height, width = latents[0], *latents[-2:]
    shape, size = (channels, height, width), (8 * width, 8 * height)
    if clip:
        shape, size = latents, (*size, 4 * latents[1] - 3)
    framings = [Framing.whole(size)]
    noised, target = torch.randn(2, 1, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    levels = torch.full((1,), 500, device=device)
    return model, (noised, levels, model.conditions.batch([caption], framings, device)), target


def train_steps(
    model: Any,
    inputs: tuple[Any, ...],
    target: Any,
    rank: int,
    level: str,
    device: Any,
    begun: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Train a network on every layer with a session, passes and a level of checkpointing; yield after each step.

    begun: called in the session, before the first step.
    """
    import torch
    import torch.nn.functional as F

    from lora_atelier.bench.contenders import OPTIMIZER
    from lora_atelier.trainer_core.config import LoraConfig
    from lora_atelier.trainer_core.memory import recompute
    from lora_atelier.trainer_core.networks import Network
    from lora_atelier.trainer_core.networks.choose import trained_layer_of
    from lora_atelier.trainer_core.networks.layers.shape import is_matrix
    from lora_atelier.trainer_core.optim import build_optimizer

    layers = [layer for layer in model.layers.listed() if layer.trainable and is_matrix(layer.module)]
    chosen = [trained_layer_of(layer, rank, rank) for layer in layers]
    network = Network(chosen, LoraConfig(rank=rank, alpha=rank), seed=0).to(device)
    parameters = list(network.parameters())
    optimizer = build_optimizer(OPTIMIZER, [{"params": parameters, "lr": OPTIMIZER.learning_rate}])
    with ExitStack() as stack:
        stack.enter_context(model.host.session(device))
        stack.enter_context(network.attached())
        recompute(model.denoiser.units(), level, copies=True)
        begun()
        while True:
            with model.denoiser.written.passes(inputs[0].shape):
                F.mse_loss(model.denoiser.predict(*inputs), target).backward()
            torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def frozen_steps(model: Any, inputs: tuple[Any, ...], target: Any, device: Any) -> Iterator[None]:
    """Run forward and backward with full checkpointing down to the model's input; yield after each pass."""
    import torch.nn.functional as F

    from lora_atelier.trainer_core.memory import recompute

    noised, *others = inputs
    with model.host.session(device):
        recompute(model.denoiser.units(), "full", copies=True)
        while True:
            given = noised.clone().requires_grad_()
            with model.denoiser.written.passes(given.shape):
                F.mse_loss(model.denoiser.predict(given, *others), target).backward()
            assert given.grad is not None
            yield


if __name__ == "__main__":
    main()
