"""Runs as durable things on the disk: by what they are the same, their folders, and which one a queue means."""

from .choose import Choice, choose_run, finished_checkpoint, working_run
from .folder import (
    LORA,
    OPTIMIZER,
    SAMPLES,
    WEIGHTS,
    Checkpoint,
    RunFolder,
    find_runs,
    open_run,
    read_json,
)
from .key import FORMAT, Keys, build_keys, model_digests

__all__ = [
    "FORMAT",
    "LORA",
    "OPTIMIZER",
    "SAMPLES",
    "WEIGHTS",
    "Checkpoint",
    "Choice",
    "Keys",
    "RunFolder",
    "build_keys",
    "choose_run",
    "find_runs",
    "finished_checkpoint",
    "model_digests",
    "open_run",
    "read_json",
    "working_run",
]
