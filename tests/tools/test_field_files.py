"""Settings files of other people: each becomes a graph, or one clear sentence; nearly all become a graph.

The files are not ours, so that they are not here: field_files.tsv names each by repository, path and commit. Put them
into a folder as REPOSITORY/PATH, and name the folder by ATELIER_FIELD_FILES. field_numbers.json says by what
numbers the file's own program trains: what its functions returned, run on the file outside of this repository.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
import os
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foreign_numbers import SHARES, TEXTS, buckets, captions, opened, schedule, shares, weights

from lora_atelier.trainer_core.config import RunConfig, read_in_a_shell
from lora_atelier.trainer_core.optim.build import arguments, optimizer_class
from lora_atelier.trainer_core.workflow.foreign import read_foreign
from lora_atelier.trainer_core.workflow.importing import bring

LISTED = Path(__file__).with_name("field_files.tsv")
MEASURED = Path(__file__).with_name("field_numbers.json")
LISTS = ("rates", "schedule", "options", "buckets", "captions", "weights", "levels")  # by their place in `values`
LEAST = 0.95  # of the files become a graph


def rows() -> list[dict[str, str]]:
    with LISTED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def at_hand(name: str) -> Path | None:
    """Find a listed file; None where it is not at hand."""
    folder = os.environ.get("ATELIER_FIELD_FILES", "")
    path = Path(folder) / name
    return path if folder and path.is_file() else None


def measured() -> dict[str, dict[str, Any]]:
    """Read what the files' own programs gave, by file."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {
        name: {key: found["values"][value] if key in LISTS else value for key, value in own.items()}
        for name, own in found["files"].items()
    }


def options(config: RunConfig) -> dict[str, Any]:
    """List what the optimizer is built with: its arguments, and the defaults of its class."""
    known = inspect.signature(optimizer_class(config.optimizer).__init__).parameters
    usual = {name: each.default for name, each in known.items() if each.default is not inspect.Parameter.empty}
    return json.loads(json.dumps(usual | arguments(config.optimizer), default=str))


def trains_by(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Compute those of the numbers of a file that its program was asked for."""
    found = read_foreign(path)
    config = opened(found)
    concept = config.dataset.concepts[0]
    one = replace(concept, resolutions=concept.resolutions[:1])
    first = replace(config, dataset=replace(config.dataset, concepts=(one,)))
    read = {
        "rank": lambda: config.lora.rank,
        "alpha": lambda: config.lora.alpha or config.lora.rank,
        "batch": lambda: config.train.batch_size,
        "accumulate": lambda: config.train.accumulate,
        "steps": lambda: config.train.steps,
        "epochs": lambda: config.train.epochs,
        "dropout": lambda: max(0.0, concept.captions.dropout),
        "rates": lambda: config.optimizer.part_rates,
        "schedule": lambda: schedule(config, expected.get("length", 1000), expected.get("late", 1)),
        "options": lambda: {name: options(config).get(name, value) for name, value in expected["options"].items()},
        "buckets": lambda: [list(size) for size in buckets(first)],
        "captions": lambda: [sorted(captions(config, (text,))) for text in TEXTS],
        "weights": lambda: weights(config, found.family),
        "levels": lambda: shares(config, expected["levels"]),
        "left": lambda: next((each for each in found.left if each.startswith(expected["left"])), ""),
    }
    if config.lora.algorithm == "full":  # which has no rank
        expected = {name: value for name, value in expected.items() if name not in ("rank", "alpha")}
    return {name: compute() for name, compute in read.items() if name in expected}


def wanted(name: str, value: Any) -> Any:
    """Say how close a number has to be: theirs are rounded to six digits, and some of them earlier."""
    if name == "levels":
        return pytest.approx(SHARES, abs=0.006)
    if name == "options":
        return {key: math.inf if each == 1e308 else each for key, each in value.items()}
    if name == "schedule":
        return pytest.approx(value, abs=3e-5)
    return pytest.approx(value, rel=2e-5) if name in ("rates", "weights") else value


def test_files_are_listed_once_with_where_they_are_from() -> None:
    found = [(row["repository"], row["path"]) for row in rows()]
    assert len(found) == len(set(found)) >= 150
    assert all(len(row["commit"]) == 40 and row["program"] for row in rows())


def test_each_number_is_known_of_a_hundred_and_fifty_files() -> None:
    known = Counter(key for own in measured().values() for key in own)
    assert min(known[each] for each in ("rank", "alpha", *LISTS)) >= 150, known


def test_files_of_other_people_become_graphs() -> None:
    files = [path for row in rows() if (path := at_hand(f"{row['repository']}/{row['path']}"))]
    if not files:
        warnings.warn(f"no file of other people is at hand, so that none was read: see {LISTED.name}", stacklevel=1)
        return
    refused = {}
    for path in files:
        try:
            assert bring(path).workflow["nodes"]
            with read_in_a_shell():
                assert bring(path).workflow["nodes"]
        except ValueError as problem:
            refused[path.name] = str(problem)
    assert all(sentence.count("\n") == 0 and len(sentence) < 400 for sentence in refused.values()), refused
    assert len(refused) <= (1 - LEAST) * len(files), refused


def test_files_of_other_people_train_by_the_numbers_of_their_programs() -> None:
    listed = {f"{row['repository']}/{row['path']}" for row in rows()}
    numbers = measured()
    assert len(numbers) >= 150 and numbers.keys() <= listed
    files = {name: path for name in numbers if (path := at_hand(name))}
    if not files:
        warnings.warn(f"no file of other people is at hand, so that none was compared: see {LISTED.name}", stacklevel=1)
        return
    differing = {}
    for name, path in files.items():
        for key, value in trains_by(path, numbers[name]).items():
            theirs = numbers[name][key]
            if not (value.startswith(theirs) if key == "left" else value == wanted(key, theirs)):
                differing[f"{name}: {key}"] = (value, theirs)
    assert not differing
