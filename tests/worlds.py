"""Runs that several processes share: the jobs, and the program of each process, which carries out one after another.

As a program: `python worlds.py FOLDER TOKENIZER`, with the environment that torchrun gives. It gives the arguments in
FOLDER/command.json to the command line, whose output goes to `command-<number>.txt`. Then it carries out the jobs of
FOLDER/jobs.json, in subfolders of their names, and writes what each has come to, as `<name>-<number>.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from durable import Cut
from prepared import Ready, without_estimates
from recipes.recipes import RECIPES, Material, Recipe, configure
from tiny_runs import run

from comfy_client import free_port
from lora_atelier.trainer_core import train as training
from lora_atelier.trainer_core.commands import main as main_of_the_pack
from lora_atelier.trainer_core.common.callbacks import StepReport
from lora_atelier.trainer_core.common.world import ALONE, ProcessFailed, World, joined
from lora_atelier.trainer_core.config import EmbeddingConfig, MemoryConfig
from lora_atelier.trainer_core.data import fit
from lora_atelier.trainer_core.runs.asked import Paused, ask
from lora_atelier.trainer_core.training import encode

THREADS = 1  # the same in all processes, as sums depend on it
LADDER = [MemoryConfig(checkpointing="0"), MemoryConfig(checkpointing="full")]


def recipe_of(job: dict[str, Any]) -> Recipe:
    """Build the recipe of a job: one of RECIPES with other settings."""
    recipe = RECIPES[job["recipe"]]
    parts = ("base_model", "optimizer", "scheduler", "objective", "train", "memory")
    lora = {**recipe.lora, **job.get("lora", {})}
    lora["embeddings"] = tuple(EmbeddingConfig.from_dict(word) for word in lora.get("embeddings", ()))
    return Recipe(**{
        "model": recipe.model,
        "concepts": recipe.concepts,
        "held": recipe.held,
        **{part: {**getattr(recipe, part), **job.get(part, {})} for part in parts},
        "lora": lora,
    })  # fmt: skip


def carry_out(job: dict[str, Any], material: Material, folder: Path, world: World = ALONE) -> dict[str, Any]:
    """Train a job in its folder, where an earlier one of the same name may have left a run; tell what it came to."""
    config = configure(recipe_of(job), material)
    if not config.train.validate_every:  # saves a third of the time
        concepts = tuple(concept for concept in config.dataset.concepts if concept.role != "validation")
        config = config.replace(dataset=config.dataset.replace(concepts=concepts))
    if job.get("other_pictures") == world.number:
        concepts = (config.dataset.concepts[0].replace(folder=material.pictures("tall")), *config.dataset.concepts[1:])
        config = config.replace(dataset=config.dataset.replace(concepts=concepts))
    done, seen, notes = [0], {"words": [], "encoded": 0}, list[str]()

    def asked() -> tuple[str, ...]:
        return tuple(job.get("asked", {}).get(str(done[0]), ()))

    def check() -> None:
        if job.get("cancel") == done[0]:
            raise Cut("Cancel")

    runs: list[Path] = []

    def step(report: StepReport) -> None:
        done[0] = report.step
        if word := job.get("wishes", {}).get(str(report.step)):
            ask(runs[0], word)

    with ExitStack() as stack:
        ladder = [memory.replace(compute=config.memory.compute) for memory in LADDER]
        stack.enter_context(without_estimates(ladder))
        stack.enter_context(counted(seen))
        for name, value in job.get("watched", {}).items():
            stack.enter_context(mock.patch.object(fit, name, value))
        if job.get("fails", {}).get("process") == world.number:
            stack.enter_context(failing(job["fails"]))
        found: dict[str, Any] = {"error": ""}
        try:
            cache = (folder if job.get("own_cache") else folder.parent) / "cache"
            result = run(
                config,
                folder,
                cache,
                world=world,
                run=lambda path, _: runs.append(path),
                step=step,
                asked=asked,
                check=check,
                note=notes.append,
            )
        except (ProcessFailed, Paused, ValueError, RuntimeError, Cut) as error:
            found["error"] = f"{type(error).__name__}: {error}"
            result = None
    if result is not None:
        found |= {"losses": result.losses, "validation": result.validation, "finished": result.finished}
    return {**found, **seen, "notes": notes}


@contextmanager
def counted(seen: dict[str, Any]) -> Iterator[None]:
    """Count the pictures that this process encodes."""
    real = encode._encode_pictures

    def encoding(work: Any, missing: Any) -> None:
        seen["encoded"] += len(missing)
        real(work, missing)

    with mock.patch.object(encode, "_encode_pictures", encoding):
        yield


@contextmanager
def failing(how: dict[str, Any]) -> Iterator[None]:
    """Let one thing fail in this process: kind "error", "killed" or "memory", in `where` after so many calls."""
    place = torch.amp.GradScaler if how["where"] == "step" else training
    calls, real = [0], getattr(place, how["where"])

    def work(*values: Any, **options: Any) -> Any:
        calls[0] += 1
        found = real(*values, **options)
        if calls[0] != how["calls"]:
            return found
        if how["kind"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("out of memory" if how["kind"] == "memory" else "the disk is gone")

    with mock.patch.object(place, how["where"], work):
        yield


def start(folder: Path, tokenizer: Path) -> subprocess.Popen:
    """Start two processes, by one that imports all they need and forks them."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), str(tokenizer)], env=env | {"OMP_NUM_THREADS": str(THREADS)}
    )


def work(folder: Path, tokenizer: Path, number: int) -> None:
    """Carry out the command and the jobs, together with the other process."""
    with (folder / f"command-{number}.txt").open("w") as said, redirect_stdout(said):
        print(main_of_the_pack(json.loads((folder / "command.json").read_text())))
    os.environ["MASTER_PORT"] = os.environ["PORT_OF_JOBS"]
    jobs = json.loads((folder / "jobs.json").read_text())
    with joined() as world, mock.patch.object(os, "fsync", os.fstat):
        for name, job in jobs.items():
            found = carry_out(job, Material(folder / "material", tokenizer), folder / job.get("in", name), world)
            (folder / f"{name}-{world.number}.json").write_text(json.dumps(found))


def main() -> None:
    """Fork two processes with what torchrun tells its own; write how they end, below 0 by which signal."""
    folder, tokenizer = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(THREADS)
    for job in json.loads((folder / "jobs.json").read_text()).values():  # read once for both
        source = Ready(configure(recipe_of(job), Material(folder / "material", tokenizer)).base_model)
        source.outline()
        source.load(torch.float32)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PORT_OF_JOBS": str(free_port()),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    children = []
    for number in range(2):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            try:
                work(folder, tokenizer, number)
            finally:
                sys.stderr.flush()
                os._exit(int(sys.exc_info()[0] is not None))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
