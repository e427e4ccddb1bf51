"""Settings files of other people: each becomes a graph, or one clear sentence; nearly all become a graph.

The files are not ours, so that they are not here: field_files.tsv names each by repository, path and commit. Put them
into a folder as REPOSITORY/PATH, and name the folder by ATELIER_FIELD_FILES.
"""

import csv
import os
import warnings
from pathlib import Path

from lora_atelier.trainer_core.workflow.importing import bring

LISTED = Path(__file__).with_name("field_files.tsv")
LEAST = 0.95  # of the files become a graph


def rows() -> list[dict[str, str]]:
    with LISTED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_files_are_listed_once_with_where_they_are_from() -> None:
    found = [(row["repository"], row["path"]) for row in rows()]
    assert len(found) == len(set(found)) >= 150
    assert all(len(row["commit"]) == 40 and row["program"] for row in rows())


def test_files_of_other_people_become_graphs() -> None:
    folder = os.environ.get("ATELIER_FIELD_FILES", "")
    listed = [Path(folder) / row["repository"] / row["path"] for row in rows()]
    files = [path for path in listed if folder and path.is_file()]
    if not files:
        warnings.warn(f"no file of other people is at hand, so that none was read: see {LISTED.name}", stacklevel=1)
        return
    refused = {}
    for path in files:
        try:
            assert bring(path).workflow["nodes"]
        except ValueError as problem:
            refused[path.name] = str(problem)
    assert all(sentence.count("\n") == 0 and len(sentence) < 400 for sentence in refused.values()), refused
    assert len(refused) <= (1 - LEAST) * len(files), refused
