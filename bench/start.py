"""Time a run up to its first step, and its parts separately; called by `dev.py bench --start`.

Every part runs in a new process, libraries not yet imported: loading the weights, encoding pictures and captions,
hashing the model file, and whole runs with a cold and with a warm cache. The system's page cache holds the model file
in all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

from lora_atelier.bench.report import build_ratio, ratios_head, verdict

PICTURES = 16
RESOLUTIONS = {"tiny": 64, "sd15": 384}  # pixels
ONCE = ("hash", "encode", "cold")
PAIR = ("load", "warm")  # their difference is small, so they take turns
PARTS = (*ONCE, *PAIR)
GOAL = 1.05  # a cold start over the sum of its parts
WARM_GOAL = 3.0  # seconds that a warm start takes beside loading


def measure(name: str, part: str, folder: Path) -> float:
    """Measure the seconds of one part; folder: holds pictures and caches of all parts."""
    began = time.perf_counter()
    from lora_atelier.bench.bases import ready, tokenizer
    from lora_atelier.trainer_core.common.files import file_digest

    if part == "hash":
        path = ready(name)
        began = time.perf_counter()
        file_digest(path)
        return time.perf_counter() - began
    from lora_atelier.trainer_core.config import BaseModelConfig, ConceptConfig, DatasetConfig, RunConfig, TrainConfig

    config = RunConfig(
        base_model=BaseModelConfig(path=str(ready(name)), precision="float32", tokenizer=tokenizer()),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(folder / "pictures")),)),
        train=TrainConfig(steps=PICTURES, resolution=RESOLUTIONS[name], seed=PARTS.index(part)),  # all are encoded
    )
    if part in ("load", "encode"):
        return measure_alone(config, part, folder, began)
    shutil.rmtree(folder / "out", ignore_errors=True)  # the run before: a warm start is a new run, too
    return measure_run(config, folder, began)


def measure_alone(config: Any, part: str, folder: Path, began: float) -> float:
    """Measure the seconds of loading with the import of its libraries, or of encoding after it."""
    import torch

    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.data.cache import Cache
    from lora_atelier.trainer_core.data.plan import build_plan
    from lora_atelier.trainer_core.data.scan import scan
    from lora_atelier.trainer_core.models import source_of
    from lora_atelier.trainer_core.training.encode import encode_plan

    base = source_of(config.base_model).load(torch.float32)
    _ = base.denoiser  # which is read meanwhile
    if part == "load":
        return time.perf_counter() - began
    plan = build_plan(scan(config.dataset), config.dataset, config.train)
    with Cache(folder / "encoded") as cache:
        began = time.perf_counter()
        encode_plan(base, plan, cache, torch.device("cpu"), Callbacks(), prompts=set())
        return time.perf_counter() - began


def measure_run(config: Any, folder: Path, began: float) -> float:
    """Measure the seconds from the call of `train_lora`, with its import, to the first step; the run stops after it."""
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.train import train_lora

    at: list[float] = []
    callbacks = Callbacks(
        step=lambda report: at.append(time.perf_counter() - report.seconds), asked=lambda: ("stop",) if at else ()
    )
    train_lora(config, folder / "out" / "lora.safetensors", folder / "cache", callbacks=callbacks)
    return at[0] - began


def write_pictures(name: str, folder: Path) -> None:
    """Write the pictures of all parts, with old dates, as a scan reads fresh files again."""
    from lora_atelier.bench.loop import write_pictures as write

    write(folder, RESOLUTIONS[name], PICTURES)


def render(rounds: list[dict[str, Any]], name: str, about: dict[str, Any], command: str, stamp: str) -> str:
    """Write the table of times to the first step as Markdown."""
    pairs = [pair for each in rounds for pair in each["pairs"]]
    load, warm = zip(*pairs, strict=True)
    seconds = {part: [each[part] for each in rounds] for part in ONCE} | {"load": load, "warm": warm}
    sums = [each["hash"] + median(load) + each["encode"] for each in rounds]
    cold = build_ratio(
        "cold cache: to the first step / hashing, loading and encoding by themselves",
        [each["cold"] / total for each, total in zip(rounds, sums, strict=True)],
        most=GOAL,
    )
    beyond = build_ratio(
        "warm cache: seconds to the first step beyond loading",
        [after - alone for alone, after in pairs],
        most=WARM_GOAL,
    )
    lines = [
        "### From the call to the first step, CPU",
        "",
        f"{about['title']}, {PICTURES} pictures of {RESOLUTIONS[name]} px, every part in a new process, so that "
        f"loading includes the import of diffusers and transformers. {stamp}, {about['cpu']}, {about['cores']} cores. "
        f"Command: `{command}`.",
        "",
        *ratios_head(),
        *(verdict(build_ratio(f"seconds: {part}", list(seconds[part])), False) for part in PARTS),
        verdict(cold, name != "tiny"),
        verdict(beyond, name != "tiny"),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure one part of the start and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, choices=RESOLUTIONS)
    parser.add_argument("--part", required=True, choices=("prepare", *PARTS))
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    if options.part == "prepare":
        import torch

        from lora_atelier.bench.bases import ready
        from lora_atelier.bench.cases import BASES
        from lora_atelier.bench.measure import describe_machine

        ready(options.model)
        write_pictures(options.model, options.folder)
        about = {**describe_machine(torch.device("cpu")), "title": BASES[options.model].title}
        options.out.write_text(json.dumps(about))
    else:
        options.out.write_text(json.dumps(measure(options.model, options.part, options.folder)))


if __name__ == "__main__":
    main()
