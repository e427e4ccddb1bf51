"""Measure the tools for LoRAs at the size of SDXL; called by `dev.py bench --tools`."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_atelier.bench.report import build_ratio, ratios_head, verdict

RANK, SMALLER = 32, 8
GOAL = 20.0  # seconds for a LoRA of SDXL's size on two cores
SIZES = {"sdxl": "sdxl", "toy": "toy-sdxl"}


def measure(name: str) -> dict[str, Any]:
    """Resize a random LoRA on all of a UNet's matrices by several rules, and decompose each change as a whole beside.

    Whole decompositions and extraction are measured once for each shape, and count as often as it occurs.
    """
    import torch

    from lora_atelier.bench.checkpoints import ARCHITECTURES, checkpoint_shapes
    from lora_atelier.bench.measure import describe_machine
    from lora_atelier.trainer_core.lora_files.extract import extract
    from lora_atelier.trainer_core.lora_files.formats import delta_weight
    from lora_atelier.trainer_core.lora_files.lora import layers_of
    from lora_atelier.trainer_core.lora_files.recipes import parse_recipes
    from lora_atelier.trainer_core.lora_files.resize import RankRule, resize, resize_by_recipes
    from lora_atelier.trainer_core.models.sd.family import UNET

    draws = torch.Generator().manual_seed(0)
    shapes = {
        key.removeprefix(UNET).removesuffix(".weight").replace(".", "_"): tuple(tensor.shape)
        for key, tensor in checkpoint_shapes(ARCHITECTURES[SIZES[name]]).items()
        if key.startswith(UNET) and tensor.ndim > 1
    }
    tensors = {}
    for layer, (rows, *rest) in shapes.items():
        rank = min(RANK, rows, rest[0])
        down = torch.randn(rank, *rest, generator=draws) * 0.5 ** (torch.arange(rank) / 4).view(-1, *[1] * len(rest))
        up = torch.randn(rows, rank, *[1] * (len(rest) - 1), generator=draws)
        tensors |= {f"{layer}.lora_down.weight": down.half(), f"{layer}.lora_up.weight": up.half() * 0.01}
    lora = layers_of(tensors, "a LoRA")

    def seconds(work: Callable[[], Any]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    ours = {
        f"rank {SMALLER}": seconds(lambda: resize(lora, RankRule(rank=SMALLER))),
        "sv_fro 0.9": seconds(lambda: resize(lora, RankRule(mode="sv_fro", value=0.9))),
        "recipe spn_lora=1,thr=-1": seconds(lambda: resize_by_recipes(lora, parse_recipes("spn_lora=1,thr=-1"))),
    }
    weights = {shape: torch.randn(shape, generator=draws) / shape[1] ** 0.5 for shape in set(shapes.values())}
    for recipe in ("fro_ckpt=1,thr=-3.55", "spn_ckpt=1,thr=-1", "spn_ckpt=1,size=100"):
        parsed = parse_recipes(recipe)
        ours[f"recipe {recipe}"] = seconds(
            lambda parsed=parsed: resize_by_recipes(lora, parsed, lambda layer: weights[shapes[layer]])
        )
    whole, extracted = 0.0, 0.0
    for shape, count in Counter(shapes.values()).items():
        layer = next(key for key, each in shapes.items() if each == shape)
        change = delta_weight(lora.layers[layer]).view(shape)
        whole += count * seconds(lambda change=change: torch.linalg.svd(change.flatten(1), full_matrices=False))
        base = torch.randn(shape, generator=draws)
        pair = {layer: lambda base=base, change=change: base + change}, {layer: lambda base=base: base}
        extracted += count * seconds(lambda pair=pair: extract(*pair, RankRule(rank=RANK)))
    return {
        "machine": describe_machine(torch.device("cpu")),
        "layers": len(shapes),
        "megabytes": sum(tensor.nbytes for tensor in tensors.values()) / 1e6,
        "ours": ours,
        "whole": whole,
        "extracted": extracted,
    }


def render(result: dict[str, Any], command: str, stamp: str) -> str:
    """Write the table of tools as Markdown."""
    machine = result["machine"]
    fro = result["ours"]["sv_fro 0.9"]
    lines = [
        "### Tools for LoRAs, CPU",
        "",
        "The checkpoint's weights are random as well: one tensor for each shape, in memory. "
        f"A random LoRA of rank {RANK} in float16 on all {result['layers']} matrices of SDXL's UNet, "
        f"{result['megabytes']:.0f} MB. {stamp}, {machine['cpu']}, {machine['cores']} cores. Command: `{command}`.",
        "",
        "| | seconds | target | |",
        "|---|---|---|---|",
        *(
            f"| Resize LoRA, {name} | {seconds:.1f} | ≤ {GOAL:.0f} | {'met' if seconds <= GOAL else '**missed**'} |"
            for name, seconds in result["ours"].items()
        ),
        f"| singular values of each whole change, as other programs resize | {result['whole']:.1f} |  |  |",
        f"| Extract LoRA, rank {RANK}, without reading files | {result['extracted']:.1f} |  |  |",
        "",
        *ratios_head("ratio"),
        verdict(build_ratio("whole decompositions / Resize LoRA, sv_fro", [result["whole"] / fro], least=10), False),
        verdict(build_ratio("whole decompositions / Extract LoRA", [result["whole"] / result["extracted"]]), False),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=SIZES)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(options.model)))


if __name__ == "__main__":
    main()
