"""Measure two processes of one thread against one, on the same steps; called by `dev.py bench --ranks`.

One process starts those of a world, as torchrun does. Wrappers around the passes, the optimizer and the calls of
torch.distributed time the parts of a step. Two runs that share nothing, at the same time, are the limit of the machine:
two busy cores are slower than one, since they share caches and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from lora_atelier.bench.report import build_ratio, ratios_head, verdict

RESOLUTIONS = {"tiny": 128, "sd15": 256}  # pixels
STEPS = {"tiny": 4, "sd15": 5}  # of which the first is left out
ACCUMULATE = 2  # micro-batches of a step, of one picture each, which is encoded before the first step
MEASURED = "measured.json"  # in the folder of a world
SPEED, ENCODING, SHARE = 1.8, 1.9, 0.05  # goals: how many times as fast, share of a step that is no computing


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train in this process, one of a world; return the seconds of encoding and of each step, and what was sent."""
    import torch
    import torch.distributed as dist
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    from lora_atelier.bench.bases import ready, tokenizer
    from lora_atelier.bench.contenders import OPTIMIZER
    from lora_atelier.bench.loop import timed
    from lora_atelier.bench.measure import describe_machine
    from lora_atelier.trainer_core import train as training
    from lora_atelier.trainer_core.common.callbacks import Callbacks, StepReport
    from lora_atelier.trainer_core.common.world import World, joined
    from lora_atelier.trainer_core.config import (
        BaseModelConfig,
        ConceptConfig,
        DatasetConfig,
        LoraConfig,
        MemoryConfig,
        RunConfig,
        SavesConfig,
        TrainConfig,
    )
    from lora_atelier.trainer_core.models.sd import load
    from lora_atelier.trainer_core.training import prepare
    from lora_atelier.trainer_core.training import start as begin

    cpu, spent, rows, counts = torch.device("cpu"), dict[str, Any](), list[dict[str, Any]](), dict[str, float]()
    original, at = dist.all_reduce, [time.perf_counter()]

    def collect(_: StepReport) -> None:
        at.append(time.perf_counter())
        rows.append({"seconds": at[-1] - at[-2], **spent})
        spent.clear()

    def sending(tensor: Any, *others: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = original(tensor, *others, **options)
        if tensor.is_floating_point():  # else a message of a few numbers
            spent["sum"], spent["bytes"] = time.perf_counter() - began, tensor.nbytes
        return found

    def read(work: Any) -> Future[Any]:
        """Read the UNet before the encoding: beside it, it would take a core that one process leaves idle."""
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def once_all_are_there(world: World, *others: Any) -> Any:
        """Encode when the other process has read its models, too, which is no encoding."""
        world.meet()
        return encode(world, *others)

    def count(*values: Any, **options: Any) -> Any:
        run = prepare_run(*values, **options)
        counts["bytes"] = sum(p.nbytes for group in run.optimizer.param_groups for p in group["params"])
        return run

    config = RunConfig(
        base_model=BaseModelConfig(path=str(ready(name)), tokenizer=tokenizer(), precision="float32"),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(folder / "pictures")),)),
        lora=LoraConfig(rank=8, alpha=8, preset="full"),
        optimizer=OPTIMIZER,
        train=TrainConfig(steps=STEPS[name], accumulate=ACCUMULATE, resolution=RESOLUTIONS[name]),
        memory=MemoryConfig(checkpointing="0"),
        saves=SavesConfig(save_every=0),
    )
    prepare_run, begin.prepare_run = begin.prepare_run, count
    dist.all_reduce, load.begin = sending, read
    with joined() as world, ExitStack() as stack:
        for owner, method, part in (
            (UNet2DConditionModel, "forward", "forward"),
            (torch.Tensor, "backward", "backward"),
            (torch.optim.AdamW, "step", "optimizer"),
            (World, "agree", "meeting"),
        ):
            stack.enter_context(timed(owner, method, part, spent, cpu))
        stack.enter_context(timed(prepare, "encode_together", "encoding", counts, cpu))
        encode, prepare.encode_together = prepare.encode_together, once_all_are_there
        output = folder / f"of-{world.size}" / "lora.safetensors"
        output.parent.mkdir(exist_ok=True)
        training.train_lora(config, output, folder / "encoded", cpu, Callbacks(step=collect), world=world)
    return {"rows": rows, "size": world.size, **counts, "machine": describe_machine(cpu)}


def start(name: str, folder: Path, size: int) -> list[subprocess.Popen]:
    """Start the processes of a world, of one thread each; the first writes what it measures into `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--model", name, "--folder", str(folder), "--process"]
    return [
        subprocess.Popen(
            [*command, str(number)],
            env=env
            | {"TORCHELASTIC_RUN_ID": "bench", "WORLD_SIZE": str(size), "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.DEVNULL,
        )
        for number in range(size)
    ]


def measured(folders: list[Path], name: str, size: int) -> list[dict[str, Any]]:
    """Run a world of this size in each folder at the same time; give the measurements of their first processes."""
    processes = [process for folder in folders for process in start(name, folder, size)]
    if any([process.wait() for process in processes]):
        raise SystemExit(f"bench: a process of {size} failed.")
    return [json.loads((folder / MEASURED).read_text(encoding="utf-8")) for folder in folders]


def race(name: str, rounds: int) -> list[dict[str, Any]]:
    """Measure one process, two of one run, and two runs at once in turn, each in a folder of its own."""
    from lora_atelier.bench.loop import write_pictures

    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="atelier-bench-") as text:
            folders = [Path(text) / part for part in ("1", "2", "apart", "apart too")]
            for folder in folders:
                folder.mkdir()
                write_pictures(folder, RESOLUTIONS[name], STEPS[name] * ACCUMULATE)
            one, two, *apart = folders
            [alone], [pair] = measured([one], name, 1), measured([two], name, 2)
            found.append({"1": alone, "2": pair, "apart": measured(apart, name, 1)[0]})
        print(json.dumps({size: [row["seconds"] for row in part["rows"]] for size, part in found[-1].items()}))
    return found


def render(rounds: list[dict[str, Any]], name: str, title: str, command: str, stamp: str) -> str:
    """Write the block of the page as Markdown."""
    ones, twos, aparts = ([row for each in rounds for row in each[part]["rows"][1:]] for part in ("1", "2", "apart"))
    about = rounds[0]["1"]["machine"]
    targets = name != "tiny"
    speed = [a["seconds"] / b["seconds"] for a, b in zip(ones, twos, strict=True)]
    limit = [2 * a["seconds"] / b["seconds"] for a, b in zip(ones, aparts, strict=True)]
    near = [b["seconds"] / (2 * a["seconds"]) for a, b in zip(twos, aparts, strict=True)]
    share = [own(row) / row["seconds"] for row in twos]
    encoding = [each["1"]["encoding"] / each["2"]["encoding"] for each in rounds]
    apart = [2 * each["1"]["encoding"] / each["apart"]["encoding"] for each in rounds]
    sent = [row["bytes"] / rounds[0]["2"]["bytes"] for row in twos]
    loads = ", ".join(f"{part['machine']['load']:g}" for each in rounds for part in each.values())
    lines = [
        "### Two processes, CPU",
        "",
        f"{title}, {RESOLUTIONS[name]} px, float32, LoRA of rank 8 on all layers, {ACCUMULATE} micro-batches of one "
        f"picture a step, processes of one thread each, by gloo. {stamp}, {about['cpu']}, {about['cores']} cores, load "
        f"at the ends {loads}. Command: `{command}`.",
        "",
        *ratios_head(),
        verdict(build_ratio("steps per second, two processes / one", speed, least=SPEED), targets),
        verdict(build_ratio("pictures encoded per second, two processes / one", encoding, least=ENCODING), targets),
        verdict(build_ratio("pictures encoded per second, two runs at once that share nothing / one", apart), targets),
        verdict(build_ratio("steps per second, two runs at once that share nothing / one", limit), targets),
        verdict(build_ratio("steps per second, two processes / two runs at once", near), targets),
        verdict(build_ratio("share of a step: bookkeeping and the sum", share, most=SHARE), targets),
        verdict(build_ratio("share of a step: the sum alone", [row["sum"] / row["seconds"] for row in twos]), targets),
        verdict(build_ratio("share of a step: waiting", [row["meeting"] / row["seconds"] for row in twos]), targets),
        verdict(build_ratio("bytes sent / bytes of the network's parameters", sent, most=1.01), targets),
        "",
        f"{STEPS[name] * ACCUMULATE} pictures and their captions are encoded in "
        f"{median(each['1']['encoding'] for each in rounds):.1f} s by one process and in "
        f"{median(each['2']['encoding'] for each in rounds):.1f} s by two. Seconds per step: "
        f"{median(r['seconds'] for r in ones):.2f} of one process, {median(r['seconds'] for r in twos):.2f} of two, "
        f"{median(r['seconds'] for r in aparts):.2f} of each of two runs at once; "
        f"{rounds[0]['2']['bytes'] / 1e6:.1f} MB of parameters.",
    ]
    return "\n".join(lines) + "\n"


def own(row: dict[str, float]) -> float:
    """Compute the seconds of a step that are neither passes, nor the optimizer, nor waiting for the other process."""
    return row["seconds"] - sum(row.get(part, 0.0) for part in ("forward", "backward", "optimizer", "meeting"))


def main() -> None:
    """Measure as one process of a world, and write JSON if it leads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=RESOLUTIONS)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--process", required=True, type=int)
    options = parser.parse_args()
    result = measure(options.model, options.folder)
    if options.process == 0:
        (options.folder / MEASURED).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
