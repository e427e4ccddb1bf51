"""What runs of tests need not do each time: load the same base model, or estimate what a run will need."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.common.files import file_digest
from lora_atelier.trainer_core.config import BaseModelConfig, MemoryConfig, RunConfig
from lora_atelier.trainer_core.models.sd import StableDiffusionFiles, load_base_model, outline_base_model
from lora_atelier.trainer_core.preflight.estimate import Estimate, LargestBatch
from lora_atelier.trainer_core.preflight.memory import estimate_run
from lora_atelier.trainer_core.preflight.outline import outline_run
from lora_atelier.trainer_core.runs.folder import new_run
from lora_atelier.trainer_core.runs.publish import Destination
from lora_atelier.trainer_core.training import prepare
from lora_atelier.trainer_core.training.job import Job
from lora_atelier.trainer_core.training.prepare import plan_run, prepare_run

CPU = torch.device("cpu")
SHARED: list[Path] = []  # the folder for encodings of runs that name none, else one beside each run


class Mould:
    """Makes copies of a base model, in a quarter of the time that copy.deepcopy takes."""

    def __init__(self, base: Any) -> None:
        self.kept: list[Any] = []  # tensors, which every copy has its own of, and the tokenizer, which all share
        numbers: dict[int, int] = {}  # id -> place in `kept`
        file = io.BytesIO()

        def number(value: Any) -> int | None:
            if value is not base.tokenizer and not isinstance(value, torch.Tensor):
                return None
            if id(value) not in numbers:
                numbers[id(value)] = len(self.kept)
                self.kept.append(value)
            return numbers[id(value)]

        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = number  # pyright: ignore[reportAttributeAccessIssue]
        pickler.dump(base)
        self.rest = file.getvalue()

    def cast(self) -> Any:
        """Build a copy."""

        @functools.cache
        def part(number: int) -> Any:
            value = self.kept[number]
            return copy.deepcopy(value) if isinstance(value, torch.Tensor) else value

        unpickler = pickle.Unpickler(io.BytesIO(self.rest))
        unpickler.persistent_load = part  # pyright: ignore[reportAttributeAccessIssue]
        return unpickler.load()


@functools.lru_cache(maxsize=4)
def _loaded(config: BaseModelConfig, dtype: torch.dtype) -> Mould:
    return Mould(load_base_model(config, dtype, amend=lambda _: None))  # read before it returns


@functools.lru_cache(maxsize=8)
def _outlined(config: BaseModelConfig, dtype: torch.dtype) -> Mould:
    return Mould(outline_base_model(config, dtype))


class Unheld(StableDiffusionFiles):
    """The files of a model that holds nothing in memory between hashing and loading: tests say what is free."""

    def digest(self, path):
        """Hash a file."""
        return file_digest(path)


class NeverLoaded(Unheld):
    """The files of a model that no test may load: what is wrong has to be found before."""

    def load(self, *_: Any, **__: Any) -> Any:
        """Fail the test."""
        pytest.fail("a model was loaded")


class Ready(Unheld):
    """A base model that is read from the disk once; every run gets a copy, as every run changes its own."""

    def outline(self, dtype=torch.float32):
        """Copy the outline."""
        return _outlined(self.config, dtype).cast()

    def load(self, dtype, amend=None, *, in_file=False):
        """Copy the model; one that is changed before it is cast is loaded."""
        if in_file or (amend is not None and dtype != torch.float32):
            return super().load(dtype, amend, in_file=in_file)
        base = _loaded(self.config, dtype).cast()
        if amend is not None:
            amend(base)
        return base


def cache_of(folder: Path) -> Path:
    """Choose the folder for the encodings of a run in a folder."""
    return SHARED[0] if SHARED else folder / "cache"


def prepared(config: RunConfig, folder, device="cpu", **callbacks):
    """Prepare a run and take no step of it."""
    job = Job(
        config=config,
        source=Ready(config.base_model),
        device=torch.device(device),
        dtype=torch.float32,
        cache=cache_of(folder),
        cache_limit=0,
        runs=folder / "runs",
        logs=None,
        destination=Destination(output=folder / "lora.safetensors", embeddings=folder, saves=config.saves),
        callbacks=Callbacks(**callbacks),
        verify=None,
    )
    planned = plan_run(job, job.source.outline(job.dtype))
    about = {"config": config.to_dict(), "pictures": len(planned.plan.manifest.pictures), "models": planned.models}
    own = new_run(job.runs, planned.keys, "lora", planned.plan.steps, **about)
    return prepare_run(job, planned, config.memory, own)


def estimated(config: RunConfig, level="0", samples=4, size=(128, 128), tokens=77) -> Estimate:
    """Estimate the memory of a run's steps with a level of checkpointing, at a shape of micro-batches."""
    several = config.train.accumulate > 1 or config.dataset.paired
    shape = LargestBatch(samples=samples, latents=(size[1] // 8, size[0] // 8), tokens=tokens, accumulates=several)
    return estimate_run(config, outline_run(config), MemoryConfig(checkpointing=level), shape, CPU)


def without_estimates(ladder=None):
    """Leave out the estimates of memory, disk and network before each run, which have separate tests.

    ladder: the memory settings to begin with and to fall back on, by default those that were set.
    """
    return mock.patch.multiple(
        prepare,
        fit_memory=lambda config, *_: (ladder or [config.memory], "Memory enough."),
        check_disk=lambda *_: None,
        measure_run=lambda *_: None,
        describe_network=lambda _: "A network.",
    )
