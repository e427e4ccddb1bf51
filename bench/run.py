"""Measure seconds per step and peak memory; print ratios and write docs/benchmarks.md (called by `dev.py bench`).

Each round runs steps of the frozen pass, ours and peft in turn in one process, then steps of ComfyUI's own node in
another. Memory is measured of each contender alone: on the CPU in a separate process, on a GPU after torch has freed
all its memory. Only one process with a model runs at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_atelier.bench import (
    busy,
    cases,
    clips,
    connected,
    full_size,
    gpu_report,
    large,
    learning,
    ranks,
    saves,
    share,
    slider,
    start,
    tools,
)
from lora_atelier.bench.cases import CACHE, CPU, CPU_DRY, GPU, GPU_DRY, ROOT, Case
from lora_atelier.bench.parts import case_parts, case_result, describe, gpu_parts, has_comfyui, suite
from lora_atelier.bench.report import render, render_data, write_block
from lora_atelier.bench.results import Child, PartFailed, Results, child, commit, found, sources_digest, stamp

PAGE = ROOT / "docs" / "benchmarks.md"
LEARNING = ROOT / "docs" / "learning.md"


def main() -> int:
    """Run the benchmarks of the command line."""
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="measure on one NVIDIA card instead of the CPU")
    parser.add_argument("--layers", action="store_true", help="compare forms of a LoRA layer instead")
    parser.add_argument("--networks", action="store_true", help="compare algorithms with LyCORIS' instead")
    parser.add_argument("--data", action="store_true", help="measure scanning and encoding of pictures instead")
    parser.add_argument("--estimates", action="store_true", help="count memory by settings in dry runs instead")
    parser.add_argument("--saves", action="store_true", help="time of a save against a step instead")
    parser.add_argument("--tools", action="store_true", help="resize and extract a LoRA of SDXL's size instead")
    parser.add_argument("--learning", action="store_true", help="learn the example concept by settings instead")
    parser.add_argument("--variants", nargs="+", choices=learning.VARIANTS, help="of --learning (default all)")
    parser.add_argument("--slider", action="store_true", help="train sliders, and draw at several strengths instead")
    parser.add_argument("--start", action="store_true", help="time of a run to its first step instead")
    parser.add_argument("--busy", action="store_true", help="a step beside other programs instead")
    parser.add_argument("--connected", action="store_true", help="linked models against ComfyUI's own node instead")
    parser.add_argument("--clips", action="store_true", help="clips against ComfyUI's own nodes instead")
    parser.add_argument("--ranks", action="store_true", help="two processes of one thread against one instead")
    parser.add_argument("--full-size", action="store_true", help="full-size models from load to ComfyUI instead")
    parser.add_argument("--model", choices=[*cases.BASES, *(model.row for model in large.LARGE), "all"], default="all")
    parser.add_argument("--rounds", type=int, help="rounds of race and stock node (default 3, 1 with --gpu)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="end within this many minutes; continue with --resume"
    )
    parser.add_argument("--dry", action="store_true", help="the same at toy sizes on the CPU, once; writes no page")
    parser.add_argument(
        "--resume", action="store_true", help="keep the parts that a run of the same sources has measured"
    )
    parser.add_argument("--results", type=Path, help="file of the measurements (default in .cache/bench)")
    parser.add_argument(
        "--share", action="store_true", help="with --gpu: half an hour, and one file without a path to show to others"
    )
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="RESULTS", help="write the page from such files of --gpu instead"
    )
    options = parser.parse_args()
    if options.share and (not options.gpu or options.data or options.saves):
        parser.error("--share is for the measurements of --gpu alone: write --gpu --share")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes that measure are ended, too
    command = " ".join(["python3 dev.py bench", *sys.argv[1:]])
    try:
        if options.render:
            return write_gpu_page([measured_on_a_card(path) for path in options.render])
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
        if options.tools:
            return run_tools(command, dry=options.dry)
        if options.learning:
            return run_learning(options, command)
        if options.slider:
            return run_slider(options, command)
        if options.start:
            return run_start(options, command)
        if options.busy:
            return run_busy(options, command)
        if options.connected:
            return run_connected(options.rounds or (1 if options.dry else 3), command, dry=options.dry)
        if options.clips:
            return run_clips(options.rounds or (1 if options.dry else 3), command, dry=options.dry)
        if options.ranks:
            return run_ranks(options, command)
        if options.full_size:
            return run_full_size(options, command)
        return run_cpu(options, command)
    except (OSError, PartFailed, ValueError) as problem:
        sys.exit(f"bench: {problem}" if not isinstance(problem, PartFailed) else str(problem))


def run_estimates(command: str) -> int:
    """Estimate memory by settings and write the block."""
    from lora_atelier.bench.estimates import render as render_estimates  # here, as it loads torch

    text = f"{render_estimates()}\n\nCommand: `{command}`, {stamp()}."
    print(text)
    write_block(PAGE, "estimates", text)
    return 0


def run_cpu(options: argparse.Namespace, command: str) -> int:
    """Race on the CPU and write a block for each case."""
    wanted = chosen(CPU_DRY if options.dry else CPU, options.model)
    rounds = options.rounds or (1 if options.dry else 3)
    results = Results(options.results or CACHE / f"cpu{dried(options)}.json", Child, command, resume=options.resume)
    began = time.monotonic()
    for case in wanted:
        parts = case_parts(case, rounds, results)
        results.measure(parts, seconds=60 * options.minutes - (time.monotonic() - began))
        if not (result := case_result(case, results.data)):
            sys.exit(f"bench: {case.name} cannot be described: {found(results.data, describe(case))['left_out']}.")
        text = render(result | results.about())
        print(f"\n{text}", flush=True)
        if not options.dry:
            write_block(PAGE, case.name, text)
    return 1 if results.failed else 0


def run_gpu(options: argparse.Namespace, command: str) -> int:
    """Run the GPU suite (in a dry run at toy sizes on the CPU) and write its block."""
    if not options.dry and not has_cuda():
        sys.exit("bench: torch finds no CUDA device here; --gpu --dry runs the suite at toy sizes on the CPU.")
    path = options.results or CACHE / f"gpu{dried(options)}.json"
    results = Results(path, Child, command, resume=options.resume or options.share)
    models = [m for m in (large.LARGE_DRY if options.dry else large.LARGE) if options.model in ("all", m.row)]
    group = [] if models and options.model != "all" else chosen(GPU_DRY if options.dry else GPU, options.model)
    minutes = min(options.minutes, share.MINUTES) if options.share else options.minutes
    results.measure(gpu_parts(group, options.rounds or 1, results, models), share_process=True, seconds=60 * minutes)
    print(f"\n{gpu_report.render(results.data, suite(results.data))}", flush=True)
    if waiting := results.waiting():
        print(f"bench: {waiting} parts wait for another call; run the same command again with --resume.", flush=True)
    if options.share:
        file = share.write(results.data, device_of(results.data), ROOT)
        print(f"bench: attach {file.name} of the pack's folder to an issue. It holds no path and no name.", flush=True)
    elif not options.dry:
        write_gpu_page([results.data])
    return 1 if results.failed else 0


def measured_on_a_card(path: Path) -> dict[str, Any]:
    """Read a file to render; ValueError for one of a dry run, whose figures say nothing."""
    data = share.read(path)
    if device_of(data) == "CPU":
        raise ValueError(f"{path.name} was measured without a card, in a dry run. Leave it out")
    return data


def device_of(data: dict[str, Any]) -> str:
    """Find the name of the card of measurements."""
    return suite(data).get("device", {}).get("machine", {}).get("device", "unknown")


def dried(options: argparse.Namespace) -> str:
    """The suffix of result files: "-dry" in dry runs."""
    return "-dry" if options.dry else ""


def write_gpu_page(files: Sequence[dict[str, Any]]) -> int:
    """Write the GPU suite's block from result files, a part for each card, perhaps of machines without git."""
    for data in files:
        if data["commit"] == "unknown" and data["sources"] == sources_digest():
            data["commit"] = commit()
    texts = [gpu_report.render(data, suite(data)) for data in sorted(files, key=device_of)]
    write_block(PAGE, "gpu", "\n".join(texts))
    return 0


def chosen(group: Sequence[Case], model: str) -> list[Case]:
    """List the cases of a group with the chosen model."""
    found = [case for case in group if model in ("all", case.base)]
    if not found:
        sys.exit(f"bench: {model} is not measured there; choose one of {sorted({case.base for case in group})}.")
    return found


def run_layers(command: str) -> int:
    """Compare forms of a LoRA layer and write the block."""
    text = child("layers.py")
    write_block(PAGE, "layers", f"{text['table']}\nCommand: `{command}`, {stamp()}.")
    print(text["table"])
    return 0


def run_networks(command: str, rounds: int, *, dry: bool) -> int:
    """Compare each algorithm with LyCORIS' own and write the block."""
    text = child("networks.py", "--rounds", str(rounds), *(["--dry"] if dry else []))
    print(text["table"])
    if not dry:
        write_block(PAGE, "networks", f"{text['table']}\nCommand: `{command}`, {stamp()}.")
    return 0


def run_data(device: str, command: str, *, dry: bool) -> int:
    """Measure scans of growing folders, each in new processes, and the throughput of encoding."""
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
    """Measure saves of Stable Diffusion 1.5 (in a dry run of the tiny base)."""
    result = child("saves.py", "--model", "tiny" if dry else "sd15", "--device", device)
    text = saves.render(result, command, stamp())
    print(text)
    if not dry:
        write_block(PAGE, f"saves-{device}", text)
    return 0


def run_tools(command: str, *, dry: bool) -> int:
    """Measure the tools for LoRAs at SDXL's size (in a dry run of a toy)."""
    text = tools.render(child("tools.py", "--model", "toy" if dry else "sdxl"), command, stamp())
    print(text)
    if not dry:
        write_block(PAGE, "tools-cpu", text)
    return 0


def run_learning(options: argparse.Namespace, command: str) -> int:
    """Train the example concept by settings, a process for each run, and write the table of those that are measured."""
    path = options.results or CACHE / f"learning{dried(options)}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if options.resume and path.exists() else {}
    known = kept.get("runs", {}) if kept.get("sources") == sources_digest() else {}
    steps = ["--steps", "2"] if options.dry else []
    for name in options.variants or learning.VARIANTS:
        for seed in range(options.rounds or (1 if options.dry else 3)):
            if str(seed) in known.setdefault(name, {}):
                continue
            print(f"{name}, seed {seed} ...", flush=True)
            known[name][str(seed)] = child("learning.py", "--variant", name, "--seed", str(seed), *steps)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"sources": sources_digest(), "runs": known}), encoding="utf-8")
    on_flow = {name: name in learning.FLOW for name in learning.VARIANTS if known.get(name)}
    for block, flow in ("learning", False), ("learning-flow", True):
        measured = {name: list(known[name].values()) for name, of_flow in on_flow.items() if of_flow == flow}
        if measured:
            text = learning.render(measured, command, stamp())
            print(text)
            if not options.dry:
                write_block(LEARNING, block, text)
    return 0


def run_slider(options: argparse.Namespace, command: str) -> int:
    """Train both kinds of slider on the tiny base, a process for each seed, and write the rows of their strengths."""
    dry = ["--dry"] if options.dry else []
    seeds = range(options.rounds or (1 if dry else 3))
    text = slider.render([child("slider.py", "--seed", str(seed), *dry) for seed in seeds], command, stamp())
    print(text)
    if not dry:
        write_block(LEARNING, "slider", text)
    return 0


def run_start(options: argparse.Namespace, command: str) -> int:
    """Measure the time to the first step of Stable Diffusion 1.5 (in a dry run of the tiny base)."""
    name, rounds = "tiny" if options.dry else "sd15", []
    for number in range(options.rounds or (1 if options.dry else 3)):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="start-", dir=CACHE) as folder:
            arguments = ["--model", name, "--folder", folder, "--part"]
            about = child("start.py", *arguments, "prepare")
            rounds.append({part: child("start.py", *arguments, part) for part in start.ONCE})
            pairs = [
                [child("start.py", *arguments, part) for part in start.PAIR] for _ in range(1 if options.dry else 4)
            ]
            rounds[-1]["pairs"] = pairs
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    text = start.render(rounds, name, about, command, stamp())
    print(text)
    if not options.dry:
        write_block(PAGE, "start-cpu", text)
    return 0


def run_busy(options: argparse.Namespace, command: str) -> int:
    """Measure a step at rest and beside busy processes, by how threads wait."""
    rounds, about = [], {}
    for number in range(options.rounds or (1 if options.dry else 3)):
        seconds: dict[str, dict[str, float]] = {waiting: {} for waiting in busy.WAITING}
        for when, count in {"rest": 0, "busy": 1 if options.dry else busy.LOAD - 1}.items():
            for waiting, changes in busy.WAITING.items():
                steps = "1" if options.dry else str(busy.STEPS[count > 0])
                with busy.others(count):
                    about = child("busy.py", "--steps", steps, env=changes(count))
                seconds[waiting][when] = about["seconds"]
        with busy.others((os.cpu_count() or 1) - 1):
            alone = child("busy.py", "--steps", "1" if options.dry else str(busy.STEPS[False]), env=busy.ONE)
        rounds.append({**seconds, "fair": {"busy": alone["seconds"]}})
        print(f"round {number + 1}: {seconds}", flush=True)
    text = busy.render(rounds, about, command, stamp())
    print(text)
    if not options.dry:
        write_block(PAGE, "busy-cpu", text)
    return 0


def run_connected(rounds: int, command: str, *, dry: bool) -> int:
    """Race on linked models of middle size (in a dry run tiny ones) and compare gradients."""
    results = {model: connected.race(model, rounds, toy=dry) for model in connected.MODELS}
    text = connected.render(results, child("gradient_errors.py"), command, stamp())
    print(text)
    if not dry:
        write_block(PAGE, "connected-cpu", text)
    return 0


def run_clips(rounds: int, command: str, *, dry: bool) -> int:
    """Encode clips and race on them with a linked model of middle size (in a dry run a tiny one)."""
    encoding = child("clips.py", "--size", "toy" if dry else "middle")
    race = connected.race("clip", rounds, toy=dry)
    text = clips.render(encoding, connected.race_lines(race), command, stamp())
    print(text)
    if not dry:
        write_block(PAGE, "clips-cpu", text)
    return 0


def run_ranks(options: argparse.Namespace, command: str) -> int:
    """Measure two processes against one on Stable Diffusion 1.5 (in a dry run the tiny base)."""
    name = "tiny" if options.dry else "sd15"
    rounds = ranks.race(name, options.rounds or (1 if options.dry else 2))
    text = ranks.render(rounds, name, cases.BASES[name].title, command, stamp())
    print(text)
    if not options.dry:
        write_block(PAGE, "ranks-cpu", text)
    return 0


def run_full_size(options: argparse.Namespace, command: str) -> int:
    """Train full-size models (in a dry run the tiny one) and load their LoRAs in ComfyUI."""
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


def has_cuda() -> bool:
    """Tell whether torch finds a CUDA device, without loading torch into this process."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
