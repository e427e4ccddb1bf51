"""Read the settings of a run from a file: the run.json of a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.json_files import read_json
from ..config import MODEL_FILES, RunConfig, plain_name

RUN = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A run as a file describes it."""

    name: str  # of the LoRA
    config: RunConfig
    models: Mapping[str, str] = field(default_factory=dict)  # sha256 of its model files, by role


def read_run(path: Path, changes: Sequence[str] = ()) -> RunFile:
    """Read the run in a folder or a file, with NAME=VALUE changes; raises ValueError in one sentence."""
    file = path / RUN if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"There is no run {file}; name a run's folder or its {RUN}.")
    try:
        about = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise ValueError(f"{file} is no run: it has no settings under config.")
    values = about["config"]
    for change in changes:
        change_setting(values, change)
    config = RunConfig.from_dict(values)
    if config.existing.on_existing == "train again":  # which is done: its folder continues
        config = config.replace(existing=config.existing.replace(on_existing="resume"))
    models = about.get("models", {})
    name = plain_name(str(about.get("name", "my_lora")))
    return RunFile(name=name, config=config, models=models if isinstance(models, dict) else {})


def change_setting(values: dict[str, Any], change: str) -> None:
    """Set one value by a text NAME=VALUE, such as train.steps=500; items of lists are counted from 1.

    Raises ValueError for a name whose place does not exist; unknown settings are refused when the values are read.
    """
    name, equals, text = change.partition("=")
    *parts, last = name.strip().split(".")
    if not equals or not all((*parts, last)):
        raise ValueError(f"--set {change} is no setting with its value; write it as train.steps=500.")
    place: Any = values
    for part in parts:
        if isinstance(place, dict):
            place = place.setdefault(part, {})
        else:
            place = place[_number(part, place, name)] if isinstance(place, list) else None
    if isinstance(place, list):
        place[_number(last, place, name)] = _value(text)
    elif isinstance(place, dict):
        place[last] = _value(text)
    else:
        raise ValueError(f"There is no setting {name.strip()}; `show` of a run lists its settings.")


def _number(part: str, place: list[Any], name: str) -> int:
    if not part.isdecimal() or not 0 < int(part) <= len(place):
        raise ValueError(f"There is no setting {name.strip()}; {part} must be a number from 1 to {len(place)}.")
    return int(part) - 1


def _value(text: str) -> Any:
    """Read a value as TOML and JSON write it: a number, true, false, "text", [1, 2]; anything else is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def describe_missing(run: RunFile) -> str:
    """Describe the first file or folder of a run that is not on this machine, with the remedy; "" if all are there."""
    base = run.config.base_model
    for role in MODEL_FILES if base.connected is None else ():
        path = getattr(base, role)
        if path and not Path(path).exists():
            digest = run.models.get(role)
            known = f" (sha256 {digest})" if digest else ""
            remedy = "--base-model FILE" if role == "path" else f"--set base_model.{role}=FILE"
            what = "base model" if role == "path" else role.replace("_", " ")
            return f"The {what} {Path(path).name}{known} is not at {path}; name the file by {remedy}."
    for number, concept in enumerate(run.config.dataset.concepts, 1):
        if not Path(concept.folder).is_dir():
            remedy = f"--set dataset.concepts.{number}.folder=FOLDER"
            return f"The pictures are not at {concept.folder}; name their folder by {remedy}."
    return ""
