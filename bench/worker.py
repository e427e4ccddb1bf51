"""One measurement, in a process of its own: a case described or raced, a contender alone, the loop, the device."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lora_atelier.bench.bases import empty_unet, load_unet, ready
from lora_atelier.bench.cases import BASES, CASES, CURVE, Case
from lora_atelier.bench.contenders import CONTENDERS, build_batch, count_flops, estimated, prepare, race, warm_up
from lora_atelier.bench.loop import time_loop
from lora_atelier.bench.measure import describe_machine, now, read_peak, read_reserved, start_peak
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.memory import DTYPES, kept_activations, room_for_programs
from lora_atelier.trainer_core.networks.choose import unet_layers

META = torch.device("meta")
ALONE_STEPS = 2  # on the CPU, after one more: the second is the first with optimizer state, the third repeats it


def measure(part: dict[str, Any]) -> dict[str, Any]:
    """Measure what a part names; what cannot be done here comes back as one sentence under `left_out`."""
    try:
        if part["what"] == "device":
            return measure_device(torch.device(part["device"]), part["side"])
        case = CASES[part["case"]]
        if part["what"] == "describe":
            return describe_case(case)
        if part["what"] == "race":
            with room_for_programs("compiled" in part["contenders"]):
                return {"steps": race_case(case, part["contenders"])}
        if part["what"] == "alone":
            return measure_alone(case, part["contender"], part.get("setting", CURVE[0].name))
        return {"steps": time_loop(case)}
    except torch.OutOfMemoryError:
        return {"left_out": "it does not fit into the memory of this device"}


def describe_case(case: Case) -> dict[str, Any]:
    """Return what a case is: the machine, its base model (made if it is not there yet), its layers and its work."""
    unet = empty_unet(ready(case.base))
    batch = build_batch(unet, case.resolution, case.batch, META, DTYPES[case.dtype])
    layers = len(unet_layers(unet, case.preset))
    return {
        "machine": describe_machine(torch.device(case.device)),
        "title": BASES[case.base].title,
        "layers": layers,
        "flops": count_flops(torch.nn.Module.to(unet, DTYPES[case.dtype]), batch),
        "missing": [name for name in case.contenders if name == "peft" and not importlib.util.find_spec("peft")],
    }


def race_case(case: Case, contenders: list[str]) -> list[dict[str, dict[str, float]]]:
    """Race contenders on a case."""
    unet = load_unet(ready(case.base))
    batch = build_batch(unet, case.resolution, case.batch, torch.device(case.device), DTYPES[case.dtype])
    return race(unet, batch, _lora(case), contenders, case.race_steps)


def measure_alone(case: Case, contender: str, setting_name: str) -> dict[str, Any]:
    """Return seconds of steps, and memory in MB: with the model loaded, the peak, and what the preflight foretells."""
    device, dtype = torch.device(case.device), DTYPES[case.dtype]
    setting = next(setting for setting in CURVE if setting.name == setting_name)
    build, memory = CONTENDERS[contender]
    memory = memory if setting == CURVE[0] else setting.memory
    unet = prepare(load_unet(ready(case.base)), memory, setting.weights, dtype, device)
    batch = build_batch(unet, case.resolution, case.batch, device, dtype)
    gc.collect()
    loaded = start_peak(device)
    step = build(unet, batch, _lora(case))
    with kept_activations(memory, [unet], device), room_for_programs(memory.compile):
        steps = [step() for _ in range(warm_up(device) + (ALONE_STEPS if device.type == "cpu" else case.race_steps))]
    result = {
        "seconds": [taken["seconds"] for taken in steps[warm_up(device) :]],
        "loaded": loaded,
        "peak": read_peak(device),
        "reserved": read_reserved(device),
    }
    if contender == "ours":
        empty = empty_unet(ready(case.base))
        on_meta = build_batch(empty, case.resolution, case.batch, META, dtype)
        result["estimated"] = estimated(empty, on_meta, _lora(case), setting)
    return result


def measure_device(device: torch.device, side: int) -> dict[str, Any]:
    """Return the bfloat16 operations per second of a product of two side x side matrices, the median of ten."""
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    taken = []
    for _ in range(13):
        began = now(device)
        torch.mm(left, right)
        taken.append(now(device) - began)
    total = torch.cuda.get_device_properties(device).total_memory / 1e6 if device.type == "cuda" else None
    return {"machine": describe_machine(device), "measured": 2 * side**3 / median(taken[3:]), "megabytes": total}


def _lora(case: Case) -> LoraConfig:
    return LoraConfig(rank=case.rank, alpha=case.rank, preset=case.preset)  # type: ignore[arg-type]


def main() -> None:
    """Measure one part and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", required=True, type=json.loads)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(options.part)))


if __name__ == "__main__":
    main()
