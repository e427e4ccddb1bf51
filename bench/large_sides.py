"""Measure a large linked model on one card: random weights made there, in the format they lie in, layer by layer."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lora_atelier.bench.large import MODELS, RANK, SIDES, STEPS, Large, Side
from lora_atelier.bench.results import publish

STATE = 16  # bytes for each number of a LoRA: itself, its gradient and the optimizer's two, in float32
FILES = {
    "int8": ({"format": "int8_tensorwise"}, {"per_channel": True}),
    "float8, scaled": ({"format": "float8_e4m3fn"}, {"scale": "recalculate"}),
}  # ComfyUI's formats of files: what they say of a layer, and how it is rounded


def main() -> None:
    """Read parts as lines of JSON, measure them, and send each one's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    for number, line in enumerate(sys.stdin):
        part = json.loads(line)
        comfy_on(MODELS[part["case"]].device)
        publish(options.out, number, measure(part))


def comfy_on(device: str) -> None:
    """Import ComfyUI so that it computes on a device, and leaves a model there as a whole."""
    if os.environ["COMFYUI_PATH"] not in sys.path:
        sys.path.insert(0, os.environ["COMFYUI_PATH"])  # before `import nodes` could find another
    import comfy.cli_args

    args = comfy.cli_args.args
    args.cpu, args.highvram = device == "cpu", device != "cpu"  # read when model_management is imported
    import comfy.model_management
    import zoo.zoo  # noqa: F401  # asks for the CPU, too late to get it elsewhere

    args.cpu = device == "cpu"


def measure(part: dict[str, Any]) -> dict[str, Any]:
    """Measure a side of a model alone: seconds of steps, and MB; why it is left out, under `left_out`."""
    import torch
    from zoo import zoo

    from lora_atelier.bench.contenders import short_reason, warm_up
    from lora_atelier.bench.measure import read_overhead, read_peak, read_reserved, start_peak
    from lora_atelier.trainer_core.memory import check_compute

    model, side, device = MODELS[part["case"]], SIDES[part["side"]], torch.device(MODELS[part["case"]].device)
    if model.row not in zoo.ZOO:
        return {"left_out": f"this ComfyUI has no {model.title}."}
    size(model)
    if why := too_large(model, side, device):
        return {"left_out": why}
    gc.collect()
    try:
        check_compute(side.compute, device, "auto")
        built = build(model, side, device)
        loaded = start_peak(device)
        seconds = list(islice(steps(model, side, built, device), warm_up(device) + STEPS))
    except (torch.OutOfMemoryError, ValueError) as problem:
        return {"left_out": short_reason(problem)}
    return {
        "seconds": seconds[warm_up(device) :],
        "parameters": sum(counts(model)),
        "loaded": loaded,
        "peak": read_peak(device),
        "reserved": read_reserved(device),
        "overhead": read_overhead(device),
    }


def size(model: Large) -> None:
    """Give the row of the tiny models this model's size; a toy keeps its own."""
    from zoo import zoo

    row = zoo.ZOO[model.row]
    if model.text[0]:
        config = {**row.config, **dict(model.config)}
        zoo.ZOO[model.row] = replace(row, config=config, latents=model.latents, text=model.text)


def counts(model: Large) -> tuple[int, int]:
    """Count the weights that files of 8 bits round, and the others, without making them."""
    outline = outlined(model)
    chosen = sum(module.weight.numel() for module in rounding(outline).values())
    return chosen, sum(parameter.numel() for parameter in outline.parameters()) - chosen


def outlined(model: Large) -> Any:
    """Build a model's layers without weights."""
    import torch
    from zoo import zoo

    with zoo.row_of(model.row).building():
        return zoo.settings(model.row, torch.bfloat16).get_model({}, "", device="meta").diffusion_model


def rounding(module: Any) -> dict[str, Any]:
    """List the linear layers that files of 8 bits round: those of blocks, without modulations."""
    import torch

    from lora_atelier.trainer_core.memory import takes_sides

    named = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    inside = {name: layer for name, layer in named.items() if re.search(r"\.\d+\.", name) and "mod" not in name.lower()}
    return {name: layer for name, layer in inside.items() if takes_sides(*layer.weight.shape)}


def needed(model: Large, side: Side) -> int:
    """Count the bytes of weights and LoRA, the least that a side needs."""
    import torch

    rounded, others = counts(model)
    shapes = [layer.weight.shape for layer in outlined(model).modules() if isinstance(layer, torch.nn.Linear)]
    lora = STATE * RANK * sum(map(sum, shapes)) if side.trains else 0
    one = side.stored != "bfloat16"
    return rounded * (1 if one else 2) + others * (1 if side.stored == "float8" else 2) + lora


def too_large(model: Large, side: Side, device: Any) -> str:
    """Say why a model is not built: its counted bytes are more than the device has; "" if they are not."""
    import torch

    if device.type != "cuda":
        return ""
    total, least = torch.cuda.get_device_properties(device).total_memory, needed(model, side)
    if least < total:
        return ""
    return f"weights and LoRA alone take {least / 1e9:.1f} GB, and the card has {total / 1e9:.1f} GB."


def build(model: Large, side: Side, device: Any) -> Any:
    """Build a model on the device, its weights drawn in the format they lie in; return its patcher."""
    import comfy.model_patcher
    import comfy.ops
    import torch
    from zoo import zoo

    compute = getattr(torch, model.dtype)
    stored = torch.float8_e4m3fn if side.stored == "float8" else compute
    config = zoo.settings(model.row, stored, compute)
    if side.stored in FILES:
        config.quant_config = {"mixed_ops": True}
        config.custom_operations = comfy.ops.mixed_precision_ops({"mixed_ops": True}, compute)
    with zoo.row_of(model.row).building():
        whole = config.get_model({}, "", device=device)
    fill(whole, device, side, set(rounding(outlined(model))))
    whole.device = device
    return comfy.model_patcher.ModelPatcher(whole, load_device=device, offload_device=device)


def fill(model: Any, device: Any, side: Side, chosen: set[str]) -> None:
    """Draw weights one by one on the device, in bfloat16, so that activations stay near 1; round the chosen ones."""
    import torch

    draws = torch.Generator(device).manual_seed(0)

    def drawn(shape: Any) -> Any:
        values = torch.randn(shape, generator=draws, device=device, dtype=torch.bfloat16)
        return values / values[0].numel() ** 0.5 if values.ndim > 1 else values.mul_(0.05)

    with torch.no_grad():
        for name, layer in model.diffusion_model.named_modules():
            if not hasattr(layer, "weight") and hasattr(layer, "_orig_shape"):  # a layer of a file, not read yet
                load(layer, drawn(layer._orig_shape), side.stored if name in chosen else "")
        for name, parameter in model.diffusion_model.named_parameters():
            if type(parameter.data) is torch.Tensor:
                norm = parameter.ndim == 1 and name.endswith(("weight", "gamma"))
                parameter.copy_(drawn(parameter.shape) + 1 if norm else drawn(parameter.shape))


def load(layer: Any, weight: Any, stored: str) -> None:
    """Load a layer's weight as ComfyUI does from a file, in 8 bits where `stored` names such a format."""
    import torch
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    state = {"weight": weight}
    if stored:
        config, how = FILES[stored]
        packed = QuantizedTensor.from_float(weight, QUANT_ALGOS[config["format"]]["comfy_tensor_layout"], **how)
        about = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
        state = {"weight": packed._qdata, "weight_scale": packed._params.scale, "comfy_quant": about}
    layer.load_state_dict(state, strict=False)


def steps(model: Large, side: Side, patcher: Any, device: Any) -> Any:
    """Take steps with full checkpointing, and yield the seconds of each."""
    from lora_atelier.bench.connected_sides import frozen_steps, inputs_of, train_steps
    from lora_atelier.bench.measure import now
    from lora_atelier.trainer_core.memory import multiply_in
    from lora_atelier.trainer_core.networks.rounded import rounding_layers

    linked, inputs, target = inputs_of(model.row, patcher, device)

    def begun() -> None:
        if side.compute:
            for layers in rounding_layers(linked).values():
                multiply_in(side.compute, layers)

    if side.trains:
        taken = train_steps(linked, inputs, target, RANK, "full", device, begun)
    else:
        taken = frozen_steps(linked, inputs, target, device)
    began = now(device)
    for _ in taken:
        yield now(device) - began
        began = now(device)


if __name__ == "__main__":
    main()
