"""Measure seconds per step and peak memory; print ratios and write docs/benchmarks.md (called by `dev.py bench`).

Each round takes steps of the frozen pass, ours and peft in turn in one process, then steps of ComfyUI's own node in
another. Memory is taken of each contender alone in a fresh process. No two processes with a model run at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_atelier.bench.report import render, render_data, write_block

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
CACHE = ROOT / ".cache" / "bench"
STOCK_NEEDS = {"tiny": 2_000, "sd15": 18_000}  # MB of memory that the stock node takes on the CPU


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="dev.py bench", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["tiny", "sd15", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of race and stock node (default 3)")
    parser.add_argument("--quick", action="store_true", help="one short round on the tiny base; writes no page")
    parser.add_argument("--layers", action="store_true", help="compare forms of a LoRA layer instead")
    parser.add_argument("--data", action="store_true", help="measure scanning and encoding of pictures instead")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: both where there is CUDA")
    options = parser.parse_args()
    if not (Path(os.environ.get("COMFYUI_PATH", "")) / "main.py").is_file():
        sys.exit("bench: COMFYUI_PATH must name a ComfyUI folder; `python3 dev.py bench` sets it.")
    command = " ".join(["python3 dev.py bench", *sys.argv[1:]])
    if options.layers:
        text = child("layers.py")
        write_block(PAGE, "layers", f"{text['table']}\nCommand: `{command}`, {stamp()}.")
        print(text["table"])
        return 0
    if options.data:
        device = options.device or ("cuda" if has_cuda() else "cpu")
        text = render_data(measure_data(device, short=options.quick), command, stamp())
        print(text)
        if not options.quick:
            write_block(PAGE, f"data-{device}", text)
        return 0
    models = ["tiny"] if options.quick else ["tiny", "sd15"] if options.model == "all" else [options.model]
    devices = [options.device] if options.device else ["cpu", "cuda"] if has_cuda() else ["cpu"]
    for device in devices:
        for model in models:
            result = measure(model, device, 1 if options.quick else options.rounds, short=options.quick)
            result |= {"command": command, "date": f"{datetime.date.today()}", "commit": commit()}
            text = render(result)
            print(f"\n{text}", flush=True)
            CACHE.mkdir(parents=True, exist_ok=True)
            name = f"{model}-{device}{'-quick' if options.quick else ''}"
            (CACHE / f"{name}.json").write_text(json.dumps(result, indent=1))
            if not options.quick:
                write_block(PAGE, name, text)
    return 0


def measure(model: str, device: str, rounds: int, *, short: bool) -> dict[str, Any]:
    """Measure one model on one device; return everything that was measured."""
    say = f"{model} on {device}"
    fixed = ["--model", model, "--device", device]
    print(f"{say}: preparing the base model ...", flush=True)
    prepared = child("worker.py", "prepare", *fixed)
    sizes = prepared["sizes"]
    race_steps, stock_steps, loop_steps = (3, 2, 8) if short else (sizes[k] for k in ("race", "stock", "loop"))
    stock = ["--model", sizes["path"], "--device", device, "--resolution", str(sizes["resolution"])]
    skipped = lacks_memory(model, device)
    measured = []
    for i in range(rounds):
        print(f"{say}: round {i + 1} of {rounds}, in turn ...", flush=True)
        measured.append({"race": child("worker.py", "race", *fixed, "--steps", str(race_steps))})
        if not skipped:
            print(f"{say}: round {i + 1} of {rounds}, ComfyUI's node ...", flush=True)
            measured[-1]["stock"] = child("stock.py", *stock, "--steps", str(stock_steps))
    memory = {}
    for contender in ("frozen", "ours", "peft"):
        print(f"{say}: memory of {contender} ...", flush=True)
        memory[contender] = child("worker.py", "memory", *fixed, "--contender", contender)
    print(f"{say}: the training loop ...", flush=True)
    return {
        "model": model,
        "title": sizes["title"],
        "resolution": sizes["resolution"],
        "precision": "float32" if device == "cpu" else "bfloat16",
        "layers": sizes["layers"],
        "targets": model == "sd15" and device == "cpu",
        "machine": prepared["machine"],
        "rounds": measured,
        "memory": memory,
        "loop": child("worker.py", "loop", *fixed, "--steps", str(loop_steps)),
        "skipped": skipped,
    }


def measure_data(device: str, *, short: bool) -> dict[str, Any]:
    """Measure scans of growing folders, each twice in processes of their own, and the throughput of encoding."""
    scans = []
    for count in (50, 100) if short else (1000, 2500, 5000, 10_000):
        print(f"scan of {count} pictures ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
            child("data.py", "write", "--folder", folder, "--count", str(count))
            time.sleep(0 if short else 3)  # files changed a moment ago are read again, as they may change once more
            scans.append([child("data.py", "scan", "--folder", folder) for _ in range(3)])
    print(f"encoding on {device} ...", flush=True)
    sizes = ["--model", "tiny", "--resolution", "128"] if short else []
    return {"scans": scans, "encode": child("data.py", "encode", "--device", device, *sizes)}


def child(script: str, *arguments: str) -> Any:
    """Run one script of this folder in a process of its own and return the JSON it writes."""
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments, "--out", str(out)]
        with log.open("w", encoding="utf-8") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT).returncode
        if status != 0:
            tail = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            sys.exit(f"bench: `{' '.join(command[1:])}` ended with status {status}:\n{tail}")
        return json.loads(out.read_text())


def lacks_memory(model: str, device: str) -> str:
    """Say why the stock node is left out here, or return "" when there is memory enough."""
    meminfo = Path("/proc/meminfo")
    if device != "cpu" or not meminfo.exists():
        return ""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 / 1e6
    if free >= STOCK_NEEDS[model]:
        return ""
    return f"TrainLoraNode was left out: it needs about {STOCK_NEEDS[model]:,} MB and {free:,.0f} MB were free."


def has_cuda() -> bool:
    """Tell whether torch finds a CUDA device, without loading torch into this process."""
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def commit() -> str:
    """Return the short commit id, marked when files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


def stamp() -> str:
    """Return date and commit."""
    return f"{datetime.date.today()}, commit {commit()}"


if __name__ == "__main__":
    sys.exit(main())
