"""Time ComfyUI's own TrainLoraNode, executed in this process as its server would execute it.

The node computes in float32 when training_dtype is "fp32": it then casts every weight to float32, and torch.autocast,
which knows no float32 on either device, turns itself off. The dtype that reaches the UNet's layers is looked at.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the options, run the node and write what was measured as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--resolution", required=True, type=int)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    # ComfyUI reads the command line when it is imported, and `import nodes` must find its own.
    sys.argv = [sys.argv[0], *(["--cpu"] if options.device == "cpu" else [])]
    sys.path[0] = os.environ["COMFYUI_PATH"]
    import comfy.options

    comfy.options.enable_args_parsing()
    options.out.write_text(json.dumps(run_stock(options.model, options.resolution, options.steps, options.device)))


def run_stock(path: Path, resolution: int, steps: int, device_name: str) -> dict[str, Any]:
    """Train `steps` steps after one that is not counted; return seconds of each, memory in MB and what was trained."""
    import comfy.sd
    import comfy_extras.nodes_train as stock
    import torch
    from comfy.weight_adapter import adapter_maps
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from lora_atelier.bench.measure import now, read_peak, start_peak

    device = torch.device(device_name)
    precision = "fp32" if device.type == "cpu" else "bf16"
    register_tiny()
    ends: list[float] = []
    computed: set[str] = set()

    def look(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            computed.add(str(output.dtype).removeprefix("torch."))

    def end_step(*_: Any) -> None:
        looking.remove()  # the first step, which is not counted, has shown it
        ends.append(now(device))

    with torch.inference_mode():  # as ComfyUI's executor
        model = comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]
        unet = model.model.diffusion_model
        seeded = torch.Generator().manual_seed(0)
        width = unet.input_blocks[1][1].transformer_blocks[0].attn2.to_k.weight.shape[1]
        context = torch.randn(1, 77, width, generator=seeded)
        latents = torch.randn(1, 4, resolution // 8, resolution // 8, generator=seeded)
        values: dict[str, Any] = {
            "latents": {"samples": latents},
            "positive": [[context, {}]],
            "batch_size": 1,
            "steps": steps + 1,
            "grad_accumulation_steps": 1,
            "learning_rate": 0.0005,
            "rank": 8,
            "optimizer": "AdamW",
            "loss_function": "MSE",
            "seed": 0,
            "training_dtype": precision,
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
        "seconds": [later - earlier for earlier, later in pairwise(ends)],
        "whole": time.perf_counter() - began,
        "loaded": loaded,
        "peak": read_peak(device),
        "compute_dtype": sorted(computed),
        "adapters": sum(name.endswith(("lora_up.weight", "lora_B.weight")) for name in lora),
        "tensors": len(lora),
    }


def register_tiny() -> None:
    """Teach ComfyUI's loader the tiny base model, with the pack's own file."""
    path = Path(__file__).resolve().parents[1] / "nodes" / "tiny.py"
    spec = importlib.util.spec_from_file_location("atelier_tiny", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.register_tiny_model()


if __name__ == "__main__":
    main()
