"""Run folders on the disk: find, resume, save, list, publish and delete runs.

A column of the list is a value of `catalogue.py`; `js/runs.js` shows it in the page (its type is in `js/types.d.ts`),
and `cli.py` in a shell. What describes a save is a field of `Checkpoint` in `folder.py`, filled by
`training/saving.py`, and handed out by `catalogue.py`.
"""

from .catalogue import describe, describe_in_detail, list_runs, run_paths, signature
from .choose import Choice, Join, Joins, choose_run, finished_checkpoint, working_run
from .detail import thumbnail_of
from .explain import explain_choice
from .folder import (
    FILES,
    HISTORY,
    LORA,
    OPTIMIZER,
    PICTURES,
    PUBLISHED,
    SAMPLES,
    WEIGHTS,
    Checkpoint,
    RunFolder,
    find_runs,
    open_run,
)
from .key import FORMAT, Keys, build_keys, build_parts, model_digests

__all__ = [
    "FILES",
    "FORMAT",
    "HISTORY",
    "LORA",
    "OPTIMIZER",
    "PICTURES",
    "PUBLISHED",
    "SAMPLES",
    "WEIGHTS",
    "Checkpoint",
    "Choice",
    "Join",
    "Joins",
    "Keys",
    "RunFolder",
    "build_keys",
    "build_parts",
    "choose_run",
    "describe",
    "describe_in_detail",
    "explain_choice",
    "find_runs",
    "finished_checkpoint",
    "list_runs",
    "model_digests",
    "open_run",
    "run_paths",
    "signature",
    "thumbnail_of",
    "working_run",
]
