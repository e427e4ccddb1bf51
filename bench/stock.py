"""Time ComfyUI's own TrainLoraNode, executed in this process as its server would execute it: alone, or in turns.

The node computes in float32 when training_dtype is "fp32": it then casts every weight to float32, and torch.autocast,
which knows no float32 on either device, turns itself off. The dtype that reaches the UNet's layers is recorded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from lora_atelier.bench.bases import ready
from lora_atelier.bench.cases import CASES, Case
from lora_atelier.bench.results import publish

SIZE_NUMBERS = 6 * 256  # channels of Stable Diffusion XL's size and crop numbers


def main() -> None:
    """Read a case as a line of JSON, run the node on it, and send the measurements.

    A case with turns takes a step for each line, the uncounted ones for the first; after the last it sends all of them.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    part = json.loads(sys.stdin.readline())
    case = CASES[part["case"]]
    # ComfyUI reads the command line when it is imported, and `import nodes` must find its own.
    sys.argv = [sys.argv[0], *(["--cpu"] if case.device == "cpu" else [])]
    sys.path[0] = os.environ["COMFYUI_PATH"]
    import comfy.options

    comfy.options.enable_args_parsing()
    numbers = count()

    def wait(seconds: float) -> None:
        publish(options.out, next(numbers), {"seconds": seconds})
        if not sys.stdin.readline():
            sys.exit()

    found = run_stock(case, part["turns"], wait) if "turns" in part else run_stock(case, case.stock_steps)
    publish(options.out, next(numbers), found)


def run_stock(case: Case, steps: int, wait: Callable[[float], None] | None = None) -> dict[str, Any]:
    """Train steps after uncounted ones; return their seconds, memory in MB and the trained tensors.

    wait: gets the seconds of the last uncounted step and of each after it but the last, and returns when it is this
    node's turn again.
    """
    import comfy.sd
    import comfy_extras.nodes_train as stock
    import torch
    from comfy.weight_adapter import adapter_maps
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from lora_atelier.bench.measure import now, read_peak, read_reserved, start_peak

    device = torch.device(case.device)
    uncounted = 1 if case.device == "cpu" else 2
    register_tiny()
    taken: list[float] = []  # seconds of each step; those of the first include what comes before it
    since = now(device)
    computed: set[str] = set()

    def look(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            computed.add(str(output.dtype).removeprefix("torch."))

    def end_step(*_: Any) -> None:
        nonlocal since
        looking.remove()  # the first step, which is not counted, has shown it
        taken.append(now(device) - since)
        if wait and uncounted <= len(taken) < uncounted + steps:
            wait(taken[-1])
        since = now(device)

    with torch.inference_mode():  # as ComfyUI's executor
        path = str(ready(case.base))
        model = comfy.sd.load_checkpoint_guess_config(path, output_vae=False, output_clip=False)[0]
        unet = model.model.diffusion_model
        seeded = torch.Generator().manual_seed(0)
        width = next(p.shape[1] for n, p in unet.named_parameters() if n.endswith("attn2.to_k.weight"))
        context = torch.randn(1, 77, width, generator=seeded)
        more = {}
        if hasattr(unet, "label_emb"):
            more["pooled_output"] = torch.randn(1, unet.label_emb[0][0].in_features - SIZE_NUMBERS, generator=seeded)
        latents = torch.randn(case.batch, 4, case.resolution // 8, case.resolution // 8, generator=seeded)
        values: dict[str, Any] = {
            "latents": {"samples": latents},
            "positive": [[context, more]],
            "batch_size": case.batch,
            "steps": steps + uncounted,
            "grad_accumulation_steps": 1,
            "learning_rate": 0.0005,
            "rank": case.rank,
            "optimizer": "AdamW",
            "loss_function": "MSE",
            "seed": 0,
            "training_dtype": {"float32": "fp32", "bfloat16": "bf16"}[case.dtype],
            "lora_dtype": "fp32",
            "quantized_backward": False,
            "algorithm": next(iter(adapter_maps)),
            "gradient_checkpointing": False,
            "checkpoint_depth": 1,
            "offloading": False,
            "existing_lora": "[None]",
            "bucket_mode": False,
            "bypass_mode": False,
        }
        looking = register_module_forward_hook(look)  # on all modules: the node works on a copy of the model
        hook = register_optimizer_step_post_hook(end_step)
        loaded = start_peak(device)
        began = time.perf_counter()
        output = stock.TrainLoraNode.execute(model=[model], **{name: [value] for name, value in values.items()})
        hook.remove()
    lora = output.args[0]
    return {
        "seconds": taken[uncounted:],
        "whole": time.perf_counter() - began,
        "loaded": loaded,
        "peak": read_peak(device),
        "reserved": read_reserved(device),
        "compute_dtype": sorted(computed),
        "adapters": sum(name.endswith(("lora_up.weight", "lora_B.weight")) for name in lora),
        "tensors": len(lora),
    }


def register_tiny() -> None:
    """Make ComfyUI's loader know the tiny base model, with the pack's own file."""
    path = Path(__file__).resolve().parents[1] / "nodes" / "comfyui" / "tiny.py"
    spec = importlib.util.spec_from_file_location("atelier_tiny", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register_tiny_model()


if __name__ == "__main__":
    main()
