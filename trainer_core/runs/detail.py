"""Describe the settings, samples and files of one run; nothing in it names a place of this machine."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from ..common.files import folder_size
from ..common.sample_names import sample_name
from ..common.values import is_texts
from ..common.wording import printable
from .folder import PICTURE, SAMPLES, RunFolder

MOST_SETTINGS = 1000
MOST_SAMPLES = 2000  # of one run, the newest
MOST_FILES = 200
LONGEST = 500  # characters of a setting
GIVEN = "base_model.tokenizer"  # ComfyUI's own folder, which no node has an input for
_ABSOLUTE = re.compile(r"[A-Za-z]:[\\/]|[\\/]")  # paths of either system; 0:1 is a point of a curve


def settings_of(run: RunFolder) -> dict[str, Any]:
    """List the settings of a run by their names, `train.steps`; of a path only its last part."""
    return dict(itertools.islice(_leaves(run.about["config"], ""), MOST_SETTINGS))


def names_left_open(asked: dict[str, Any], filled: dict[str, Any]) -> list[str]:
    """List the settings that a run took from its model's defaults, as nobody set them; asked: before that."""
    before, after = dict(_leaves(asked, "")), dict(_leaves(filled, ""))
    return [name for name, value in after.items() if before.get(name) != value]


def nodes_of(run: RunFolder, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Group a run's settings by the node that sets them, each with its name there, and whether a person changed it.

    A list of {node: its id, title, number: of the concept or the like, "" if there is one at most, settings: a list of
    {name, input, words, changed}}. A setting that no node has stands alone under its section.
    """
    from ..config.forms import FORMS  # imported here, so that lists of runs need no image library
    from ..config.forms.places import place_of

    opened = run.about.get("open")
    left_open = set(opened if isinstance(opened, list) and is_texts(opened) else ())
    optimizer = settings.get("optimizer.name")
    several = {name.partition(".2.")[0] for name in settings if ".2." in name}  # lists of more than one
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, value in settings.items():
        place = place_of(name, optimizer if isinstance(optimizer, str) else "")
        number = next((part for part in place.section if part.isdecimal()), "")
        number = number if ".".join(place.section).partition(f".{number}")[0] in several else ""
        key = place.node, place.title, number
        group = groups.setdefault(key, {"node": place.node, "title": place.title, "number": number, "settings": []})
        changed = name not in left_open and name != GIVEN and not place.is_usual(value)
        group["settings"].append({"name": name, "input": place.input, "words": place.words, "changed": changed})
    for (node, *_), group in groups.items():  # run.json sorts its keys; people look for the order of the node
        at = {each.input: number for number, each in enumerate(FORMS[node].inputs)} if node in FORMS else {}
        group["settings"].sort(key=lambda row, at=at: at.get(row["input"].partition(".")[0], len(at)))
    order = {node: number for number, node in enumerate(FORMS)}  # as a graph stands, from the model to the run
    return sorted(groups.values(), key=lambda group: order.get(group["node"], len(order)))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value, 1) if isinstance(value, list) else ()
    if not inner or not value:
        yield printable(name[1:LONGEST]), _shown(value)
        return
    for key, each in inner:
        yield from _leaves(each, f"{name}.{key}"[:LONGEST])


def _shown(value: Any) -> Any:
    if isinstance(value, (dict, list)):  # empty ones
        return None
    if not isinstance(value, str):
        return value if not isinstance(value, int) or abs(value) < 2**53 else str(value)  # exact in JavaScript
    return last_part(value) if _ABSOLUTE.match(value) else printable(value[:LONGEST])


def last_part(path: str) -> str:
    """Name the last part of either system's path."""
    return printable(PureWindowsPath(path).name[:LONGEST])


def sample_files(run: RunFolder) -> list[Path]:
    """List the pictures and clips drawn for a run, by step, prompt and weights, the newest MOST_SAMPLES; no links."""
    folder = run.path / SAMPLES
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [
            (name, entry.name)
            for entry in entries
            if (name := sample_name(entry.name)) and entry.is_file(follow_symlinks=False)
        ]
    return [folder / name for *_, name in sorted(found)[-MOST_SAMPLES:]]


def thumbnail_of(run: RunFolder) -> Path | None:
    """Find the picture that stands for a run: of its last sampled step the first, else one that it was trained on."""
    found, trained = sample_files(run), run.path / PICTURE
    last = (file for file in found if file.name.split("-")[1] == found[-1].name.split("-")[1])
    return next(last, trained if trained.is_file() else None)


def files_of(run: RunFolder) -> list[dict[str, Any]]:
    """List the files and folders in a run's folder with their bytes, at most MOST_FILES."""

    entries = sorted((path for path in run.path.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    return [
        {"name": printable(path.name), "size": folder_size(path) if path.is_dir() else path.lstat().st_size}
        for path in entries[:MOST_FILES]
    ]
