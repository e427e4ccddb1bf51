"""Bring a file of another trainer in: a run and a workflow of ours, and a report of what became of each setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..common.wording import printable
from ..config import plain_name
from ..config.naming import SECTIONS, setting
from .foreign import Imported, read_foreign
from .foreign.loaders import FAMILIES
from .run_file import RunFile, read_open, write_run
from .write import workflow_of

MOST_TOLD = 200  # lines of each part of a report


LEFT_OPEN = {  # nodes -> the input that a file may leave open, its section, and what to choose for it
    "AtelierLoadBaseModel": ("base_model.path", "The file names no base model"),
    "AtelierConceptDataset": ("concepts.folder", "The file names no folder of pictures"),
}


class Brought(NamedTuple):
    """What an import makes."""

    name: str  # of the LoRA
    workflow: dict[str, Any]  # for the canvas, with the report as a note
    text: str  # the run as TOML; "" for a model that only ComfyUI's own nodes load
    report: str  # Markdown
    open: dict[str, str]  # by the id of a node of the workflow: what is to be chosen there


def bring(path: Path, *, hidden: Path | None = None) -> Brought:
    """Read a file of another trainer; raises ValueError in one sentence for one that cannot be read.

    hidden: a folder that the file has only meanwhile; the report shows paths below it as the file writes them.
    """
    found = read_foreign(path)
    if hidden:
        found.values, found.models = _shown(found.values, str(hidden)), _shown(found.models, str(hidden))
    if found.family and found.family not in FAMILIES:
        found.open.append(f"The file trains {found.family}; choose the loader of its text encoders, and their type.")
    if found.family:
        base = found.values.setdefault("base_model", {})
        base |= {"path": found.family, "connected": base.get("connected", {})}
    name = re.sub(r"[^\w ().-]+", "_", found.name)[:100].strip(" .") or "my_lora"
    run = RunFile(name=plain_name(name), config=read_open(found.values))
    models = found.models if found.family else None
    left_open = _left_open(found, workflow_of(run, models, found.family))
    report = describe(found)
    workflow = workflow_of(run, models, found.family, report)
    return Brought(run.name, workflow, "" if found.family else write_run(run), report, left_open)


def _left_open(found: Imported, workflow: Mapping[str, Any]) -> dict[str, str]:
    """Say at which nodes something is to be chosen; what the reader has not said is added to `open`."""
    told: dict[str, str] = {}
    for node in workflow["nodes"]:
        name, sentence = LEFT_OPEN.get(node["type"], ("", ""))
        if name and not node["widgets_values"][0]:
            told[str(node["id"])] = f"{sentence}; set {setting(name)}."
    found.open = list(dict.fromkeys([*told.values(), *found.open]))
    return told


def _shown(values: Any, hidden: str) -> Any:
    """Take a folder's path off the texts in nested values."""
    if isinstance(values, dict):
        return {name: _shown(value, hidden) for name, value in values.items()}
    if isinstance(values, list):
        return [_shown(value, hidden) for value in values]
    return values.removeprefix(hidden).lstrip("/\\") if isinstance(values, str) and hidden in values else values


def describe(found: Imported) -> str:
    """Write what became of the settings as Markdown: what is open, what has no counterpart, what was carried over."""
    parts = (
        ("Choose these before you train", found.open),
        ("No counterpart here", found.left),
        ("Carried over", [*_carried(found.values)]),
    )
    lines = [f"**Settings of {found.program or 'another trainer'}**"]
    for title, entries in parts:
        if entries:
            told = [f"- {printable(entry)}" for entry in entries[:MOST_TOLD]]
            more = len(entries) - len(told)
            lines += ["", f"**{title}**", "", *told, *([f"- and {more} more"] if more else [])]
    if not found.left:
        lines += ["", "Every setting of the file is carried over, or is a default."]
    return "\n".join(lines)


def _carried(values: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield each setting with its value, by the name that its reader knows."""
    for name, value in values.items():
        inner = name if name in SECTIONS else ""
        if isinstance(value, Mapping) and name != "options":
            yield from _carried(value, inner or section)
        elif name == "options" and isinstance(value, Mapping):
            yield from (f"{setting(f'options.{key}')}: {each}" for key, each in value.items())
        elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value) and value:
            for each in value:
                yield from _carried(each, inner or section)
        elif value != "" and section in SECTIONS and name in SECTIONS[section].__dataclass_fields__:
            yield f"{setting(f'{section}.{name}')}: {value}"
