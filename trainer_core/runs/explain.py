"""Tell people, before a run starts, which earlier run it has to do with: one of another name, or one that differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.values import is_object, is_words
from ..common.wording import names
from ..config import node, setting
from ..config.rows import decides
from .choose import Choice
from .folder import RunFolder, find_runs
from .key import PARTS, Keys

if TYPE_CHECKING:
    from ..config import RunConfig

MOST = 3  # settings of a node that are named
OWN = "settings of single pictures"
DATA = ("pictures", "captions", "masks", "control pictures", OWN)


def explain_choice(
    choice: Choice, runs: Path, keys: Keys, name: str, inputs: Mapping[str, str], config: RunConfig
) -> str:
    """Say that this run reuses or resumes one of another name, or why it is trained anew; "" if neither is so.

    name: of this run. inputs: of `build_parts`.
    """
    if config.existing.on_existing not in ("resume", "reuse"):  # a person asked for what happens
        return ""
    known = choice.run or (choice.begin_with and choice.begin_with[0])
    if known:
        if known.about["name"] == name:
            return ""
        what = "its result is reused" if choice.finished else "it is resumed"
        return (
            f"The run {known.path.name} has the same settings, pictures and captions under the name "
            f"{known.about['name']!r}, so {what}. For a run of its own under the name {name!r}, set "
            f"{setting('existing.on_existing')} to train again."
        )
    newest = next((run for run in find_runs(runs) if run.about["name"] == name), None)
    if newest is None or newest.keys.run == keys.run:
        return ""
    changed = list(_changed(newest, inputs, config))
    if not changed:
        return ""
    return f"Trained anew, as this differs from the newest run of this name, {newest.path.name}: {names(changed)}."


def _changed(run: RunFolder, inputs: Mapping[str, str], config: RunConfig) -> Iterator[str]:
    """Name what differs from another run; nothing for a run that does not tell its inputs."""
    stored: dict[str, str] = run.about.get("inputs") or {}
    if not stored or not is_words(stored):
        return
    different = [part for part in {**inputs, **stored} if stored.get(part) != inputs.get(part)]
    data = [part for part in DATA if part in different]
    if data[:1] == ["pictures"]:  # other pictures have other captions
        data = [part for part in data if part in ("pictures", OWN)]
    yield from data
    if "models" in different:
        yield "files of the base model or of LoRAs"
    for part in (part for part in PARTS if part in different):
        section, before = getattr(config, part), run.about["config"].get(part)
        after: dict[str, Any] = section.to_dict()
        counted = [each.name for each in dataclasses.fields(section) if decides(each) != "nothing"]
        fields = [key for key in counted if is_object(before) and before.get(key) != after[key]]
        which = names(fields, MOST) if fields and part != "dataset" else "settings"
        yield f"{which} of {node('concepts' if part == 'dataset' else part)}"
