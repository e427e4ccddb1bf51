"""List the parts of the benchmarks in the order of measuring, and collect their results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_atelier.bench import large
from lora_atelier.bench.cases import CURVE, GPU, GPU_DRY, Case, Part
from lora_atelier.bench.large import Large
from lora_atelier.bench.results import WAITS, Results, found

NODE = "TrainLoraNode"


def gpu_parts(group: Sequence[Case], rounds: int, results: Results, models: Sequence[Large] = ()) -> list[Part]:
    """List all parts of the GPU suite: the goals', beginning with the largest races; then large models'; the rest."""
    parts = [part for case in group for part in case_parts(case, rounds, results)]
    curves = [case for case in reversed(group) if case.curve]
    races = [part for case in group[:2] for part in races_of(case, rounds)]
    memory = [alone(case, "ours", setting.name) for case in curves for setting in CURVE]
    estimates = [estimate(case, setting.name) for case in curves for setting in CURVE]
    linked = [large.part(model, side) for model in models for side in large.SIDES]
    if linked and not has_comfyui():
        for part in linked:
            results.leave_out(part, "COMFYUI_PATH names no ComfyUI folder")
        linked = []
    goals = [*map(describe, group), *races, *memory, *estimates]
    first = [device(group or (GPU if models[0].device == "cuda" else GPU_DRY)), *goals, *linked]
    rest = [part for what in ("race", "alone", "loop", "stock") for part in parts if part["what"] == what]
    return first + [part for part in rest if part not in first]


def case_parts(case: Case, rounds: int, results: Results) -> list[Part]:
    """List the parts of a case, with the reason for each part that is left out."""
    parts, why = [describe(case)], stock_left_out(case) if case.stock_steps else ""
    results.data["rounds"] = rounds
    for i, race in enumerate(races_of(case, rounds)):
        parts.append(race)
        if why:
            results.leave_out(stock(case, i), why)
        elif i < rounds and case.stock_steps:
            parts.append(stock(case, i))
    parts += [alone(case, name) for name in sorted(case.contenders, key="compiled".__eq__)]
    if case.loop_steps and has_comfyui():
        parts.append(loop(case))
    elif case.loop_steps:
        results.leave_out(loop(case), "COMFYUI_PATH names no ComfyUI folder with a tokenizer")
    return parts


def case_result(case: Case, data: dict[str, Any]) -> dict[str, Any]:
    """Collect the measurements of a case and a sentence for each part left out; empty if it was not described."""
    described = found(data, describe(case))
    if "left_out" in described:
        return {}
    left_out: list[str] = []

    def get(title: str, part: Part) -> dict[str, Any]:
        result = found(data, part)
        reasons = {title: result["left_out"]} if "left_out" in result else result.get("without", {})
        left_out.extend(
            f"{NODE if name == 'stock' else name} was left out: {why.rstrip('.')}." for name, why in reasons.items()
        )
        return {} if "left_out" in result else result

    rounds = []
    for i, race in enumerate(races_of(case, data["rounds"])):
        raced = get("The race" + ("" if i else ", first round,"), race)
        apart = get(NODE, stock(case, i)) if case.stock_steps and i < data["rounds"] else {}
        timings = apart or raced.get("stock", {})
        rounds.append({"race": raced.get("steps", []), **({"stock": timings} if timings else {})})
    if not case.stock_steps and not case.stock_needs:
        left_out.append(f"{NODE} was left out: it is not measured in this case.")
    memory = {name: get(f"{name} alone", alone(case, name)) for name in case.contenders}
    return {
        "case": described["case"],
        "described": described,
        "rounds": rounds,
        "memory": {name: used for name, used in memory.items() if used},
        "loop": get("The training loop", loop(case)).get("steps", []) if case.loop_steps else [],
        "left_out": list(dict.fromkeys(left_out)),
    }


def suite(data: dict[str, Any]) -> dict[str, Any]:
    """Collect the measurements of the GPU suite so far."""
    collected: dict[str, Any] = {}
    for group in (GPU, GPU_DRY):
        measured = found(data, device(group))
        if "left_out" not in measured:
            collected["device"] = measured
        collected |= {case.name: result for case in group if (result := case_result(case, data))}
        for case in (case for case in group if case.curve and case.name in collected):
            collected[f"{case.name}-curve"] = {
                setting.name: found(data, alone(case, "ours", setting.name))
                | {"estimated": found(data, estimate(case, setting.name)).get("megabytes")}
                for setting in CURVE
            }
    for model in large.MODELS.values():
        sides = {side: found(data, large.part(model, side)) for side in large.SIDES}
        if any(row.get("left_out") != WAITS for row in sides.values()):
            collected[model.name] = sides
    return collected


def device(group: Sequence[Case]) -> Part:
    """The part that measures the device of a group of cases."""
    return {"what": "device", "device": group[0].device, "side": 256 if group[0].device == "cpu" else 8192}


def describe(case: Case) -> Part:
    """The part that describes a case."""
    return {"what": "describe", "case": case.name}


def races_of(case: Case, rounds: int) -> list[Part]:
    """The races of a case: one without a compiler, then those with one, which may be slow or fail."""
    field = [*case.contenders, *(["stock"] if case.stock_needs else [])]
    quick = [name for name in field if name != "compiled"]
    fields = [quick] * (len(quick) < len(field)) + [field] * rounds
    return [{"what": "race", "case": case.name, "contenders": field, "round": i} for i, field in enumerate(fields)]


def alone(case: Case, contender: str, setting: str = CURVE[0].name) -> Part:
    """The part that measures a contender alone."""
    return {"what": "alone", "case": case.name, "contender": contender, "setting": setting}


def estimate(case: Case, setting: str) -> Part:
    """The part that estimates the memory of ours."""
    return {"what": "estimate", "case": case.name, "setting": setting}


def loop(case: Case) -> Part:
    """The part that times the training loop."""
    return {"what": "loop", "case": case.name}


def stock(case: Case, number: int) -> Part:
    """The part that times ComfyUI's node."""
    return {"what": "stock", "case": case.name, "round": number}


def stock_left_out(case: Case) -> str:
    """Explain why ComfyUI's node is left out of a case; "" if it is not."""
    if not has_comfyui():
        return "COMFYUI_PATH names no ComfyUI folder."
    meminfo = Path("/proc/meminfo")
    if not case.stock_needs or not meminfo.exists():
        return ""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 / 1e6
    if free >= case.stock_needs:
        return ""
    return f"a race with it needs about {case.stock_needs:,} MB and {free:,.0f} MB were free."


def has_comfyui() -> bool:
    """Tell whether COMFYUI_PATH names a ComfyUI folder."""
    return (Path(os.environ.get("COMFYUI_PATH", "")) / "main.py").is_file() and bool(os.environ.get("COMFYUI_PATH"))
