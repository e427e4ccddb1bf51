"""Compare gradients under checkpointing with exact ones, of ComfyUI's own node and of ours, on tiny models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lora_atelier.bench.connected_sides import comfy_first

MODELS = {
    "Flux": "flux_dev",
    "HunyuanVideo": "hunyuan_video",
    "Chroma": "chroma",
    "LTXV": "ltxv",
    "Wan 2.1": "wan21_t2v",
}
RANK, STEP = 4, 0.02
LEVELS = ("1", "3", "full")


def main() -> None:
    """Measure all models and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    comfy_first()
    import torch

    torch.set_num_threads(1)  # the models are tiny
    names = [options.model] if options.model else list(MODELS)
    options.out.write_text(json.dumps({name: measure(MODELS[name]) for name in names}))


def measure(row: str) -> dict[str, Any]:
    """Compute each way's error, and under "slope" those of the exact passes against central differences."""
    theirs, their_slope = _of_the_node(row)
    ours, our_slope = _of_ours(row)
    return {**theirs, **ours, "slope": (their_slope, our_slope)}


def _of_the_node(row: str) -> tuple[dict[str, float], float]:
    """Take the gradients of the node's first step, its network filled as if it had been trained."""
    import torch
    from zoo import zoo

    from lora_atelier.trainer_core.memory import copied_before_written

    def run(depth: int, move: Callable[[int, Any], Any] = lambda number, value: value, **more: Any) -> Any:
        torch.manual_seed(0)  # the node draws its level of noise from the global generator
        return first_step(row, zoo.build(row)[1], depth, move, **more)

    _, exact = run(0, around=copied_before_written)
    norm = _length(exact)
    losses = [
        run(0, lambda number, value, way=way: value + way * exact[number] / norm, around=copied_before_written)[0]
        for way in (STEP, -STEP)
    ]
    found = {f"node, depth {depth}": _apart(run(depth)[1], exact) for depth in (1, 2)}
    return found, abs((losses[0] - losses[1]) / (2 * STEP) / norm - 1)


def first_step(
    row: str, patcher: Any, depth: int, move: Callable[[int, Any], Any], **more: Any
) -> tuple[float, list[Any]]:
    """Run the node for one step; return its loss and the gradient of every parameter in order.

    move: changes the value of the parameter of a number.
    """
    from unittest.mock import patch

    import comfy_extras.nodes_train as stock
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from lora_atelier.bench.stock_node import train

    own, found = stock._create_optimizer, []

    def fill(name: str, parameters: Any, rate: float) -> Any:
        parameters, draws = list(parameters), torch.Generator().manual_seed(3)
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                if parameter.requires_grad:
                    parameter.copy_(move(number, 0.05 * torch.randn(parameter.shape, generator=draws)))
        return own(name, parameters, rate)

    def note(optimizer: Any, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters)

    hook = register_optimizer_step_pre_hook(note)
    try:
        with patch.object(stock, "_create_optimizer", fill):
            (loss,) = train(row, patcher, rank=RANK, steps=1, depth=depth, **more)
    finally:
        hook.remove()
    return loss, found


def _of_ours(row: str) -> tuple[dict[str, float], float]:
    """Take the gradients of our pass at every level of checkpointing."""
    from zoo.trial import Trial

    from lora_atelier.nodes.comfyui.connected import gradients
    from lora_atelier.trainer_core.memory import recompute

    trial = Trial(row)
    with gradients.session(trial.patcher), trial.network.attached():
        exact = trial.gradients()
        norm = _length(exact)
        slope = trial.slope([gradient / norm for gradient in exact], STEP)
        found = {"ours": _apart(trial.gradients(), exact)}
        for level in LEVELS:
            recompute(trial.units, level, copies=True)
            found[f"ours, level {level}"] = _apart(trial.gradients(), exact)
    return found, float(abs(slope / norm - 1))


def _length(tensors: Sequence[Any]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5


def _apart(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Compute how far two gradients are apart, relative to the second."""
    return _length([a.double() - b.double() for a, b in zip(one, other, strict=True)]) / _length(other)


if __name__ == "__main__":
    main()
