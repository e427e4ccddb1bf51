"""Measure a step on a busy machine, by how threads are chosen and wait; called by `dev.py bench --busy`.

`threads` of dev.py chooses. By default OpenMP takes as many threads as there are processors, and lets them spin while
they wait. On a busy machine a thread spins through the turn that the thread for which it waits would need.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lora_atelier.bench.report import build_ratio, ratios_head, verdict
from lora_atelier.dev import threads

DEFAULT = {"OMP_WAIT_POLICY": None, "KMP_BLOCKTIME": None, "GOMP_SPINCOUNT": None, "OMP_NUM_THREADS": None}
WAITING: dict[str, Callable[[int], Mapping[str, str | None]]] = {  # others at work -> changes of the environment
    "chosen": lambda others: {**DEFAULT, **threads(others)},
    "default": lambda others: DEFAULT,
}
LOAD = 8  # processes that compute at once, the run among them
STEPS = {False: 40, True: 8}  # by whether the machine is busy
ONE = {**DEFAULT, "OMP_NUM_THREADS": "1"}
REST_GOAL, LOAD_GOAL, FAIR_GOAL = 1.05, 6.0, 1.05


def measure(steps: int) -> dict[str, Any]:
    """Train the tiny base as the demo does; return the median seconds of a step, the first three left out."""
    import torch

    from lora_atelier.bench.bases import ready, tokenizer
    from lora_atelier.bench.loop import write_pictures
    from lora_atelier.bench.measure import describe_machine
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.config import (
        BaseModelConfig,
        ConceptConfig,
        DatasetConfig,
        LoraConfig,
        RunConfig,
        TrainConfig,
    )
    from lora_atelier.trainer_core.train import train_lora

    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as name:
        folder = Path(name)
        config = RunConfig(
            base_model=BaseModelConfig(path=str(ready("tiny")), tokenizer=tokenizer()),
            dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(write_pictures(folder, 128))),)),
            lora=LoraConfig(preset="full"),
            train=TrainConfig(steps=steps + 3, batch_size=4, resolution=128),
        )
        callbacks = Callbacks(step=lambda report: seconds.append(report.seconds))
        train_lora(config, folder / "lora.safetensors", folder / "cache", callbacks=callbacks)
    return {"seconds": median(seconds[3:]), **describe_machine(torch.device("cpu"))}


@contextmanager
def others(count: int) -> Iterator[None]:
    """Keep `count` processes computing for the length of a `with` block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def fair(each: dict[str, dict[str, float]], cores: int) -> float:
    """Return the seconds of a busy step that a fair share allows, of one round.

    One thread beside programs that leave it one processor whole, times the programs that share each processor.
    """
    return each["fair"]["busy"] * max(1, LOAD / cores)


def render(rounds: list[dict[str, dict[str, float]]], about: dict[str, Any], command: str, stamp: str) -> str:
    """Write the table of seconds and ratios as Markdown.

    rounds: seconds of a step by choice of threads, at rest and busy; `fair`: of one thread that has a processor to
    itself, while the others are taken.
    """
    rest = [each["chosen"]["rest"] / each["default"]["rest"] for each in rounds]
    busy = [each["chosen"]["busy"] / each["chosen"]["rest"] for each in rounds]
    spinning = [each["default"]["busy"] / each["default"]["rest"] for each in rounds]
    limit = [fair(each, about["cores"]) / each["chosen"]["rest"] for each in rounds]
    reached = [each["chosen"]["busy"] / fair(each, about["cores"]) for each in rounds]
    ratios = (
        build_ratio("at rest: as dev.py chooses / as OpenMP does", rest, most=REST_GOAL),
        build_ratio(f"as dev.py chooses: under a load of {LOAD} / at rest", busy, most=LOAD_GOAL),
        build_ratio(f"the limit: a fair share under a load of {LOAD} / at rest", limit),
        build_ratio(f"as dev.py chooses: under a load of {LOAD} / the limit", reached, most=FAIR_GOAL),
        build_ratio(f"as OpenMP does: under a load of {LOAD} / at rest", spinning),
    )
    seconds = [
        build_ratio(f"seconds: {waiting}, {when}", [each[waiting][when] for each in rounds])
        for waiting in WAITING
        for when in ("rest", "busy")
    ]
    lines = [
        "### A step on a busy machine, CPU",
        "",
        f"The tiny base at 128 px, batch 4, all layers, each run in a new process. {stamp}, {about['cpu']}, "
        f"{about['cores']} cores. Command: `{command}`.",
        "",
        *ratios_head(),
        *(verdict(ratio, False) for ratio in seconds),
        *(verdict(ratio, ratio.most is not None) for ratio in ratios),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure one run and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(measure(options.steps)))


if __name__ == "__main__":
    main()
