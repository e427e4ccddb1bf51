"""Measure seconds per step and peak memory; print ratios and write docs/benchmarks.md (called by `dev.py bench`).

Each round takes steps of the frozen pass, ours and peft in turn in one process, then steps of ComfyUI's own node in
another. Memory is taken of each contender alone in a fresh process. No two processes with a model run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lora_atelier.bench import cases, full_size, gpu_report, saves
from lora_atelier.bench.cases import CACHE, CPU, CPU_DRY, CURVE, GPU, GPU_DRY, ROOT, Case
from lora_atelier.bench.report import render, render_data, write_block
from lora_atelier.bench.results import (
    PartFailed,
    Results,
    child,
    commit,
    measure_here,
    measure_in_child,
    sources_digest,
    stamp,
)

PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="measure on one NVIDIA card instead of the CPU")
    parser.add_argument("--layers", action="store_true", help="compare forms of a LoRA layer instead")
    parser.add_argument("--networks", action="store_true", help="compare algorithms with LyCORIS' instead")
    parser.add_argument("--data", action="store_true", help="measure scanning and encoding of pictures instead")
    parser.add_argument("--estimates", action="store_true", help="count memory by settings in dry runs instead")
    parser.add_argument("--saves", action="store_true", help="what a save costs against a step instead")
    parser.add_argument("--full-size", action="store_true", help="full-size models from load to ComfyUI instead")
    parser.add_argument("--model", choices=[*cases.BASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, help="rounds of race and stock node (default 3, 2 with --gpu)")
    parser.add_argument("--dry", action="store_true", help="the same at toy sizes on the CPU, once; writes no page")
    parser.add_argument(
        "--resume", action="store_true", help="keep what a run of the same sources has measured already"
    )
    parser.add_argument("--results", type=Path, help="file of the measurements (default in .cache/bench)")
    parser.add_argument(
        "--render", type=Path, metavar="RESULTS", help="write the page from such a file of --gpu instead"
    )
    options = parser.parse_args()
    command = " ".join(["python3 dev.py bench", *sys.argv[1:]])
    try:
        if options.render:
            return write_gpu_page(json.loads(options.render.read_text(encoding="utf-8")))
        if options.estimates:
            return run_estimates(command)
        if options.gpu and not (options.data or options.saves):
            return run_gpu(options, command)
        if not has_comfyui():
            sys.exit("bench: COMFYUI_PATH must name a ComfyUI folder; `python3 dev.py bench` sets it.")
        if options.layers:
            return run_layers(command)
        if options.networks:
            return run_networks(command, options.rounds or 7, dry=options.dry)
        if options.data:
            return run_data("cuda" if options.gpu else "cpu", command, dry=options.dry)
        if options.saves:
            return run_saves("cuda" if options.gpu else "cpu", command, dry=options.dry)
        if options.full_size:
            return run_full_size(options, command)
        return run_cpu(options, command)
    except PartFailed as problem:
        sys.exit(str(problem))


def run_estimates(command: str) -> int:
    """Count memory by settings and write the block."""
    from lora_atelier.bench.estimates import render as render_estimates  # here, as it loads torch

    text = f"{render_estimates()}\n\nCommand: `{command}`, {stamp()}."
    print(text)
    write_block(PAGE, "estimates", text)
    return 0


def run_cpu(options: argparse.Namespace, command: str) -> int:
    """Race on the CPU and write a block for each case."""
    wanted = chosen(CPU_DRY if options.dry else CPU, options.model)
    name = "cpu-dry" if options.dry else "cpu"
    results = Results(options.results or CACHE / f"{name}.json", measure_in_child, command, resume=options.resume)
    for case in wanted:
        text = render(measure_case(case, options.rounds or (1 if options.dry else 3), results) | results.told())
        print(f"\n{text}", flush=True)
        if not options.dry:
            write_block(PAGE, case.name, text)
    return 1 if results.failed else 0


def run_gpu(options: argparse.Namespace, command: str) -> int:
    """Run the GPU suite, or at toy sizes in this process the same code, and write its block."""
    if not options.dry and not has_cuda():
        sys.exit("bench: torch finds no CUDA device here; --gpu --dry runs the suite at toy sizes on the CPU.")
    name, measure = ("gpu-dry", measure_here) if options.dry else ("gpu", measure_in_child)
    results = Results(options.results or CACHE / f"{name}.json", measure, command, resume=options.resume)
    group = chosen(GPU_DRY if options.dry else GPU, options.model)
    measure_gpu(group, options.rounds or (1 if options.dry else 2), results)
    text = gpu_report.render(results.data)
    print(f"\n{text}", flush=True)
    if not options.dry:
        write_gpu_page(results.data)
    return 1 if results.failed else 0


def write_gpu_page(data: dict[str, Any]) -> int:
    """Write the GPU suite's block from results that a machine without git may have measured."""
    if data["commit"] == "unknown" and data["sources"] == sources_digest():
        data["commit"] = commit()
    write_block(PAGE, "gpu", gpu_report.render(data))
    return 0


def chosen(group: Sequence[Case], model: str) -> list[Case]:
    """Return the cases of a group that measure a model."""
    found = [case for case in group if model in ("all", case.base)]
    if not found:
        sys.exit(f"bench: {model} is not measured there; choose one of {sorted({case.base for case in group})}.")
    return found


def measure_gpu(group: Sequence[Case], rounds: int, results: Results) -> None:
    """Measure the device, every case, and the curve of memory against speed where a case has one."""
    side = 256 if group[0].device == "cpu" else 8192
    device = results.get({"what": "device", "device": group[0].device, "side": side})
    results.set("device", device)
    for case in group:
        results.set(case.name, measure_case(case, rounds, results))
    for case in group:
        if case.curve:
            results.set(f"{case.name}-curve", {s.name: results.get(alone(case, "ours", s.name)) for s in CURVE})


def measure_case(case: Case, rounds: int, results: Results) -> dict[str, Any]:
    """Measure one case; return everything that was measured, with a sentence for all that was left out."""
    described = results.get({"what": "describe", "case": case.name})
    if "left_out" in described:
        raise PartFailed(f"bench: {case.name} cannot be described: {described['left_out']}")
    names = [name for name in case.contenders if name not in described["missing"]]
    left_out = [f"{name} was left out: it is not installed." for name in described["missing"]]
    why = stock_left_out(case)
    left_out += [f"TrainLoraNode was left out: {why}"] if why else []
    measured = []
    for i in range(rounds):
        race = results.get({"what": "race", "case": case.name, "contenders": names, "round": i})
        measured.append({"race": race.get("steps", [])})
        left_out += [f"The race was left out: {race['left_out']}."] if "left_out" in race else []
        if not why:
            stock = results.get({"what": "stock", "case": case.name, "round": i})
            if "left_out" in stock:
                left_out.append(f"TrainLoraNode was left out: {stock['left_out']}.")
            else:
                measured[-1]["stock"] = stock
    memory = {}
    for name in names:
        memory[name] = results.get(alone(case, name))
        if "left_out" in memory[name]:
            left_out.append(f"{name} alone was left out: {memory.pop(name)['left_out']}.")
    loop: dict[str, Any] = {}
    if case.loop_steps and not has_comfyui():
        left_out.append("The training loop was left out: COMFYUI_PATH names no ComfyUI folder with a tokenizer.")
    elif case.loop_steps:
        loop = results.get({"what": "loop", "case": case.name})
        left_out += [f"The training loop was left out: {loop['left_out']}."] if "left_out" in loop else []
    return {
        "case": asdict(case),
        "described": described,
        "rounds": measured,
        "memory": memory,
        "loop": loop.get("steps", []),
        "left_out": list(dict.fromkeys(left_out)),
    }


def alone(case: Case, contender: str, setting: str = CURVE[0].name) -> dict[str, str]:
    """Return the part that measures a contender alone."""
    return {"what": "alone", "case": case.name, "contender": contender, "setting": setting}


def stock_left_out(case: Case) -> str:
    """Say why ComfyUI's node is left out of a case, or return ""."""
    if not case.stock_steps:
        return "it is not measured in this case."
    if not has_comfyui():
        return "COMFYUI_PATH names no ComfyUI folder."
    meminfo = Path("/proc/meminfo")
    if case.device != "cpu" or not meminfo.exists():
        return ""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 / 1e6
    if free >= case.stock_needs:
        return ""
    return f"it needs about {case.stock_needs:,} MB and {free:,.0f} MB were free."


def run_layers(command: str) -> int:
    """Compare forms of a LoRA layer."""
    text = child("layers.py")
    write_block(PAGE, "layers", f"{text['table']}\nCommand: `{command}`, {stamp()}.")
    print(text["table"])
    return 0


def run_networks(command: str, rounds: int, *, dry: bool) -> int:
    """Compare each algorithm with LyCORIS' own."""
    text = child("networks.py", "--rounds", str(rounds), *(["--dry"] if dry else []))
    print(text["table"])
    if not dry:
        write_block(PAGE, "networks", f"{text['table']}\nCommand: `{command}`, {stamp()}.")
    return 0


def run_data(device: str, command: str, *, dry: bool) -> int:
    """Measure scans of growing folders, each in processes of their own, and the throughput of encoding."""
    scans = []
    for count in (50, 100) if dry else (1000, 2500, 5000, 10_000):
        print(f"scan of {count} pictures ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
            child("data.py", "write", "--folder", folder, "--count", str(count))
            time.sleep(0 if dry else 3)  # files changed a moment ago are read again, as they may change once more
            scans.append([child("data.py", "scan", "--folder", folder) for _ in range(3)])
    print(f"encoding on {device} ...", flush=True)
    sizes = ["--model", "tiny", "--resolution", "128"] if dry else []
    result = {"scans": scans, "encode": child("data.py", "encode", "--device", device, *sizes)}
    text = render_data(result, command, stamp())
    print(text)
    if not dry:
        write_block(PAGE, f"data-{device}", text)
    return 0


def run_saves(device: str, command: str, *, dry: bool) -> int:
    """Measure saves of Stable Diffusion 1.5, or in a dry run of the tiny base."""
    result = child("saves.py", "--model", "tiny" if dry else "sd15", "--device", device)
    text = saves.render(result, command, stamp())
    print(text)
    if not dry:
        write_block(PAGE, f"saves-{device}", text)
    return 0


def run_full_size(options: argparse.Namespace, command: str) -> int:
    """Take full-size models, or in a dry run the tiny one, from load to ComfyUI."""
    names = ["tiny"] if options.dry else ["sd15", "sd2", "sdxl"] if options.model == "all" else [options.model]
    measured: dict[str, Any] = {}
    for name in names:
        print(f"{name}: one step and back into ComfyUI ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
            arguments = ["--model", name, "--lora", str(Path(folder) / "lora.safetensors")]
            measured[name] = {what: child("full_size.py", what, *arguments) for what in ("train", "load")}
        full_size.check(name, measured[name])
        measured[name] |= {"stamp": stamp(), "command": command}
    kept = CACHE / "full-size.json"
    if not options.dry:  # one model at a time may be measured
        before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        measured = {**before, **measured}
        kept.write_text(json.dumps(measured, indent=1), encoding="utf-8")
        write_block(PAGE, "full-size", full_size.render(measured))
    print(full_size.render(measured), flush=True)
    return 0


def has_comfyui() -> bool:
    """Tell whether COMFYUI_PATH names a ComfyUI folder."""
    return (Path(os.environ.get("COMFYUI_PATH", "")) / "main.py").is_file() and bool(os.environ.get("COMFYUI_PATH"))


def has_cuda() -> bool:
    """Tell whether torch finds a CUDA device, without loading torch into this process."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
