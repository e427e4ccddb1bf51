"""Read and write runs as files: a run's folder or its run.json, a TOML of the same names, a saved workflow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.files import open_file
from ..common.json_files import read_json
from ..config import (
    MODEL_FILES,
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    RunConfig,
    plain_name,
)
from ..models import Open, source_of
from .connecting import connector
from .places import Folders, is_tokenizer
from .read import Connect, read_workflow
from .settings import OPEN_CAPTIONS, read_train
from .toml_text import read_toml, write_toml

WITHOUT_COMFYUI = connector()
RUN, WORKFLOW = "run.json", "workflow.json"  # in a run's folder
LARGEST = 2**20  # bytes of a TOML
KINDS_OF_MODELS = {"path": ("checkpoints", "diffusers"), "vae": ("vae",)}  # where a file of a role is looked for
OPEN = read_train(BaseModelConfig(path=""), DatasetConfig())  # what a TOML leaves out: as nodes that are not linked
EXPLAINED = "Settings of a run of LoRA Atelier. What is left out suits the model, as on the canvas."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A run as a file describes it."""

    name: str  # of the LoRA
    config: RunConfig
    models: Mapping[str, str] = field(default_factory=dict)  # sha256 of its model files, by role
    workflow: Mapping[str, Any] | None = None  # as the editor saved it
    open: Open = source_of  # builds the source of its base model
    changed: bool = False  # whether its settings are others than its workflow's


def read_run(
    path: Path, places: Folders, changes: Sequence[str] = (), node: str = "", connect: Connect = WITHOUT_COMFYUI
) -> RunFile:
    """Read the run in a folder or a file, with NAME=VALUE changes; raises ValueError in one sentence.

    node, connect: as for `read_workflow`.
    """
    file = path / RUN if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"There is no run {file}; name a run's folder, its {RUN}, a TOML or a saved workflow.")
    try:
        renamed = [plain_name(str(_value(change.partition("=")[2]))) for change in changes if _is_name(change)]
        run = _read(file, places, [change for change in changes if not _is_name(change)], node, connect)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} cannot be read: it is not text in UTF-8.") from error
    except ValueError as error:
        sentence = str(error)
        end = "" if sentence.endswith((".", "?")) else "."
        raise ValueError(f"{file.name} cannot be trained: {sentence}{end}") from error
    if renamed and renamed[-1] != run.name:
        run = _without_workflow(dataclasses.replace(run, name=renamed[-1]))
    return run


def _is_name(change: str) -> bool:
    """Tell whether a change is of the LoRA's name, which is beside the settings."""
    name, equals, _ = change.partition("=")
    return bool(equals) and name.strip() == "name"


def _read(file: Path, places: Folders, changes: Sequence[str], node: str, connect: Connect) -> RunFile:
    """Read the run in a file of any kind."""
    if file.suffix.lower() == ".toml":
        return _of_toml(file, changes)
    about = read_json(file)
    if isinstance(about, dict) and isinstance(about.get("config"), dict) and "nodes" not in about:
        return _of_run(about, file, places, changes, connect)
    name, config, opened = read_workflow(about, places, node, connect)
    _check_files(config, changes)
    workflow = about if "nodes" in about else None
    run = RunFile(name=name, config=_changed(config, changes), workflow=workflow, open=opened)
    return run if not changes else _without_workflow(run)


def _check_files(config: RunConfig, changes: Sequence[str]) -> None:
    """Refuse changes of model files where the nodes of a workflow load the models."""
    files = {f"base_model.{role}" for role in MODEL_FILES}
    named = next((name for change in changes if (name := change.partition("=")[0].strip()) in files), "")
    if named and config.base_model.connected is not None:
        raise ValueError(f"its own nodes load the models; choose the file there, without --base-model or --set {named}")


def _without_workflow(run: RunFile) -> RunFile:
    """Drop a workflow that other settings replace; that of a connected model stays, as its nodes load the models."""
    if run.config.base_model.connected is not None:
        return dataclasses.replace(run, changed=True)
    return dataclasses.replace(run, workflow=None)


def _of_run(about: Mapping[str, Any], file: Path, places: Folders, changes: Sequence[str], connect: Connect) -> RunFile:
    """Read a run.json; a connected model comes from the workflow beside it."""
    values = about["config"]
    for change in changes:
        change_setting(values, change)
    config, opened = RunConfig.from_dict(values), source_of
    if config.existing.on_existing == "train again":  # which is done: its folder continues
        config = config.replace(existing=config.existing.replace(on_existing="resume"))
    workflow = read_json(file.parent / WORKFLOW) if (file.parent / WORKFLOW).is_file() else None
    if config.base_model.connected is not None:
        _check_files(config, changes)
        _, wired, opened = read_workflow(workflow or {}, places, "", connect)
        config = config.replace(base_model=config.base_model.replace(path=wired.base_model.path))
    run = _run_file(about, config, workflow if isinstance(workflow, dict) else None, opened)
    return run if not changes else _without_workflow(run)


def _of_toml(file: Path, changes: Sequence[str]) -> RunFile:
    with open_file(file) as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"larger than {LARGEST // 2**20} MiB")
    values = read_toml(content.decode("utf-8"))
    about = {name: values.pop(name) for name in ("name", "models") if name in values}
    for change in changes:
        change_setting(values, change)
    return _run_file(about, read_open(values))


def _run_file(
    about: Mapping[str, Any],
    config: RunConfig,
    workflow: Mapping[str, Any] | None = None,
    opened: Open = source_of,
) -> RunFile:
    models, name = about.get("models", {}), about.get("name", "my_lora")
    if not isinstance(name, str) or not isinstance(models, dict):
        raise ValueError("name must be a text, and models a table of sha256")
    return RunFile(name=plain_name(name), config=config, models=models, workflow=workflow, open=opened)


def read_open(values: Mapping[str, Any]) -> RunConfig:
    """Build a configuration of nested values; what they leave out is as on the canvas where nothing is linked."""
    usual = OPEN.to_dict()
    del usual["optimizer"]["options"]  # another optimizer has others, and its own defaults
    merged = _merged(usual, values)
    concepts = (values.get("dataset") or {}).get("concepts") if isinstance(values.get("dataset"), Mapping) else None
    if isinstance(concepts, list) and all(isinstance(each, Mapping) for each in concepts):
        captions = {"captions": OPEN_CAPTIONS.to_dict()}
        merged["dataset"]["concepts"] = [_merged(captions, each) for each in concepts]
    if "base_model" not in values:
        raise ValueError("it has no base_model; write [base_model] and path = the model's file")
    return RunConfig.from_dict(merged)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put nested changes over nested values."""
    result = dict(values)
    for name, value in changes.items():
        own = result.get(name)
        result[name] = _merged(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return result


def write_run(run: RunFile) -> str:
    """Write a run as TOML: name, what differs from an open setting, and the sha256 of its model files."""
    if run.config.base_model.connected is not None:
        raise ValueError(
            f"{run.name} trains on a model that ComfyUI's own nodes load, which a TOML cannot name; train the workflow "
            "itself."
        )
    values = _differing(run.config.to_dict(), OPEN.to_dict())
    values["dataset"] = {"concepts": [_concept(each) for each in run.config.dataset.concepts]}
    return write_toml({"name": run.name, **values, "models": dict(run.models)}, EXPLAINED)


def _concept(concept: ConceptConfig) -> dict[str, Any]:
    usual = ConceptConfig(folder="", captions=OPEN_CAPTIONS, masks=MaskConfig() if concept.masks else None)
    values = _differing(concept.to_dict(), usual.to_dict())
    if concept.masks:  # also with all defaults
        values.setdefault("masks", {"source": concept.masks.source})
    return values


def _differing(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what differs from usual values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        own = usual.get(name)
        if value == own:
            continue
        # An optimizer's own parameters belong together, and so does what is usually not there.
        if isinstance(value, dict) and isinstance(own, dict) and name != "options":
            found[name] = _differing(value, own)
        else:
            found[name] = value
    return found


def change_setting(values: dict[str, Any], change: str) -> None:
    """Set one value by a text NAME=VALUE, such as train.steps=500; items of lists are counted from 1.

    Raises ValueError for a name that does not exist; unknown settings are refused when the values are read.
    """
    name, equals, text = change.partition("=")
    *parts, last = name.strip().split(".")
    if not equals or not all((*parts, last)):
        raise ValueError(f"--set {change} is no setting with its value; write it as train.steps=500")
    holder: Any = values
    for part in parts:
        if isinstance(holder, dict):
            holder = holder.setdefault(part, {})
        else:
            holder = holder[_number(part, holder, name)] if isinstance(holder, list) else None
    if isinstance(holder, list):
        holder[_number(last, holder, name)] = _value(text)
    elif isinstance(holder, dict):
        holder[last] = _value(text)
    else:
        raise ValueError(f"There is no setting {name.strip()}; write names as in {RUN}, such as train.steps")


def _changed(config: RunConfig, changes: Sequence[str]) -> RunConfig:
    values = config.to_dict()
    for change in changes:
        change_setting(values, change)
    return RunConfig.from_dict(values) if changes else config


def _number(part: str, holder: list[Any], name: str) -> int:
    if not part.isdecimal() or not 0 < int(part) <= len(holder):
        raise ValueError(f"There is no setting {name.strip()}; {part} must be a number from 1 to {len(holder)}")
    return int(part) - 1


def _value(text: str) -> Any:
    """Read a value as TOML and JSON write it: a number, true, false, "text", [1, 2]; anything else is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def on_this_machine(run: RunFile, places: Folders) -> RunFile:
    """Find the run's files on this machine, by their full paths; raises ValueError for the first that is missing."""
    base, dataset = run.config.base_model, run.config.dataset
    if base.connected is None:
        named = {role: Path(getattr(base, role)).absolute() for role in MODEL_FILES if getattr(base, role)}
        for role, path in named.items():
            if not path.exists():
                named[role] = places.known(path, KINDS_OF_MODELS.get(role, ("text_encoders",))) or path
        own = base.tokenizer and places.tokenizer is None and is_tokenizer(Path(base.tokenizer))
        tokenizer = Path(base.tokenizer).absolute() if own else places.tokenizer_path() or ""
        base = base.replace(tokenizer=str(tokenizer), **{role: str(path) for role, path in named.items()})
    concepts = (concept.replace(folder=str(Path(concept.folder).absolute())) for concept in dataset.concepts)
    config = run.config.replace(base_model=base, dataset=dataset.replace(concepts=tuple(concepts)))
    run = dataclasses.replace(run, config=config)
    if sentence := describe_missing(run):
        raise ValueError(sentence)
    return run


def describe_missing(run: RunFile) -> str:
    """Describe the first file or folder that is not on this machine, with the remedy; "" if all are there."""
    base = run.config.base_model
    for role in MODEL_FILES if base.connected is None else ():
        path = getattr(base, role)
        if path and not Path(path).exists():
            digest = run.models.get(role)
            known = f" (sha256 {digest})" if digest else ""
            remedy = "--base-model FILE" if role == "path" else f"--set base_model.{role}=FILE"
            what = "base model" if role == "path" else role.replace("_", " ")
            return f"The {what} {Path(path).name}{known} is not at {path}; name the file by {remedy}."
    if base.connected is None and not base.tokenizer and not is_tokenizer(Path(base.path) / "tokenizer"):
        return (
            "There is no tokenizer on this machine; name ComfyUI's folder comfy/sd1_tokenizer, or a copy of it, by "
            "--tokenizer FOLDER."
        )
    for number, concept in enumerate(run.config.dataset.concepts, 1):
        if not Path(concept.folder).is_dir():
            remedy = f"--set dataset.concepts.{number}.folder=FOLDER"
            return f"The pictures are not at {concept.folder}; name their folder by {remedy}."
    return ""
