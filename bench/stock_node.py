"""ComfyUI's TrainLoraNode, called on a random model as its server calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch


def train(
    row: str,
    patcher: Any,
    *,
    rank: int,
    steps: int,
    depth: int,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Train on a random picture and caption in float32, and return the losses of the steps.

    depth: of its gradient checkpointing, 0 for none. around: makes what wraps every forward and backward pass.
    """
    import comfy_extras.nodes_train as stock
    import torch
    from comfy.weight_adapter import adapter_maps
    from zoo import zoo

    own = stock.TrainSampler.fwd_bwd

    def wrapped(*arguments: Any, **named: Any) -> Any:
        with around():
            return own(*arguments, **named)

    patcher.cached_patcher_init = (lambda **_: patcher, ())  # no second copy of the weights
    values: dict[str, Any] = {
        "latents": {"samples": zoo.latents(row)},
        "positive": zoo.conditioning(row),
        "batch_size": 1,
        "steps": steps,
        "grad_accumulation_steps": 1,
        "learning_rate": 0.0005,
        "rank": rank,
        "optimizer": "AdamW",
        "loss_function": "MSE",
        "seed": 0,
        "training_dtype": "fp32",
        "lora_dtype": "fp32",
        "quantized_backward": False,
        "algorithm": next(iter(adapter_maps)),
        "gradient_checkpointing": depth > 0,
        "checkpoint_depth": max(depth, 1),
        "offloading": False,
        "existing_lora": "[None]",
        "bucket_mode": False,
        "bypass_mode": False,
    }
    with torch.inference_mode(), patch.object(stock.TrainSampler, "fwd_bwd", wrapped):
        output = stock.TrainLoraNode.execute(model=[patcher], **{name: [value] for name, value in values.items()})
    return output.args[1]["loss"]
