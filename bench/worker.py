"""One measurement in a process of its own: the race, a contender's memory, or the training loop."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from lora_atelier.bench.bases import BASES, Base, load_unet, ready
from lora_atelier.bench.contenders import CONTENDERS, build_batch, race
from lora_atelier.bench.loop import time_loop
from lora_atelier.bench.measure import describe_machine, read_peak, start_peak
from lora_atelier.trainer_core.models.family import UNET, detect_family
from lora_atelier.trainer_core.models.header import read_header
from lora_atelier.trainer_core.models.unet import unet_shape
from lora_atelier.trainer_core.networks.attach import unet_layers

MEMORY_STEPS = 3  # the second step is the first with optimizer state, the third repeats it


def measure_memory(unet: torch.nn.Module, resolution: int, contender: str, device: torch.device) -> dict[str, float]:
    """Return the memory in MB with the model loaded, and the peak of a contender that is alone with it."""
    gc.collect()
    batch = build_batch(unet, resolution)
    loaded = start_peak(device)
    step = CONTENDERS[contender](unet, batch)
    for _ in range(MEMORY_STEPS):
        step()
    return {"loaded": loaded, "peak": read_peak(device)}


def describe_base(base: Base, resolution: int) -> dict[str, Any]:
    """Return what the runner needs to know of a base model, made if it is not there yet."""
    path = ready(base)
    header = read_header(path)
    shapes = {k.removeprefix(UNET): v for k, v in header.shapes.items() if k.startswith(UNET)}
    shape = unet_shape(shapes, detect_family(header))
    with torch.device("meta"):
        unet = UNet2DConditionModel(**shape)
    return {
        "title": base.title,
        "path": str(path),
        "resolution": resolution,
        "layers": len(unet_layers(unet, "full")),
        "race": base.race_steps,
        "stock": base.stock_steps,
        "loop": base.loop_steps,
    }


def main() -> None:
    """Read the options, measure and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["prepare", "race", "memory", "loop"])
    parser.add_argument("--model", required=True, choices=BASES)
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--contender", choices=CONTENDERS, default="ours")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    base, device = BASES[options.model], torch.device(options.device)
    resolution = base.resolution if device.type == "cpu" else base.gpu_resolution
    result: Any
    if options.what == "prepare":
        result = {"machine": describe_machine(device), "sizes": describe_base(base, resolution)}
    elif options.what == "loop":
        result = time_loop(base.path, resolution, options.steps, device)
    else:
        unet = load_unet(base.path, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        if options.what == "race":
            result = race(unet, build_batch(unet, resolution), options.steps)
        else:
            result = measure_memory(unet, resolution, options.contender, device)
    options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
