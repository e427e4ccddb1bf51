"""Bring a file of another trainer in: a run and a workflow of ours, and a report of what became of each setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..common.wording import printable_said, say
from ..config import plain_name
from ..config.naming import SECTIONS, setting
from .foreign import Imported, read_foreign
from .foreign.loaders import FAMILIES
from .run_file import RunFile, read_open, write_run
from .write import workflow_of

MOST_TOLD = 200  # lines of each part of a report


LEFT_OPEN: dict[str, Callable[[], str]] = {  # nodes -> what to choose for the input that a file may leave open
    "AtelierLoadBaseModel": lambda: say("The file names no base model; set {0}.", setting("base_model.path")),
    "AtelierConceptDataset": lambda: say("The file names no folder of pictures; set {0}.", setting("concepts.folder")),
}


class Chapter(NamedTuple):
    """A part of a report, in sentences of `say`, so that a page can translate them."""

    title: str
    lead: str  # a sentence before the lines, or ""
    lines: list[str]


class Account(NamedTuple):
    """What became of a file's settings."""

    title: str
    parts: list[Chapter]
    end: str  # a sentence after them, or ""


class Brought(NamedTuple):
    """What an import makes."""

    name: str  # of the LoRA
    workflow: dict[str, Any]  # for the canvas, with the report as a note
    text: str  # the run as TOML; "" for a model that only ComfyUI's own nodes load
    report: str  # Markdown, in English
    told: Account  # the same, for a page to translate
    open: dict[str, str]  # by the id of a node of the workflow: what is to be chosen there


def bring(path: Path, *, hidden: Path | None = None) -> Brought:
    """Read a file of another trainer; raises ValueError in one sentence for one that cannot be read.

    hidden: a folder that the file has only meanwhile; the report shows paths below it as the file writes them.
    """
    found = read_foreign(path)
    if hidden:
        found.values, found.models = _shown(found.values, str(hidden)), _shown(found.models, str(hidden))
    if found.family and found.family not in FAMILIES:
        told = say("The file trains {0}; choose the loader of its text encoders, and their type.", found.family)
        found.open.append(told)
    if found.family:
        base = found.values.setdefault("base_model", {})
        base |= {"path": found.family, "connected": base.get("connected", {})}
    name = re.sub(r"[^\w ().-]+", "_", found.name)[:100].strip(" .") or "my_lora"
    run = RunFile(name=plain_name(name), config=read_open(found.values))
    models = found.models if found.family else None
    left_open = _left_open(found, workflow_of(run, models, found.family))
    told = describe(found)
    workflow = workflow_of(run, models, found.family, markdown(told, _unmarked))
    return Brought(run.name, workflow, "" if found.family else write_run(run), markdown(told), told, left_open)


def _left_open(found: Imported, workflow: Mapping[str, Any]) -> dict[str, str]:
    """Say at which nodes something is to be chosen; what the reader has not said is added to `open`."""
    told: dict[str, str] = {}
    for node in workflow["nodes"]:
        if node["type"] in LEFT_OPEN and not node["widgets_values"][0]:
            told[str(node["id"])] = LEFT_OPEN[node["type"]]()
    found.open = list(dict.fromkeys([*told.values(), *found.open]))
    return told


def _shown(values: Any, hidden: str) -> Any:
    """Take a folder's path off the texts in nested values."""
    if isinstance(values, dict):
        return {name: _shown(value, hidden) for name, value in values.items()}
    if isinstance(values, list):
        return [_shown(value, hidden) for value in values]
    return values.removeprefix(hidden).lstrip("/\\") if isinstance(values, str) and hidden in values else values


def describe(found: Imported) -> Account:
    """Tell what became of the settings: what is open, what has no counterpart, what was carried over."""
    program = found.program
    parts = (
        Chapter(say("Choose these before you train"), "", found.open),
        Chapter(
            say("No counterpart here"),
            say("The run goes without these; docs/coming-from.md says what comes nearest."),
            found.left,
        ),
        Chapter(
            say("Carried over"),
            say("What the file leaves out is the default of {0}.", program),
            [*_carried(found.values)],
        ),
    )
    kept = [Chapter(title, lead, _bounded(lines)) for title, lead, lines in parts if lines]
    end = "" if found.left else say("Every setting of the file is carried over, or is a default.")
    return Account(say("Settings of {0}", program), kept, end)


def _bounded(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_TOLD
    return [*map(printable_said, lines[:MOST_TOLD]), *([say("and {0} more", more)] if more > 0 else [])]


def markdown(report: Account, escaped: Callable[[str], str] = str) -> str:
    """Write a report in English; js/importing.js writes one in the editor's language."""
    lines = [f"**{report.title}**"]
    for title, lead, entries in report.parts:
        lines += [
            "",
            f"**{title}**",
            "",
            *([f"{lead}", ""] if lead else []),
            *(f"- {escaped(each)}" for each in entries),
        ]
    return "\n".join([*lines, *(["", f"{report.end}"] if report.end else [])])


def _unmarked(text: str) -> str:
    """Let a note show a text as it stands, whatever its file holds: no picture, no tag."""
    return re.sub(r"[*<`]|\]\(", lambda mark: "".join(f"\\{letter}" for letter in mark.group()), text)


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
