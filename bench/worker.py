"""Measure parts in a separate process: describe or race a case, time a contender alone, the loop, the device."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from contextlib import closing
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lora_atelier.bench.bases import empty_unet, load_unet, matrices_of
from lora_atelier.bench.cases import BASES, CASES, CURVE, PATIENCE, Case, Setting
from lora_atelier.bench.contenders import (
    CONTENDERS,
    CannotCompile,
    build_batch,
    count_flops,
    prepare,
    race,
    share_weights,
    short_reason,
    warm_up,
)
from lora_atelier.bench.estimates import estimate
from lora_atelier.bench.loop import time_loop
from lora_atelier.bench.measure import describe_machine, now, read_overhead, read_peak, read_reserved, start_peak
from lora_atelier.bench.parts import stock_left_out
from lora_atelier.bench.results import Child, publish
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.memory import DTYPES, kept_activations, room_for_programs

META = torch.device("meta")
TRIFLE = 200e6  # bytes: workspaces that libraries keep
ALONE_STEPS = 2  # on the CPU, after one more: the second is the first with optimizer state, the third repeats it


def measure(part: dict[str, Any]) -> dict[str, Any]:
    """Measure a part; return a failure as one sentence under `left_out`."""
    if part["what"] == "device":
        return measure_device(torch.device(part["device"]), part["side"])
    case = CASES[part["case"]]
    try:
        if part["what"] == "describe":
            return describe_case(case)
        if part["what"] == "race":
            return race_case(case, part["contenders"])
        if part["what"] == "alone":
            return measure_alone(case, part["contender"], setting_named(part["setting"]))
        if part["what"] == "estimate":
            return {"megabytes": estimate(case, setting_named(part["setting"]))}
        return {"steps": time_loop(case)}
    except (torch.OutOfMemoryError, CannotCompile, ModuleNotFoundError) as problem:
        return {"left_out": short_reason(problem)}


def setting_named(name: str) -> Setting:
    """Find a setting by its name."""
    return next(setting for setting in CURVE if setting.name == name)


def describe_case(case: Case) -> dict[str, Any]:
    """Describe a case: its settings, the machine, the layers of its base model and its work."""
    layers = len(matrices_of(empty_unet(case.base), case.preset))
    return {
        "case": asdict(case),
        "machine": describe_machine(torch.device(case.device)),
        "title": BASES[case.base].title,
        "layers": layers,
        "flops": case.batch * flops_of_one(case.base, case.resolution, DTYPES[case.dtype]),
    }


@cache
def flops_of_one(base: str, resolution: int, dtype: torch.dtype) -> float:
    """Count the operations of a frozen pass of one picture."""
    unet = empty_unet(base)
    return count_flops(torch.nn.Module.to(unet, dtype), build_batch(unet, resolution, 1, META, dtype))


@lru_cache(maxsize=1)
def loaded_unet(base: str, device: torch.device) -> torch.nn.Module:
    """Load a UNet into RAM; all parts of this process share it."""
    return load_unet(base, device)


def frozen_unet(case: Case) -> torch.nn.Module:
    """Load a separate UNet for a part, as on the CPU the measured memory must hold nothing else."""
    device = torch.device(case.device)
    return load_unet(case.base, device) if device.type == "cpu" else share_weights(loaded_unet(case.base, device))


def race_case(case: Case, contenders: list[str]) -> dict[str, Any]:
    """Race contenders on a case; return their steps, the reasons of those that left, and what the node told of itself.

    ComfyUI's node takes its turns in a process of its own.
    """
    why = stock_left_out(case) if "stock" in contenders else ""
    own = [name for name in contenders if name != "stock"]
    unet = frozen_unet(case)
    batch = build_batch(unet, case.resolution, case.batch, torch.device(case.device), DTYPES[case.dtype])
    with room_for_programs("compiled" in own):
        if why or own == contenders:
            steps, without = race(unet, batch, _lora(case), own, case.race_steps)
            return {"steps": steps, "without": without | ({"stock": why} if why else {})}
        with closing(Node(case)) as node:
            steps, without = race(unet, batch, _lora(case), own, case.race_steps, {"stock": node.step})
    return {"steps": steps, "without": without, **({"stock": node.told} if node.told else {})}


class Node:
    """ComfyUI's node in a process of its own, which takes a step for each call; `told`: what it says after the last."""

    def __init__(self, case: Case) -> None:
        self._part = {"what": "stock", "case": case.name, "turns": case.race_steps}
        self._process, self.told = Child(self._part), {}

    def step(self) -> dict[str, float]:
        """Let the node take a step, the first time the uncounted ones; return its seconds."""
        told = self._process.measure(self._part, PATIENCE)
        if isinstance(told["seconds"], list):
            self.told = told
            return {"seconds": told["seconds"][-1]}
        return told

    def close(self) -> None:
        """End the process."""
        self._process.end()


def measure_alone(case: Case, contender: str, setting: Setting) -> dict[str, Any]:
    """Measure a contender alone: seconds of steps, and MB with the model loaded, at the peak, and of CUDA itself.

    Raises RuntimeError when an earlier part of this process left more than TRIFLE on the device.
    """
    device, dtype = torch.device(case.device), DTYPES[case.dtype]
    gc.collect()
    if device.type == "cuda" and (kept := torch.cuda.memory_allocated(device)) > TRIFLE:
        raise RuntimeError(f"{kept / 1e6:,.0f} MB of the part before are still on the device.")
    build, memory = CONTENDERS[contender]
    memory = memory if setting == CURVE[0] else setting.memory
    unet = prepare(frozen_unet(case), memory, setting.weights, dtype, device)
    batch = build_batch(unet, case.resolution, case.batch, device, dtype)
    gc.collect()
    loaded = start_peak(device)
    step = build(unet, batch, _lora(case))
    with kept_activations(memory, [unet], device), room_for_programs(memory.compile):
        steps = [step() for _ in range(warm_up(device) + (ALONE_STEPS if device.type == "cpu" else case.race_steps))]
    return {
        "seconds": [timings["seconds"] for timings in steps[warm_up(device) :]],
        "loaded": loaded,
        "peak": read_peak(device),
        "reserved": read_reserved(device),
        "overhead": read_overhead(device),
    }


def measure_device(device: torch.device, side: int) -> dict[str, Any]:
    """Measure the bfloat16 operations per second of a product of two side x side matrices, the median of ten."""
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    timings = []
    for _ in range(13):
        began = now(device)
        torch.mm(left, right)
        timings.append(now(device) - began)
    total = torch.cuda.get_device_properties(device).total_memory / 1e6 if device.type == "cuda" else None
    return {"machine": describe_machine(device), "measured": 2 * side**3 / median(timings[3:]), "megabytes": total}


def _lora(case: Case) -> LoraConfig:
    return LoraConfig(rank=case.rank, alpha=case.rank, preset=case.preset)  # type: ignore[arg-type]


def main() -> None:
    """Read parts as lines of JSON, measure them, and send each one's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    for number, line in enumerate(sys.stdin):
        publish(options.out, number, measure(json.loads(line)))


if __name__ == "__main__":
    main()
